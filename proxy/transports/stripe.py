"""Several devices as one: ``stripe:URL,URL,...``, units dealt to the members in turn.

Rules, beside those of a transport:
1. A request is cut where units end; each piece goes to its member's queue, in order.  Members may
   take fewer pieces than they are given: the rest goes at the next submit, poll or wait.
2. A request completes when all its pieces have.  Of several that fail the first one's status is
   reported: it does not depend on which member was faster.
3. A FLUSH goes to every member behind what was queued before it, and completes with the last.
4. The set is as long as its members allow: up to the first block that one of them does not have.
Must stay in sync: where a block lies is said by `Geometry`, `cut` and hyades.common.stripe.
"""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import PeerError, UsageError
from hyades.common.layout import BLOCK, COMPLETION, REQUEST
from hyades.common.units import format_size
from hyades.proxy import stripe_tables as t
from hyades.proxy.arena import check_arena
from hyades.proxy.locate import failed_lba, flush_failure, locate, patience
from hyades.proxy.records import (
    COUNTERS,
    REQUEST_WORDS,
    completion_words,
    counter_dict,
    request_words,
)
from hyades.proxy.stripes import find_set
from hyades.proxy.transport import Limits, Records, Transport
from hyades.proxy.urls import Url

_LONGEST_REQUEST = 64  # units
_MOST_REQUESTS = 1024
_KEPT_FAILURES = 64
_SLICE, _LONGEST_SLICE = 50e-6, 1e-3  # seconds that one of several members is waited for at a time


