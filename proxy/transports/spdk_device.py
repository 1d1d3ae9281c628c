"""One namespace behind SPDK's driver: opening it, keeping it alive, and getting it back.

It lives in the SPDK process and makes the slow calls; spdk_pump.py makes the fast ones.  Rules:
1. The environment is initialised once in a process, and never in one that was forked.
2. Huge pages or not is said once: `no_huge` needs `mem_size` and forbids `iova_mode`.
3. A namespace that comes back after a loss is the one that was lost: same identity, same format,
   no fewer blocks.  Anything else is refused.
4. After `drop` SPDK holds no buffer and no queue.
"""

import ctypes as c
import os
from dataclasses import dataclass
from typing import Any

from hyades.common.errors import BackendMissing, DeviceLost, PeerError, UsageError
from hyades.common.layout import BLOCK
from hyades.common.nvme.identify import is_same_cache, parse_cache_epoch
from hyades.common.nvme.layout import IDENTIFY_BYTES
from hyades.common.units import MIB
from hyades.proxy.transports.spdk_abi import (
    NS_FLUSH_SUPPORTED,
    CtrlrOpts,
    EnvOpts,
    QpairOpts,
    TransportId,
)
from hyades.proxy.transports.spdk_library import Functions
from hyades.proxy.transports.spdk_memory import Settings

_IDENTITY = 16  # bytes of an NGUID or UUID
_MAX_ACK_TIMEOUT = 31


@dataclass(frozen=True, slots=True)
class Namespace:
    """What the driver says about the namespace."""

    number: int
    sector: int  # bytes
    sectors: int
    max_transfer: int  # bytes
    flushes: bool  # it has a volatile cache
    cache_epoch: bytes  # of a Hyades target: the same for as long as its cache has lost nothing
    identity: bytes  # NGUID and UUID, where it has them

    def keeps_writes_of(self, before: "Namespace") -> bool:
        """Tell whether what *before* completed and did not flush cannot have been lost since."""
        return is_same_cache(before.cache_epoch, self.cache_epoch)

    @property
    def nblocks(self) -> int:
        """Whole blocks of 4096 bytes."""
        return self.sectors * self.sector // BLOCK


def start_environment(spdk: Functions, settings: Settings) -> None:
    """Initialise SPDK's environment; the caller's CPU affinity stays as it is."""
    allowed = os.sched_getaffinity(0)
    options = EnvOpts()
    options.opts_size = c.sizeof(EnvOpts)
    spdk.spdk_env_opts_init(c.byref(options))
    options.opts_size = c.sizeof(EnvOpts)
    options.name = b"hyades"
    options.core_mask = f"[{min(allowed)}]".encode()
    options.no_pci = settings.transport != "PCIE"
    if not settings.huge_pages:
        options.no_huge = True
        options.mem_size = settings.memory
    try:
        code = spdk.spdk_env_init(c.byref(options))
    finally:
        os.sched_setaffinity(0, allowed)  # it pins the caller, and threads would inherit that
    if code:
        hint = (
            "it may need huge pages (echo 1024 > /proc/sys/vm/nr_hugepages), or hugepages=0"
            if settings.huge_pages
            else f"it was given memory={settings.memory}MiB, and needs a DPDK that it supports"
        )
        raise BackendMissing(f"spdk_env_init failed ({os.strerror(abs(code))}): {hint}")


