"""Requests on the live links of an nvme+tcp transport: sent, answered, sent again.  Rules:

1. An accepted request waits for a queue, is out on one, is held for a moment, or has ended.
2. When a link is lost, what was out on it waits again, and is sent on another link: reads and page
   writes give the same result twice.  No completion comes twice: the sockets of the lost link are
   closed first.
3. A write that a lost target may still execute, over a newer one, is kept from that: it waits
   until the target has closed its end of the connection, which it does when it has executed what it
   got.  Where the target no longer reacts, the socket is reset, and the write waits until the
   keep-alive timeout has passed, when the target must have ended the association by itself.
   (A target that executes commands after that is not guarded against.)  Reads do not wait.
4. A link is lost when its sockets or its keep-alive say so, when a protocol rule is broken, when
   the target owes answers and gives no sign of life for `timeout` seconds, or when one command is
   out for STALLED times as long.
5. A wrong data digest, or an answer that blames the path, sends a request again up to _TRIES times;
   any other error ends it with the status of hyades.common.nvme.status.
6. Without a live link for ctrl_loss_timeout seconds, counted from the last loss before which a
   command was answered, everything ends with Status.LOST, now and later.  Who looks only then, for
   example to close a volume, does not wait as long again.
7. A view is asked for again with each connection.  While a target makes one and shows that it is
   alive, rule 6 waits.  Where every target refuses it, everything ends with Status.LOST at once.
One thread calls everything but `locate`.  Which flushes succeed: nvme_flushes.py.
"""

import select
import time
from heapq import heappop, heappush

from hyades.common.errors import PeerError
from hyades.common.layout import BLOCK, Op, Status
from hyades.common.nvme import commands
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.status import DNR, StatusCode, describe, lost_path, to_transport
from hyades.proxy.records import FLUSH, READ, WRITE
from hyades.proxy.transports.nvme_flushes import Flushes
from hyades.proxy.transports.nvme_links import Dying, Lane, Link, least_loaded
from hyades.proxy.transports.nvme_paths import Path, Paths
from hyades.proxy.transports.nvme_session import Session
from hyades.proxy.transports.nvme_table import OP, TRIES, Table
from hyades.proxy.transports.nvme_wire import Gone

_TRIES = 8
_PAUSE = 0.1  # seconds before a path that was blamed is tried again; doubled
_LOOK = 0.05  # seconds between two looks at the clock
STALLED = 4
_LAST_CHANCE = 6.0  # seconds; longer than a path pauses between two attempts
_KEPT = 64  # failures whose NVMe status is remembered, for messages
_LOST, _CANCELLED = int(Status.LOST), int(Status.CANCELLED)


