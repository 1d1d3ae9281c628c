"""Get everything compiled or loaded before the clocks and the memory watch of a run start."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from hyades.common.layout import BLOCK, REQUEST, Op, RequestFlag
from hyades.common.ring import Ring
from hyades.gpu_side.warm import compile_kernels
from hyades.proxy.arena import allocate_arena
from hyades.proxy.proxy import Proxy
from hyades.proxy.registry import open_transport
from hyades.proxy.stripes import map_members
from hyades.proxy.transports.nvme_url import with_patience


@contextmanager
def warmed_up(url: str, progress: Callable[[str, int, int, str], None] | None) -> Iterator[None]:
    """Compile the kernels of both sides of the ring, and read one block of the volume with them."""
    if progress is not None:
        progress("kernels (compiled once)", 0, 1, "step")
    compile_kernels()
    device = open_transport(map_members(url, with_patience), writable=False)
    ready = np.zeros(2, np.int64)
    arena = allocate_arena(BLOCK, shared=device.limits.shared_arena)
    proxy = Proxy(Ring.create(2), ready, arena, [device])
    request = np.zeros(1, REQUEST)
    request["op"], request["nbytes"], request["generation"] = int(Op.READ), BLOCK, 1
    # The checksum is wrong on purpose: what is compiled matters here, not what is read.
    request["flags"] = int(RequestFlag.CHECK_CRC)
    proxy.start()
    try:
        proxy.ring.push(request)
        while ready[0] == 0 and proxy.death() is None:
            time.sleep(1e-4)
    finally:
        proxy.stop(drain=False)
        device.close()
    if progress is not None:
        progress("kernels (compiled once)", 1, 1, "step")
    yield
