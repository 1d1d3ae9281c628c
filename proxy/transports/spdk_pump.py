"""The compiled loop of the SPDK process: one call takes requests, submits, polls and answers.

It is imported after SPDK's libraries are loaded: their functions are resolved by name when the
machine code is linked (a pointer could not be cached).  Rules:
1. A slot belongs to one request of the caller, from the ring to its answer: FREE -> WAITING ->
   RUNNING -> FREE.  One that failed with its path is PARKED until `requeue`.
2. A command's argument is a *ticket*, never a slot.  Its callback writes only to the ticket and to
   the list of done tickets.  A ticket is used again only after its callback came, and counts for
   its slot only if that is RUNNING with the ticket's attempt number: an answer to a command that
   was given up changes nothing.
3. Callbacks run inside SPDK's calls, on this thread; nothing here is shared with another thread
   but the rings and words of spdk_memory.py.
4. -ENOMEM at submit keeps the request first in line until commands complete.  A negative poll,
   or -ENXIO at submit, ends the call with FAULT.
"""

import errno
from typing import Any

from numba import types
from numba.np.numpy_support import carray

from hyades.common.atomics import doze, fence_sys, ld_acquire_sys, pause
from hyades.common.jit import callback, intrinsic, jit
from hyades.common.layout import BLOCK, RQ_COOKIE, RQ_LBA, RQ_LEN_SLOT, RQ_OFFSET, RQ_OP, Op, Status
from hyades.common.ring import STOP, claim, pop_batch, publish
from hyades.proxy.transports.spdk_abi import CPL_STATUS_MASK, CPL_STATUS_SHIFT
from hyades.proxy.transports.spdk_memory import (
    AN_COOKIE,
    AN_NBYTES,
    AN_STATUS,
    CALLER_SLEEPS,
    LATE,
    PARTIAL,
    REPLAYED,
    SLOT_MASK,
)
from hyades.proxy.transports.spdk_status import AGAIN, outcome

# What `pump` returns.
IDLE, BUSY, FAULT, BROKEN = range(4)

# columns of `slots`
S_STATE, S_OP, S_SECTOR, S_SECTORS, S_ADDRESS, S_NBYTES, S_COOKIE, S_ATTEMPT, S_STATUS = range(9)
S_COLUMNS = 10
FREE, WAITING, RUNNING, PARKED = range(4)

# columns of `tickets`; the first is the one that the callback writes
K_STATUS, K_SLOT, K_ATTEMPT, K_QUEUE, K_DONE, K_INDEX = range(6)
K_COLUMNS = 8
_PENDING, _UNUSED = -1, -2  # values of K_STATUS besides NVMe's

# columns of `queues`
Q_PAIR, Q_OUT, Q_COLUMNS = 0, 1, 2

# words of `state`
(
    W_NAMESPACE, W_CALLBACK, W_ARENA, W_ARENA_BYTES, W_SECTORS_PER_BLOCK, W_FLUSHES, W_BELL,
    W_HEAD, W_WAITING, W_RUNNING, W_PARKED, W_FREE_TICKETS, W_FAULTY, W_CODE, W_LOST, W_COMPLETED,
) = range(16)  # fmt: skip
W_WORDS = 16

_ROUNDS = 1024  # of the loop in one call
_PAUSES = 64  # fruitless rounds before the first nap
_IDLE = 512  # fruitless rounds with nothing under way before the caller's bell is awaited
_NAP, _LONGEST_NAP = 10_000, 100_000  # nanoseconds
_BATCH = 64

_READ, _WRITE, _FLUSH = int(Op.READ), int(Op.WRITE), int(Op.FLUSH)
_OK, _IO, _LOST = int(Status.OK), int(Status.IO), int(Status.LOST)
_INVALID, _CANCELLED = int(Status.INVALID), int(Status.CANCELLED)
_ENOMEM, _ENXIO, _EINVAL = -errno.ENOMEM, -errno.ENXIO, -errno.EINVAL
_I64, _I32, _U32 = types.int64, types.int32, types.uint32
_cmd = _I32(_I64, _I64, _I64, types.uint64, _U32, _I64, _I64, _U32)
_read = types.ExternalFunction("spdk_nvme_ns_cmd_read", _cmd)
_write = types.ExternalFunction("spdk_nvme_ns_cmd_write", _cmd)
_flush = types.ExternalFunction("spdk_nvme_ns_cmd_flush", _I32(_I64, _I64, _I64, _I64))
_poll = types.ExternalFunction("spdk_nvme_qpair_process_completions", _I32(_I64, _U32))
_libc_write = types.ExternalFunction("write", _I64(_I32, _I64, _I64))


