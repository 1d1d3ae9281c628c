"""The edge of one queue over shared memory: a thread, a socket, two eventfds, a DmaTargetQueue.

Rules:
1. The host is asked for its memory first: Hello ->, <- Welcome, Memory ->, <- Ready.  Its files are
   mapped only where they are sealed against shrinking: a page that is gone would end this process.
2. A turn is: start commands and begin their copies, take what the engine has done, take commands
   and chunks; wake the host where something was published and it may sleep; then wait.  While
   copies are under way nobody tells of their end: the engine is looked at.
3. The end of the socket is the end of the host.  The socket is closed last, when no engine touches
   the host's memory any more: so its end tells the host that.
4. A host that has not connected after `Limits.handshake` is cut, and one that takes no chunks, or
   sends none that are due, for `Limits.stall` seconds.
5. Draining and threads: as in connection.py.
Must stay in sync: nvme_dma_session.py and nvme_dma_wire.py are the other end.
"""

import fcntl
import mmap
import os
import select
import socket
import struct
import time
from contextlib import suppress

from hyades.common.dma.engine import Device, Engine
from hyades.common.errors import DeviceLost, HyadesError, PeerError
from hyades.common.nvme import dma
from hyades.common.nvme.dma import Kind
from hyades.common.nvme.dma_memory import QueueMemory
from hyades.common.nvme.dma_target import DmaTargetQueue
from hyades.common.nvme.pdu import Violation
from hyades.common.rdma.device import address_of
from hyades.target_side.dma_output import DmaOutput
from hyades.target_side.edge import Edge
from hyades.target_side.events import AT_STOP, BY_HOST
from hyades.target_side.executor import Executor
from hyades.target_side.service import Service

_SEALS = fcntl.F_SEAL_SHRINK
_CREDENTIALS = struct.Struct("3i")
_COPIES = 256  # of one engine at a time
_LOOK = 50e-6  # seconds between two looks at an engine


