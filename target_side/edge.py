"""What the connections of all transports share: being ended, told apart, and waited for.

A subclass owns the wire: it makes `queue`, `output` and `executor`, registers its descriptor with
`_poll`, and receives in `_receive`.  Rules and threads: connection.py.
"""

import select
import time
from typing import Generic, TypeVar

from hyades.common.errors import PeerError
from hyades.target_side.controller import Controller
from hyades.target_side.counters import Counters
from hyades.target_side.events import AT_STOP, WITH_ADMIN_QUEUE, Accepted, Closed, Refused
from hyades.target_side.executor import Executor
from hyades.target_side.ports import CommandQueue, Sender
from hyades.target_side.service import Service
from hyades.target_side.waker import Waker

_TICK = 1.0  # seconds between looks at the deadlines
Queue = TypeVar("Queue", bound=CommandQueue)
Out = TypeVar("Out", bound=Sender)


class Edge(Generic[Queue, Out]):
    """One connection; see the module."""

    queue: Queue
    output: Out
    executor: Executor

    def __init__(self, peer: str, local: str, service: Service, *, tls: bool) -> None:
        self._waker = Waker()
        self.peer, self.local, self.service, self.tls = peer, local, service, tls
        self.controller: Controller | None = None
        self.qid = 0
        self.born = self.last_heard = time.monotonic()
        self.counters: Counters = service.totals.open()
        self.draining = False
        self._cut = ""
        self._refused = False
        self._poll = select.poll()
        self._poll.register(self._waker.fd, select.POLLIN)

    def cut(self, reason: str) -> None:
        """End the connection soon, whatever is in flight."""
        self._cut = self._cut or reason
        self.wake()

    def drain(self) -> None:
        """End the connection when what is in flight has ended."""
        self.draining = True
        self.wake()

    def wake(self) -> None:
        """Make a waiting connection look around."""
        self._waker.wake()

    def joined(self, controller: Controller) -> None:
        """Report that this connection is a queue now."""
        self.service.totals.accepted += 1
        want = controller.connected
        self.service.sink.emit(
            Accepted(
                self.peer, want.hostnqn, want.subnqn, controller.cntlid, self.qid,
                self.queue.depth, self.queue.digests, self.tls,
            )
        )  # fmt: skip

    def refused(self, reason: str) -> None:
        """Report a Connect that was refused, or a connection that never became a queue."""
        self._refused = True
        self.service.totals.refused += 1
        self.service.sink.emit(Refused(self.peer, reason))

    # -- what a subclass does

    def discard(self) -> None:
        """Let go of the wire of a connection that does not run (any more)."""
        raise NotImplementedError

    def run(self) -> None:
        """Serve until the connection is over."""
        raise NotImplementedError

    def _receive(self) -> bool:
        """Take what is there; return whether there was something."""
        raise NotImplementedError

    def _wait(self, blocked: bool) -> None:
        """Sleep until something happens; *blocked*: not everything is sent."""
        raise NotImplementedError

    # -- what it calls

    def _take_turns(self) -> str:
        """Serve; return why the connection ends in order."""
        while True:
            blocked = not self.executor.pump()
            if self._cut:
                return self._cut
            if self.draining and self.executor.idle and not blocked:
                return AT_STOP
            if not self._receive():
                self._wait(blocked)

    def _sleep(self) -> float:
        """Sleep until a descriptor is ready, return the time; PeerError for a host that is late."""
        for fd, _ in self._poll.poll(_TICK * 1000):
            if fd == self._waker.fd:
                self._waker.clear()
        now = time.monotonic()
        if self.controller is None and now - self.born > self.service.limits.handshake:
            raise PeerError(f"not connected after {self.service.limits.handshake:g} s")
        return now

    def _leave(self) -> tuple[Controller | None, int]:
        """Leave the controller, with what goes with it; return which it was, and the queue."""
        service, was = self.service, (self.controller, self.qid)
        with service.lock:
            others = service.target.leave(self)
        for link in others:
            if not self.draining and isinstance(link, Edge):
                link.cut(WITH_ADMIN_QUEUE)
        service.pool.forget(self)
        return was

    def _report(self, was: tuple[Controller | None, int], reason: str) -> None:
        """Report the end of a connection that was a queue, or else its refusal, once."""
        controller, qid = was
        if controller is not None:
            self.service.sink.emit(Closed(self.peer, controller.cntlid, qid, reason))
        elif not self._refused:
            self.refused(reason)