@intrinsic
def _pointer(_context: Any, address: Any) -> Any:
    """Return *address* as a pointer to int64 words."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int64)(address), generate


@callback("void(CPointer(int64), CPointer(int64))")
def on_completion(argument: Any, completion: Any) -> None:
    """Note the status of one command: spdk_nvme_cmd_cb."""
    ticket = carray(argument, K_COLUMNS)
    if ticket[K_STATUS] != _PENDING:
        return
    status = carray(completion, 2)[1] >> CPL_STATUS_SHIFT
    ticket[K_STATUS] = status & CPL_STATUS_MASK
    done = carray(_pointer(ticket[K_DONE]), 1)
    done[0] += 1
    carray(_pointer(ticket[K_DONE] + 8 * done[0]), 1)[0] = ticket[K_INDEX]


@jit
def _answer(answers: Any, control: Any, cookie: Any, status: Any, nbytes: Any) -> Any:
    """Put one answer into the ring; False where it is full, which the caller's depth forbids."""
    position = claim(answers, control)
    if position < 0:
        return False
    base = (position & ((answers.shape[0] >> 3) - 1)) << 3
    answers[base + AN_COOKIE] = cookie
    answers[base + AN_STATUS] = status
    answers[base + AN_NBYTES] = nbytes
    publish(answers, position)
    return True


@jit
def _ring_bell(words: Any, state: Any, one: Any) -> None:
    """Wake the caller if it sleeps; *one* is int64[1] holding 1."""
    fence_sys()
    if ld_acquire_sys(words, CALLER_SLEEPS) != 0:
        _libc_write(state[W_BELL], one.ctypes.data, 8)


@jit
def _end(answers: Any, control: Any, slots: Any, slot: Any, status: Any) -> Any:
    nbytes = slots[slot, S_NBYTES] if status == _OK else 0
    slots[slot, S_STATE] = FREE
    return _answer(answers, control, slots[slot, S_COOKIE], status, nbytes)


@jit
def _wait(slots: Any, line: Any, state: Any, slot: Any) -> None:
    slots[slot, S_STATE] = WAITING
    line[(state[W_HEAD] + state[W_WAITING]) % line.shape[0]] = slot
    state[W_WAITING] += 1


@jit
def _take(
    requests: Any, request_control: Any, answers: Any, answer_control: Any,
    slots: Any, line: Any, batch: Any, state: Any,
) -> Any:  # fmt: skip
    """Move requests from the ring to the line; return how many came, or -1: a broken record."""
    count = pop_batch(requests, request_control, batch)
    for i in range(count):
        slot = batch[i, RQ_COOKIE] & SLOT_MASK
        nbytes = batch[i, RQ_LEN_SLOT] & 0xFFFFFFFF
        op, offset = batch[i, RQ_OP] & 0xFF, batch[i, RQ_OFFSET]
        if slot >= slots.shape[0] or slots[slot, S_STATE] != FREE:
            return -1
        if op == _FLUSH:
            nbytes = 0
        elif offset < 0 or offset + nbytes > state[W_ARENA_BYTES]:
            return -1
        slots[slot, S_OP] = op
        slots[slot, S_SECTOR] = batch[i, RQ_LBA] * state[W_SECTORS_PER_BLOCK]
        slots[slot, S_SECTORS] = nbytes // BLOCK * state[W_SECTORS_PER_BLOCK]
        slots[slot, S_ADDRESS] = state[W_ARENA] + offset
        slots[slot, S_NBYTES] = nbytes
        slots[slot, S_COOKIE] = batch[i, RQ_COOKIE]
        if state[W_LOST]:
            status = _LOST
        elif op == _FLUSH and not state[W_FLUSHES]:
            status = _OK  # the namespace has no volatile cache
        else:
            _wait(slots, line, state, slot)
            continue
        if not _end(answers, answer_control, slots, slot, status):
            return -1
    return count


