"""The proxy's bookkeeping: jobs, device queues and transfers, in compiled loops over int64 tables.

A *job* is one request of the ring.  A *transfer* is what a device gets: a part of a job longer than
`max_transfer`, one job, or a chain of jobs that are neighbours both on the device and in the arena.
Rules:
1. Jobs of one device wait in one queue, first in, first out; a transfer is cut from its head when
   the device has room, so neighbours that queue up behind a busy device are found.
2. A read that asks for what another read in the table asks for becomes its twin: it is not issued,
   it gets a copy.  A read that was ever in the table beside an overlapping write takes no twins:
   who asks after the write was answered must not get what stood there before.
3. A FLUSH is queued once no write that came before it is in the table.
4. A transfer that fails is retried job by job, so that one bad page does not fail its neighbours.
"""

from typing import Any

import numpy as np

from hyades.common.jit import jit
from hyades.common.layout import (
    BLOCK,
    RQ_GEN_OBJ,
    RQ_LBA,
    RQ_LEN_SLOT,
    RQ_OFFSET,
    RQ_OP,
    RQ_PAGE,
    Status,
)
from hyades.proxy.records import FLUSH, READ, WRITE

# columns of jobs; one whose J_ACTIVE is 0 is free
(
    J_ACTIVE, J_OP, J_FLAGS, J_DEVICE, J_LBA, J_OFFSET, J_NBYTES, J_SLOT, J_GENERATION, J_CRC,
    J_OBJECT, J_PAGE, J_ORDER, J_CURSOR, J_LEFT, J_STATUS, J_TRIES, J_CRC_TRIES, J_ALONE, J_TWIN,
    J_CHAIN, J_COLUMNS,
) = range(22)  # fmt: skip
# rows of spans [., job]: blocks of reads that may take twins and of all writes; S_START -1: none
S_START, S_END, S_DEVICE, S_OP, S_ROWS = range(5)
# columns of transfers [device, depth]; one whose T_JOB is -1 is free
T_JOB, T_OP, T_NBYTES, T_COLUMNS = range(4)
# columns of devices: configuration, state, counters
(
    D_DEPTH, D_LIMIT, D_HEAD, D_COUNT, D_FREE, D_STAGED, D_FLUSHES,
    D_REQUESTS, D_TRANSFERS, D_MAX_DEPTH, D_READ, D_WRITTEN, D_COLUMNS,
) = range(13)  # fmt: skip
# words shared by all devices: state, counters
G_FREE, G_ACTIVE, G_ORDER, G_TWINS, G_CHAINED, G_SPLIT, G_RETRIES, G_WORDS = range(8)

LOOK_AHEAD = 32  # queued jobs among which a neighbour is looked for
_INVALID = int(Status.INVALID)


@jit
def _take(jobs: Any, free: Any, shared: Any, words: Any, i: Any) -> Any:
    """Return a new job made from request *i* of int64[n, 8]."""
    shared[G_FREE] -= 1
    job = free[shared[G_FREE]]
    row = jobs[job]
    row[:] = 0
    packed = words[i, RQ_OP]
    row[J_ACTIVE] = 1
    row[J_OP] = packed & 0xFF
    row[J_FLAGS] = (packed >> 8) & 0xFF
    row[J_DEVICE] = (packed >> 16) & 0xFFFF
    row[J_CRC] = (packed >> 32) & 0xFFFFFFFF
    row[J_LBA] = words[i, RQ_LBA]
    row[J_OFFSET] = words[i, RQ_OFFSET]
    row[J_NBYTES] = words[i, RQ_LEN_SLOT] & 0xFFFFFFFF
    row[J_SLOT] = (words[i, RQ_LEN_SLOT] >> 32) & 0xFFFFFFFF
    row[J_GENERATION] = words[i, RQ_GEN_OBJ] & 0xFFFFFFFF
    row[J_OBJECT] = (words[i, RQ_GEN_OBJ] >> 32) & 0xFFFFFFFF
    row[J_PAGE] = words[i, RQ_PAGE]
    row[J_ORDER] = shared[G_ORDER]
    row[J_TWIN] = -1
    row[J_CHAIN] = -1
    shared[G_ORDER] += 1
    shared[G_ACTIVE] += 1
    return job