class SpdkDevice:
    """A connected controller, its namespace and its queues."""

    def __init__(self, spdk: Functions, settings: Settings) -> None:
        """Connect; DeviceLost where that fails, UsageError for a namespace that cannot be used."""
        self._spdk, self._settings = spdk, settings
        self._ctrlr: int | None = None
        self.pairs: list[int] = []
        self.space = 0  # struct spdk_nvme_ns *
        self._trid = TransportId()
        text = settings.trid()
        if spdk.spdk_nvme_transport_id_parse(c.byref(self._trid), text.encode()):
            raise UsageError(f"SPDK takes no such address: {text}")
        kind = "PCIe" if settings.transport == "PCIE" else settings.transport
        if not spdk.spdk_nvme_transport_available_by_name(kind.encode()):
            how = "--with-rdma" if kind == "RDMA" else f"its {kind} transport"
            raise BackendMissing(
                f"these SPDK libraries were built without {kind}: build them with {how}"
            )
        self.namespace = self._connect()

    def poll_admin(self) -> bool:
        """Send and answer keep-alives; return False where the controller is lost."""
        spdk, ctrlr = self._spdk, self._ctrlr
        if ctrlr is None:
            return False
        return bool(spdk.spdk_nvme_ctrlr_process_admin_completions(ctrlr) >= 0)

    def reconnect_queue(self, index: int) -> bool:
        """Try to bring one queue back, where its controller still lives."""
        spdk, ctrlr = self._spdk, self._ctrlr
        if ctrlr is None or index >= len(self.pairs) or spdk.spdk_nvme_ctrlr_is_failed(ctrlr):
            return False
        return bool(spdk.spdk_nvme_ctrlr_reconnect_io_qpair(self.pairs[index]) == 0)

    def reconnect(self) -> bool:
        """Connect anew after `drop`; False where the target does not answer.

        PeerError where another namespace is there.
        """
        before = self.namespace
        try:
            after = self._connect()
        except DeviceLost:
            self.drop(lost=True)
            return False
        except UsageError as error:
            raise PeerError(str(error)) from error
        same = (before.number, before.sector, before.identity)
        if same != (after.number, after.sector, after.identity) or after.sectors < before.sectors:
            raise PeerError(
                f"{self._settings.trid()}: namespace {before.number} is another one since the"
                f" connection was lost (it was {before}, it is {after})"
            )
        self.namespace = after
        return True

    def drop(self, *, lost: bool = False) -> None:
        """Give up queues and controller; callbacks of what was under way come first.

        A controller that is *lost* is not asked to shut down, which it might not answer.
        """
        spdk = self._spdk
        if lost and self._ctrlr is not None:
            spdk.spdk_nvme_ctrlr_fail(self._ctrlr)
        pairs, self.pairs = self.pairs, []
        for pair in pairs:
            spdk.spdk_nvme_ctrlr_free_io_qpair(pair)
        ctrlr, self._ctrlr = self._ctrlr, None
        if ctrlr is not None:
            spdk.spdk_nvme_detach(ctrlr)

    def register(self, address: int, nbytes: int) -> None:
        """Let the adapter reach the arena, where the transport needs that."""
        if self._settings.transport == "TCP":
            return  # sockets reach all memory
        code = self._spdk.spdk_mem_register(address, nbytes)
        if code:
            raise BackendMissing(
                f"spdk_mem_register of {nbytes} bytes failed ({os.strerror(abs(code))}):"
                " raise ulimit -l; spdk+pcie:// needs the device bound to vfio-pci with an IOMMU"
            )

    def _connect(self) -> Namespace:
        spdk, settings = self._spdk, self._settings
        options = CtrlrOpts()
        spdk.spdk_nvme_ctrlr_get_default_ctrlr_opts(c.byref(options), c.sizeof(CtrlrOpts))
        options.opts_size = c.sizeof(CtrlrOpts)
        options.num_io_queues = settings.queues
        options.io_queue_size = max(options.io_queue_size, settings.depth)
        options.io_queue_requests = max(options.io_queue_requests, 2 * settings.depth)
        options.header_digest, options.data_digest = settings.header_digest, settings.data_digest
        options.keep_alive_timeout_ms = int(1000 * settings.kato)
        if settings.transport == "TCP":
            # data that nobody acknowledges breaks the connection, not only a reset by the peer
            milliseconds = int(1000 * settings.timeout)
            options.transport_ack_timeout = min(_MAX_ACK_TIMEOUT, milliseconds.bit_length())
        if settings.hostnqn:
            options.hostnqn = settings.hostnqn.encode()
        size = c.sizeof(CtrlrOpts)
        self._ctrlr = spdk.spdk_nvme_connect(c.byref(self._trid), c.byref(options), size)
        if not self._ctrlr:
            raise DeviceLost(f"no connection to {settings.trid()}")
        namespace = self._find_namespace()
        self.pairs = [self._open_queue() for _ in range(settings.queues)]
        return namespace

    def _find_namespace(self) -> Namespace:
        spdk, ctrlr, wanted = self._spdk, self._ctrlr, self._settings.namespace
        active = []
        number = spdk.spdk_nvme_ctrlr_get_first_active_ns(ctrlr)
        while number:
            active.append(number)
            number = spdk.spdk_nvme_ctrlr_get_next_active_ns(ctrlr, number)
        where = self._settings.trid()
        if not active or (wanted and wanted not in active):
            there = ", ".join(map(str, active)) or "none"
            raise UsageError(f"{where}: no namespace {wanted or 'at all'}; there are: {there}")
        number = wanted or active[0]
        space = spdk.spdk_nvme_ctrlr_get_ns(ctrlr, number)
        sector = spdk.spdk_nvme_ns_get_sector_size(space)
        metadata = spdk.spdk_nvme_ns_get_md_size(space)
        limit = spdk.spdk_nvme_ns_get_max_io_xfer_size(space) // BLOCK * BLOCK
        if not sector or BLOCK % sector or metadata or not limit:
            raise UsageError(
                f"{where}: namespace {number} has blocks of {sector} bytes with {metadata} bytes of"
                f" metadata and transfers of {limit} bytes: format it with 512 or 4096 bytes and"
                " no metadata"
            )
        self.space = space
        identities = (spdk.spdk_nvme_ns_get_nguid(space), spdk.spdk_nvme_ns_get_uuid(space))
        data = c.string_at(spdk.spdk_nvme_ctrlr_get_data(ctrlr), IDENTIFY_BYTES)
        return Namespace(
            number=number,
            cache_epoch=parse_cache_epoch(data),
            sector=sector,
            sectors=spdk.spdk_nvme_ns_get_num_sectors(space),
            max_transfer=min(limit, self._settings.max_transfer),
            flushes=bool(spdk.spdk_nvme_ns_get_flags(space) & NS_FLUSH_SUPPORTED),
            identity=b"".join(c.string_at(where, _IDENTITY) for where in identities if where),
        )

    def _open_queue(self) -> int:
        spdk, settings, size = self._spdk, self._settings, c.sizeof(QpairOpts)
        options = QpairOpts()
        spdk.spdk_nvme_ctrlr_get_default_io_qpair_opts(self._ctrlr, c.byref(options), size)
        options.opts_size = size
        options.io_queue_requests = max(options.io_queue_requests, 2 * settings.depth)
        pair: Any = spdk.spdk_nvme_ctrlr_alloc_io_qpair(self._ctrlr, c.byref(options), size)
        if not pair:
            raise DeviceLost(f"{settings.trid()} gives no I/O queue: lower queues= or depth=")
        return int(pair)


def arena_room(nbytes: int) -> int:
    """Return *nbytes* in whole huge pages, which spdk_mem_register of old releases asks for."""
    return -(-nbytes // (2 * MIB)) * 2 * MIB