class StripeTransport:
    """Cuts requests into pieces for *members*, which it owns, and joins their completions."""

    def __init__(
        self, members: Sequence[Transport], names: Sequence[str], unit: int, *,
        writable: bool = True,
    ) -> None:  # fmt: skip
        """*unit* is in bytes; *names* are the members' URLs, for messages."""
        self.members = list(members)
        self.names = list(names)
        self.geometry = t.Geometry(unit // BLOCK, len(self.members))
        limits = [member.limits for member in self.members]
        longest = min(limit.max_transfer for limit in limits)
        if len(limits) > 1:
            longest = min(longest, _LONGEST_REQUEST * unit)
        depth = min(_MOST_REQUESTS, sum(limit.max_inflight for limit in limits))
        self._limits = Limits(
            longest, depth, max(BLOCK, *(limit.alignment for limit in limits)),
            any(limit.shared_arena for limit in limits),
        )  # fmt: skip
        self._writable = writable
        self._arena: NDArray[np.uint8] | None = None
        self._closed = False
        self._make_tables(depth, longest // unit + 2)

    def _make_tables(self, depth: int, pieces: int) -> None:
        count = len(self.members)
        room = depth * (-(-pieces // count))
        self._parents = np.zeros((depth, t.P_COLUMNS), np.int64)
        self._free = np.arange(depth)[::-1].copy()
        self._done = np.zeros(depth, np.int64)
        self._queues = np.zeros((count, room, REQUEST_WORDS), np.int64)
        self._records = self._queues.view(REQUEST).reshape(count, room)
        self._table = np.zeros((t.M_ROWS, count), np.int64)
        self._failures = np.full((_KEPT_FAILURES, t.F_COLUMNS), -1, np.int64)
        self._state = np.zeros(t.S_WORDS, np.int64)
        self._state[t.S_FREE] = depth
        self._counters = np.zeros(COUNTERS, np.int64)
        self._batch = np.zeros(64, COMPLETION)

    @property
    def limits(self) -> Limits:
        """What one request and the queue may hold."""
        return self._limits

    @property
    def nblocks(self) -> int:
        """Blocks of the set."""
        return self.geometry.set_blocks([member.nblocks for member in self.members])

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the uint8 *arena*, for every member too."""
        self._refuse_closed()
        check_arena(arena, self._limits.alignment, registered=self._arena is not None)
        for member in self.members:
            member.register(arena)
        self._arena = arena

    def submit(self, requests: Records) -> int:
        """Take a prefix of REQUEST[n] and give the members what they take; return its length."""
        self._refuse_closed()
        if self._arena is None:
            raise UsageError(f"{self._name()} has no arena: call register first")
        accepted: int = t.cut(
            request_words(requests), self._parents, self._free, self._queues, self._table,
            self._done, self._state, self.nblocks, self.geometry.unit, len(self._arena),
            self._limits.max_transfer, self._writable,
        )  # fmt: skip
        self._feed()
        return accepted

    def poll(self, completions: Records) -> int:
        """Fill COMPLETION[n] with finished requests; return how many."""
        self._reap()
        if not len(completions) or not self._state[t.S_DONE]:
            return 0
        count: int = t.report(
            completion_words(completions), self._parents, self._free, self._done, self._state,
            self._counters,
        )  # fmt: skip
        return count

    def wait(self, timeout: float) -> None:
        """Sleep until a request has finished, at most *timeout* seconds."""
        self._reap()
        busy = [self.members[i] for i in np.flatnonzero(self._table[t.M_FLYING])]
        if self._state[t.S_DONE]:
            return
        if not busy:
            time.sleep(timeout)
        elif len(busy) == 1:
            busy[0].wait(timeout)
        else:
            self._wait_for_any(busy, time.monotonic() + timeout)

    def grow(self, nblocks: int) -> None:
        """Grow the members until the set has *nblocks*; UsageError names one that cannot."""
        self._refuse_closed()
        for index, (name, member) in enumerate(zip(self.names, self.members, strict=True)):
            needed = self.geometry.member_blocks(nblocks, index)
            if needed <= member.nblocks:
                continue
            try:
                member.grow(needed)
            except UsageError as error:
                raise UsageError(f"member {index} of the stripe, {name}: {error}") from error

    def close(self) -> None:
        """Close every member; what none of them was given is cancelled."""
        if self._closed:
            return
        self._closed = True
        errors: list[Exception] = []
        for index, member in enumerate(self.members):
            try:
                member.close()
            except Exception as error:  # the others must be closed too
                errors.append(error)
            t.drop(
                index, self._queues, self._parents, self._table, self._done, self._failures,
                self._state, self.geometry.unit,
            )  # fmt: skip
        if errors:
            raise errors[0]

    def stats(self) -> dict[str, Any]:
        """Return the counters, and those of each member."""
        members = [member.stats() for member in self.members]
        return {**counter_dict(self._counters), "describe": self.describe(), "members": members}

    def describe(self) -> str:
        """Return one line for people."""
        inner = "; ".join(member.stats()["describe"] for member in self.members)
        return f"{len(self.members)} members in units of {self._unit_text()}: {inner}"

    def locate(self, lba: int) -> str:
        """Return the member that holds block *lba*, and where it lies there."""
        index, there = self.geometry.place(lba)
        inside = locate(self.members[index], there) or f"{self.names[index]} LBA {there}"
        return f"member {index}: {inside}"

    def failed_lba(self, lba: int, nblocks: int) -> int:
        """Return the first block in a range whose piece failed lately, else *lba*."""
        end = lba + nblocks
        total = int(self._state[t.S_FAILURES])
        for number in range(total - 1, max(-1, total - 1 - _KEPT_FAILURES), -1):
            first, blocks = map(int, self._failures[number % _KEPT_FAILURES])
            low, high = max(first, lba), min(first + blocks, end)
            if low < high:
                index, there = self.geometry.place(low)
                return low + failed_lba(self.members[index], there, high - low) - there
        return lba

    def flush_failure(self) -> str:
        """Return why the members' last flushes failed."""
        return "; ".join(filter(None, map(flush_failure, self.members)))

    @property
    def patience(self) -> float:
        """Seconds for which a member may be silent."""
        return max(patience(member, 0.0) for member in self.members)

    def _name(self) -> str:
        return f"stripe:{','.join(self.names)}"

    def _unit_text(self) -> str:
        return format_size(self.geometry.unit * BLOCK)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError(f"{self._name()} is closed")

    def _feed(self) -> None:
        """Give each member as much of its queue as it takes."""
        for index in np.flatnonzero(self._table[t.M_COUNT]).tolist():
            member, records = self.members[index], self._records[index]
            while count := int(self._table[t.M_COUNT, index]):
                head = int(self._table[t.M_HEAD, index])
                part = records[head : min(head + count, len(records))]
                taken = member.submit(part)
                self._table[t.M_HEAD, index] = (head + taken) % len(records)
                self._table[t.M_COUNT, index] -= taken
                self._table[t.M_FLYING, index] += taken
                if taken < len(part):
                    break

    def _reap(self) -> None:
        """Take what the members finished, and give them more."""
        for index in np.flatnonzero(self._table[t.M_FLYING]).tolist():
            while count := self.members[index].poll(self._batch):
                joined = t.join(
                    completion_words(self._batch[:count]), index, self._parents, self._table,
                    self._done, self._failures, self._state, self.geometry.unit,
                )  # fmt: skip
                if joined == t.STRAY:
                    raise PeerError(f"{self.names[index]} completed what it was not given")
                if count < len(self._batch):
                    break
        if not self._closed:
            self._feed()

    def _wait_for_any(self, busy: list[Transport], deadline: float) -> None:
        nap = _SLICE
        while True:
            for member in busy:
                left = deadline - time.monotonic()
                if left <= 0:
                    return
                member.wait(min(nap, left))
                self._reap()
                if self._state[t.S_DONE]:
                    return
            nap = min(2 * nap, _LONGEST_SLICE)


def open_url(url: Url, *, create: bool, writable: bool) -> StripeTransport:
    """Open ``stripe:[unit=SIZE,]URL,URL,...``, the members in any order."""
    from hyades.proxy.registry import open_transport

    found = find_set(url, create=create)
    members: list[Transport] = []
    try:
        for name in found.members:
            members.append(open_transport(name, writable=writable))
    except BaseException:
        for member in members:
            member.close()
        raise
    return StripeTransport(members, found.members, found.unit, writable=writable)


def probe() -> str | None:
    """Return None: it needs only its members' transports."""
    return None
