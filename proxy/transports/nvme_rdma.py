"""A namespace of an NVMe/RDMA target: ``nvme+rdma://host:port/subnqn?ns=1`` (see nvme_url.py).

Commands travel in capsules; pages are moved by the RDMA device of the target's side, straight
between its memory and the arena, which is registered once.  The paths, queues, replays and errors
are those of nvme+tcp:// (nvme_tcp.py); only the connection is another (nvme_rdma_session.py,
nvme_rdma_wire.py).  The target can reach the whole arena while it is connected.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hyades.common.layout import BLOCK
from hyades.common.nvme.rdma import MAX_LENGTH
from hyades.common.rdma import library
from hyades.common.rdma.device import Devices
from hyades.proxy.transport import Limits
from hyades.proxy.transports.nvme_rdma_session import RdmaSession
from hyades.proxy.transports.nvme_tcp import NvmeTcpTransport
from hyades.proxy.transports.nvme_url import Options, parse
from hyades.proxy.urls import Url


class NvmeRdmaTransport(NvmeTcpTransport):
    """Moves pages between an arena and a remote namespace by RDMA."""

    def __init__(self, options: Options, *, writable: bool = True) -> None:
        """Connect; UsageError or PeerError where no path leads to the namespace."""
        self._devices = Devices()
        try:
            super().__init__(
                options, writable=writable, session=partial(RdmaSession, self._devices)
            )
        except BaseException:
            self._devices.close()
            raise

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the uint8 *arena* that request offsets index; all of it becomes resident."""
        super().register(arena)
        self._devices.share(arena.data)

    def close(self) -> None:
        """Cancel what is under way, leave the controllers in order, and let go of the memory."""
        if not self._closed:
            super().close()
            self._devices.close()

    def _measure(self) -> Limits:
        limits = super()._measure()
        most = MAX_LENGTH // BLOCK * BLOCK
        return Limits(min(limits.max_transfer, most), limits.max_inflight, limits.alignment)


def open_url(url: Url, *, create: bool, writable: bool) -> NvmeRdmaTransport:  # noqa: ARG001
    """Open a namespace, which exists already: *create* means nothing."""
    return NvmeRdmaTransport(parse(url, "rdma"), writable=writable)


def open_view(url: Url, request: bytes) -> NvmeRdmaTransport:
    """Open the view that *request* asks for of the volume in a namespace."""
    return NvmeRdmaTransport(replace(parse(url, "rdma"), view=request), writable=False)


def probe() -> str | None:
    """Return what RDMA lacks here and how to get it, or None."""
    return library.probe()


def detail() -> str:
    """Return the devices of this machine."""
    return f"RDMA devices {', '.join(library.devices())}"
