"""One NVMe queue over shared memory, with the interface of nvme_wire.Wire.

Rules:
1. One thread at a time uses a wire.  Nothing here waits, but `close` and `half_close` where the
   target may be touching the arena for a command that is out: then until its end of the socket is
   closed, which is when it has let go.  A target that is alive and does not let go would write
   over what a slot holds next: `Slots.stuck` then says so, and the transport is of no more use.
2. `fd` becomes readable when the target rings or goes, once `buffered` has said no.
3. The end of the socket raises Gone, after what the target did before has been taken.
"""

import os
import select
import socket
import time
from contextlib import suppress
from typing import cast

from hyades.common.nvme.dma import pack_arena
from hyades.common.nvme.dma_host import DmaHostQueue
from hyades.common.nvme.host import HostQueue, State
from hyades.common.rdma.device import address_of
from hyades.proxy.transports.nvme_wire import Gone, Wire

_LET_GO = 30.0  # seconds that a target has to let go of the arena


class Slots:
    """The arena that targets may touch, once there is one; all wires of a transport share it."""

    def __init__(self) -> None:
        self.fd = -1
        self.stuck = ""  # why slots must not be used any more
        self.offset = self.nbytes = self.address = 0

    def share(self, fd: int, offset: int, arena: memoryview) -> None:
        """Let the *arena*, which begins at *offset* of *fd*, be named in commands."""
        self.offset, self.nbytes, self.address = offset, arena.nbytes, address_of(arena)
        self.fd = fd  # last: other threads look at it

    def locate(self, memory: memoryview) -> int | None:
        """Return where *memory* lies in the arena, None where it does not."""
        at = address_of(memory) - self.address
        return at if self.fd >= 0 and at >= 0 and at + memory.nbytes <= self.nbytes else None


class DmaWire(Wire):
    """See the module."""

    def __init__(
        self, sock: socket.socket, queue: DmaHostQueue, bells: tuple[int, int], slots: Slots | None
    ) -> None:
        """Take over a socket, and the eventfds of the target and of this side."""
        self.sock = sock
        self.queue = cast(HostQueue, queue)  # as far as anybody uses it here, it is one
        self.closed = False
        self.bytes_sent = 0  # as the queue counts them
        self._dma, self._theirs, self._own = queue, *bells
        self._slots, self._announced = slots, False
        self._asleep = False
        self._epoll = select.epoll()
        self._epoll.register(self._own, select.EPOLLIN)
        self._epoll.register(sock.fileno(), select.EPOLLIN)
        self.fd = self._epoll.fileno()

    @property
    def blocked(self) -> bool:
        """Say no: what waits for buffers is woken when the target has emptied some."""
        return False

    @property
    def buffered(self) -> bool:
        """Whether something is there already; if not, `fd` will tell."""
        if self.closed or self._dma.state is not State.READY:
            return False
        self._asleep = self._dma.sleep()
        return not self._asleep

    def send(self) -> None:
        """Publish what the queue has, as far as there are buffers."""
        if self.closed:
            raise Gone("the connection is closed")
        if self._slots is not None and not self._announced and self._slots.fd >= 0:
            self._announce(self._slots)
        if self._dma.publish():
            self._ring()
        self.bytes_sent = self._dma.bytes_out

    def receive(self, now: float, most: int = 64) -> bool:
        """Take what is there; return whether anything was."""
        del most
        if self.closed:
            raise Gone("the connection is closed")
        if self._asleep:
            self._asleep = False
            self._dma.awake()
            with suppress(BlockingIOError):
                os.eventfd_read(self._own)
        if self._dma.advance(now):
            self._dma.publish()
            self._ring()
            return True
        if self._ended():
            self._dma.advance(now)
            raise Gone("the target closed the connection", by_peer=True)
        return False

    def half_close(self) -> None:
        """Send nothing more; the target ends the connection when it has executed what it got."""
        if self.closed:
            return
        with suppress(OSError):  # it is over already
            self.sock.shutdown(socket.SHUT_WR)
        self._let_go()

    def discard(self) -> bool:
        """Return whether the end has come, after `half_close`."""
        if not self.closed and self._ended():
            self.close()
        return self.closed

    def close(self, *, reset: bool = False) -> None:
        """End the connection; nothing touches the arena for it when this returns."""
        del reset
        if self.closed:
            return
        self.half_close()
        self.closed = True
        self._epoll.close()
        self.sock.close()
        os.close(self._own)
        os.close(self._theirs)

    def _announce(self, slots: Slots) -> None:
        try:
            socket.send_fds(self.sock, [pack_arena(slots.offset, slots.nbytes)], [slots.fd])
        except OSError as error:
            raise Gone(f"the connection broke: {error.strerror}", by_peer=True) from error
        self._announced = True

    def _ring(self) -> None:
        if self._dma.must_wake():
            with suppress(BlockingIOError):  # it was rung 2**64 times: awake enough
                os.eventfd_write(self._theirs, 1)

    def _ended(self) -> bool:
        """Return whether the target has closed the socket; it sends nothing by it."""
        try:
            self.sock.recv(1, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass
        return True

    def _let_go(self) -> None:
        if self._slots is None or not self._dma.direct:
            return
        poll = select.poll()
        poll.register(self.sock.fileno(), select.POLLIN)
        deadline = time.monotonic() + _LET_GO
        while not self._ended():
            left = deadline - time.monotonic()
            if left <= 0:
                self._slots.stuck = (
                    f"the target does not let go of the slots within {_LET_GO:g} s: end its process"
                    " and begin again, or leave out zerocopy=1"
                )
                return
            poll.poll(left * 1000 + 1)
