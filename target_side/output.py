"""What is on its way into a connection's socket, without a copy of page data.

Rules:
1. Segments go out in order: memory by sendmsg, many at once; ranges of files by os.sendfile, the
   bytes before them held back by MSG_MORE so that they share a packet.
2. A range that cannot be read was promised already: zeroes take its place, its `status` says why,
   and the command is answered with that.  `sent` returns the ranges that are through.
3. A buffer in the queue goes back to the pool when what stands before it is out: the kernel has a
   copy then.  `abandon` gives back those that are left.
4. `send` never blocks; False means that the socket takes no more now.
TLS has neither sendmsg nor sendfile: memory only, and one segment at a time.
"""

import errno
import os
import socket
import ssl
from collections import deque
from collections.abc import Iterable
from itertools import islice

from hyades.common.nvme.status import StatusCode
from hyades.common.nvme.target import Segment
from hyades.target_side.namespaces import FileRange, status_of
from hyades.target_side.pool import Buffer, BufferPool

_AT_ONCE = 64  # segments of a sendmsg
_NETWORK = (errno.ENOTCONN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_ZEROS = memoryview(bytes(1 << 16))


class Output:
    """See the module."""

    def __init__(self, sock: socket.socket, pool: BufferPool) -> None:
        self.attach(sock)
        self.nbytes = 0  # not sent yet
        self.moved = 0  # bytes sent since the connection began
        self._pool = pool
        self._queue: deque[Segment | Buffer] = deque()
        self._sent: list[FileRange] = []

    def attach(self, sock: socket.socket) -> None:
        """Send into *sock* from now on."""
        self.sock = sock
        self._tls = isinstance(sock, ssl.SSLSocket)

    @property
    def memory_only(self) -> bool:
        """Whether ranges of files cannot be sent."""
        return self._tls

    def push(self, segments: Iterable[Segment]) -> None:
        """Queue segments."""
        for segment in segments:
            self._queue.append(segment)
            self.nbytes += len(segment) if isinstance(segment, bytes) else segment.nbytes

    def hold(self, buffer: Buffer) -> None:
        """Give *buffer* back when all that is queued now is out."""
        self._queue.append(buffer)

    def sent(self) -> list[FileRange]:
        """Return and forget the ranges that are through."""
        done, self._sent = self._sent, []
        return done

    def send(self) -> bool:
        """Send what the socket takes; return whether everything is out."""
        queue = self._queue
        try:
            while queue:
                head = queue[0]
                if type(head) is FileRange:
                    self._send_range(head)
                elif type(head) is Buffer:
                    queue.popleft()
                    self._pool.release(head)
                elif self._tls:
                    self._advance(self._send_tls())
                else:
                    self._advance(self._send_memory())
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return False
        return True

    def abandon(self) -> None:
        """Forget everything, the connection is over."""
        for item in self._queue:
            if type(item) is Buffer:
                self._pool.release(item)
        self._queue.clear()
        self.nbytes = 0

    def _send_memory(self) -> int:
        batch: list[bytes | memoryview] = []
        flags = 0
        for item in islice(self._queue, _AT_ONCE):
            if type(item) is FileRange:
                flags = socket.MSG_MORE
                break
            if type(item) is not Buffer:
                batch.append(item)  # type: ignore[arg-type]
        return self.sock.sendmsg(batch, (), flags)

    def _send_tls(self) -> int:
        head = self._queue[0]
        if type(head) is not bytes:
            return self.sock.send(head)  # type: ignore[arg-type]
        headers = []
        for item in islice(self._queue, _AT_ONCE):
            if type(item) is not bytes:
                break
            headers.append(item)
        return self.sock.send(b"".join(headers))

    def _advance(self, nbytes: int) -> None:
        """Forget the *nbytes* that are out."""
        queue = self._queue
        self.nbytes -= nbytes
        self.moved += nbytes
        while nbytes:
            head = queue.popleft()
            if type(head) is Buffer:
                self._pool.release(head)
                continue
            assert isinstance(head, bytes | memoryview)
            if nbytes < len(head):
                queue.appendleft(memoryview(head)[nbytes:])
                return
            nbytes -= len(head)

    def _send_range(self, part: FileRange) -> None:
        try:
            count = os.sendfile(self.sock.fileno(), part.fd, part.offset, part.nbytes)
        except (BlockingIOError, ConnectionError, TimeoutError):
            raise
        except OSError as error:
            if error.errno in _NETWORK:
                raise
            self._replace(part, status_of(error, StatusCode.READ_ERROR))
            return
        if not count:  # the file was cut
            self._replace(part, StatusCode.READ_ERROR)
            return
        part.offset += count
        part.nbytes -= count
        self.nbytes -= count
        self.moved += count
        if not part.nbytes:
            self._queue.popleft()
            self._sent.append(part)

    def _replace(self, part: FileRange, status: int) -> None:
        """Let zeroes take the place of what is left of *part*."""
        self._queue.popleft()
        left, part.status = part.nbytes, status
        self._sent.append(part)
        while left:
            step = min(left, len(_ZEROS))
            self._queue.appendleft(_ZEROS[:step])
            left -= step
