"""What the transport's thread knows of a live session: its I/O queues, and which row each command
of theirs belongs to."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from hyades.common.errors import PeerError
from hyades.proxy.transports.nvme_paths import Path
from hyades.proxy.transports.nvme_session import Session
from hyades.proxy.transports.nvme_wire import Gone, Wire

_NEVER = float("inf")


class Lane:
    """One I/O queue."""

    __slots__ = ("begun", "link", "queue", "rows", "wire")

    def __init__(self, link: "Link", wire: Wire) -> None:
        self.link, self.wire, self.queue = link, wire, wire.queue
        self.rows = [0] * wire.queue.depth  # by command id
        self.begun = [_NEVER] * wire.queue.depth  # when a command that is out was sent

    def sent(self, cid: int, row: int, now: float) -> None:
        """Note that command *cid* is for *row*."""
        self.rows[cid], self.begun[cid] = row, now

    def answered(self, cid: int) -> int:
        """Note the answer to *cid*; return its row."""
        self.begun[cid] = _NEVER
        return self.rows[cid]


class Link:
    """One live session."""

    __slots__ = ("covering", "dirty", "lanes", "lost", "path", "session", "shunned_until")

    def __init__(self, path: Path, session: Session) -> None:
        self.path, self.session = path, session
        self.lanes = [Lane(self, wire) for wire in session.wires]
        self.dirty = False  # writes completed here since the last flush was sent
        self.covering: set[int] = set()  # rows of flushes that are out for the sake of such writes
        self.lost = False
        self.shunned_until = 0.0  # it said that it cannot reach the namespace now

    @property
    def outstanding(self) -> int:
        """Commands that are out."""
        return sum(lane.queue.outstanding for lane in self.lanes)

    def cut(self, error: PeerError, culprit: Lane | None) -> Iterator[tuple[Lane, list[int]]]:
        """End it; yield each lane and the rows that were out.

        Where the target still reacts, it is left to end the connections itself (`Wire.discard`
        says when): it has then executed all that it will.  Else they are reset.
        """
        self.lost = True
        self.session.end(error)
        silent = isinstance(error, Gone) and not error.by_peer
        for lane in self.lanes:
            if silent or (lane is culprit and isinstance(error, Gone)):
                lane.wire.close(reset=silent)
            else:
                if lane is culprit:
                    with contextlib.suppress(PeerError):  # the TermReq, if it still goes out
                        lane.wire.send()
                lane.wire.half_close()
            yield lane, [lane.rows[cid] for cid in lane.queue.close()]

    def leave(self) -> Iterator[int]:
        """Close the I/O queues in order; yield the rows that were out."""
        for lane in self.lanes:
            lane.wire.close()
            for cid in lane.queue.close():
                yield lane.rows[cid]

    def quiet_for(self, now: float) -> float:
        """Return for how many seconds the target owes an answer without giving a sign of life."""
        since = [lane.queue.quiet_since() for lane in self.lanes]
        return max((now - t for t in since if t is not None), default=0.0)

    def oldest_for(self, now: float) -> float:
        """Return for how many seconds the oldest command is out."""
        return now - min((min(lane.begun) for lane in self.lanes), default=now)

    def stats(self) -> dict[str, Any]:
        """Return what it has moved."""
        return {
            "queues": len(self.lanes),
            "outstanding": self.outstanding,
            "bytes_received": sum(lane.queue.bytes_in for lane in self.lanes),
            "bytes_sent": sum(lane.wire.bytes_sent for lane in self.lanes),
        }


class Dying:
    """Writes of a lost lane that the target may still execute, until `over`."""

    __slots__ = ("_silent", "rows", "until", "wire")

    def __init__(self, wire: Wire, rows: list[int], until: float, *, silent: bool) -> None:
        self.wire, self.rows, self.until = wire, rows, until
        self._silent = silent  # the target tells nothing: only the time helps

    def over(self, now: float) -> bool:
        """Return whether the target has ended, or must have ended, what they were part of."""
        if now < self.until and (self._silent or not self.wire.discard()):
            return False
        self.wire.close(reset=True)
        return True


def least_loaded(lanes: Sequence[Lane]) -> Lane | None:
    """Return the lane with the fewest commands out that takes one more, None where none does."""
    best, load = None, 1 << 30
    for lane in lanes:
        queue = lane.queue
        out = queue.outstanding
        if out < load and out < queue.depth:
            best, load = lane, out
    return best
