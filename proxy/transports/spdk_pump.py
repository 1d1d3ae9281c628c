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
from hyades.proxy.transports import spdk_tables as t
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
    ticket = carray(argument, t.K_COLUMNS)
    if ticket[t.K_STATUS] != t.PENDING:
        return
    status = carray(completion, 2)[1] >> CPL_STATUS_SHIFT
    ticket[t.K_STATUS] = status & CPL_STATUS_MASK
    done = carray(_pointer(ticket[t.K_DONE]), 1)
    done[0] += 1
    carray(_pointer(ticket[t.K_DONE] + 8 * done[0]), 1)[0] = ticket[t.K_INDEX]


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
        _libc_write(state[t.W_BELL], one.ctypes.data, 8)


@jit
def _end(answers: Any, control: Any, slots: Any, slot: Any, status: Any) -> Any:
    nbytes = slots[slot, t.S_NBYTES] if status == _OK else 0
    slots[slot, t.S_STATE] = t.FREE
    return _answer(answers, control, slots[slot, t.S_COOKIE], status, nbytes)


@jit
def _wait(slots: Any, line: Any, state: Any, slot: Any) -> None:
    slots[slot, t.S_STATE] = t.WAITING
    line[(state[t.W_HEAD] + state[t.W_WAITING]) % line.shape[0]] = slot
    state[t.W_WAITING] += 1


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
        if slot >= slots.shape[0] or slots[slot, t.S_STATE] != t.FREE:
            return -1
        if op == _FLUSH:
            nbytes = 0
        elif offset < 0 or offset + nbytes > state[t.W_ARENA_BYTES]:
            return -1
        slots[slot, t.S_OP] = op
        slots[slot, t.S_SECTOR] = batch[i, RQ_LBA] * state[t.W_SECTORS_PER_BLOCK]
        slots[slot, t.S_SECTORS] = nbytes // BLOCK * state[t.W_SECTORS_PER_BLOCK]
        slots[slot, t.S_ADDRESS] = state[t.W_ARENA] + offset
        slots[slot, t.S_NBYTES] = nbytes
        slots[slot, t.S_COOKIE] = batch[i, RQ_COOKIE]
        if state[t.W_LOST]:
            status = _LOST
        elif op == _FLUSH and not state[t.W_FLUSHES]:
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
    if state[t.W_FREE_TICKETS] == 0:
        return _ENOMEM
    queue = 0
    for i in range(1, queues.shape[0]):
        if queues[i, t.Q_OUT] < queues[queue, t.Q_OUT]:
            queue = i
    ticket = unused[state[t.W_FREE_TICKETS] - 1]
    row = tickets[ticket]
    row[t.K_STATUS] = t.PENDING
    row[t.K_SLOT] = slot
    row[t.K_ATTEMPT] = slots[slot, t.S_ATTEMPT]
    slots[slot, t.S_MARK] = state[t.W_WRITES]  # what a flush covers
    row[t.K_QUEUE] = queue
    pair, argument, space = queues[queue, t.Q_PAIR], row.ctypes.data, state[t.W_NAMESPACE]
    op, call = slots[slot, t.S_OP], state[t.W_CALLBACK]
    address, sector = slots[slot, t.S_ADDRESS], types.uint64(slots[slot, t.S_SECTOR])
    sectors = types.uint32(slots[slot, t.S_SECTORS])
    if op == _READ:
        code = _read(space, pair, address, sector, sectors, call, argument, types.uint32(0))
    elif op == _WRITE:
        code = _write(space, pair, address, sector, sectors, call, argument, types.uint32(0))
    else:
        code = _flush(space, pair, call, argument)
    if code != 0:
        row[t.K_STATUS] = t.UNUSED
        state[t.W_FAULTY] = queue
        return types.int64(code)
    state[t.W_FREE_TICKETS] -= 1
    slots[slot, t.S_STATE] = t.RUNNING
    queues[queue, t.Q_OUT] += 1
    state[t.W_RUNNING] += 1
    return types.int64(0)


@jit
def _submit(
    answers: Any, answer_control: Any, words: Any, slots: Any, line: Any,
    tickets: Any, unused: Any, queues: Any, state: Any,
) -> Any:  # fmt: skip
    """Start what waits, in order; return how many left the line, or a negative code of SPDK."""
    count = 0
    while state[t.W_WAITING] > 0:
        slot = line[state[t.W_HEAD]]
        code = _start(slots, tickets, unused, queues, state, slot)
        if code == _ENOMEM:
            words[PARTIAL] += 1
            break
        if code == _ENXIO:
            return types.int64(code)
        state[t.W_HEAD] = (state[t.W_HEAD] + 1) % line.shape[0]
        state[t.W_WAITING] -= 1
        count += 1
        if code != 0:
            status = _INVALID if code == _EINVAL else _IO
            if not _end(answers, answer_control, slots, slot, status):
                return types.int64(_EINVAL)
    return types.int64(count)


