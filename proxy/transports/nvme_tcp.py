"""A namespace of an NVMe/TCP target: ``nvme+tcp://host:port/subnqn?ns=1`` (options: nvme_url.py).

The transport's thread encodes commands and moves their data between sockets and the arena; a thread
a path connects, keeps alive and connects again (nvme_paths.py, nvme_session.py).  Rules:
1. An accepted request waits for a queue, is out on one, is held for a moment, or has ended.
2. When a link is lost, what was out on it waits again, and is sent on another link: reads and page
   writes give the same result twice.  Its completion cannot come twice: the sockets of the lost
   link are closed first.
3. A write that the lost target may still execute later, over a newer one, is kept from that: where
   the target itself ended the connection nothing of it is left; else the socket is reset, and the
   write is held until the keep-alive timeout has passed, when the target must have ended the
   association by itself.
4. A wrong data digest, or an answer that blames the path, sends a request again up to _TRIES times;
   another error ends it with the status of hyades.common.nvme.status.
5. Without any live link for ctrl_loss_timeout seconds, measured from the last answered command,
   everything ends with Status.LOST, now and later.
Which flushes succeed: nvme_flushes.py.
"""

import select
import time
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import PeerError, UsageError
from hyades.common.layout import BLOCK, Op, Status
from hyades.common.nvme import commands
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.status import DNR, StatusCode, describe, lost_path, to_transport
from hyades.common.units import format_size
from hyades.proxy.arena import check_arena
from hyades.proxy.records import FLUSH, WRITE, completion_words, counter_dict, request_words
from hyades.proxy.transport import Limits, Records
from hyades.proxy.transports.nvme_flushes import Flushes
from hyades.proxy.transports.nvme_links import Lane, Link, least_loaded
from hyades.proxy.transports.nvme_paths import Path, Paths
from hyades.proxy.transports.nvme_session import Session
from hyades.proxy.transports.nvme_table import OP, TRIES, Table
from hyades.proxy.transports.nvme_url import Options, parse
from hyades.proxy.transports.nvme_wire import Gone
from hyades.proxy.urls import Url

_TRIES = 5
_PAUSE = 0.1  # seconds before the first of these tries; doubled
_LOOK = 0.05  # seconds between two looks at the clock
_MAX_BLOCKS = 1 << 16  # logical blocks of one command
_KEPT = 64  # failures whose NVMe status is remembered, for messages
_LOST, _CANCELLED = int(Status.LOST), int(Status.CANCELLED)


