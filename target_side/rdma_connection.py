"""The edge of one NVMe/RDMA queue: a thread, a queue pair, and an RdmaTargetQueue.

Rules:
1. A turn is: start commands and post what they ask for, take the completions that are there; then
   wait for the queue pair or for `wake`.
2. The listener's thread has the connection's events (rdma_listener.py): it cuts the connection when
   the host has left or is gone.
3. A host that has not connected after `Limits.handshake` is cut.  One that does not take what is
   sent ends its connection by itself: sends are tried again a few times, then fail.
4. Draining and threads: as in connection.py.
Must stay in sync: executor.py starts and ends the commands.
"""

import select
import time
from contextlib import suppress

from hyades.common.errors import HyadesError, PeerError
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.rdma_target import RdmaTargetQueue
from hyades.common.rdma.cm import Identifier
from hyades.common.rdma.endpoint import Broken, Endpoint, Send, Verb
from hyades.target_side.controller import Controller
from hyades.target_side.counters import Counters
from hyades.target_side.events import AT_STOP, WITH_ADMIN_QUEUE, Accepted, Closed, Refused
from hyades.target_side.executor import Executor
from hyades.target_side.rdma_output import RdmaOutput
from hyades.target_side.service import Service
from hyades.target_side.waker import Waker

_TICK = 1.0  # seconds between looks at the deadlines
_FAREWELL = 1.0  # seconds that the host has to take the last answers


class RdmaConnection:
    """See the module."""

    def __init__(
        self, identifier: Identifier, endpoint: Endpoint, peer: str, depth: int, service: Service
    ) -> None:
        """Serve the host at *peer*; *service* has a pool whose buffers the device knows."""
        self.identifier, self.endpoint = identifier, endpoint
        self.peer, self.service = peer, service
        self.local = identifier.local[0]
        self.controller: Controller | None = None
        self.qid = 0
        self.tls = False
        self.born = self.last_heard = time.monotonic()
        self.counters: Counters = service.totals.open()
        self.queue = RdmaTargetQueue(depth=depth, in_capsule=service.limits.in_capsule)
        self.output = RdmaOutput(endpoint, self.queue, service.pool)
        self.draining = False
        self.ended = False
        self._cut = ""
        self._refused = False
        self._waker = Waker()
        self.executor = Executor(self)
        self._poll = select.poll()
        self._poll.register(self._waker.fd, select.POLLIN)
        self._poll.register(endpoint.fd, select.POLLIN)

    def run(self) -> None:
        """Serve until the connection is over."""
        reason, whole = "the thread has failed", False
        try:
            reason = self._serve()
            whole = self.draining
        except Violation as violation:
            self.service.totals.violations += 1
            reason = str(violation)
        except HyadesError as error:
            # The host's leaving ends the queue pair a moment before the listener hears of it.
            reason = self._cut or str(error)
        finally:
            self._end(reason, whole=whole)

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
        controller.keyed = True
        self.service.totals.accepted += 1
        want = controller.connected
        self.service.sink.emit(
            Accepted(
                self.peer, want.hostnqn, want.subnqn, controller.cntlid, self.qid,
                self.queue.depth, 0, False,
            )
        )  # fmt: skip

    def speaks_for(self, hostnqn: str, subnqn: str) -> bool:
        """Return True: nothing was proved before Connect."""
        del hostnqn, subnqn
        return True

    def refused(self, reason: str) -> None:
        """Report a Connect that was refused, or a connection that never became a queue."""
        self._refused = True
        self.service.totals.refused += 1
        self.service.sink.emit(Refused(self.peer, reason))

    # -- the loop

    def _serve(self) -> str:
        while True:
            blocked = not self.executor.pump()
            if self._cut:
                return self._cut
            if self.draining and self.executor.idle and not blocked:
                return AT_STOP
            if not self._receive():
                self._wait()

    def _receive(self) -> bool:
        """Take what is there; return whether there was something."""
        found = self.endpoint.take(self._message, self.output.done)
        if self.queue.commands or self.queue.arrived:
            self.executor.take(self.last_heard)
        return found

    def _message(self, slot: int, nbytes: int) -> None:
        self.last_heard = time.monotonic()
        self.queue.received(self.endpoint.message(slot, nbytes), self.last_heard)
        self.endpoint.post_receive(slot)

    def _wait(self) -> None:
        """Sleep until something happens; look at the deadline."""
        if self.endpoint.arm():
            return
        for fd, _ in self._poll.poll(_TICK * 1000):
            if fd == self._waker.fd:
                self._waker.clear()
        now = time.monotonic()
        if self.controller is None and now - self.born > self.service.limits.handshake:
            raise PeerError(f"not connected after {self.service.limits.handshake:g} s")

    # -- the end

    def _end(self, reason: str, *, whole: bool) -> None:
        service = self.service
        controller, qid = self.controller, self.qid
        with service.lock:
            others = service.target.leave(self)
        for link in others:
            if not self.draining and isinstance(link, RdmaConnection):
                link.cut(WITH_ADMIN_QUEUE)
        service.pool.forget(self)
        if whole:
            with suppress(PeerError):
                self._say_farewell()
        self.discard()
        if controller is not None:
            service.sink.emit(Closed(self.peer, controller.cntlid, qid, reason))
        elif not self._refused:
            self.refused(reason)

    def discard(self) -> None:
        """Let go of everything; the identifier is the listener's to free."""
        if self.ended:
            return
        self.queue.close()
        self.endpoint.fail()
        self.identifier.disconnect()
        left = self.endpoint.close()
        self.executor.abandon()
        self.output.abandon(left)
        self._waker.close()
        self.service.totals.close(self.counters)
        self.ended = True

    def _say_farewell(self) -> None:
        """Wait until the host has taken the last answers: ending the queue pair takes them back."""
        ring = self.endpoint.ring
        deadline = time.monotonic() + _FAREWELL
        if ring.room:  # an RDMA WRITE of nothing, whose completion comes after all others
            self.endpoint.post([Send(Verb.WRITE, 0, 0, 0, signal=True)])
        while ring.room < ring.capacity and time.monotonic() < deadline:
            try:
                self.endpoint.take(lambda *_: None, self.output.done)
            except Broken:
                return
            time.sleep(0.001)
