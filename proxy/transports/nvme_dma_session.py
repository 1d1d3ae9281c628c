"""An association over shared memory: nvme_session.Session, whose connections are sockets of this
machine.

Connecting: Hello -> Welcome with the eventfds -> memory file -> Ready (hyades.common.nvme.dma);
each step waits with the deadline of the session.  The target must be of this user, or root: it is
handed memory.
"""

import errno
import fcntl
import mmap
import os
import select
import socket
import struct
from collections.abc import Callable

from hyades.common.errors import PeerError, UsageError
from hyades.common.nvme import dma
from hyades.common.nvme.dma import Hello, Kind, Shape
from hyades.common.nvme.dma_host import DmaHostQueue
from hyades.common.nvme.dma_memory import QueueMemory
from hyades.common.units import KIB
from hyades.proxy.transports.nvme_dma_url import DmaOptions
from hyades.proxy.transports.nvme_dma_wire import DmaWire, Slots
from hyades.proxy.transports.nvme_session import Session
from hyades.proxy.transports.nvme_talk import Waker
from hyades.proxy.transports.nvme_url import Address, Options
from hyades.proxy.transports.nvme_wire import Gone, Unreachable, Wire

_ADMIN_BUFFER, _ADMIN_BUFFERS = 64 * KIB, 2
_CREDENTIALS = struct.Struct("3i")


class DmaSession(Session):
    """See the module."""

    def __init__(
        self, slots: Slots | None, options: Options, address: Address, waker: Waker,
        stopping: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Share *slots* with the target, if any."""
        super().__init__(options, address, waker, stopping)
        assert isinstance(options, DmaOptions)
        self._dma, self._slots = options, slots

    def _connect(self, depth: int) -> Wire:
        """Return a wire whose queue is ready for Connect."""
        sock = self._dial()
        fds: list[int] = []
        try:
            return self._join(sock, depth, fds)
        except OSError as error:
            _free(sock, fds)
            raise Gone(f"the connection broke: {error.strerror}", by_peer=True) from error
        except BaseException:
            _free(sock, fds)
            raise

    def _join(self, sock: socket.socket, depth: int, fds: list[int]) -> Wire:
        options, admin = self._dma, self._admin is None
        shape = Shape(
            depth + 1,
            _ADMIN_BUFFERS if admin else options.buffers,
            min(options.buffer, _ADMIN_BUFFER) if admin else options.buffer,
        )
        slots = None if admin else self._slots
        sock.send(Hello(shape, slots is not None).pack())
        chunk_bytes = dma.parse_welcome(self._await(sock, fds), shape)
        if len(fds) != 2:
            raise PeerError(f"{self.address}: {len(fds)} eventfds with the welcome, not 2")
        memory, file = _make_memory(shape.nbytes)
        try:
            socket.send_fds(sock, [dma.pack_plain(Kind.MEMORY)], [file])
        finally:
            os.close(file)
        dma.check_plain(self._await(sock, fds), Kind.READY)
        queue = DmaHostQueue(
            depth, QueueMemory(memory, shape), chunk_bytes,
            slots.locate if slots is not None else lambda _: None,
        )  # fmt: skip
        return DmaWire(sock, queue, (fds[0], fds[1]), slots)

    def _dial(self) -> socket.socket:
        path = self.address.host
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            sock.connect(path)
            raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(raw)
            if uid not in (0, os.geteuid()):
                raise UsageError(
                    f"{path}: the target there is of user {uid}, not of {os.geteuid()} or root: it"
                    " would be handed memory"
                )
        except OSError as error:
            sock.close()
            raise self._failed(path, error) from error
        except BaseException:
            sock.close()
            raise
        return sock

    def _failed(self, path: str, error: OSError) -> UsageError:
        if error.errno in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
            return Unreachable(
                f"{path}: no target listens there ({error.strerror}): start one: hyades serve"
                f" --listen dma:{path}"
            )
        return UsageError(f"{path}: cannot connect: {error.strerror}")

    def _await(self, sock: socket.socket, fds: list[int]) -> bytes:
        """Return the next message; the files that come with it go into *fds*."""
        self._wait(sock.fileno(), select.POLLIN)
        data, got, _, _ = socket.recv_fds(sock, dma.MESSAGE, 4)
        fds.extend(got)
        if not data:
            raise Gone("the target closed the connection", by_peer=True)
        return data


def _make_memory(nbytes: int) -> tuple[memoryview, int]:
    """Return new memory and its file, whose length is sealed."""
    file = os.memfd_create("hyades-queue", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return memoryview(mmap.mmap(file, nbytes, mmap.MAP_SHARED)), file
    except BaseException:
        os.close(file)
        raise


def _free(sock: socket.socket, fds: list[int]) -> None:
    sock.close()
    for fd in fds:
        os.close(fd)
