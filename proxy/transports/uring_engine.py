"""The file transport's fast engine: one compiled call submits a batch, one reaps a batch."""

import errno
import os
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.jit import jit
from hyades.common.layout import (
    BLOCK,
    RQ_COOKIE,
    RQ_LBA,
    RQ_LEN_SLOT,
    RQ_OFFSET,
    RQ_OP,
    Status,
)
from hyades.proxy.records import COUNTERS, FLUSH, Words, account, check_request, put_completion
from hyades.proxy.transports.engines import TRIES, Geometry, errno_status
from hyades.proxy.transports.uring import (
    G_NANOSECONDS,
    G_SECONDS,
    Rings,
    consumed,
    enter,
    next_completion,
    open_rings,
    pin,
    prepare,
)

_OK, _SHORT, _CANCELLED = int(Status.OK), int(Status.SHORT), int(Status.CANCELLED)
_EINTR, _EAGAIN, _EBUSY = errno.EINTR, errno.EAGAIN, errno.EBUSY

# columns of `slots`, one row a request that was accepted and not yet reported
_OP, _PLACE, _OFFSET, _NBYTES, _DONE, _COOKIE, _TRIES, _STATUS = range(8)
# rows of `stacks`: free slots; slots whose request ended without a completion of the kernel's
_FREE, _ENDED = range(2)
# words of `state`; the first two are the heights of the stacks
_KERNEL, _ADDRESS, _ARENA, _NBLOCKS, _LIMIT, _WRITABLE, _STEP, _PINNED, _CLOSING, _FATAL = range(
    2, 12
)


