"""Bookkeeping of a stripe: requests cut at unit borders, pieces joined again; int64 tables.

Must stay in sync: where a block lies is also said by hyades.common.stripe and, for one block at a
time, by `Geometry`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
from hyades.proxy.records import FLUSH, account, check_request, put_completion

# columns of parents: requests that were accepted and not yet reported
P_COOKIE, P_OP, P_LBA, P_NBYTES, P_LEFT, P_STATUS, P_FAILED, P_COLUMNS = range(8)
# rows of members [., member]
M_HEAD, M_COUNT, M_FLYING, M_ROWS = range(4)
# words of state
S_FREE, S_DONE_HEAD, S_DONE, S_FAILURES, S_WORDS = range(5)
# columns of failures, the last pieces that failed: first block and blocks in the set
F_LBA, F_BLOCKS, F_COLUMNS = range(3)

PIECE_SHIFT = 20  # a piece's cookie: its number in the request, then its parent
_PARENT = (1 << PIECE_SHIFT) - 1
STRAY = -1  # returned by `join`: a member reported what it was not given
_OK, _CANCELLED = int(Status.OK), int(Status.CANCELLED)


@dataclass(frozen=True, slots=True)
class Geometry:
    """Units of *unit* blocks dealt to *count* members, each with one unit reserved in front."""

    unit: int
    count: int

    def place(self, lba: int) -> tuple[int, int]:
        """Return the member that holds block *lba* of the set, and its block there."""
        unit, inside = divmod(lba, self.unit)
        return unit % self.count, (unit // self.count + 1) * self.unit + inside

    def member_blocks(self, total: int, index: int) -> int:
        """Return the blocks that member *index* needs for a set of *total* blocks."""
        full, rest = divmod(total, self.unit)
        turns, last = divmod(full, self.count)
        blocks = (turns + (index < last)) * self.unit + (rest if index == last else 0)
        return self.unit + blocks

    def set_blocks(self, sizes: Sequence[int]) -> int:
        """Return the blocks of a set whose members have *sizes* blocks: up to the first gap."""
        ends = []
        for index, size in enumerate(sizes):
            full, rest = divmod(max(0, size - self.unit), self.unit)
            ends.append((full * self.count + index) * self.unit + rest)
        return min(ends)


@jit
def _push(queues: Any, members: Any, member: Any, op: Any, lba: Any, offset: Any, nbytes: Any,
          cookie: Any) -> None:  # fmt: skip
    place = (members[M_HEAD, member] + members[M_COUNT, member]) % queues.shape[1]
    row = queues[member, place]
    row[:] = 0
    row[RQ_OP] = op
    row[RQ_LBA] = lba
    row[RQ_OFFSET] = offset
    row[RQ_LEN_SLOT] = nbytes
    row[RQ_COOKIE] = cookie
    members[M_COUNT, member] += 1


@jit
def _end(done: Any, state: Any, parent: Any) -> None:
    """Queue *parent* for `report`."""
    done[(state[S_DONE_HEAD] + state[S_DONE]) % done.shape[0]] = parent
    state[S_DONE] += 1


@jit
def cut(
    words: Any, parents: Any, free: Any, queues: Any, members: Any, done: Any, state: Any,
    nblocks: Any, unit: Any, arena_bytes: Any, max_transfer: Any, writable: Any,
) -> Any:  # fmt: skip
    """Take a prefix of int64[n, 8] requests, queue their pieces; return its length.

    The queues hold the pieces of as many requests as there are parents.
    """
    count = members.shape[1]
    for i in range(words.shape[0]):
        if state[S_FREE] == 0:
            return i
        state[S_FREE] -= 1
        parent = free[state[S_FREE]]
        row = parents[parent]
        op, lba = words[i, RQ_OP] & 0xFF, words[i, RQ_LBA]
        nbytes = words[i, RQ_LEN_SLOT] & 0xFFFFFFFF
        row[P_COOKIE] = words[i, RQ_COOKIE]
        row[P_OP] = op
        row[P_LBA] = lba
        row[P_NBYTES] = 0 if op == FLUSH else nbytes
        row[P_LEFT] = 0
        row[P_FAILED] = 0
        row[P_STATUS] = check_request(words, i, nblocks, arena_bytes, max_transfer, writable)
        if row[P_STATUS] != _OK:
            _end(done, state, parent)
            continue
        if op == FLUSH:
            for member in range(count):
                _push(queues, members, member, op, 0, 0, 0, (member << PIECE_SHIFT) | parent)
            row[P_LEFT] = count
            continue
        offset, left, piece = words[i, RQ_OFFSET], nbytes // BLOCK, 0
        while left > 0:
            turn, inside = lba // unit, lba % unit
            blocks = left if count == 1 else min(left, unit - inside)
            there = (turn // count + 1) * unit + inside
            cookie = (piece << PIECE_SHIFT) | parent
            _push(queues, members, turn % count, op, there, offset, blocks * BLOCK, cookie)
            piece += 1
            lba += blocks
            left -= blocks
            offset += blocks * BLOCK
        row[P_LEFT] = piece
    return words.shape[0]


@jit
def _note_failure(failures: Any, state: Any, row: Any, piece: Any, unit: Any, count: Any) -> None:
    start, end = row[P_LBA], row[P_LBA] + row[P_NBYTES] // BLOCK
    if count > 1:
        first = start // unit
        start = max(start, (first + piece) * unit)
        end = min(end, (first + piece + 1) * unit)
    place = state[S_FAILURES] % failures.shape[0]
    failures[place, F_LBA] = start
    failures[place, F_BLOCKS] = end - start
    state[S_FAILURES] += 1


@jit
def _settle(
    cookie: Any, status: Any, parents: Any, done: Any, failures: Any, state: Any, unit: Any,
    count: Any,
) -> Any:  # fmt: skip
    """Count one finished piece; of several that fail, the first of the request is reported."""
    parent, piece = cookie & _PARENT, cookie >> PIECE_SHIFT
    if cookie < 0 or parent >= parents.shape[0] or parents[parent, P_LEFT] <= 0:
        return False
    row = parents[parent]
    row[P_LEFT] -= 1
    if status != _OK:
        if row[P_STATUS] == _OK or piece < row[P_FAILED]:
            row[P_STATUS] = status
            row[P_FAILED] = piece
        if row[P_OP] != FLUSH and status != _CANCELLED:
            _note_failure(failures, state, row, piece, unit, count)
    if row[P_LEFT] == 0:
        _end(done, state, parent)
    return True


@jit
def join(
    words: Any, member: Any, parents: Any, members: Any, done: Any, failures: Any, state: Any,
    unit: Any,
) -> Any:  # fmt: skip
    """Take int64[n, 3] completions of *member*; return how many, or STRAY."""
    for i in range(words.shape[0]):
        status = _signed(words[i, 1])
        count = members.shape[1]
        if not _settle(words[i, 0], status, parents, done, failures, state, unit, count):
            return STRAY
        members[M_FLYING, member] -= 1
    return words.shape[0]


@jit
def _signed(word: Any) -> Any:
    """Return the signed low half of *word*."""
    low = word & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low


@jit
def drop(
    member: Any, queues: Any, parents: Any, members: Any, done: Any, failures: Any, state: Any,
    unit: Any,
) -> None:  # fmt: skip
    """Cancel the pieces of *member* that it was not given."""
    while members[M_COUNT, member] > 0:
        cookie = queues[member, members[M_HEAD, member], RQ_COOKIE]
        members[M_HEAD, member] = (members[M_HEAD, member] + 1) % queues.shape[1]
        members[M_COUNT, member] -= 1
        _settle(
            cookie, _CANCELLED, parents, done, failures, state, unit, members.shape[1]
        )  # fmt: skip


@jit
def report(
    out: Any, parents: Any, free: Any, done: Any, state: Any, counters: Any,
) -> Any:  # fmt: skip
    """Fill int64[n, 3] with finished requests; return how many."""
    count = min(out.shape[0], state[S_DONE])
    for i in range(count):
        parent = done[state[S_DONE_HEAD]]
        state[S_DONE_HEAD] = (state[S_DONE_HEAD] + 1) % done.shape[0]
        row = parents[parent]
        nbytes = row[P_NBYTES] if row[P_STATUS] == _OK else 0
        put_completion(out, i, row[P_COOKIE], row[P_STATUS], nbytes)
        account(counters, row[P_OP], row[P_STATUS], nbytes)
        free[state[S_FREE]] = parent
        state[S_FREE] += 1
    state[S_DONE] -= count
    return count
