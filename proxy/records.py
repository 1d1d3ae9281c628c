"""Requests and completions as int64 words, for the compiled loops of all transports.

Must stay in sync with REQUEST and COMPLETION in common/layout.py.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.jit import jit
from hyades.common.layout import (
    BLOCK,
    COMPLETION,
    REQUEST,
    RQ_LBA,
    RQ_LEN_SLOT,
    RQ_OFFSET,
    RQ_OP,
    Op,
    Status,
)
from hyades.proxy.transport import Records

Words = NDArray[np.int64]  # [n, 8] of REQUEST or [n, 3] of COMPLETION

REQUEST_WORDS, COMPLETION_WORDS = 8, 3
READ, WRITE, FLUSH = int(Op.READ), int(Op.WRITE), int(Op.FLUSH)
# words of a transport's counters
BYTES_READ, BYTES_WRITTEN, REQUESTS, ERRORS, COUNTERS = range(5)
_OK, _INVALID = int(Status.OK), int(Status.INVALID)


def request_words(requests: Records) -> Words:
    """View (or, where it is strided, copy) REQUEST[n] as int64[n, 8]."""
    assert requests.dtype == REQUEST
    return np.ascontiguousarray(requests).view(np.int64).reshape(-1, REQUEST_WORDS)


def completion_words(completions: Records) -> Words:
    """View COMPLETION[n], which must be contiguous, as int64[n, 3]."""
    assert completions.dtype == COMPLETION
    assert completions.flags.c_contiguous
    return completions.view(np.int64).reshape(-1, COMPLETION_WORDS)


def counter_dict(counters: NDArray[np.int64]) -> dict[str, int]:
    """Return the counters that every transport keeps, under the names of Transport.stats."""
    return {
        "bytes_read": int(counters[BYTES_READ]),
        "bytes_written": int(counters[BYTES_WRITTEN]),
        "requests": int(counters[REQUESTS]),
        "errors": int(counters[ERRORS]),
    }


@jit
def check_request(
    words: Any, i: Any, nblocks: Any, arena_bytes: Any, max_transfer: Any, writable: Any
) -> Any:
    """Return Status.OK, or Status.INVALID for a request that must not reach the device."""
    op = words[i, RQ_OP] & 0xFF
    if op == FLUSH:
        return _OK
    if op != READ and (op != WRITE or not writable):
        return _INVALID
    nbytes = words[i, RQ_LEN_SLOT] & 0xFFFFFFFF
    if nbytes == 0 or nbytes % BLOCK != 0 or nbytes > max_transfer:
        return _INVALID
    offset = words[i, RQ_OFFSET]  # unsigned in the record: what is negative here is far outside
    if offset < 0 or offset % BLOCK != 0 or offset > arena_bytes - nbytes:
        return _INVALID
    lba = words[i, RQ_LBA]
    if lba < 0 or lba > nblocks - nbytes // BLOCK:
        return _INVALID
    return _OK


@jit
def put_completion(out: Any, i: Any, cookie: Any, status: Any, nbytes: Any) -> None:
    """Write completion *i* into int64[n, 3]."""
    out[i, 0] = cookie
    out[i, 1] = (status & 0xFFFFFFFF) | (nbytes << 32)
    out[i, 2] = 0


@jit
def account(counters: Any, op: Any, status: Any, nbytes: Any) -> None:
    """Count one finished request."""
    counters[REQUESTS] += 1
    if status != _OK:
        counters[ERRORS] += 1
    elif op == READ:
        counters[BYTES_READ] += nbytes
    elif op == WRITE:
        counters[BYTES_WRITTEN] += nbytes


assert REQUEST.itemsize == 8 * REQUEST_WORDS
assert COMPLETION.itemsize == 8 * COMPLETION_WORDS
