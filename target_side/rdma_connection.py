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
from hyades.target_side.edge import Edge
from hyades.target_side.executor import Executor
from hyades.target_side.rdma_output import RdmaOutput
from hyades.target_side.service import Service

_FAREWELL = 1.0  # seconds that the host has to take the last answers


class RdmaConnection(Edge[RdmaTargetQueue, RdmaOutput]):
    """See the module."""

    def __init__(
        self, identifier: Identifier, endpoint: Endpoint, peer: str, depth: int, service: Service
    ) -> None:
        """Serve the host at *peer*; *service* has a pool whose buffers the device knows."""
        queue = RdmaTargetQueue(depth=depth, in_capsule=service.limits.in_capsule)
        output = RdmaOutput(endpoint, queue, service.pool)  # fails where memory is short
        super().__init__(peer, identifier.local[0], service, tls=False)
        self.identifier, self.endpoint = identifier, endpoint
        self.queue, self.output = queue, output
        self.ended = False
        self.executor = Executor(self)
        self._poll.register(endpoint.fd, select.POLLIN)

    def run(self) -> None:
        """Serve until the connection is over."""
        reason, whole = "the thread has failed", False
        try:
            reason = self._take_turns()
            whole = self.draining
        except Violation as violation:
            self.service.totals.violations += 1
            reason = str(violation)
        except HyadesError as error:
            # The host's leaving ends the queue pair a moment before the listener hears of it.
            reason = self._cut or str(error)
        finally:
            self._end(reason, whole=whole)

    def joined(self, controller: Controller) -> None:
        """Report that this connection is a queue now."""
        controller.keyed = True
        super().joined(controller)

    def speaks_for(self, hostnqn: str, subnqn: str) -> bool:
        """Return True: nothing was proved before Connect."""
        del hostnqn, subnqn
        return True

    # -- the loop

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

    def _wait(self, blocked: bool) -> None:
        """Sleep until something happens; look at the deadline."""
        del blocked  # completions tell, too, when there is room again
        if not self.endpoint.arm():
            self._sleep()

    # -- the end

    def _end(self, reason: str, *, whole: bool) -> None:
        was = self._leave()
        if whole:
            with suppress(PeerError):
                self._say_farewell()
        self.discard()
        self._report(was, reason)

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
