"""Where hosts of this machine connect over shared memory: the path of a socket, and its engine.

Rules:
1. The socket has permissions 0600 from its first moment, and a host must be of this user, or root.
2. A socket that a killed target has left is replaced; one that another target listens on is not.
3. A connection becomes a DmaConnection with a thread of its own, which asks it for its memory.
4. All connections share one device, and a pool whose buffers it knows.
"""

import errno
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hyades.common.dma.engine import open_device
from hyades.common.errors import HyadesError, UsageError
from hyades.common.nvme.dma import Shape
from hyades.common.nvme.dma_memory import QueueMemory
from hyades.common.rdma.device import address_of
from hyades.target_side.dma_connection import DmaConnection
from hyades.target_side.dma_output import DmaPool
from hyades.target_side.service import Service

_BACKLOG = 128
_LONGEST = 107  # bytes of a path in a socket address


class DmaListener:
    """See the module."""

    def __init__(
        self, path: str, service: Service, begin: Callable[[DmaConnection], str],
        refuse: Callable[[str, str], None], *, engine: str, buffer_bytes: int,
    ) -> None:  # fmt: skip
        """Listen at *path*; *begin* starts a connection's thread or says why not.

        *engine* copies (hyades.common.dma.engine), at most *buffer_bytes* of a buffer at a time.
        """
        self.path = path
        self._begin, self._refuse, self._buffer_bytes = begin, refuse, buffer_bytes
        self._device = open_device(engine)
        self._stopping = False
        try:
            self._service = replace(service, pool=self._pool(service))
            self._socket = _listen(path)
        except BaseException:
            self._device.close()
            raise
        self._made = Path(path).stat().st_ino
        _warm()
        self.thread = threading.Thread(target=self._run, name="hyades-dma", daemon=True)

    def stop(self) -> None:
        """Take no more connections; `close` comes when the last one is over."""
        self._stopping = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        with suppress(OSError):  # somebody has removed it
            if Path(self.path).stat().st_ino == self._made:
                Path(self.path).unlink()

    def close(self) -> None:
        """Free everything; every connection is over."""
        self.stop()
        if self.thread.ident is not None:
            self.thread.join(5)
        self._socket.close()
        self._device.close()

    def _pool(self, service: Service) -> DmaPool:
        """Return a pool whose buffers the device knows; namespaces in memory it then knows too."""
        for memory in service.target.memories():
            self._device.register(address_of(memory), memory.nbytes)
        return DmaPool(service.limits.buffers, self._device)

    def _run(self) -> None:
        while not self._stopping:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                if not self._stopping:
                    time.sleep(0.05)  # out of descriptors: others will be closed
                continue
            try:
                connection = DmaConnection(
                    sock, self.path, self._service, self._device, self._buffer_bytes
                )
            except (HyadesError, OSError) as error:
                sock.close()
                self._refuse(f"dma:{self.path}", str(error))
                continue
            reason = self._begin(connection)
            if reason:
                connection.discard()
                self._refuse(connection.peer, reason)


def _listen(path: str) -> socket.socket:
    if len(os.fsencode(path)) > _LONGEST:
        raise UsageError(
            f"cannot listen on dma:{path}: a socket's path has at most {_LONGEST} bytes"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        os.fchmod(sock.fileno(), 0o600)  # what `bind` makes has these permissions
        try:
            sock.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_left_over(path):
                raise
            Path(path).unlink()
            sock.bind(path)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        busy = " (another target listens there)" if error.errno == errno.EADDRINUSE else ""
        raise UsageError(
            f"cannot listen on dma:{path}: {error.strerror}{busy}; choose another path in a folder"
            " that you may write to"
        ) from error
    return sock


def _is_left_over(path: str) -> bool:
    """Return whether *path* is a socket that nobody listens on."""
    if not stat.S_ISSOCK(Path(path).lstat().st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _warm() -> None:
    """Compile what touches shared words, before a host waits for it."""
    shape = Shape(2, 1, 4096)
    memory = QueueMemory(memoryview(bytearray(shape.nbytes)), shape)
    memory.sleep(0)
    memory.sleeps(0)