@jit
def _start(slots: Any, tickets: Any, unused: Any, queues: Any, state: Any, slot: Any) -> Any:
    """Give one command to the queue with the fewest; return SPDK's code."""
    if state[W_FREE_TICKETS] == 0:
        return _ENOMEM
    queue = 0
    for i in range(1, queues.shape[0]):
        if queues[i, Q_OUT] < queues[queue, Q_OUT]:
            queue = i
    ticket = unused[state[W_FREE_TICKETS] - 1]
    row = tickets[ticket]
    row[K_STATUS] = _PENDING
    row[K_SLOT] = slot
    row[K_ATTEMPT] = slots[slot, S_ATTEMPT]
    row[K_QUEUE] = queue
    pair, argument, space = queues[queue, Q_PAIR], row.ctypes.data, state[W_NAMESPACE]
    op, call = slots[slot, S_OP], state[W_CALLBACK]
    address, sector = slots[slot, S_ADDRESS], types.uint64(slots[slot, S_SECTOR])
    sectors = types.uint32(slots[slot, S_SECTORS])
    if op == _READ:
        code = _read(space, pair, address, sector, sectors, call, argument, types.uint32(0))
    elif op == _WRITE:
        code = _write(space, pair, address, sector, sectors, call, argument, types.uint32(0))
    else:
        code = _flush(space, pair, call, argument)
    if code != 0:
        row[K_STATUS] = _UNUSED
        state[W_FAULTY] = queue
        return types.int64(code)
    state[W_FREE_TICKETS] -= 1
    slots[slot, S_STATE] = RUNNING
    queues[queue, Q_OUT] += 1
    state[W_RUNNING] += 1
    return types.int64(0)


@jit
def _submit(
    answers: Any, answer_control: Any, words: Any, slots: Any, line: Any,
    tickets: Any, unused: Any, queues: Any, state: Any,
) -> Any:  # fmt: skip
    """Start what waits, in order; return how many left the line, or a negative code of SPDK."""
    count = 0
    while state[W_WAITING] > 0:
        slot = line[state[W_HEAD]]
        code = _start(slots, tickets, unused, queues, state, slot)
        if code == _ENOMEM:
            words[PARTIAL] += 1
            break
        if code == _ENXIO:
            return types.int64(code)
        state[W_HEAD] = (state[W_HEAD] + 1) % line.shape[0]
        state[W_WAITING] -= 1
        count += 1
        if code != 0:
            status = _INVALID if code == _EINVAL else _IO
            if not _end(answers, answer_control, slots, slot, status):
                return types.int64(_EINVAL)
    return types.int64(count)


@jit
def settle(
    answers: Any, answer_control: Any, words: Any, slots: Any,
    tickets: Any, unused: Any, done: Any, queues: Any, state: Any, closing: Any,
) -> Any:  # fmt: skip
    """Turn done tickets into answers; return how many came, or -1: the answer ring is full."""
    count = done[0]
    for i in range(count):
        row = tickets[done[1 + i]]
        slot, status = row[K_SLOT], row[K_STATUS]
        unused[state[W_FREE_TICKETS]] = done[1 + i]
        state[W_FREE_TICKETS] += 1
        row[K_STATUS] = _UNUSED
        if slots[slot, S_STATE] != RUNNING or slots[slot, S_ATTEMPT] != row[K_ATTEMPT]:
            words[LATE] += 1
            continue
        queues[row[K_QUEUE], Q_OUT] -= 1
        state[W_RUNNING] -= 1
        state[W_COMPLETED] += 1
        slots[slot, S_STATUS] = status
        slots[slot, S_ATTEMPT] += 1
        result = outcome(status)
        if result == AGAIN:
            if not closing:
                slots[slot, S_STATE] = PARKED
                state[W_PARKED] += 1
                continue
            result = _CANCELLED
        if not _end(answers, answer_control, slots, slot, result):
            return -1
    done[0] = 0
    return count


