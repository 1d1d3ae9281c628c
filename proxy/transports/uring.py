"""io_uring by raw system calls: rings are mmapped as numpy arrays, the loops are compiled.

Must stay in sync with linux/io_uring.h.  What the kernel writes is read with acquire, what it reads
is written with release.  Indices are uint32 and wrap; here they are int64 masked to 32 bits.
"""

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from hyades.common.atomics import ld_acquire, st_release
from hyades.common.jit import jit
from hyades.common.units import MIB

_SETUP, _ENTER, _REGISTER = 425, 426, 427  # the same on every architecture
_OFF_SQ, _OFF_CQ, _OFF_SQES = 0, 0x8000000, 0x10000000
_FEAT_SINGLE_MMAP, _FEAT_NODROP, _FEAT_EXT_ARG = 1, 2, 1 << 8
_ENTER_GETEVENTS, _ENTER_EXT_ARG = 1, 8
_REGISTER_BUFFERS, _UNREGISTER_BUFFERS = 0, 1
_OP_FSYNC, _OP_READ_FIXED, _OP_WRITE_FIXED, _OP_READ, _OP_WRITE = 3, 4, 5, 22, 23
_DATASYNC = 1
# Registering touches every page: 1.1 GiB took two seconds here, to save about 1 us a transfer.
# Slots lie at the start of an arena, lane states behind them.
_PIN_LIMIT = 32 * MIB
_MASK = 0xFFFFFFFF
_EINTR, _EAGAIN, _ETIME = errno.EINTR, errno.EAGAIN, errno.ETIME

# What may be done to an SQE; READ and WRITE as in layout.Op.
READ, WRITE, FLUSH = 1, 2, 3

# words of Rings.geometry; G_ARG is where struct io_uring_getevents_arg begins, which points to the
# struct timespec in the last two words
G_RING_FD, G_FILE_FD, G_SQ_HEAD, G_SQ_TAIL, G_CQ_HEAD, G_CQ_TAIL, G_ARG = range(7)
G_SECONDS, G_NANOSECONDS, G_WORDS = G_ARG + 3, G_ARG + 4, G_ARG + 5

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
# Resolved by name when the machine code is linked, so that it can be cached; a pointer could not.
_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_errno = types.ExternalFunction("__errno_location", types.CPointer(types.int32)())


