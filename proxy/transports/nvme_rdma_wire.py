"""One NVMe/RDMA queue on one queue pair, with the interface of nvme_wire.Wire.

Rules:
1. One thread at a time uses a wire.  Nothing here waits: `send` posts what the send queue has room
   for, `receive` takes the completions that are there.
2. `fd` becomes readable for completions, once `buffered` has asked for that, and for events of the
   connection.
3. Every end raises Gone, and never says that the target has executed what it got: that a connection
   ended does not tell that of RDMA targets.  So writes wait as nvme_engine.py's rule 3 says.
4. Once `close` has returned, no device touches memory for this queue.
"""

import mmap
import select
from collections import deque
from typing import cast

from hyades.common.nvme.host import HostQueue
from hyades.common.nvme.layout import SQE_BYTES
from hyades.common.nvme.rdma_host import Capsule, RdmaHostQueue
from hyades.common.rdma.cm import Channel, Identifier, Kind
from hyades.common.rdma.endpoint import Broken, Endpoint, Send, Verb
from hyades.proxy.transports.nvme_wire import Gone, Wire

CAPSULE_ROOM = 4096  # bytes of data that a capsule carries at most: a block
_SLOT = SQE_BYTES + CAPSULE_ROOM
_ENDS = {
    Kind.DISCONNECTED: "the target closed the connection",
    Kind.DEVICE_REMOVAL: "the RDMA device was removed",
    Kind.ADDRESS_CHANGE: "the address of the RDMA device changed",
}


class RdmaWire(Wire):
    """See the module."""

    def __init__(
        self, channel: Channel, identifier: Identifier, endpoint: Endpoint, queue: RdmaHostQueue
    ) -> None:
        """Take over a connection that is established."""
        self.endpoint = endpoint
        self.queue = cast(HostQueue, queue)  # as far as anybody uses it here, it is one
        self.closed = False
        self._channel, self._identifier, self._rdma = channel, identifier, queue
        self._epoll = select.epoll()
        self._epoll.register(endpoint.fd, select.EPOLLIN)
        self._epoll.register(channel.fd, select.EPOLLIN)
        self.fd = self._epoll.fileno()
        self.bytes_sent = 0  # as the queue counts them
        self._waiting: deque[Capsule] = deque()
        slots = endpoint.ring.capacity
        self._capsules = memoryview(mmap.mmap(-1, slots * _SLOT))
        self._region = endpoint.device.register(self._capsules, remote=False)
        self._next, self._slots = 0, slots

    @property
    def blocked(self) -> bool:
        """Say no: what waits for room is woken by completions."""
        return False

    @property
    def buffered(self) -> bool:
        """Whether completions are there already; if not, `fd` will tell."""
        return not self.closed and self.endpoint.arm()

    def send(self) -> None:
        """Post what the queue has to send, as far as there is room."""
        if self.closed:
            raise Gone("the connection is closed")
        waiting, ring = self._waiting, self.endpoint.ring
        waiting.extend(self._rdma.take_output())
        self.bytes_sent = self._rdma.bytes_out
        if not waiting or not ring.room:
            return
        batch = [self._prepare(waiting.popleft()) for _ in range(min(ring.room, len(waiting)))]
        try:
            self.endpoint.post(batch)
        except Broken as error:
            raise Gone(str(error)) from error

    def receive(self, now: float, most: int = 64) -> bool:
        """Take what has arrived; return whether anything did."""
        del most
        if self.closed:
            raise Gone("the connection is closed")

        def take(slot: int, nbytes: int) -> None:
            self._rdma.received(bytes(self.endpoint.message(slot, nbytes)), now)
            self.endpoint.post_receive(slot)

        try:
            found = self.endpoint.take(take, lambda _: None)
        except Broken as error:
            self._hear()
            raise Gone(f"the connection broke: {error}") from error
        if self._epoll.poll(0):
            self._hear()
        return found

    def half_close(self) -> None:
        """Close it: there are no halves."""
        self.close()

    def discard(self) -> bool:
        """Say that there is nothing any more."""
        return self.closed

    def close(self, *, reset: bool = False) -> None:
        """End the connection and free everything."""
        del reset
        if self.closed:
            return
        self.closed = True
        self._waiting.clear()
        self._epoll.close()
        self._identifier.disconnect()
        self.endpoint.close()
        self.endpoint.device.forget(self._region)
        self._identifier.close()
        self._channel.close()

    def _hear(self) -> None:
        """Take the events of the connection; Gone where it is over."""
        while (event := self._channel.take()) is not None:
            if event.kind in _ENDS:
                raise Gone(_ENDS[Kind(event.kind)])

    def _prepare(self, capsule: Capsule) -> Send:
        # There are as many slots as sends that may be out, so this one is free.
        at = self._next % self._slots * _SLOT
        self._next += 1
        nbytes = SQE_BYTES + len(capsule.data)
        self._capsules[at : at + SQE_BYTES] = capsule.sqe
        self._capsules[at + SQE_BYTES : at + nbytes] = capsule.data
        return Send(Verb.SEND, self._region.base + at, nbytes, self._region.lkey)