@jit
def requeue(words: Any, slots: Any, line: Any, queues: Any, state: Any, running: Any) -> None:
    """Put what is parked in line again, and with *running* what has no callback yet, too."""
    for slot in range(slots.shape[0]):
        if running and slots[slot, S_STATE] == RUNNING:
            slots[slot, S_ATTEMPT] += 1  # its callback, if it ever comes, is late
            state[W_RUNNING] -= 1
        elif slots[slot, S_STATE] == PARKED:
            state[W_PARKED] -= 1
        else:
            continue
        words[REPLAYED] += 1
        _wait(slots, line, state, slot)
    if running:
        queues[:, Q_OUT] = 0


@jit
def abandon(
    answers: Any, answer_control: Any, words: Any, slots: Any, queues: Any, state: Any,
    status: Any, one: Any,
) -> None:  # fmt: skip
    """Answer everything that is under way with *status*; no queue may hold a buffer any more."""
    for slot in range(slots.shape[0]):
        if slots[slot, S_STATE] != FREE:
            slots[slot, S_ATTEMPT] += 1
            _end(answers, answer_control, slots, slot, status)
    state[W_WAITING] = state[W_RUNNING] = state[W_PARKED] = 0
    queues[:, Q_OUT] = 0
    _ring_bell(words, state, one)


@jit
def cancel(
    requests: Any, request_control: Any, answers: Any, answer_control: Any,
    slots: Any, line: Any, batch: Any, state: Any,
) -> None:  # fmt: skip
    """Answer all that was not started with Status.CANCELLED."""
    while _take(
        requests, request_control, answers, answer_control, slots, line, batch, state
    ) > 0:  # fmt: skip
        pass
    for slot in range(slots.shape[0]):
        if slots[slot, S_STATE] in (WAITING, PARKED):
            _end(answers, answer_control, slots, slot, _CANCELLED)
    state[W_WAITING] = state[W_PARKED] = 0


@jit
def poll_queues(queues: Any, state: Any) -> Any:
    """Let SPDK complete commands; return 0 or the negative code of the queue in W_FAULTY."""
    for i in range(queues.shape[0]):
        if queues[i, Q_PAIR] == 0:
            continue
        code = _poll(queues[i, Q_PAIR], types.uint32(0))
        if code < 0:
            state[W_FAULTY] = i
            return types.int64(code)
    return types.int64(0)


@jit
def pump(
    requests: Any, request_control: Any, answers: Any, answer_control: Any, words: Any,
    slots: Any, line: Any, tickets: Any, unused: Any, done: Any, queues: Any, batch: Any,
    state: Any, one: Any,
) -> Any:  # fmt: skip
    """Run the loop for a while; see IDLE, BUSY, FAULT and BROKEN."""
    quiet = 0
    nap = _NAP
    for _ in range(_ROUNDS):
        moved = _take(requests, request_control, answers, answer_control, slots, line, batch, state)
        if moved < 0:
            return BROKEN
        code = types.int64(0)
        if not state[W_LOST]:
            code = _submit(
                answers, answer_control, words, slots, line, tickets, unused, queues, state
            )
            if code > 0:
                moved += code
            if code >= 0:
                code = poll_queues(queues, state)
        ended = settle(
            answers, answer_control, words, slots, tickets, unused, done, queues, state, False
        )
        if ended < 0:
            return BROKEN
        moved += ended
        if moved:
            _ring_bell(words, state, one)
            quiet, nap = 0, _NAP
        if code < 0:
            state[W_CODE] = code
            return FAULT
        if moved:
            continue
        quiet += 1
        if ld_acquire_sys(request_control, STOP) != 0:
            return IDLE
        if quiet < _PAUSES:
            pause(0)
        elif state[W_RUNNING] + state[W_WAITING] == 0:
            if quiet >= _IDLE:
                return IDLE
            pause(0)
        else:
            doze(nap)
            nap = min(nap + nap // 2, _LONGEST_NAP)
    return BUSY