@jit
def _valid(row: Any, device_count: Any, arena_bytes: Any) -> Any:
    """Say whether the proxy itself can handle the job; the transport checks the rest."""
    if row[J_DEVICE] >= device_count:
        return False
    if row[J_OP] == FLUSH:
        return True
    offset, nbytes = row[J_OFFSET], row[J_NBYTES]
    inside = nbytes > 0 and offset >= 0 and offset <= arena_bytes - nbytes
    return (row[J_OP] == READ or row[J_OP] == WRITE) and inside


@jit
def enqueue(jobs: Any, devices: Any, queues: Any, job: Any) -> None:
    """Put *job* at the end of its device's queue."""
    device = jobs[job, J_DEVICE]
    place = (devices[device, D_HEAD] + devices[device, D_COUNT]) % queues.shape[1]
    queues[device, place] = job
    devices[device, D_COUNT] += 1


@jit
def _find_twin(jobs: Any, spans: Any, job: Any) -> Any:
    """Return the read that *job* repeats, or -1."""
    row = jobs[job]
    for other in range(spans.shape[1]):
        if spans[S_START, other] == row[J_LBA] and spans[S_OP, other] == READ:
            first = jobs[other]
            same = first[J_DEVICE] == row[J_DEVICE] and first[J_NBYTES] == row[J_NBYTES]
            if same and first[J_FLAGS] == row[J_FLAGS] and first[J_CRC] == row[J_CRC]:
                return other
    return -1


@jit
def _enter_span(jobs: Any, spans: Any, job: Any) -> None:
    """Note what *job* touches, and end the merging of reads that meet a write."""
    row = jobs[job]
    start, end = row[J_LBA], row[J_LBA] + row[J_NBYTES] // BLOCK
    alone = False
    for other in range(spans.shape[1]):
        if spans[S_START, other] < 0 or spans[S_DEVICE, other] != row[J_DEVICE]:
            continue
        if spans[S_START, other] < end and spans[S_END, other] > start:
            if row[J_OP] == WRITE and spans[S_OP, other] == READ:
                spans[S_START, other] = -1
            alone = alone or spans[S_OP, other] == WRITE
    if row[J_OP] == WRITE or not alone:
        spans[S_START, job] = start
        spans[S_END, job] = end
        spans[S_DEVICE, job] = row[J_DEVICE]
        spans[S_OP, job] = row[J_OP]


@jit
def admit(
    words: Any, jobs: Any, free: Any, spans: Any, devices: Any, queues: Any, flushes: Any,
    shared: Any, arena_bytes: Any, refused: Any,
) -> Any:  # fmt: skip
    """Turn int64[n, 8] requests into jobs; list in *refused* what cannot run, return how many.

    The caller has room for n jobs, has made the checksums of writes and has checked the slots.
    """
    count = 0
    for i in range(words.shape[0]):
        job = _take(jobs, free, shared, words, i)
        row = jobs[job]
        if not _valid(row, devices.shape[0], arena_bytes):
            row[J_STATUS] = _INVALID
            refused[count] = job
            count += 1
            continue
        device = row[J_DEVICE]
        devices[device, D_REQUESTS] += 1
        if row[J_OP] == FLUSH:
            flushes[device, devices[device, D_FLUSHES]] = job
            devices[device, D_FLUSHES] += 1
            continue
        first = _find_twin(jobs, spans, job) if row[J_OP] == READ else -1
        if first >= 0:
            row[J_TWIN] = jobs[first, J_TWIN]
            jobs[first, J_TWIN] = job
            shared[G_TWINS] += 1
        else:
            _enter_span(jobs, spans, job)
            enqueue(jobs, devices, queues, job)
    return count


@jit
def release_flushes(jobs: Any, devices: Any, queues: Any, flushes: Any, device: Any) -> None:
    """Queue the device's flushes that no earlier write is in the way of."""
    oldest = np.int64(1) << 62
    for job in range(jobs.shape[0]):
        row = jobs[job]
        if row[J_ACTIVE] and row[J_OP] == WRITE and row[J_DEVICE] == device:
            oldest = min(oldest, row[J_ORDER])
    kept = 0
    for i in range(devices[device, D_FLUSHES]):
        job = flushes[device, i]
        if jobs[job, J_ORDER] < oldest:
            enqueue(jobs, devices, queues, job)
        else:
            flushes[device, kept] = job
            kept += 1
    devices[device, D_FLUSHES] = kept
