"""Page-aligned memory that transports read into and write from."""

import mmap

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import round_up

_HUGE = 2 << 20


def allocate_arena(nbytes: int) -> NDArray[np.uint8]:
    """Return zeroed uint8[nbytes rounded up to a block], aligned for O_DIRECT and huge pages.

    The memory is reserved, not touched: the process grows as pages land.
    """
    size = round_up(max(nbytes, BLOCK), BLOCK)
    # one huge page more than asked for, so that the start can be moved onto a huge page: with 4 KiB
    # pages a 1 MiB transfer has 256 segments, and many disks split it at 128 or 254
    space = mmap.mmap(-1, size + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    space.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(space, np.uint8)
    start = -memory.ctypes.data % _HUGE
    return memory[start : start + size]


def release_arena(arena: NDArray[np.uint8]) -> None:
    """Give the pages of *arena* back now, whoever still refers to it; it reads as zeros."""
    base: object = arena
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    if isinstance(base, mmap.mmap):
        base.madvise(mmap.MADV_DONTNEED)


def check_arena(arena: NDArray[np.uint8], alignment: int, *, registered: bool) -> None:
    """Raise UsageError unless *arena* may be registered with a transport."""
    if registered:
        raise UsageError("this transport has an arena already: open a second transport")
    if arena.dtype != np.uint8 or arena.ndim != 1 or not arena.flags.c_contiguous:
        raise UsageError("an arena is a contiguous one-dimensional uint8 array")
    if arena.ctypes.data % alignment:
        raise UsageError(
            f"the arena starts at an address that is no multiple of {alignment}:"
            " use hyades.proxy.arena.allocate_arena"
        )
