"""What controllers say of themselves: Identify structures, log pages, discovery entries.

Each has a builder for the target and a parser for the host.  What is parsed is checked before it is
believed: PeerError.  Source: NVM Express Base Specification 2.0, section 5.17 and figures there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack_into, unpack_from
from uuid import UUID

from hyades.common.errors import PeerError
from hyades.common.nvme.layout import (
    DISCOVERY_ENTRY_BYTES,
    DISCOVERY_NQN,
    IDENTIFY_BYTES,
    SQE_BYTES,
)

NVME_1_3 = 0x00010300
ADDRESS_BYTES = 256  # of an address in the discovery log
CAP = 0x200F01007F  # 128 entries, contiguous queues, ready within 7.5 s, NVM command set
_IO_SUBSYSTEM, _DISCOVERY = 1, 2  # CNTRLTYPE
_SGLS = 0x1  # supported, any alignment
_SGLS_KEYED = 1 << 2  # RDMA only
_SGLS_OFFSET = 1 << 20  # in-capsule offset in the descriptor
_ONCS_WRITE_ZEROES = 1 << 3
_VWC_PRESENT = 1  # there is a write cache: flush matters
_RDMA = 1  # TRTYPE
_VENDOR, _EPOCH_MARK = 3072, b"hyades-epoch-1:\0"  # vendor specific bytes: mark, cache epoch


@dataclass(frozen=True, slots=True)
class ControllerInfo:
    """The fields of Identify Controller that matter here; sizes in bytes, 0: not said."""

    subnqn: str
    cntlid: int
    serial: str
    model: str
    firmware: str
    max_transfer: int  # MDTS, 0: no limit
    in_capsule: int  # of an I/O command (IOCCSZ less the SQE)
    namespaces: int
    max_commands: int = 128
    discovery: bool = False
    keep_alive: int = 1  # granularity in 100 ms
    write_zeroes: bool = True
    write_cache: bool = True
    keyed: bool = False  # keyed SGL descriptors: RDMA
    # Hyades only, all zeros elsewhere: as long as it is the same, the target has lost no write that
    # it completed (it changes when the machine, or an in-memory namespace, starts anew)
    cache_epoch: bytes = bytes(16)


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """The fields of Identify Namespace that matter here."""

    blocks: int  # of block_bytes each
    block_bytes: int
    guid: bytes = bytes(16)
    shared: bool = True
    metadata_bytes: int = 0
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class DiscoveryEntry:
    """One record of the discovery log: where a subsystem can be reached."""

    subnqn: str
    address: str
    service: str
    transport: int = 3  # TCP; 1: RDMA
    family: int = 1  # IPv4; 2: IPv6
    subtype: int = 2  # NVM subsystem; 1, 3: discovery
    port: int = 1
    secure: bool = False  # TLS is required


def build_controller(info: ControllerInfo) -> bytes:
    """Return the 4096 bytes of Identify Controller."""
    data = bytearray(IDENTIFY_BYTES)
    _put_text(data, 4, 20, info.serial)
    _put_text(data, 24, 40, info.model)
    _put_text(data, 64, 8, info.firmware)
    data[76] = 0 if info.discovery else 2  # CMIC: several controllers
    data[77] = (info.max_transfer // 4096).bit_length() - 1 if info.max_transfer else 0
    pack_into("<HI", data, 78, info.cntlid, NVME_1_3)
    data[111] = _DISCOVERY if info.discovery else _IO_SUBSYSTEM
    data[258:261] = bytes((3, 3, 3))  # ACL, AERL (0-based), FRMW
    data[261] = 1 << 2  # LPA: extended data (offset) of log pages
    pack_into("<H", data, 320, info.keep_alive)
    data[512], data[513] = 0x66, 0x44
    pack_into("<HI", data, 514, info.max_commands, info.namespaces)
    pack_into("<H", data, 520, _ONCS_WRITE_ZEROES if info.write_zeroes else 0)
    data[525] = _VWC_PRESENT if info.write_cache else 0
    sgls = (_SGLS if info.discovery else _SGLS | _SGLS_OFFSET) | (_SGLS_KEYED if info.keyed else 0)
    pack_into("<I", data, 536, sgls)
    raw = info.subnqn.encode()
    data[768 : 768 + len(raw)] = raw
    pack_into("<IIHBB", data, 1792, (SQE_BYTES + info.in_capsule) // 16, 1, 0, 0, 1)
    if any(info.cache_epoch):
        data[_VENDOR : _VENDOR + 32] = _EPOCH_MARK + info.cache_epoch
    return bytes(data)


def parse_controller(data: bytes | memoryview) -> ControllerInfo:
    """Return what Identify Controller says; PeerError where it cannot be meant."""
    data = _whole(data, "Identify Controller")
    (cntlid,) = unpack_from("<H", data, 78)
    keep_alive, max_commands, namespaces = (
        unpack_from("<H", data, 320)[0], *unpack_from("<HI", data, 514),
    )  # fmt: skip
    subnqn, (capsule,) = _text(data, 768, 256), unpack_from("<I", data, 1792)
    discovery = data[111] == _DISCOVERY or subnqn == DISCOVERY_NQN
    if discovery:  # has no I/O commands, and need not say how large they are: nvmet gives 0
        capsule = max(capsule, SQE_BYTES // 16)
    if capsule < SQE_BYTES // 16:
        raise PeerError(f"Identify Controller: IOCCSZ {capsule}, at least {SQE_BYTES // 16}")
    if data[77] > 20:
        raise PeerError(f"Identify Controller: MDTS {data[77]}")
    return ControllerInfo(
        subnqn=subnqn,
        cntlid=cntlid,
        serial=_text(data, 4, 20),
        model=_text(data, 24, 40),
        firmware=_text(data, 64, 8),
        max_transfer=4096 << data[77] if data[77] else 0,
        in_capsule=min(capsule * 16 - SQE_BYTES, 1 << 20),
        namespaces=namespaces,
        max_commands=max_commands,
        discovery=discovery,
        keep_alive=keep_alive,
        write_zeroes=bool(data[520] & _ONCS_WRITE_ZEROES),
        write_cache=bool(data[525] & 1),
        keyed=bool(unpack_from("<I", data, 536)[0] & _SGLS_KEYED),
        cache_epoch=parse_cache_epoch(data),
    )


def parse_cache_epoch(data: bytes) -> bytes:
    """Return the cache epoch in Identify Controller; zeros where the target has none."""
    known = data[_VENDOR : _VENDOR + 16] == _EPOCH_MARK
    return data[_VENDOR + 16 : _VENDOR + 32] if known else bytes(16)


def is_same_cache(before: bytes, now: bytes) -> bool:
    """Say whether these epochs show that what was completed *before* cannot be lost *now*."""
    return any(before) and before == now


def build_namespace(info: NamespaceInfo) -> bytes:
    """Return the 4096 bytes of Identify Namespace."""
    data = bytearray(IDENTIFY_BYTES)
    pack_into("<QQQ", data, 0, info.blocks, info.blocks, info.blocks)
    data[30] = int(info.shared)  # NMIC
    data[99] = int(info.read_only)  # NSATTR: write protected
    data[104:120] = info.guid
    pack_into("<I", data, 128, (info.block_bytes.bit_length() - 1) << 16)
    return bytes(data)


def parse_namespace(data: bytes | memoryview) -> NamespaceInfo:
    """Return what Identify Namespace says; PeerError where it cannot be meant."""
    data = _whole(data, "Identify Namespace")
    blocks, _, _ = unpack_from("<QQQ", data, 0)
    form = data[26] & 0xF | (data[26] >> 1 & 0x30 if data[25] > 15 else 0)
    (lbaf,) = unpack_from("<I", data, 128 + 4 * form)
    shift = lbaf >> 16 & 0xFF
    if not 9 <= shift <= 16:
        raise PeerError(f"Identify Namespace: logical blocks of 2^{shift} bytes")
    if blocks << shift > 1 << 63:
        raise PeerError(f"Identify Namespace: {blocks} blocks of {1 << shift} bytes")
    return NamespaceInfo(
        blocks, 1 << shift, bytes(data[104:120]), bool(data[30] & 1), lbaf & 0xFFFF,
        bool(data[99] & 1),
    )  # fmt: skip


def build_active_list(nsids: Sequence[int]) -> bytes:
    """Return the list of active namespaces (CNS 2): up to 1024 ascending ids."""
    data = bytearray(IDENTIFY_BYTES)
    pack_into(f"<{len(nsids[:1024])}I", data, 0, *nsids[:1024])
    return bytes(data)


def parse_active_list(data: bytes | memoryview) -> list[int]:
    """Return the ids before the first zero; PeerError unless they ascend."""
    data = _whole(data, "the list of namespaces")
    found: list[int] = []
    for (nsid,) in (unpack_from("<I", data, at) for at in range(0, IDENTIFY_BYTES, 4)):
        if not nsid:
            break
        if found and nsid <= found[-1]:
            raise PeerError(f"the list of namespaces: {nsid} after {found[-1]}")
        found.append(nsid)
    return found


def build_descriptors(uuid: UUID, *, guid: bytes = b"") -> bytes:
    """Return the namespace identification descriptors (CNS 3): NGUID if any, and UUID."""
    data = b""
    if any(guid):
        data += bytes((2, 16, 0, 0)) + guid
    data += bytes((3, 16, 0, 0)) + uuid.bytes
    return data.ljust(IDENTIFY_BYTES, b"\0")


def parse_descriptors(data: bytes | memoryview) -> bytes:
    """Return the UUID among the identification descriptors (CNS 3), b"" where there is none."""
    data = _whole(data, "the identification descriptors")
    at = 0
    while at + 4 <= len(data) and data[at]:
        kind, nbytes = data[at], data[at + 1]
        if at + 4 + nbytes > len(data):
            raise PeerError(f"the identification descriptors: {nbytes} bytes at byte {at}")
        if (kind, nbytes) == (3, 16):
            return data[at + 4 : at + 20]
        at += 4 + nbytes
    return b""


def build_discovery_log(generation: int, entries: Sequence[DiscoveryEntry]) -> bytes:
    """Return the discovery log: a header of 1024 bytes and 1024 bytes an entry."""
    data = bytearray(DISCOVERY_ENTRY_BYTES * (1 + len(entries)))
    pack_into("<QQH", data, 0, generation, len(entries), 0)
    for index, entry in enumerate(entries, 1):
        at = index * DISCOVERY_ENTRY_BYTES
        # A secure channel is required, or nothing is specified: at "not required", too, libnvme 1.3
        # (Debian 12) asks the kernel for TLS.
        treq = 1 if entry.secure else 0
        data[at : at + 4] = bytes((entry.transport, entry.family, entry.subtype, treq))
        pack_into("<HHH", data, at + 4, entry.port, 0xFFFF, 32)
        _put_text(data, at + 32, 32, entry.service)
        raw = entry.subnqn.encode()
        data[at + 256 : at + 256 + len(raw)] = raw
        _put_text(data, at + 512, ADDRESS_BYTES, entry.address)
        if entry.transport == _RDMA:  # connected queue pairs, of any provider, through RDMA_CM
            data[at + 768 : at + 771] = bytes((1, 1, 1))
        else:
            data[at + 768] = 2 if entry.secure else 0  # SECTYPE: TLS 1.3, none
    return bytes(data)


def parse_discovery_log(data: bytes | memoryview) -> tuple[int, list[DiscoveryEntry]]:
    """Return (generation, entries); PeerError where the log is shorter than it says."""
    if len(data) < DISCOVERY_ENTRY_BYTES:
        raise PeerError(f"the discovery log has {len(data)} bytes")
    generation, count, form = unpack_from("<QQH", data, 0)
    if form or (count + 1) * DISCOVERY_ENTRY_BYTES > len(data):
        raise PeerError(f"the discovery log: {count} entries in {len(data)} bytes, format {form}")
    entries = []
    for index in range(1, count + 1):
        at = index * DISCOVERY_ENTRY_BYTES
        transport, family, subtype, treq, port = unpack_from("<BBBBH", data, at)
        entries.append(
            DiscoveryEntry(
                _text(data, at + 256, 256),
                _text(data, at + 512, ADDRESS_BYTES),
                _text(data, at + 32, 32),
                transport,
                family,
                subtype,
                port,
                treq & 3 == 1,
            )
        )
    return generation, entries


def _whole(data: bytes | memoryview, what: str) -> bytes:
    if len(data) != IDENTIFY_BYTES:
        raise PeerError(f"{what}: {len(data)} bytes, not {IDENTIFY_BYTES}")
    return bytes(data)


def _put_text(data: bytearray, at: int, length: int, text: str) -> None:
    data[at : at + length] = text.encode("ascii", "replace")[:length].ljust(length)


def _text(data: bytes | memoryview, at: int, length: int) -> str:
    raw = bytes(data[at : at + length]).partition(b"\0")[0]
    return raw.decode("utf-8", "replace").strip()