@jit
def _note(slots: Any, state: Any, slot: Any) -> Any:
    """Keep account of writes that no flush has covered; return the Status of *slot*.

    After such writes were left behind by a connection the next flush is LOST, once.
    """
    op = slots[slot, t.S_OP]
    if op == _WRITE:
        state[t.W_WRITES] += 1
    elif op == _FLUSH:
        state[t.W_FLUSHED] = max(state[t.W_FLUSHED], slots[slot, t.S_MARK])
        if state[t.W_IN_DOUBT]:
            state[t.W_IN_DOUBT] = 0
            return _LOST
    return _OK


@jit
def settle(
    answers: Any, answer_control: Any, words: Any, slots: Any,
    tickets: Any, unused: Any, done: Any, queues: Any, state: Any, closing: Any,
) -> Any:  # fmt: skip
    """Turn done tickets into answers; return how many came, or -1: the answer ring is full."""
    count = done[0]
    for i in range(count):
        row = tickets[done[1 + i]]
        slot, status = row[t.K_SLOT], row[t.K_STATUS]
        unused[state[t.W_FREE_TICKETS]] = done[1 + i]
        state[t.W_FREE_TICKETS] += 1
        row[t.K_STATUS] = t.UNUSED
        if slots[slot, t.S_STATE] != t.RUNNING or slots[slot, t.S_ATTEMPT] != row[t.K_ATTEMPT]:
            words[LATE] += 1
            continue
        queues[row[t.K_QUEUE], t.Q_OUT] -= 1
        state[t.W_RUNNING] -= 1
        state[t.W_COMPLETED] += 1
        slots[slot, t.S_ATTEMPT] += 1
        result = outcome(status)
        if result == AGAIN:
            if not closing:
                slots[slot, t.S_STATE] = t.PARKED
                state[t.W_PARKED] += 1
                continue
            result = _CANCELLED
        elif result == _OK:
            result = _note(slots, state, slot)
        if not _end(answers, answer_control, slots, slot, result):
            return -1
    done[0] = 0
    return count


@jit
def requeue(words: Any, slots: Any, line: Any, queues: Any, state: Any, running: Any) -> None:
    """Put what is parked in line again, and with *running* what has no callback yet, too."""
    for slot in range(slots.shape[0]):
        if running and slots[slot, t.S_STATE] == t.RUNNING:
            slots[slot, t.S_ATTEMPT] += 1  # its callback, if it ever comes, is late
            state[t.W_RUNNING] -= 1
        elif slots[slot, t.S_STATE] == t.PARKED:
            state[t.W_PARKED] -= 1
        else:
            continue
        words[REPLAYED] += 1
        _wait(slots, line, state, slot)
    if running:
        queues[:, t.Q_OUT] = 0


@jit
def abandon(
    answers: Any, answer_control: Any, words: Any, slots: Any, queues: Any, state: Any,
    status: Any, one: Any,
) -> None:  # fmt: skip
    """Answer everything that is under way with *status*; no queue may hold a buffer any more."""
    for slot in range(slots.shape[0]):
        if slots[slot, t.S_STATE] != t.FREE:
            slots[slot, t.S_ATTEMPT] += 1
            _end(answers, answer_control, slots, slot, status)
    state[t.W_WAITING] = state[t.W_RUNNING] = state[t.W_PARKED] = 0
    queues[:, t.Q_OUT] = 0
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
        if slots[slot, t.S_STATE] in (t.WAITING, t.PARKED):
            _end(answers, answer_control, slots, slot, _CANCELLED)
    state[t.W_WAITING] = state[t.W_PARKED] = 0


@jit
def poll_queues(queues: Any, state: Any) -> Any:
    """Let SPDK complete commands; return 0 or the negative code of the queue in t.W_FAULTY."""
    for i in range(queues.shape[0]):
        if queues[i, t.Q_PAIR] == 0:
            continue
        code = _poll(queues[i, t.Q_PAIR], types.uint32(0))
        if code < 0:
            state[t.W_FAULTY] = i
            return types.int64(code)
    return types.int64(0)


@jit
def pump(
    requests: Any, request_control: Any, answers: Any, answer_control: Any, words: Any,
    slots: Any, line: Any, tickets: Any, unused: Any, done: Any, queues: Any, batch: Any,
    state: Any, one: Any,
) -> Any:  # fmt: skip
    """Run the loop for a while; see t.IDLE, t.BUSY, t.FAULT and t.BROKEN."""
    quiet = 0
    nap = _NAP
    for _ in range(_ROUNDS):
        moved = _take(requests, request_control, answers, answer_control, slots, line, batch, state)
        if moved < 0:
            return t.BROKEN
        code = types.int64(0)
        if not state[t.W_LOST]:
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
            return t.BROKEN
        moved += ended
        if moved:
            _ring_bell(words, state, one)
            quiet, nap = 0, _NAP
        if code < 0:
            return t.FAULT
        if moved:
            continue
        quiet += 1
        if ld_acquire_sys(request_control, STOP) != 0:
            return t.IDLE
        if quiet < _PAUSES:
            pause(0)
        elif state[t.W_RUNNING] + state[t.W_WAITING] == 0:
            if quiet >= _IDLE:
                return t.IDLE
            pause(0)
        else:
            doze(nap)
            nap = min(nap + nap // 2, _LONGEST_NAP)
    return t.BUSY
