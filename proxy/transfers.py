"""Cutting transfers from the device queues, and settling the jobs of those that completed.

The rules are in hyades.proxy.tables.
"""

from typing import Any

import numpy as np

from hyades.common.atomics import st_release_sys
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
from hyades.common.units import MIB
from hyades.proxy.records import FLUSH, READ, WRITE
from hyades.proxy.tables import (
    D_COUNT,
    D_DEPTH,
    D_FREE,
    D_HEAD,
    D_LIMIT,
    D_MAX_DEPTH,
    D_READ,
    D_STAGED,
    D_TRANSFERS,
    D_WRITTEN,
    G_ACTIVE,
    G_CHAINED,
    G_FREE,
    G_RETRIES,
    G_SPLIT,
    J_ACTIVE,
    J_ALONE,
    J_CHAIN,
    J_CURSOR,
    J_GENERATION,
    J_LBA,
    J_LEFT,
    J_NBYTES,
    J_OFFSET,
    J_OP,
    J_SLOT,
    J_STATUS,
    J_TRIES,
    J_TWIN,
    LOOK_AHEAD,
    S_START,
    T_JOB,
    T_NBYTES,
    T_OP,
    enqueue,
)

_OK, _SHORT, _CANCELLED = int(Status.OK), int(Status.SHORT), int(Status.CANCELLED)
_IO, _TIMEOUT = int(Status.IO), int(Status.TIMEOUT)
CHAIN_BYTES = MIB  # more would only make the first page of a chain wait for the last
PROTOCOL_BROKEN = -1  # returned by `complete`


@jit
def _chain(jobs: Any, devices: Any, queues: Any, shared: Any, device: Any, job: Any) -> Any:
    """Append queued neighbours to the transfer that begins with *job*; return its bytes."""
    total, last = jobs[job, J_NBYTES], job
    places, limit = queues.shape[1], min(devices[device, D_LIMIT], CHAIN_BYTES)
    if jobs[job, J_ALONE] or total % BLOCK:
        return total
    ahead, end = 1, min(devices[device, D_COUNT], LOOK_AHEAD)
    while ahead < end and total < limit:
        place = (devices[device, D_HEAD] + ahead) % places
        other = queues[device, place]
        ahead += 1
        if other < 0:
            continue
        row = jobs[other]
        if (
            row[J_OP] == jobs[job, J_OP]
            and row[J_LBA] == jobs[job, J_LBA] + total // BLOCK
            and row[J_OFFSET] == jobs[job, J_OFFSET] + total
            and total + row[J_NBYTES] <= limit
            and row[J_NBYTES] % BLOCK == 0
            and not row[J_ALONE]
        ):
            queues[device, place] = -1
            jobs[last, J_CHAIN] = other
            row[J_CURSOR] = row[J_NBYTES]
            row[J_LEFT] = 1
            last = other
            total += row[J_NBYTES]
            shared[G_CHAINED] += 1
            ahead = 1  # its own neighbour may stand before it
    return total


@jit
def _pop_head(devices: Any, queues: Any, device: Any) -> None:
    devices[device, D_HEAD] = (devices[device, D_HEAD] + 1) % queues.shape[1]
    devices[device, D_COUNT] -= 1


@jit
def stage(
    jobs: Any, devices: Any, queues: Any, transfers: Any, places: Any, staged: Any, shared: Any,
    device: Any,
) -> Any:  # fmt: skip
    """Cut transfers for *device* while it has room; append them to staged[device], int64[depth, 8].

    Return how many are staged; the caller submits them and calls `unstage`.
    """
    words = staged[device]
    while devices[device, D_FREE] > 0 and devices[device, D_COUNT] > 0:
        job = queues[device, devices[device, D_HEAD]]
        if job < 0:
            _pop_head(devices, queues, device)
            continue
        row = jobs[job]
        done, left = row[J_CURSOR], row[J_NBYTES] - row[J_CURSOR]
        if row[J_OP] == FLUSH:
            nbytes = 0
        elif done > 0 or left > devices[device, D_LIMIT]:
            nbytes = min(left, devices[device, D_LIMIT])
            shared[G_SPLIT] += 1
        else:
            nbytes = _chain(jobs, devices, queues, shared, device, job)
        row[J_CURSOR] = min(done + nbytes, row[J_NBYTES])
        row[J_LEFT] += 1
        if row[J_OP] == FLUSH or row[J_CURSOR] == row[J_NBYTES]:
            row[J_CURSOR] = row[J_NBYTES]
            _pop_head(devices, queues, device)
        devices[device, D_FREE] -= 1
        place = places[device, devices[device, D_FREE]]
        transfer = transfers[device, place]
        transfer[T_JOB] = job
        transfer[T_OP] = row[J_OP]
        transfer[T_NBYTES] = nbytes
        at = devices[device, D_STAGED]
        words[at] = 0
        words[at, RQ_LBA] = row[J_LBA] + done // BLOCK
        words[at, RQ_OFFSET] = row[J_OFFSET] + done
        words[at, RQ_LEN_SLOT] = nbytes
        words[at, RQ_OP] = row[J_OP]
        words[at, RQ_COOKIE] = place
        devices[device, D_STAGED] += 1
        devices[device, D_TRANSFERS] += 1
    running = devices[device, D_DEPTH] - devices[device, D_FREE]
    devices[device, D_MAX_DEPTH] = max(devices[device, D_MAX_DEPTH], running)
    return devices[device, D_STAGED]


