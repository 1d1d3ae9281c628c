"""Submission queue entries: builders for the host, a parser for the controller.

A builder returns the 64 bytes with command id 0 and no SGL: the queue that sends them fills those
in.  Source: NVM Express Base Specification 2.0, sections 3.3.3, 5 and 6.
"""

from dataclasses import dataclass
from struct import pack_into

from hyades.common.errors import DataError, UsageError
from hyades.common.nvme.layout import (
    ALL_NAMESPACES,
    ANY_CONTROLLER,
    CATTR_NO_FLOW_CONTROL,
    CONNECT_BYTES,
    CONNECT_HEAD,
    CONNECT_TAIL,
    FABRICS,
    MAX_NQN,
    PROPERTY_TAIL,
    SGL_DESCRIPTOR,
    SQE,
    SQE_CID,
    SQE_DW10,
    SQE_FCTYPE,
    SQE_SGL,
    Admin,
    Fabrics,
    Opcode,
    Sgl,
)

_SUBNQN, _HOSTNQN = 256, 512  # in the data of Connect
MAX_BLOCKS = 1 << 16  # of one command
_SGL_FLAGS = 0x40  # PSDT: SGL


class Command:
    """A parsed SQE; `dwords` are CDW10 to CDW15."""

    __slots__ = ("cid", "dwords", "fctype", "nsid", "opcode", "raw", "sgl", "sgl_at", "sgl_bytes")

    def __init__(self, sqe: bytes) -> None:
        self.dwords: tuple[int, ...]
        self.raw = sqe
        (
            self.opcode, _, self.cid, self.nsid, self.sgl_at, self.sgl_bytes, self.sgl,
            *dwords,
        ) = SQE.unpack(sqe)  # fmt: skip
        self.dwords = tuple(dwords)
        self.fctype = self.nsid & 0xFF

    @property
    def slba(self) -> int:
        """First logical block."""
        return self.dwords[0] | self.dwords[1] << 32

    @property
    def blocks(self) -> int:
        """Logical blocks."""
        return (self.dwords[2] & 0xFFFF) + 1


@dataclass(frozen=True, slots=True)
class Connect:
    """What a Connect asks for; *depth* entries, *kato* in milliseconds."""

    qid: int
    depth: int
    subnqn: str
    hostnqn: str
    hostid: bytes
    cntlid: int = ANY_CONTROLLER
    kato: int = 0
    no_flow_control: bool = True
    recfmt: int = 0


def build(opcode: int, nsid: int = 0, *dwords: int) -> bytearray:
    """Return a command with CDW10 onwards set to *dwords*."""
    padded = (*dwords, 0, 0, 0, 0, 0, 0)[:6]
    return bytearray(SQE.pack(opcode, _SGL_FLAGS, 0, nsid, 0, 0, 0, *padded))


def set_sgl(sqe: bytearray, cid: int, nbytes: int, kind: Sgl) -> None:
    """Fill in the command id and one SGL descriptor for *nbytes* of data."""
    pack_into("<H", sqe, SQE_CID, cid)
    SGL_DESCRIPTOR.pack_into(sqe, SQE_SGL, 0, nbytes, kind)


def transfer(opcode: Opcode, nsid: int, slba: int, blocks: int) -> bytearray:
    """Return a read, write or write zeroes of 1 to 65536 logical blocks."""
    if not 1 <= blocks <= MAX_BLOCKS:
        raise UsageError(f"a command for {blocks} blocks: it takes 1 to {MAX_BLOCKS}")
    return build(opcode, nsid, slba & 0xFFFFFFFF, slba >> 32, blocks - 1)


def flush(nsid: int) -> bytearray:
    """Return a flush of one namespace."""
    return build(Opcode.FLUSH, nsid)


def identify(cns: int, nsid: int = 0, *, csi: int = 0) -> bytearray:
    """Return an Identify; its answer has 4096 bytes."""
    return build(Admin.IDENTIFY, nsid, cns, csi << 24)


def get_log(page: int, nbytes: int, offset: int = 0, *, nsid: int = ALL_NAMESPACES) -> bytearray:
    """Return a Get Log Page of *nbytes* (a multiple of 4) from byte *offset*."""
    count = nbytes // 4 - 1
    low, high = page | (count & 0xFFFF) << 16, count >> 16
    return build(Admin.GET_LOG, nsid, low, high, offset & 0xFFFFFFFF, offset >> 32)