class NvmeEngine:
    """See the module."""

    def __init__(self, paths: Paths, table: Table) -> None:
        self.options, self.table = paths.options, table
        self.memory = memoryview(b"")  # the arena
        self.links: list[Link] = []
        self.losses = self.replays = self.digest_errors = 0
        self.last_failure = self.last_loss = ""
        self.flush_failure = ""
        self.gone = ""  # why everything ends with LOST
        info = paths.namespace
        self._block_bytes, self._ratio = info.block_bytes, BLOCK // info.block_bytes
        self._paths = paths
        self._lanes: list[Lane] = []
        self._held: list[tuple[float, int]] = []  # a heap of (until, row)
        self._dying: list[Dying] = []
        self._flushes = Flushes(trust=self.options.trust_cache)
        self._failures: dict[int, tuple[str, str]] = {}  # block: place, status
        self._next_look = 0.0
        self._down_since: float | None = None

    def locate(self, lba: int) -> str:
        """Return target, namespace and logical block of *lba*, and how it failed if it did."""
        found = self._failures.get(lba)
        where = found[0] if found else self.options.place(self.options.addresses[0])
        why = found[1] if found else self.gone
        return f"{where} LBA {lba * self._ratio}{f' ({why})' if why else ''}"

    def failed_lba(self, lba: int, nblocks: int) -> int:
        """Return the first block of that range whose request failed lately, else *lba*."""
        return min((x for x in tuple(self._failures) if lba <= x < lba + nblocks), default=lba)

    def wait(self, timeout: float) -> None:
        """Sleep until something arrives or may be sent, at most *timeout* seconds."""
        if self._held:
            timeout = min(timeout, max(0.0, self._held[0][0] - time.monotonic()))
        if self._dying:
            timeout = min(timeout, _LOOK)
        readers: list[int] = [self._paths.waker.fd]
        writers: list[int] = []
        for lane in self._lanes:
            if lane.wire.buffered:
                return
            readers.append(lane.wire.fd)
            if lane.wire.blocked:
                writers.append(lane.wire.fd)
        if _wait(readers, writers, timeout):
            self._paths.waker.clear()

    def receive(self, now: float) -> None:
        """Take what has arrived."""
        for lane in tuple(self._lanes):
            if not lane.link.lost:
                self._receive(lane, now)

    def dispatch(self, now: float) -> None:
        """Send what waits, as far as queues and sockets take it."""
        waiting = self.table.waiting
        if self.gone:
            while waiting:
                self.table.end(waiting.popleft(), _LOST)
            return
        lanes = self._open_lanes(now) if waiting else self._lanes
        while waiting and lanes:
            if not self._send(waiting[0], lanes, now):
                break
            waiting.popleft()
        for lane in tuple(self._lanes):
            try:
                if not lane.link.lost:
                    lane.wire.send()
            except Gone as error:
                self._lose(lane.link, error, now, lane)

    def close(self) -> None:
        """Cancel what has not ended, and close the I/O queues."""
        waiting = self.table.waiting
        waiting.extend(row for link in self.links for row in link.leave())
        self._unhold()
        while waiting:
            self.table.end(waiting.popleft(), _CANCELLED)
        self.links, self._lanes = [], []

    # -- links

    def look(self, now: float) -> None:
        """Now and then, and when a path has news: take new links, drop what is over."""
        if now < self._next_look and not self._paths.news:
            return
        self._next_look = now + _LOOK
        if self._paths.news:
            # In this order, and before the state is read: what comes later is news again.
            self._paths.waker.clear()
            self._paths.news = False
        for path, session in self._paths.changes():
            self._adopt(path, session)
        for link in tuple(self.links):
            error = self._trouble(link, now)
            if error is not None:
                self._lose(link, error, now)
        for dying in tuple(self._dying):
            if dying.over(now):
                self._dying.remove(dying)
                self.table.waiting.extend(dying.rows)
        while self._held and self._held[0][0] <= now:
            self.table.waiting.append(heappop(self._held)[1])
        if not self.links and not self.gone:
            self._consider(now)

    def _consider(self, now: float) -> None:
        """Give up where no path can be hoped for."""
        since, limit = self._down_since, self.options.ctrl_loss_timeout
        if self._paths.refused():
            self._give_up("the view is gone")
        elif since is not None and now - max(since, self._paths.alive_until()) > limit:
            self._give_up(f"no path for {limit:g} s")

    def _trouble(self, link: Link, now: float) -> PeerError | None:
        reason, timeout = link.session.reason, self.options.timeout
        if reason is not None:
            return reason if isinstance(reason, PeerError) else Gone(str(reason))
        if link.quiet_for(now) > timeout:
            return Gone(f"no answer for {timeout:g} s")
        if link.oldest_for(now) > STALLED * timeout:
            return Gone(f"a command without an answer for {STALLED * timeout:g} s")
        return None

    def _adopt(self, path: Path, session: Session) -> None:
        link = Link(path, session)
        link.dirty = self._flushes.link_found(session.controller)
        self.links.append(link)
        self._lanes = [*self._lanes, *link.lanes]
        if not self.table.open:
            self._down_since = None

    def _lose(self, link: Link, error: PeerError, now: float, culprit: Lane | None = None) -> None:
        """Drop *link*; *culprit* is the lane whose connection *error* is about, if it is one."""
        if link.lost:
            return
        self.links.remove(link)
        self._lanes = [lane for lane in self._lanes if lane.link is not link]
        self.losses += 1
        unflushed, alone = link.dirty or bool(link.covering), not self.links
        if self._flushes.link_lost(link.session.controller, unflushed=unflushed, alone=alone):
            for other in self.links:
                other.dirty = True
        if alone and self._down_since is None:
            self._down_since = self._outage_began(link, now)
        self.last_loss = f"{link.path.address}: {error}"
        gone = isinstance(error, Gone)
        silent = isinstance(error, Gone) and not error.by_peer
        until = now + self.options.kato + link.session.granularity
        for lane, rows in link.cut(error, culprit):
            self.replays += len(rows)
            writes = []
            ended = lane is culprit and gone and not silent
            for row in rows:
                op = int(self.table.rows[row, OP])
                if op == FLUSH:
                    self._flush_ended(row, *self._flushes.lost(row))
                elif op == WRITE and not ended:
                    writes.append(row)
                else:
                    self.table.waiting.append(row)
            if writes or not lane.wire.closed:
                self._dying.append(Dying(lane.wire, writes, until, silent=silent))

    def _outage_began(self, link: Link, now: float) -> float:
        """Return since when there is no path: not just now where nobody has looked for long.

        In any case the paths are left the time for one more attempt.
        """
        earliest = now - max(0.0, self.options.ctrl_loss_timeout - _LAST_CHANCE)
        return max(link.session.ended_at or now, earliest)

    def _give_up(self, why: str) -> None:
        told = ((str(path.address), str(path.problem)) for path in self._paths.paths)
        problems = "; ".join(text if where in text else f"{where}: {text}" for where, text in told)
        self.gone = f"{why}: {problems}"
        self.last_failure = self.flush_failure = self.gone
        self._paths.stop()
        self._unhold()

    def _unhold(self) -> None:
        """Let everything wait that is held."""
        for dying in self._dying:
            dying.wire.close(reset=True)
            self.table.waiting.extend(dying.rows)
        self.table.waiting.extend(row for _, row in self._held)
        self._held, self._dying = [], []

    # -- requests

    def _open_lanes(self, now: float) -> list[Lane]:
        """Return the lanes of the links that have not been blamed just now, or all."""
        if all(link.shunned_until <= now for link in self.links):
            return self._lanes
        return [x for x in self._lanes if x.link.shunned_until <= now] or self._lanes

    def _send(self, row: int, lanes: list[Lane], now: float) -> bool:
        """Give the request in *row* to a queue; False where none takes it."""
        op, lba, offset, nbytes = self.table.rows[row, :4].tolist()
        if op == FLUSH:
            return self._send_flush(row, lanes, now)
        lane = least_loaded(lanes)
        if lane is None:
            return False
        blocks, data = nbytes // self._block_bytes, self.memory[offset : offset + nbytes]
        slba, nsid = lba * self._ratio, lane.link.session.nsid
        if op == READ:
            sqe = commands.transfer(Opcode.READ, nsid, slba, blocks)
            lane.sent(lane.queue.submit(sqe, into=data, now=now), row, now)
        else:
            sqe = commands.transfer(Opcode.WRITE, nsid, slba, blocks)
            lane.sent(lane.queue.submit(sqe, source=data, now=now), row, now)
        return True

    def _send_flush(self, row: int, lanes: list[Lane], now: float) -> bool:
        if self._flushes.in_doubt:
            self._flushes.in_doubt = False
            self.flush_failure = (
                "every path was lost for a while, and the target may have lost writes that it had"
                " completed (trust_cache=1 takes that risk)"
            )
            self.last_failure = f"flush: {self.flush_failure}"
            self.table.end(row, _LOST)
            return True
        dirty = [link.lanes for link in self.links if link.dirty]
        chosen = [least_loaded(group) for group in dirty or [lanes]]
        if any(lane is None for lane in chosen):
            return False
        self._flushes.sent(row, len(chosen))
        for lane in chosen:
            assert lane is not None
            sqe = commands.flush(lane.link.session.nsid)
            lane.sent(lane.queue.submit(sqe, now=now), row, now)
            if lane.link.dirty:
                lane.link.covering.add(row)
            lane.link.dirty = False
        return True

    def _receive(self, lane: Lane, now: float) -> None:
        error: PeerError | None = None
        try:
            lane.wire.receive(now)
        except PeerError as found:  # a Gone or Violation; what came before it counts
            error = found
        completions = lane.queue.completions
        if completions:
            self._down_since = None
            for cid, code, _ in completions:
                self._answered(lane, lane.answered(cid), code, now)
            completions.clear()
        if error is not None:
            self._lose(lane.link, error, now, lane)

    def _answered(self, lane: Lane, row: int, code: int, now: float) -> None:
        op = self.table.rows[row, OP]
        if op == FLUSH:
            link = lane.link
            link.dirty = link.dirty or (code != 0 and row in link.covering)
            link.covering.discard(row)
            self._flush_ended(row, *self._flushes.answered(row, code))
        elif code:
            self._failed(lane, row, code, now)
        else:
            if op == WRITE:
                lane.link.dirty = True
            self.table.ended.append(row)

    def _failed(self, lane: Lane, row: int, code: int, now: float) -> None:
        rows = self.table.rows
        blamed, digest = lost_path(code), code & ~DNR == StatusCode.TRANSIENT_TRANSPORT
        self.digest_errors += digest
        tries = int(rows[row, TRIES])
        if (blamed or digest) and tries < _TRIES:
            rows[row, TRIES] = tries + 1
            self.replays += 1
            if digest:
                self.table.waiting.append(row)
                return
            later = now + _PAUSE * 2**tries
            lane.link.shunned_until = later
            # Another path takes it at once.
            heappush(self._held, (later if len(self.links) == 1 else now, row))
            return
        lba = int(rows[row, 1])
        place, status = self.options.place(lane.link.path.address), f"NVMe status {describe(code)}"
        if len(self._failures) >= _KEPT:
            del self._failures[next(iter(self._failures))]
        self._failures[lba] = (place, status)
        op = Op(int(rows[row, OP])).name.lower()
        self.last_failure = f"{place} LBA {lba * self._ratio}: {op}: {status}"
        self.table.end(row, int(to_transport(code)))

    def _flush_ended(self, row: int, last: bool, code: int, again: bool) -> None:
        """Take how a flush, or one part of it, ended."""
        if not last:
            return
        if again:
            self.table.waiting.append(row)
            return
        if code:
            self.flush_failure = f"NVMe status {describe(code)}"
            self.last_failure = f"flush: {self.flush_failure}"
        self.table.end(row, int(to_transport(code)) if code else 0)


def _wait(readers: list[int], writers: list[int], timeout: float) -> bool:
    """Wait for descriptors; return whether the first reader, the waker, is readable."""
    if max(readers) < 1024:  # the finer clock
        return readers[0] in select.select(readers, writers, (), timeout)[0]
    poll = select.poll()
    for fd in readers:
        poll.register(fd, select.POLLIN | (select.POLLOUT if fd in writers else 0))
    return any(fd == readers[0] for fd, _ in poll.poll(timeout * 1000 + 1))