class UringEngine:
    """Runs requests through io_uring, each continued until it is whole."""

    def __init__(self, geometry: Geometry) -> None:
        depth = geometry.depth
        entries = 1 << max(0, depth - 1).bit_length()
        self._rings: Rings = open_rings(entries, geometry.fd)
        self._slots = np.zeros((depth, 8), np.int64)
        self._stacks = np.zeros((2, depth), np.int64)
        self._stacks[_FREE] = np.arange(depth)[::-1]
        self._state = np.zeros(12, np.int64)
        self._state[_FREE] = depth
        self._state[_LIMIT] = geometry.max_transfer
        self._state[_WRITABLE] = geometry.writable
        self._state[_STEP] = geometry.step
        self.counters: NDArray[np.int64] = np.zeros(COUNTERS, np.int64)
        self._closed = False
        self._pinning = "no arena yet"
        self._slot_args = (self._slots, self._stacks, self._state)

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the arena and pin it where the kernel lets us."""
        pin(self._rings, arena)
        self._state[_ADDRESS] = arena.ctypes.data
        self._state[_ARENA] = len(arena)
        self._state[_PINNED] = self._rings.pinned
        problem = self._rings.pin_problem
        self._pinning = f"arena not registered ({problem})" if problem else "registered arena"

    def submit(self, words: Words, nblocks: int) -> int:
        """Accept a prefix of int64[n, 8] and start it."""
        self._state[_NBLOCKS] = nblocks
        rings = self._rings
        args = (rings.geometry, rings.indices, rings.sqes)
        return int(_submit(words, *args, *self._slot_args))

    def poll(self, out: Words) -> int:
        """Fill int64[n, 3] with finished requests; raise OSError if the ring itself is broken."""
        rings = self._rings
        args = (rings.geometry, rings.indices, rings.sqes, rings.cqes)
        count = int(_poll(out, *args, *self._slot_args, self.counters))
        if self._state[_FATAL]:
            code = int(self._state[_FATAL])
            raise OSError(code, f"io_uring_enter: {os.strerror(code)}")
        return count

    def wait(self, timeout: float) -> None:
        """Sleep in the kernel until a completion is there, at most *timeout* seconds."""
        seconds = int(timeout)
        nanoseconds = int((timeout - seconds) * 1e9)
        rings = self._rings
        args = (rings.geometry, rings.indices, rings.cqes, self._state)
        if self._closed or not _wait(*args, seconds, nanoseconds):
            time.sleep(timeout)

    def close(self) -> None:
        """Wait until the kernel has let go of every buffer."""
        if self._closed:
            return
        self._closed = True
        self._state[_CLOSING] = 1
        rings = self._rings
        code = _drain(rings.geometry, rings.indices, rings.cqes, *self._slot_args)
        rings.close()
        if code:
            raise OSError(code, f"io_uring_enter: {os.strerror(code)}")

    def describe(self) -> str:
        """Return the engine's part of the transport's line."""
        return f"io_uring, {self._pinning}"


@jit
def _start(geometry: Any, indices: Any, sqes: Any, slots: Any, state: Any, slot: Any) -> None:
    done = slots[slot, _DONE]
    offset = slots[slot, _OFFSET] + done
    nbytes = min(slots[slot, _NBYTES] - done, state[_STEP])
    prepare(
        geometry, indices, sqes, slots[slot, _OP], slots[slot, _PLACE] + done,
        state[_ADDRESS] + offset, nbytes, state[_PINNED], offset, slot,
    )  # fmt: skip
    state[_KERNEL] += 1


@jit
def _end(slots: Any, stacks: Any, state: Any, slot: Any, status: Any) -> None:
    slots[slot, _STATUS] = status
    stacks[_ENDED, state[_ENDED]] = slot
    state[_ENDED] += 1


@jit
def _hand_over(geometry: Any, indices: Any, state: Any) -> None:
    code = enter(geometry, indices, 0)
    if code not in (0, _EAGAIN, _EBUSY):
        state[_FATAL] = code


@jit
def _submit(
    words: Any, geometry: Any, indices: Any, sqes: Any, slots: Any, stacks: Any, state: Any
) -> Any:
    count = min(words.shape[0], state[_FREE])
    for i in range(count):
        state[_FREE] -= 1
        slot = stacks[_FREE, state[_FREE]]
        op = words[i, RQ_OP] & 0xFF
        slots[slot, _OP] = op
        slots[slot, _PLACE] = words[i, RQ_LBA] * BLOCK
        slots[slot, _OFFSET] = words[i, RQ_OFFSET]
        slots[slot, _NBYTES] = words[i, RQ_LEN_SLOT] & 0xFFFFFFFF
        slots[slot, _DONE] = 0
        slots[slot, _COOKIE] = words[i, RQ_COOKIE]
        slots[slot, _TRIES] = 0
        status = check_request(
            words, i, state[_NBLOCKS], state[_ARENA], state[_LIMIT], state[_WRITABLE]
        )
        if status == _OK:
            _start(geometry, indices, sqes, slots, state, slot)
        else:
            _end(slots, stacks, state, slot, status)
    _hand_over(geometry, indices, state)
    return count


@jit
def _advance(slots: Any, state: Any, slot: Any, result: Any) -> Any:
    """Take what the kernel says about *slot*; return its status, or 1 where it must go on."""
    if result < 0:
        if result != -_EAGAIN and result != -_EINTR:
            return np.int64(errno_status(-result))
        slots[slot, _TRIES] += 1
        if slots[slot, _TRIES] > TRIES:
            return np.int64(errno_status(-result))
    elif slots[slot, _OP] == FLUSH:
        return np.int64(_OK)
    else:
        done = slots[slot, _DONE] + result
        if done >= slots[slot, _NBYTES]:
            slots[slot, _DONE] = slots[slot, _NBYTES]
            return np.int64(_OK)
        # O_DIRECT goes on at whole blocks only; no whole block means the end of the file
        done -= done % BLOCK
        if done <= slots[slot, _DONE]:
            return np.int64(_SHORT)
        slots[slot, _DONE] = done
        slots[slot, _TRIES] = 0
    return np.int64(_CANCELLED if state[_CLOSING] else 1)


@jit
def _report(
    out: Any, i: Any, slots: Any, stacks: Any, state: Any, counters: Any, slot: Any
) -> None:
    op, status = slots[slot, _OP], slots[slot, _STATUS]
    nbytes = slots[slot, _DONE]
    put_completion(out, i, slots[slot, _COOKIE], status, nbytes)
    account(counters, op, status, nbytes)
    stacks[_FREE, state[_FREE]] = slot
    state[_FREE] += 1


@jit
def _poll(
    out: Any, geometry: Any, indices: Any, sqes: Any, cqes: Any,
    slots: Any, stacks: Any, state: Any, counters: Any,
) -> Any:  # fmt: skip
    count = 0
    while count < out.shape[0] and state[_ENDED] > 0:
        state[_ENDED] -= 1
        slot = stacks[_ENDED, state[_ENDED]]
        _report(out, count, slots, stacks, state, counters, slot)
        count += 1
    if state[_CLOSING]:
        return count
    while count < out.shape[0]:
        row = next_completion(geometry, indices, cqes)
        if row < 0:
            break
        slot = cqes[row, 0]
        result = np.int64(np.int32(cqes[row, 1] & 0xFFFFFFFF))
        consumed(geometry, indices)
        state[_KERNEL] -= 1
        status = _advance(slots, state, slot, result)
        if status == 1:
            _start(geometry, indices, sqes, slots, state, slot)
        else:
            slots[slot, _STATUS] = status
            _report(out, count, slots, stacks, state, counters, slot)
            count += 1
    _hand_over(geometry, indices, state)
    return count


@jit
def _wait(
    geometry: Any, indices: Any, cqes: Any, state: Any, seconds: Any, nanoseconds: Any
) -> Any:
    """Return False where nothing is in flight, so that the caller sleeps instead."""
    if state[_ENDED] > 0 or next_completion(geometry, indices, cqes) >= 0:
        return True
    if state[_KERNEL] == 0:
        return False
    geometry[G_SECONDS] = seconds
    geometry[G_NANOSECONDS] = nanoseconds
    code = enter(geometry, indices, 1)
    if code not in (0, _EAGAIN, _EBUSY):
        state[_FATAL] = code
    return True


@jit
def _drain(geometry: Any, indices: Any, cqes: Any, slots: Any, stacks: Any, state: Any) -> Any:
    geometry[G_SECONDS] = 1
    geometry[G_NANOSECONDS] = 0
    while state[_KERNEL] > 0:
        row = next_completion(geometry, indices, cqes)
        if row < 0:
            code = enter(geometry, indices, 1)
            if code not in (0, _EAGAIN, _EBUSY):
                return code
            continue
        slot = cqes[row, 0]
        result = np.int64(np.int32(cqes[row, 1] & 0xFFFFFFFF))
        consumed(geometry, indices)
        state[_KERNEL] -= 1
        _end(slots, stacks, state, slot, _advance(slots, state, slot, result))
    return np.int64(0)
