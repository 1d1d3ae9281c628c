"""Page-aligned memory that transports read into and write from.

A *shared* arena lies in a memory file, so that another process can map the same pages: a transport
whose `Limits.shared_arena` is set moves pages in a process of its own and registers no other kind.
"""

import fcntl
import mmap
import os
import weakref

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import round_up

_HUGE = 2 << 20


class _SharedMap(mmap.mmap):
    """A mapped memory file that knows its descriptor."""

    fd: int


def allocate_arena(nbytes: int, *, shared: bool = False) -> NDArray[np.uint8]:
    """Return zeroed uint8[nbytes rounded up to a block], aligned for O_DIRECT and huge pages.

    The memory is reserved, not touched: the process grows as pages land.  With *shared* it lies in
    a memory file (`shared_handle`).
    """
    size = round_up(max(nbytes, BLOCK), BLOCK)
    # one huge page more than asked for, so that the start can be moved onto a huge page: with 4 KiB
    # pages a 1 MiB transfer has 256 segments, and many disks split it at 128 or 254
    space = _map_file(size + _HUGE) if shared else _map_private(size + _HUGE)
    memory = np.frombuffer(space, np.uint8)
    start = -memory.ctypes.data % _HUGE
    return memory[start : start + size]


def _map_private(nbytes: int) -> mmap.mmap:
    space = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    space.madvise(mmap.MADV_HUGEPAGE)
    return space


def _map_file(nbytes: int) -> mmap.mmap:
    fd = os.memfd_create("hyades-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        # who maps it in another process must not lose its pages
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        space = _SharedMap(fd, nbytes, mmap.MAP_SHARED)
    except BaseException:
        os.close(fd)
        raise
    space.fd = fd
    weakref.finalize(space, os.close, fd)
    return space


def _owner(arena: NDArray[np.uint8]) -> object:
    base: object = arena
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return base


def shared_handle(arena: NDArray[np.uint8]) -> tuple[int, int] | None:
    """Return the descriptor and byte offset at which *arena* begins, or None: it is not shared.

    The descriptor lives as long as the arena.
    """
    space = _owner(arena)
    if not isinstance(space, _SharedMap):
        return None
    return space.fd, arena.ctypes.data - np.frombuffer(space, np.uint8).ctypes.data


def release_arena(arena: NDArray[np.uint8]) -> None:
    """Give the pages of *arena* back now, whoever still refers to it; it reads as zeros."""
    space = _owner(arena)
    if isinstance(space, _SharedMap):
        space.madvise(mmap.MADV_REMOVE)  # DONTNEED would only unmap them here
    elif isinstance(space, mmap.mmap):
        space.madvise(mmap.MADV_DONTNEED)


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