class _Params(ctypes.Structure):
    _fields_ = (
        ("sq_entries", ctypes.c_uint32),
        ("cq_entries", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("sq_thread_cpu", ctypes.c_uint32),
        ("sq_thread_idle", ctypes.c_uint32),
        ("features", ctypes.c_uint32),
        ("wq_fd", ctypes.c_uint32),
        ("resv", ctypes.c_uint32 * 3),
        ("sq_off", ctypes.c_uint32 * 10),  # head tail mask entries flags dropped array ...
        ("cq_off", ctypes.c_uint32 * 10),  # head tail mask entries overflow cqes ...
    )


@dataclass(slots=True)
class Rings:
    """One io_uring instance and the arrays that the compiled loops work on."""

    geometry: NDArray[np.int64]
    indices: NDArray[np.int32]  # the head and tail words, at geometry[G_*]
    sqes: NDArray[np.int64]  # [entries, 8]
    cqes: NDArray[np.int64]  # [2 * entries, 2]: user_data; res and flags
    pinned: int  # bytes at the start of the arena that are registered
    pin_problem: str  # why they are not

    def close(self) -> None:
        """Unpin the arena and give the ring back; nothing may be in flight."""
        fd = int(self.geometry[G_RING_FD])
        if self.pinned:  # closing alone would unpin some time later
            _libc.syscall(_REGISTER, fd, _UNREGISTER_BUFFERS, None, 0)
            self.pinned = 0
        os.close(fd)
        # the maps hold descriptors of their own, until nothing refers to them
        self.indices = np.zeros(1, np.int32)
        self.sqes = np.zeros((1, 8), np.int64)
        self.cqes = np.zeros((1, 2), np.int64)


def open_rings(entries: int, file_fd: int) -> Rings:
    """Set up a ring of *entries* (a power of two); raise OSError where the kernel refuses."""
    params = _Params()
    fd = int(_libc.syscall(_SETUP, entries, ctypes.byref(params)))
    if fd < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    try:
        needed = _FEAT_SINGLE_MMAP | _FEAT_NODROP | _FEAT_EXT_ARG
        if params.features & needed != needed:
            raise OSError(errno.ENOSYS, "io_uring of this kernel is older than Linux 5.11")
        return _map(params, fd, file_fd)
    except BaseException:
        os.close(fd)
        raise


def _map(params: _Params, fd: int, file_fd: int) -> Rings:
    sq, cq = list(params.sq_off), list(params.cq_off)
    size = max(sq[6] + 4 * params.sq_entries, cq[5] + 16 * params.cq_entries)
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
    # the arrays keep the maps alive
    ring = mmap.mmap(fd, size, flags=flags, offset=_OFF_SQ)
    sqes = mmap.mmap(fd, 64 * params.sq_entries, flags=flags, offset=_OFF_SQES)
    indices = np.frombuffer(ring, np.int32, size // 4)
    # SQE i always stands in slot i
    indices[sq[6] // 4 :][: params.sq_entries] = np.arange(params.sq_entries)
    geometry = np.zeros(G_WORDS, np.int64)
    geometry[:G_ARG] = (fd, file_fd, sq[0] // 4, sq[1] // 4, cq[0] // 4, cq[1] // 4)
    geometry[G_ARG + 2] = geometry.ctypes.data + 8 * G_SECONDS
    return Rings(
        geometry=geometry,
        indices=indices,
        sqes=np.frombuffer(sqes, np.int64).reshape(-1, 8),
        cqes=np.frombuffer(ring, np.int64, 2 * params.cq_entries, cq[5]).reshape(-1, 2),
        pinned=0,
        pin_problem="",
    )


def pin(rings: Rings, arena: NDArray[np.uint8]) -> None:
    """Register the start of *arena* so that the kernel need not look up its pages at each transfer.

    Where that is refused (a small RLIMIT_MEMLOCK, memory of a file) transfers work all the same;
    `pin_problem` then says why.
    """
    nbytes = min(len(arena), _PIN_LIMIT)
    part = np.array([arena.ctypes.data, nbytes], np.uint64)  # struct iovec
    fd = int(rings.geometry[G_RING_FD])
    if _libc.syscall(_REGISTER, fd, _REGISTER_BUFFERS, ctypes.c_void_p(part.ctypes.data), 1):
        code = ctypes.get_errno()
        hint = ": raise ulimit -l" if code == errno.ENOMEM else ""
        rings.pin_problem = f"{errno.errorcode.get(code, code)}{hint}"
        return
    rings.pinned = nbytes


@jit
def prepare(
    geometry: Any, indices: Any, sqes: Any,
    op: Any, place: Any, address: Any, nbytes: Any, pinned: Any, arena_offset: Any, cookie: Any,
) -> None:  # fmt: skip
    """Write the next SQE; the caller knows that there is room.  *place* is the file offset."""
    tail = np.int64(indices[geometry[G_SQ_TAIL]]) & _MASK
    row = tail & (sqes.shape[0] - 1)
    fd = geometry[G_FILE_FD] << 32
    fixed = arena_offset + nbytes <= pinned
    sqes[row, 5] = 0
    if op == FLUSH:
        sqes[row, 0] = _OP_FSYNC | fd
        place, address, nbytes = 0, 0, _DATASYNC << 32
    elif fixed:
        sqes[row, 0] = (_OP_READ_FIXED if op == READ else _OP_WRITE_FIXED) | fd
    else:
        sqes[row, 0] = (_OP_READ if op == READ else _OP_WRITE) | fd
    sqes[row, 1] = place
    sqes[row, 2] = address
    sqes[row, 3] = nbytes
    sqes[row, 4] = cookie
    sqes[row, 6] = 0
    sqes[row, 7] = 0
    st_release(indices, geometry[G_SQ_TAIL], np.int32((tail + 1) & _MASK))


@jit
def enter(geometry: Any, indices: Any, least: Any) -> Any:
    """Hand prepared SQEs to the kernel and wait for *least* completions; return 0 or an errno.

    The wait is no longer than the timespec in the geometry.  EAGAIN means that SQEs are left for
    the next call.
    """
    while True:
        tail = np.int64(indices[geometry[G_SQ_TAIL]])
        todo = (tail - np.int64(ld_acquire(indices, geometry[G_SQ_HEAD]))) & _MASK
        if todo == 0 and least == 0:
            return np.int64(0)
        flags, argument, size = 0, 0, 0
        if least > 0:
            flags, size = _ENTER_GETEVENTS | _ENTER_EXT_ARG, 24
            argument = geometry.ctypes.data + 8 * G_ARG
        result = _syscall(_ENTER, geometry[G_RING_FD], todo, least, flags, argument, size)
        if result >= 0:
            if result == todo:
                return np.int64(0)
            if result == 0:
                return np.int64(_EAGAIN)
        else:
            code = np.int64(carray(_errno(), 1)[0])
            if code == _ETIME:
                return np.int64(0)
            if code != _EINTR:
                return code
        least = 0  # after a part or a signal: what is left, without another wait


@jit
def next_completion(geometry: Any, indices: Any, cqes: Any) -> Any:
    """Return the row of the oldest completion, or -1; call `consumed` after reading it."""
    head = np.int64(indices[geometry[G_CQ_HEAD]]) & _MASK
    tail = np.int64(ld_acquire(indices, geometry[G_CQ_TAIL])) & _MASK
    if head == tail:
        return np.int64(-1)
    return head & (cqes.shape[0] - 1)


@jit
def consumed(geometry: Any, indices: Any) -> None:
    """Give the row of the oldest completion back to the kernel."""
    head = np.int64(indices[geometry[G_CQ_HEAD]]) & _MASK
    st_release(indices, geometry[G_CQ_HEAD], np.int32((head + 1) & _MASK))
