"""The accepted requests of an nvme+tcp transport: one row each, and the compiled loops."""

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.jit import jit
from hyades.common.layout import (
    RQ_COOKIE,
    RQ_LBA,
    RQ_LEN_SLOT,
    RQ_OFFSET,
    RQ_OP,
    Status,
)
from hyades.proxy.records import COUNTERS, FLUSH, Words, account, check_request, put_completion

# columns: the request, then how it ended and what became of it on the way
OP, LBA, OFFSET, NBYTES, COOKIE, STATUS, TRIES, COLUMNS = range(8)
_OK = int(Status.OK)


class Table:
    """Rows of requests; `waiting` are to be sent, `ended` to be reported, both by row number."""

    def __init__(self, capacity: int) -> None:
        self.rows: NDArray[np.int64] = np.zeros((capacity, 8), np.int64)
        self.counters: NDArray[np.int64] = np.zeros(COUNTERS, np.int64)
        self.waiting: deque[int] = deque()
        self.ended: deque[int] = deque()
        self._free = np.arange(capacity)[::-1].copy()
        self._height = capacity

    @property
    def open(self) -> int:
        """Requests that were accepted and not yet reported."""
        return len(self._free) - self._height

    def accept(self, words: Words, bounds: tuple[int, int, int, bool]) -> int:
        """Take a prefix of int64[n, 8]; *bounds* are those of check_request."""
        count = min(len(words), self._height)
        if count:
            self._height -= count
            taken = self._free[self._height : self._height + count]
            _accept(words, count, self.rows, taken, *bounds)
            statuses = self.rows[taken, STATUS]
            if (statuses == _OK).all():
                self.waiting.extend(taken.tolist())
            else:
                self.waiting.extend(taken[statuses == _OK].tolist())
                self.ended.extend(taken[statuses != _OK].tolist())
        return count

    def end(self, row: int, status: int) -> None:
        """Note how the request in *row* ended."""
        if status:
            self.rows[row, STATUS] = status
        self.ended.append(row)

    def report(self, out: Words) -> int:
        """Fill int64[n, 3] with requests that have ended, and free their rows."""
        ended = self.ended
        count = min(len(out), len(ended))
        if count:
            rows = np.array([ended.popleft() for _ in range(count)])
            _report(out, rows, self.rows, self.counters)
            self._free[self._height : self._height + count] = rows
            self._height += count
        return count


@jit
def _accept(
    words: Any, count: Any, rows: Any, taken: Any,
    nblocks: Any, arena: Any, limit: Any, writable: Any,
) -> None:  # fmt: skip
    for i in range(count):
        row = taken[i]
        rows[row, OP] = words[i, RQ_OP] & 0xFF
        rows[row, LBA] = words[i, RQ_LBA]
        rows[row, OFFSET] = words[i, RQ_OFFSET]
        rows[row, NBYTES] = words[i, RQ_LEN_SLOT] & 0xFFFFFFFF
        rows[row, COOKIE] = words[i, RQ_COOKIE]
        rows[row, STATUS] = check_request(words, i, nblocks, arena, limit, writable)
        rows[row, TRIES] = 0


@jit
def _report(out: Any, ended: Any, rows: Any, counters: Any) -> None:
    for i in range(ended.shape[0]):
        row = ended[i]
        status = rows[row, STATUS]
        nbytes = rows[row, NBYTES] if status == _OK and rows[row, OP] != FLUSH else 0
        put_completion(out, i, rows[row, COOKIE], status, nbytes)
        account(counters, rows[row, OP], status, nbytes)
