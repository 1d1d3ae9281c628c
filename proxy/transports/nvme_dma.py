"""A namespace of a target on this machine, over shared memory: ``dma:///run/hyades.sock/subnqn``
(options: nvme_dma_url.py).

NVMe's memory-based model: rings, doorbells and buffers lie in memory that both processes map; the
target's DMA engine moves the data, into buffers of fixed size that are copied from here, or with
zerocopy=1 straight into the slots.  The paths, queues, replays and errors are those of nvme+tcp://
(nvme_tcp.py); only the connection is another (nvme_dma_session.py, nvme_dma_wire.py).  With
zerocopy the target can touch the whole arena while it is connected.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import DeviceLost, UsageError
from hyades.common.units import format_size
from hyades.proxy.arena import shared_handle
from hyades.proxy.transport import Limits, Records
from hyades.proxy.transports.nvme_dma_session import DmaSession
from hyades.proxy.transports.nvme_dma_url import DmaOptions, parse
from hyades.proxy.transports.nvme_dma_wire import Slots
from hyades.proxy.transports.nvme_tcp import NvmeTcpTransport
from hyades.proxy.urls import Url


class NvmeDmaTransport(NvmeTcpTransport):
    """Moves pages between an arena and a namespace of another process."""

    def __init__(self, options: DmaOptions, *, writable: bool = True) -> None:
        """Connect; UsageError or PeerError where no path leads to the namespace."""
        self._dma = options
        self._slots = Slots() if options.zerocopy else None
        super().__init__(options, writable=writable, session=partial(DmaSession, self._slots))

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the uint8 *arena* that request offsets index; with zerocopy a shared one."""
        handle = shared_handle(arena) if self._slots is not None else None
        if self._slots is not None and handle is None:
            raise UsageError(
                f"{self._name()} with zerocopy=1 moves pages from another process and needs an"
                " arena that both can map: use hyades.proxy.arena.allocate_arena(nbytes,"
                " shared=True)"
            )
        super().register(arena)
        if self._slots is not None and handle is not None:
            self._slots.share(*handle, arena.data)

    def submit(self, requests: Records) -> int:
        """Take a prefix of REQUEST[n]; DeviceLost where a stuck target may write to slots."""
        self._check_slots()
        return super().submit(requests)

    def poll(self, completions: Records) -> int:
        """Fill COMPLETION[n]; DeviceLost where a stuck target may write to slots."""
        count = super().poll(completions)
        self._check_slots()  # before anybody believes what a slot holds
        return count

    def close(self) -> None:
        """Cancel what is under way; DeviceLost where the target does not let go of the slots."""
        known = self._slots is not None and self._slots.stuck
        super().close()
        if not known:
            self._check_slots()

    def describe(self) -> str:
        """Return one line for people."""
        way = "straight into the slots" if self._dma.zerocopy else (
            f"{self._dma.buffers} buffers of {format_size(self._dma.buffer)} each way"
        )  # fmt: skip
        return f"{super().describe()}, {way}"

    def _check_slots(self) -> None:
        if self._slots is not None and self._slots.stuck:
            raise DeviceLost(f"{self._name()}: {self._slots.stuck}")

    def _measure(self) -> Limits:
        limits = super()._measure()
        shared = self._slots is not None
        return Limits(limits.max_transfer, limits.max_inflight, limits.alignment, shared)


def open_url(url: Url, *, create: bool, writable: bool) -> NvmeDmaTransport:  # noqa: ARG001
    """Open a namespace, which exists already: *create* means nothing."""
    return NvmeDmaTransport(parse(url), writable=writable)


def open_view(url: Url, request: bytes) -> NvmeDmaTransport:
    """Open the view that *request* asks for of the volume in a namespace."""
    return NvmeDmaTransport(replace(parse(url), view=request), writable=False)


def probe() -> str | None:
    """Return None: shared memory is everywhere."""
    return None


def detail() -> str:
    """Return what moves the data."""
    return "shared memory with a target of this machine; its --dma-engine moves the data"