@jit
def unstage(devices: Any, staged: Any, device: Any, accepted: Any) -> None:
    """Forget the first *accepted* staged transfers."""
    left = devices[device, D_STAGED] - accepted
    for i in range(left):
        staged[device, i] = staged[device, i + accepted]
    devices[device, D_STAGED] = left


@jit
def _retryable(status: Any) -> Any:
    return status in (_IO, _SHORT, _TIMEOUT)


@jit
def retry(jobs: Any, devices: Any, queues: Any, shared: Any, job: Any) -> None:
    """Queue *job* anew, by itself."""
    row = jobs[job]
    row[J_CURSOR] = 0
    row[J_STATUS] = _OK
    row[J_ALONE] = 1
    shared[G_RETRIES] += 1
    enqueue(jobs, devices, queues, job)


@jit
def complete(
    words: Any, jobs: Any, devices: Any, queues: Any, transfers: Any, places: Any, shared: Any,
    device: Any, retries: Any, finished: Any,
) -> Any:  # fmt: skip
    """Take int64[n, 3] completions of *device*; list finished jobs, return how many.

    A finished job has its final status but for the checksum.  PROTOCOL_BROKEN where a cookie was
    not given out.
    """
    count = 0
    for i in range(words.shape[0]):
        place = words[i, 0]
        if place < 0 or place >= transfers.shape[1] or transfers[device, place, T_JOB] < 0:
            return PROTOCOL_BROKEN
        transfer = transfers[device, place]
        status = np.int64(np.int32(words[i, 1] & 0xFFFFFFFF))
        moved = (words[i, 1] >> 32) & 0xFFFFFFFF
        if status == _OK:
            if transfer[T_OP] == READ:
                devices[device, D_READ] += moved
            elif transfer[T_OP] == WRITE:
                devices[device, D_WRITTEN] += moved
            if moved < transfer[T_NBYTES]:
                status = np.int64(_SHORT)
        job = transfer[T_JOB]
        chained = jobs[job, J_CHAIN] >= 0
        transfer[T_JOB] = -1
        places[device, devices[device, D_FREE]] = place
        devices[device, D_FREE] += 1
        while job >= 0:
            row = jobs[job]
            following = row[J_CHAIN]
            row[J_CHAIN] = -1
            row[J_LEFT] -= 1
            if row[J_STATUS] == _OK:
                row[J_STATUS] = status
            if row[J_LEFT] == 0 and row[J_CURSOR] == row[J_NBYTES]:
                if chained and row[J_STATUS] not in (_OK, _CANCELLED):
                    retry(jobs, devices, queues, shared, job)  # whose fault it was is not known
                elif _retryable(row[J_STATUS]) and row[J_TRIES] < retries:
                    row[J_TRIES] += 1
                    retry(jobs, devices, queues, shared, job)
                else:
                    finished[count] = job
                    count += 1
            job = following
    return count


@jit
def publish(
    ended: Any, jobs: Any, free: Any, spans: Any, shared: Any, arena: Any, ready: Any,
    failures: Any,
) -> Any:  # fmt: skip
    """Answer the jobs listed in *ended* and their twins; list the failed in int64[n, J_COLUMNS].

    Twins are copied before the first of them is answered: its slot may be reused at once.
    Return how many failed; *failures* has room for all.
    """
    failed = 0
    for i in range(ended.shape[0]):
        job = ended[i]
        status, nbytes, source = jobs[job, J_STATUS], jobs[job, J_NBYTES], jobs[job, J_OFFSET]
        spans[S_START, job] = -1
        twin = jobs[job, J_TWIN]
        while twin >= 0 and status == _OK:
            target = jobs[twin, J_OFFSET]
            if target != source:
                arena[target : target + nbytes] = arena[source : source + nbytes]
            twin = jobs[twin, J_TWIN]
        while job >= 0:
            row = jobs[job]
            following = row[J_TWIN]
            if status != _OK:
                row[J_STATUS] = status
                failures[failed] = row
                failed += 1
            word = row[J_GENERATION] if status == _OK else status
            row[J_ACTIVE] = 0
            free[shared[G_FREE]] = job
            shared[G_FREE] += 1
            shared[G_ACTIVE] -= 1
            st_release_sys(ready, row[J_SLOT], word)
            job = following
    return failed


@jit
def abandon(jobs: Any, status: Any, ended: Any) -> Any:
    """Give every job *status* and list it for `publish`; return how many.  Nothing is in flight."""
    count = 0
    for job in range(jobs.shape[0]):
        if jobs[job, J_ACTIVE]:
            jobs[job, J_TWIN] = -1  # each is listed by itself
            jobs[job, J_STATUS] = status
            ended[count] = job
            count += 1
    return count
