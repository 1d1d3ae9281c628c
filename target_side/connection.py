"""The edge of one connection: a thread, a socket that never blocks, and a TargetQueue.

Rules:
1. A turn is: send what can be sent, receive what is there, start the commands that came; then wait
   in poll.  It receives while it cannot send, so two peers that both only send never lock up.
2. Commands are started in order.  One that needs a buffer waits for it at the head of the line; the
   buffers that this connection holds come back regardless (pool.py).
3. A peer that owes data (after an R2T) or is owed data, and moves less than a trickle for
   `Limits.stall` seconds, is cut; so is one that has not connected after `Limits.handshake`.
4. Draining: commands that have begun end as usual, later ones end with ABORTED_QUEUE_DELETED (a
   host sends them again elsewhere); then the connection is closed.
5. `cut` and `wake` may be called from any thread; all else belongs to the connection's own.
Must stay in sync: executor.py starts and ends the commands, edge.py has what RDMA shares.
"""

import select
import socket
import ssl
import time
from contextlib import suppress

from hyades.common.errors import PeerError
from hyades.common.nvme.layout import DISCOVERY_NQN
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.target import TargetQueue
from hyades.common.nvme.tls import PskSocket, wrap_server
from hyades.target_side.edge import Edge
from hyades.target_side.events import BY_HOST
from hyades.target_side.executor import Executor
from hyades.target_side.output import Output
from hyades.target_side.service import Service

_RECEIVES = 64  # at most in one turn
_TRICKLE = 1024  # bytes a second, the least that counts as moving
_FAREWELL = 1.0  # seconds that the peer has to take the last bytes


class Connection(Edge[TargetQueue, Output]):
    """See the module."""

    def __init__(self, sock: socket.socket, peer: str, service: Service) -> None:
        super().__init__(peer, str(sock.getsockname()[0]), service, tls=service.keys is not None)
        limits = service.limits
        self.sock: socket.socket = sock
        self.queue = TargetQueue(
            depth=min(32, limits.depth), in_capsule=limits.in_capsule,
            max_h2c=min(limits.max_data_pdu, limits.max_transfer),
        )  # fmt: skip
        self._window, self._window_bytes = self.born, 0
        self._received = 0
        self.output = Output(sock, service.pool)
        self.executor = Executor(self)

    def run(self) -> None:
        """Serve until the connection is over."""
        reason = "the thread has failed"
        try:
            reason = self._serve()
        except Violation as violation:
            self.service.totals.violations += 1
            reason = str(violation)
            self.output.push(self.queue.take_output())  # behind whole PDUs, never inside one
        except PeerError as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            self._end(reason)

    def discard(self) -> None:
        """Let go of the socket of a connection that does not run (any more)."""
        self.sock.close()
        self._waker.close()
        self.service.totals.close(self.counters)

    def speaks_for(self, hostnqn: str, subnqn: str) -> bool:
        """Return whether the TLS handshake, if there was one, vouches for these names.

        Whoever has a key for one subsystem may ask the discovery service, too.
        """
        identity = self.sock.identity if isinstance(self.sock, PskSocket) else None
        if identity is None:
            return True
        return identity.hostnqn == hostnqn and subnqn in (identity.subnqn, DISCOVERY_NQN)

    # -- the loop

    def _serve(self) -> str:
        self.sock.setblocking(False)
        self._poll.register(self.sock.fileno(), select.POLLIN)
        if self.service.keys is not None:
            self._shake_hands()
        return self._take_turns()

    def _receive(self) -> bool:
        """Take what is there; return whether there was something."""
        for turn in range(_RECEIVES):
            try:
                count = self._receive_once()
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return turn > 0
            if not count:
                whole = self.queue.idle or self.executor.only_events
                raise PeerError(BY_HOST if whole else "closed by the host, half-way")
            self._received += count
            now = time.monotonic()
            self.last_heard = now
            self.queue.received(count, now)
            if self.queue.commands or self.queue.arrived:
                self.executor.take(now)
        return True

    def _receive_once(self) -> int:
        if self.tls:
            return self.sock.recv_into(self.queue.buffers()[0])
        return self.sock.recvmsg_into(self.queue.buffers())[0]

    def _wait(self, blocked: bool) -> None:
        """Sleep until something happens; look at the deadlines."""
        events = select.POLLIN | (select.POLLOUT if blocked else 0)
        self._poll.modify(self.sock.fileno(), events)
        now = self._sleep()
        self._check_stall(now, owing=blocked or self.executor.awaits_data)

    def _check_stall(self, now: float, *, owing: bool) -> None:
        moved, limit = self._received + self.output.moved, self.service.limits.stall
        if not owing:
            self._window, self._window_bytes = now, moved
        elif now - self._window > limit:
            if moved - self._window_bytes < _TRICKLE * limit:
                self.service.totals.stalled += 1
                raise PeerError(
                    f"stalled: {moved - self._window_bytes} bytes in {limit:g} s with data due"
                )
            self._window, self._window_bytes = now, moved

    def _shake_hands(self) -> None:
        assert self.service.keys is not None
        tls = wrap_server(self.sock, self.service.keys, handshake=False)
        self.sock = tls
        self.output.attach(tls)
        while True:
            try:
                tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._wait(blocked=False)
            except ssl.SSLWantWriteError:
                self._wait(blocked=True)
            if self._cut:
                raise PeerError(self._cut)

    # -- the end

    def _end(self, reason: str) -> None:
        was = self._leave()
        with suppress(OSError):
            self._say_farewell()
        self.queue.close()
        self.executor.abandon()
        self.output.abandon()
        self.discard()
        self._report(was, reason)

    def _say_farewell(self) -> None:
        """Send what is left and wait for the peer to close: a reset would take it back."""
        deadline = time.monotonic() + _FAREWELL
        while not self.output.send() and time.monotonic() < deadline:
            poll = select.poll()
            poll.register(self.sock.fileno(), select.POLLOUT)
            poll.poll(100)
        if self.tls and isinstance(self.sock, ssl.SSLSocket):
            with suppress(OSError, ValueError):
                self.sock.unwrap()
        self.sock.shutdown(socket.SHUT_WR)
        self.sock.settimeout(_FAREWELL / 4)
        while time.monotonic() < deadline and self.sock.recv(1 << 16):
            pass
