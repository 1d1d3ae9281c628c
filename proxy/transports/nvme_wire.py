"""One NVMe/TCP queue on one non-blocking socket, plain or TLS.

Rules:
1. One thread at a time uses a wire.  Nothing here waits: `send` sends what the socket takes,
   `receive` takes what has arrived, straight into the memory of the commands.
2. The end of a connection raises Gone, whoever ended it; what the peer may not send, Violation.
3. A TLS socket may hold bytes that its descriptor does not show: `buffered`.
"""

import contextlib
import socket
import ssl
import struct
from collections import deque

from hyades.common.errors import PeerError, UsageError
from hyades.common.nvme.host import HostQueue

_SEGMENTS = 64  # of one sendmsg
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Gone(PeerError):  # noqa: N818
    """The connection is over; *by_peer*: the other side ended it, so nothing of it is under way."""

    def __init__(self, text: str, *, by_peer: bool = False) -> None:
        super().__init__(text)
        self.by_peer = by_peer


class Unreachable(UsageError):  # noqa: N818
    """Nobody listens at an address, at least for now."""


class Wire:
    """A queue and its socket; see the module."""

    def __init__(self, sock: socket.socket, queue: HostQueue) -> None:
        """Take over *sock*, which is connected and non-blocking."""
        self.sock, self.queue = sock, queue
        self.fd = sock.fileno()
        self.closed = False
        self.bytes_sent = 0
        self._tls = sock if isinstance(sock, ssl.SSLSocket) else None
        self._out: deque[memoryview] = deque()

    @property
    def blocked(self) -> bool:
        """Whether output waits until the socket takes more."""
        return bool(self._out)

    @property
    def buffered(self) -> bool:
        """Whether bytes may be received although the descriptor is not readable."""
        return self._tls is not None and self._tls.pending() > 0

    def send(self) -> None:
        """Send what the queue has to send, as far as the socket takes it."""
        out = self._out
        segments = self.queue.take_output()
        if segments:
            out.extend(map(memoryview, segments))
        while out:
            try:
                if self._tls is None:
                    batch = [out[i] for i in range(min(_SEGMENTS, len(out)))]
                    sent = self.sock.sendmsg(batch)
                else:
                    sent = self._tls.send(out[0])
            except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
                return
            except OSError as error:
                raise _gone(error) from error
            self._drop(sent)

    def receive(self, now: float, most: int = 64) -> bool:
        """Take what has arrived, in at most *most* reads; return whether anything did."""
        queue, tls = self.queue, self._tls
        for turn in range(most):
            try:
                if tls is None:
                    nbytes = self.sock.recvmsg_into(queue.buffers())[0]
                else:
                    nbytes = tls.recv_into(queue.buffers()[0])
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return turn > 0
            except OSError as error:
                raise _gone(error) from error
            if not nbytes:
                raise Gone("the target closed the connection", by_peer=True)
            queue.received(nbytes, now)
        return True

    def half_close(self) -> None:
        """Send nothing more; the target ends the connection when it has executed what it got."""
        self._out.clear()
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:  # it is over already
            self.close()

    def discard(self) -> bool:
        """Throw away what still arrives after `half_close`; return whether the end has come."""
        scratch = bytearray(1 << 16)
        while not self.closed:
            try:
                if self.sock.recv_into(scratch):
                    continue
            except (BlockingIOError, ssl.SSLWantReadError):
                return False
            except OSError:  # that is an end, too
                pass
            self.close()
        return True

    def close(self, *, reset: bool = False) -> None:
        """Close the socket; with *reset* the target also forgets what it has not read yet."""
        if self.closed:
            return
        self.closed = True
        self._out.clear()
        with contextlib.suppress(OSError):  # the peer may have closed it before
            if reset:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.sock.close()

    def _drop(self, nbytes: int) -> None:
        out = self._out
        self.bytes_sent += nbytes
        while nbytes:
            first = out.popleft()
            if len(first) > nbytes:
                out.appendleft(first[nbytes:])
                return
            nbytes -= len(first)


def _gone(error: OSError) -> Gone:
    return Gone(
        f"the connection broke: {error.strerror or error}",
        by_peer=isinstance(error, ConnectionError | ssl.SSLEOFError),
    )