class NvmeTcpTransport:
    """Moves pages between an arena and a remote namespace."""

    def __init__(self, options: Options, *, writable: bool = True) -> None:
        """Connect; UsageError or PeerError where no path leads to the namespace."""
        self.options = options
        self._paths = Paths(options)
        self._paths.open()
        try:
            self._limits = self._measure()
        except BaseException:
            self._paths.close()
            self._paths.waker.close()
            raise
        info = self._paths.namespace
        self._block_bytes, self._ratio = info.block_bytes, BLOCK // info.block_bytes
        self._nblocks = info.blocks // self._ratio
        self._writable = writable and not info.read_only
        self._table = Table(self._limits.max_inflight)
        self._flushes = Flushes(trust=options.trust_cache)
        self._links: list[Link] = []
        self._lanes: list[Lane] = []
        self._held: list[tuple[float, int]] = []
        self._arena: NDArray[np.uint8] | None = None
        self._memory = memoryview(b"")
        self._closed = False
        self._gone = ""  # why everything ends with LOST
        self._next_look = 0.0
        self._down_since: float | None = None
        self._replays = self._losses = self._digest_errors = 0
        self._failures: dict[int, str] = {}
        self._last_failure = ""
        self._look(time.monotonic())

    @property
    def limits(self) -> Limits:
        """What one request and the queues may hold."""
        return self._limits

    @property
    def nblocks(self) -> int:
        """Whole 4096-byte blocks of the namespace."""
        return self._nblocks

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the uint8 *arena* that request offsets index."""
        self._refuse_closed()
        check_arena(arena, BLOCK, registered=self._arena is not None)
        self._arena, self._memory = arena, arena.data

    def submit(self, requests: Records) -> int:
        """Take a prefix of REQUEST[n] and send what the queues and sockets take."""
        self._refuse_closed()
        if self._arena is None:
            raise UsageError(f"{self._name()} has no arena: call register first")
        bounds = (self._nblocks, len(self._memory), self._limits.max_transfer, self._writable)
        count = self._table.accept(request_words(requests), bounds)
        if count:
            self._look(now := time.monotonic())
            self._dispatch(now)
        return count

    def poll(self, completions: Records) -> int:
        """Take what has arrived; fill COMPLETION[n] and return how many."""
        if not self._closed:
            self._look(now := time.monotonic())
            for lane in tuple(self._lanes):
                self._receive(lane, now)
            self._dispatch(now)
        return self._table.report(completion_words(completions))

    def wait(self, timeout: float) -> None:
        """Sleep until something arrives or may be sent, at most *timeout* seconds."""
        if self._table.ended:
            return
        if self._closed:
            time.sleep(timeout)
            return
        if self._held:
            timeout = min(timeout, max(0.0, self._held[0][0] - time.monotonic()))
        readers, writers = [self._paths.waker.fd], []
        for lane in self._lanes:
            if lane.wire.buffered:
                return
            readers.append(lane.wire.fd)
            if lane.wire.blocked:
                writers.append(lane.wire.fd)
        if _wait(readers, writers, timeout):
            self._paths.waker.clear()

    def grow(self, nblocks: int) -> None:
        """Do nothing: a namespace has a fixed size; UsageError where it is too small."""
        self._refuse_closed()
        if nblocks > self._nblocks:
            size, wanted = self._nblocks * BLOCK, nblocks * BLOCK
            raise UsageError(
                f"{self._name()} has {format_size(size)}; {format_size(wanted)} are needed: serve"
                " a larger file or device"
            )

    def close(self) -> None:
        """Cancel what is under way, and leave the controllers in order."""
        if self._closed:
            return
        self._closed = True
        for link in self._links:
            self._cancel(link.leave())
        self._cancel(self._table.waiting)
        self._cancel(row for _, row in self._held)
        self._table.waiting.clear()
        self._links, self._lanes, self._held = [], [], []
        self._paths.close()
        self._paths.waker.close()

    def locate(self, lba: int) -> str:
        """Return the target, namespace and logical block of *lba*, and how it failed if it did."""
        address = self.options.addresses[0]
        status = self._failures.get(lba, "")
        place = f"{self.options.place(address)} LBA {lba * self._ratio}"
        return f"{place} ({status})" if status else place

    def stats(self) -> dict[str, Any]:
        """Return the counters, what became of connections, and each path."""
        links = {link.path.index: link for link in self._links}
        return {
            **counter_dict(self._table.counters),
            "describe": self.describe(),
            "reconnects": sum(max(0, path.connects - 1) for path in self._paths.paths),
            "losses": self._losses,
            "replays": self._replays,
            "digest_errors": self._digest_errors,
            "last_failure": self._last_failure,
            "paths": [self._path_stats(p, links.get(p.index)) for p in self._paths.paths],
        }

    def describe(self) -> str:
        """Return one line for people."""
        options, info = self.options, self._paths.namespace
        digests = [d for d in ("header", "data") if getattr(options, f"{d}_digest")]
        extras = [f"{' and '.join(digests)} digests"] if digests else []
        extras += ["TLS"] if options.psk is not None else []
        return ", ".join([
            self._name(), f"{self._nblocks * BLOCK >> 20} MiB in blocks of {info.block_bytes}",
            f"{len(self._links)} of {len(options.addresses)} paths live",
            f"{options.queues} queues of {options.depth}", *extras,
        ])  # fmt: skip

    # -- links

    def _measure(self) -> Limits:
        options, info = self.options, self._paths.namespace
        what = options.place(options.addresses[0])
        if info.metadata_bytes:
            raise UsageError(
                f"{what} has {info.metadata_bytes} bytes of metadata a block: format it without"
            )
        if info.block_bytes > BLOCK:
            raise UsageError(f"{what} has blocks of {info.block_bytes} bytes, at most {BLOCK} work")
        limit = min(options.max_transfer, _MAX_BLOCKS * info.block_bytes)
        limit = min(limit, self._paths.controller.max_transfer or limit)
        inflight = options.queues * options.depth * len(options.addresses)
        return Limits(limit, inflight, BLOCK)

    def _look(self, now: float) -> None:
        """Now and then, and when a path has news: take new links, and drop what is over."""
        if now < self._next_look and not self._paths.news:
            return
        self._next_look = now + _LOOK
        self._paths.news = False
        for path, session in self._paths.changes():
            self._adopt(path, session)
        for link in tuple(self._links):
            reason = link.session.reason
            if reason is not None:
                self._lose(
                    link, reason if isinstance(reason, PeerError) else Gone(str(reason)), now
                )
            elif link.quiet_for(now) > self.options.timeout:
                text = f"no answer for {self.options.timeout:g} s"
                self._lose(link, Gone(text), now)
        while self._held and self._held[0][0] <= now:
            self._table.waiting.append(heappop(self._held)[1])
        since = self._down_since
        if not self._links and since is not None and now - since > self.options.ctrl_loss_timeout:
            self._give_up()

    def _adopt(self, path: Path, session: Session) -> None:
        link = Link(path, session)
        link.dirty = self._flushes.link_found(session.controller)
        self._links.append(link)
        self._lanes += link.lanes
        if not self._table.open:
            self._down_since = None

    def _lose(self, link: Link, error: PeerError, now: float) -> None:
        if link not in self._links:
            return
        self._links.remove(link)
        self._lanes = [lane for lane in self._lanes if lane.link is not link]
        self._losses += 1
        unflushed = link.dirty or link.flushes > 0
        alone = not self._links
        if self._flushes.link_lost(link.session.controller, unflushed=unflushed, alone=alone):
            for other in self._links:
                other.dirty = True
        if alone and self._down_since is None:
            self._down_since = now
        fence = 0.0 if isinstance(error, Gone) and error.by_peer else now + self.options.kato
        for row in link.cut(error):
            self._replays += 1
            op = int(self._table.rows[row, OP])
            if op == FLUSH:
                self._flush_answered(row, *self._flushes.lost(row))
            elif op == WRITE and fence:
                heappush(self._held, (fence, row))
            else:
                self._table.waiting.append(row)

    def _give_up(self) -> None:
        problems = "; ".join(f"{p.address}: {p.problem}" for p in self._paths.paths)
        self._gone = f"no path for {self.options.ctrl_loss_timeout:g} s: {problems}"
        self._last_failure = self._gone
        self._paths.stop()
        self._table.waiting.extend(row for _, row in self._held)
        self._held = []

    # -- requests

    def _dispatch(self, now: float) -> None:
        waiting = self._table.waiting
        if self._gone:
            while waiting:
                self._table.end(waiting.popleft(), _LOST)
            return
        while waiting and self._lanes:
            if not self._send(waiting[0], now):
                break
            waiting.popleft()
        for lane in tuple(self._lanes):
            try:
                lane.wire.send()
            except Gone as error:
                self._lose(lane.link, error, now)

    def _send(self, row: int, now: float) -> bool:
        """Give the request in *row* to a queue; False where none takes it."""
        op, lba, offset, nbytes = self._table.rows[row, :4].tolist()
        if op == FLUSH:
            return self._send_flush(row, now)
        lane = least_loaded(self._open_lanes(now))
        if lane is None:
            return False
        opcode = Opcode.READ if op == Op.READ else Opcode.WRITE
        blocks = nbytes // self._block_bytes
        sqe = commands.transfer(opcode, self.options.nsid, lba * self._ratio, blocks)
        data = self._memory[offset : offset + nbytes]
        if op == Op.READ:
            cid = lane.queue.submit(sqe, into=data, now=now)
        else:
            cid = lane.queue.submit(sqe, source=data, now=now)
        lane.rows[cid] = row
        return True

    def _open_lanes(self, now: float) -> list[Lane]:
        if all(link.shunned_until <= now for link in self._links):
            return self._lanes
        return [x for x in self._lanes if x.link.shunned_until <= now] or self._lanes

    def _send_flush(self, row: int, now: float) -> bool:
        if self._flushes.in_doubt:
            self._flushes.in_doubt = False
            self._last_failure = (
                f"{self._name()}: flush: every path was lost, and the target may have lost writes"
                " that it had completed (trust_cache=1 takes that risk)"
            )
            self._table.end(row, _LOST)
            return True
        dirty = [link.lanes for link in self._links if link.dirty]
        lanes = [least_loaded(group) for group in dirty or [self._lanes]]
        if any(lane is None for lane in lanes):
            return False
        self._flushes.sent(row, len(lanes))
        for lane in lanes:
            assert lane is not None
            cid = lane.queue.submit(commands.flush(self.options.nsid), now=now)
            lane.rows[cid] = row
            lane.link.dirty = False
            lane.link.flushes += 1
        return True

    def _receive(self, lane: Lane, now: float) -> None:
        error: PeerError | None = None
        try:
            lane.wire.receive(now)
        except PeerError as found:  # a Gone or Violation; what came before it counts
            error = found
        completions = lane.queue.completions
        if completions:
            for cid, code, _ in completions:
                self._answered(lane, lane.rows[cid], code, now)
            completions.clear()
            self._down_since = None
        if error is not None:
            self._lose(lane.link, error, now)

    def _answered(self, lane: Lane, row: int, code: int, now: float) -> None:
        op = self._table.rows[row, OP]
        if op == FLUSH:
            lane.link.flushes -= 1
            lane.link.dirty = lane.link.dirty or code != 0
            self._flush_answered(row, *self._flushes.answered(row, code))
            return
        if not code:
            if op == WRITE:
                lane.link.dirty = True
            self._table.ended.append(row)
            return
        self._failed(lane, row, code, now)

    def _failed(self, lane: Lane, row: int, code: int, now: float) -> None:
        table = self._table
        _, lba, _, nbytes, _, _, tries = table.rows[row, :7].tolist()
        path, digest = lost_path(code), code & ~DNR == StatusCode.TRANSIENT_TRANSPORT
        self._digest_errors += digest
        if (path or digest) and tries < _TRIES:
            table.rows[row, TRIES] = tries + 1
            self._replays += 1
            later = now + _PAUSE * 2**tries
            if path:
                lane.link.shunned_until = later
            heappush(self._held, (now if digest else later, row))
            return
        address = lane.link.path.address
        status = f"NVMe status {describe(code)}"
        place = f"{self.options.place(address)} LBA {lba * self._ratio}"
        self._last_failure = f"{place}: {status}"
        if len(self._failures) >= _KEPT:
            del self._failures[next(iter(self._failures))]
        self._failures[lba] = status
        table.end(row, int(to_transport(code)))
        del nbytes

    def _flush_answered(self, row: int, last: bool, code: int, again: bool) -> None:
        if not last:
            return
        if again:
            self._table.waiting.append(row)
            return
        if code:
            self._last_failure = f"{self._name()}: flush: NVMe status {describe(code)}"
        self._table.end(row, int(to_transport(code)) if code else 0)

    def _cancel(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._table.end(row, _CANCELLED)

    # -- words

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError(f"{self._name()} is closed")

    def _name(self) -> str:
        options = self.options
        where = "+".join(map(str, options.addresses))
        return f"nvme+tcp://{where}/{options.subnqn} ns {options.nsid}"

    def _path_stats(self, path: Path, link: Link | None) -> dict[str, Any]:
        return {
            "address": str(path.address),
            "live": link is not None,
            "problem": "" if link is not None or path.problem is None else str(path.problem),
            "connects": path.connects,
            "connect_seconds": path.connect_seconds,
            **(link.stats() if link is not None else {}),
        }


def _wait(readers: list[int], writers: list[int], timeout: float) -> bool:
    """Wait for descriptors; return whether the first reader, the waker, is readable."""
    if max(readers) < 1024:  # the finer clock
        return readers[0] in select.select(readers, writers, (), timeout)[0]
    poll = select.poll()
    for fd in readers:
        poll.register(fd, select.POLLIN | (select.POLLOUT if fd in writers else 0))
    return any(fd == readers[0] for fd, _ in poll.poll(timeout * 1000 + 1))


def open_url(url: Url, *, create: bool, writable: bool) -> NvmeTcpTransport:  # noqa: ARG001
    """Open a namespace, which exists already: *create* means nothing."""
    return NvmeTcpTransport(parse(url), writable=writable)


def probe() -> str | None:
    """Return None: sockets are everywhere."""
    return None