def set_features(feature: int, value: int, nsid: int = 0) -> bytearray:
    """Return a Set Features with CDW11 = *value*."""
    return build(Admin.SET_FEATURES, nsid, feature, value)


def get_features(feature: int) -> bytearray:
    """Return a Get Features of the current value."""
    return build(Admin.GET_FEATURES, 0, feature)


def keep_alive() -> bytearray:
    """Return a Keep Alive."""
    return build(Admin.KEEP_ALIVE)


def async_event() -> bytearray:
    """Return an Asynchronous Event Request."""
    return build(Admin.ASYNC_EVENT)


def abort(qid: int, cid: int) -> bytearray:
    """Return an Abort of a command of queue *qid*."""
    return build(Admin.ABORT, 0, qid | cid << 16)


def property_get(offset: int, *, wide: bool = False) -> bytearray:
    """Return a Property Get of 4 bytes, or 8 where *wide*."""
    return _property(Fabrics.PROPERTY_GET, offset, 0, wide=wide)


def property_set(offset: int, value: int) -> bytearray:
    """Return a Property Set of 4 bytes."""
    return _property(Fabrics.PROPERTY_SET, offset, value, wide=False)


def _property(kind: Fabrics, offset: int, value: int, *, wide: bool) -> bytearray:
    sqe = build(FABRICS)
    sqe[SQE_FCTYPE] = kind
    PROPERTY_TAIL.pack_into(sqe, SQE_DW10, int(wide), offset, value)
    return sqe


def connect(what: Connect) -> tuple[bytearray, bytes]:
    """Return a Connect and its 1024 bytes of data."""
    sqe = build(FABRICS)
    sqe[SQE_FCTYPE] = Fabrics.CONNECT
    attributes = CATTR_NO_FLOW_CONTROL if what.no_flow_control else 0
    CONNECT_TAIL.pack_into(
        sqe, SQE_DW10, what.recfmt, what.qid, what.depth - 1, attributes, what.kato
    )
    data = bytearray(CONNECT_BYTES)
    CONNECT_HEAD.pack_into(data, 0, what.hostid, what.cntlid)
    for at, name in ((_SUBNQN, what.subnqn), (_HOSTNQN, what.hostnqn)):
        raw = check_nqn(name).encode()
        data[at : at + len(raw)] = raw
    return sqe, bytes(data)


def parse_connect(sqe: bytes, data: memoryview | bytes) -> Connect:
    """Return what a Connect asks for; DataError where its data is short or a name is no text."""
    if len(data) != CONNECT_BYTES:
        raise DataError(f"Connect with {len(data)} bytes of data, not {CONNECT_BYTES}")
    recfmt, qid, depth, attributes, kato = CONNECT_TAIL.unpack_from(sqe, SQE_DW10)
    hostid, cntlid = CONNECT_HEAD.unpack_from(data)
    return Connect(
        qid, depth + 1, _name(data, _SUBNQN), _name(data, _HOSTNQN), hostid, cntlid, kato,
        bool(attributes & CATTR_NO_FLOW_CONTROL), recfmt,
    )  # fmt: skip


def parse_property(sqe: bytes) -> tuple[bool, int, int]:
    """Return (8 bytes wide, offset, value) of a Property Get or Set."""
    attributes, offset, value = PROPERTY_TAIL.unpack_from(sqe, SQE_DW10)
    return bool(attributes & 7), offset, value


def check_nqn(name: str) -> str:
    """Return *name* if it can be an NVMe qualified name; UsageError."""
    raw = name.encode(errors="replace")
    if not name.startswith("nqn.") or len(raw) > MAX_NQN or any(c <= " " for c in name):
        raise UsageError(
            f"{name!r} is no NVMe qualified name: write nqn.2026-01.org.example:name,"
            f" at most {MAX_NQN} bytes without spaces"
        )
    return name


def _name(data: memoryview | bytes, at: int) -> str:
    raw = bytes(data[at : at + 256]).partition(b"\0")[0]
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise DataError(f"Connect data, byte {at}: a qualified name that is no UTF-8") from None