class DmaConnection(Edge[DmaTargetQueue, DmaOutput]):
    """See the module."""

    def __init__(
        self, sock: socket.socket, path: str, service: Service, device: Device, buffer_bytes: int
    ) -> None:
        """Serve the host behind *sock*; *service* has a pool whose buffers *device* knows."""
        super().__init__(_peer(sock), path, service, tls=False)
        sock.setblocking(False)
        self.sock, self._device, self._most = sock, device, buffer_bytes
        self._bells = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)]
        self._engine: Engine | None = None
        self._mapped: list[int] = []  # addresses that the device knows
        self._direct = False
        self._window = (self.born, 0)
        self._poll.register(sock.fileno(), select.POLLIN)

    def run(self) -> None:
        """Serve until the connection is over."""
        reason = "the thread has failed"
        try:
            self._shake_hands()
            reason = self._take_turns()
        except Violation as violation:
            self.service.totals.violations += 1
            reason = str(violation)
        except HyadesError as error:
            reason = str(error)
        except OSError as error:
            reason = error.strerror or str(error)
        finally:
            self._end(reason)

    def speaks_for(self, hostnqn: str, subnqn: str) -> bool:
        """Return True: whoever may open the socket may use any name."""
        del hostnqn, subnqn
        return True

    def discard(self) -> None:
        """Let go of everything; the socket last."""
        self._forget_memory()
        self.sock.close()
        for bell in self._bells:
            os.close(bell)
        self._bells.clear()
        self._waker.close()
        self.service.totals.close(self.counters)

    # -- before the first command

    def _shake_hands(self) -> None:
        data, _ = self._await_message()
        try:
            hello = dma.parse_hello(data)
            shape = hello.shape
            if shape.entries > self.service.limits.depth:
                raise PeerError(
                    f"rings of {shape.entries} entries, at most {self.service.limits.depth}"
                )
            chunk_bytes = min(shape.buffer_bytes, self._most, self._device.max_copy)
        except PeerError as error:
            self.sock.send(dma.pack_refusal(str(error)))
            raise
        socket.send_fds(self.sock, [dma.pack_welcome(chunk_bytes)], self._bells)
        data, fds = self._await_message()
        try:
            dma.check_plain(data, Kind.MEMORY)
            memory = self._map(fds, 0, shape.nbytes)
        finally:
            _close(fds)
        self._direct = hello.direct
        self.queue = DmaTargetQueue(QueueMemory(memory, shape), chunk_bytes, depth=32)
        self._engine = self._device.engine(_COPIES)
        self.output = DmaOutput(self.queue, self.service.pool, self._device, self._engine)
        self.executor = Executor(self)
        self._poll.register(self._bells[0], select.POLLIN)
        self.sock.send(dma.pack_plain(Kind.READY))

    def _await_message(self) -> tuple[bytes, list[int]]:
        while True:
            try:
                return self._message()
            except BlockingIOError:
                self._sleep()
            if self._cut or self.draining:
                raise PeerError(self._cut or AT_STOP)

    def _message(self) -> tuple[bytes, list[int]]:
        data, fds, _, _ = socket.recv_fds(self.sock, dma.MESSAGE, 4)
        if not data:
            raise PeerError(BY_HOST)
        return data, list(fds)

    def _map(self, fds: list[int], offset: int, nbytes: int) -> memoryview:
        """Map part of the memory file that came with a message; PeerError."""
        if len(fds) != 1:
            raise PeerError(f"{len(fds)} files with a message that has one")
        try:
            seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise PeerError("the host's memory file is not sealed against shrinking")
        if offset + nbytes > os.fstat(fds[0]).st_size:
            raise PeerError(f"a memory file without bytes {offset} to {offset + nbytes}")
        memory = memoryview(mmap.mmap(fds[0], nbytes, mmap.MAP_SHARED, offset=offset))
        address = address_of(memory)
        self._device.register(address, nbytes)
        self._mapped.append(address)
        return memory

    # -- the loop

    def _receive(self) -> bool:
        """Take what is there; return whether there was something."""
        now = time.monotonic()
        found = self.queue.advance(now, self._hear_arena)
        found = self.output.receive() or found
        if found:
            self.last_heard = now
        if self.queue.commands or self.queue.arrived:  # the output may have ended some by itself
            self.executor.take(now)
            found = True
        self._ring()
        return found

    def _wait(self, blocked: bool) -> None:
        """Sleep until something happens; look at the deadlines."""
        self._ring()
        if self.output.copying:
            time.sleep(_LOOK)
            return
        if self.queue.sleep(blocked=blocked):
            now = self._sleep()
            self.queue.awake()
            with suppress(BlockingIOError):
                os.eventfd_read(self._bells[0])
            self._hear()
            self._check_stall(now, owing=blocked or self.executor.awaits_data)

    def _ring(self) -> None:
        """Wake the host, where it sleeps and something is there for it."""
        if self.queue.must_wake():
            with suppress(BlockingIOError):  # it was rung 2**64 times: awake enough
                os.eventfd_write(self._bells[1], 1)

    def _hear_arena(self) -> None:
        if self._direct and not self.queue.arena_bytes:
            self._hear()

    def _hear(self) -> None:
        """Take what came by the socket: an arena, or the end."""
        try:
            data, fds = self._message()
        except BlockingIOError:
            return
        try:
            offset, nbytes = dma.parse_arena(data)
            if not self._direct or self.queue.arena_bytes:
                raise PeerError("an arena that was not announced, or a second one")
            self.output.arena = self._map(fds, offset, nbytes)
            self.queue.arena_bytes = nbytes
        finally:
            _close(fds)

    def _check_stall(self, now: float, *, owing: bool) -> None:
        begin, before = self._window
        moved, limit = self.output.moved, self.service.limits.stall
        if not owing or moved != before:
            self._window = (now, moved)
        elif now - begin > limit:
            self.service.totals.stalled += 1
            raise PeerError(f"stalled: nothing moved in {limit:g} s with data due")

    # -- the end

    def _end(self, reason: str) -> None:
        was = self._leave()
        if self._engine is not None:
            try:
                self._engine.close()  # nothing touches the host's memory from here on
            except DeviceLost as error:  # the host must not take it for free: all of it stays
                self._report(was, str(error))
                return
            self._ring()
            self._forget_memory()
            self.queue.close()
            self.executor.abandon()
            self.output.abandon()
        self.discard()
        self._report(was, reason)

    def _forget_memory(self) -> None:
        """Let the device forget the host's memory, while it is mapped.

        Later, another connection's memory might have its address, and be forgotten instead.
        """
        for address in self._mapped:
            self._device.forget(address)
        self._mapped.clear()


def _peer(sock: socket.socket) -> str:
    """Return who is behind *sock*; PeerError unless it is this user or root."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid not in (0, os.geteuid()):
        raise PeerError(f"process {pid} of user {uid}: only user {os.geteuid()} and root may")
    return f"pid:{pid}"


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
