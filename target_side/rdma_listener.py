"""Where NVMe/RDMA hosts connect: one address, its connections, and a thread that hears of both.

Rules:
1. A request is refused with the status of its private data (hyades.common.nvme.rdma), or becomes an
   RdmaConnection with a thread of its own.
2. Events of all connections arrive here.  A host that left, or is gone, has its connection cut.
3. An identifier is freed by this thread only, when its connection is over: so no event of it can be
   on its way to someone who is gone.
"""

import contextlib
import select
import threading
from collections.abc import Callable
from dataclasses import replace

from hyades.common.errors import BackendMissing, HyadesError, UsageError
from hyades.common.nvme.layout import SQE_BYTES
from hyades.common.nvme.rdma import (
    CmRequest,
    Reject,
    Rejected,
    pack_accept,
    pack_reject,
    parse_request,
)
from hyades.common.rdma.cm import Channel, Event, Identifier, Kind, socket_address
from hyades.common.rdma.device import Device, Devices
from hyades.common.rdma.endpoint import Endpoint
from hyades.common.rdma.library import probe
from hyades.target_side.events import BY_HOST
from hyades.target_side.rdma_connection import RdmaConnection
from hyades.target_side.rdma_output import RegisteredPool
from hyades.target_side.service import Service
from hyades.target_side.waker import Waker

MAX_TRANSFER = 8 << 20  # the largest power of two that a keyed descriptor can name
_GONE = {
    Kind.DISCONNECTED: BY_HOST, Kind.DEVICE_REMOVAL: "the RDMA device was removed",
    Kind.CONNECT_ERROR: "the connection failed", Kind.UNREACHABLE: "the host is unreachable",
    Kind.REJECTED: "the host rejected the connection",
    Kind.ADDRESS_CHANGE: "the address of the RDMA device changed",
}  # fmt: skip


class RdmaListener:
    """See the module."""

    def __init__(
        self, address: tuple[str, int], service: Service,
        begin: Callable[[RdmaConnection], str], refuse: Callable[[str, str], None],
    ) -> None:  # fmt: skip
        """Listen at *address*; *begin* starts a connection's thread or says why not."""
        self.address = address
        self._service, self._begin, self._refuse = service, begin, refuse
        self._devices = Devices()
        self._services: dict[str, Service] = {}  # by device
        self._connections: dict[int, RdmaConnection] = {}  # by identifier
        self._stopping = False
        self._channel, self._identifier = self._listen()
        self._waker = Waker()
        self.address = (self.address[0], self._identifier.local[1])
        self.thread = threading.Thread(target=self._run, name="hyades-rdma-cm", daemon=True)

    def stop(self) -> None:
        """Take no more connections; `close` comes when the last one is over."""
        self._stopping = True
        self._waker.wake()

    def close(self) -> None:
        """Free everything; every connection is over."""
        self._stopping = True
        self._waker.wake()
        if self.thread.ident is not None:
            self.thread.join(5)
        self._sweep()
        self._identifier.close()
        self._channel.close()
        self._devices.close()
        self._waker.close()

    # -- the thread

    def _listen(self) -> tuple[Channel, Identifier]:
        host, port = self.address
        problem = probe()
        if problem is not None:
            raise BackendMissing(f"cannot listen on rdma:{host}:{port}: {problem}")
        channel = identifier = None
        try:
            channel = Channel()
            identifier = Identifier(channel)
            identifier.bind(socket_address(host or "0.0.0.0", port))
            identifier.listen()
        except OSError as error:
            for part in (identifier, channel):
                if part is not None:
                    part.close()
            raise UsageError(
                f"cannot listen on rdma:{host}:{port}: {error.strerror}; the address must be that"
                " of a network device with an RDMA device (rdma link)"
            ) from error
        return channel, identifier

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._channel.fd, select.POLLIN)
        poll.register(self._waker.fd, select.POLLIN)
        while True:
            while (event := self._channel.take()) is not None:
                self._handle(event)
            self._sweep()
            if self._stopping and not self._connections:
                return
            for fd, _ in poll.poll(1000):
                if fd == self._waker.fd:
                    self._waker.clear()

    def _handle(self, event: Event) -> None:
        if event.kind == Kind.CONNECT_REQUEST:
            self._request(event)
            return
        connection = self._connections.get(event.key)
        if connection is not None and event.kind in _GONE:
            connection.cut(_GONE[Kind(event.kind)])

    def _request(self, event: Event) -> None:
        identifier = Identifier(self._channel, key=event.key)
        host, port = identifier.peer
        peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            want = parse_request(event.private, depth=self._service.limits.depth)
            if self._stopping:
                raise Rejected("the target stops", Reject.NO_RESOURCES)
            connection = self._connect(identifier, want, event, peer)
        except (HyadesError, OSError) as error:
            status = error.status if isinstance(error, Rejected) else Reject.NO_RESOURCES
            with contextlib.suppress(OSError):  # the host has given up meanwhile
                identifier.reject(pack_reject(status))
            identifier.close()
            self._refuse(peer, str(error))
            return
        self._connections[identifier.key] = connection
        reason = self._begin(connection)
        if reason:
            connection.discard()
            self._refuse(peer, reason)

    def _connect(
        self, identifier: Identifier, want: CmRequest, event: Event, peer: str
    ) -> RdmaConnection:
        device = self._devices.open(identifier.device)
        have = min(event.initiator_depth, device.reads)
        if not have:
            text = "the host serves no RDMA READ, and writes are fetched by it"
            raise Rejected(text, Reject.INVALID_RESPONDER_RESOURCES)
        serve = min(event.responder_resources, device.reads)
        sends = min(2 * want.sends + 8, device.max_work)
        if want.sends > device.max_work:
            raise Rejected(f"queue of {want.sends} entries", Reject.INVALID_SEND_SIZE)
        service = self._service_of(device)
        endpoint = Endpoint(
            device, sends=sends, receives=want.sends,
            receive_bytes=SQE_BYTES + service.limits.in_capsule,
        )  # fmt: skip
        try:
            endpoint.connect(identifier, serve=serve, have=have)
            connection = RdmaConnection(identifier, endpoint, peer, want.sends, service)
            identifier.accept(endpoint.number, pack_accept(want.sends), serve=serve, have=have)
        except BaseException:
            endpoint.close()
            raise
        return connection

    def _service_of(self, device: Device) -> Service:
        """Return the service with a pool whose buffers *device* knows; namespaces in memory too."""
        found = self._services.get(device.name)
        if found is None:
            pool = RegisteredPool(self._service.limits.buffers, device)
            found = self._services[device.name] = replace(self._service, pool=pool)
            for memory in self._service.target.memories():
                device.register(memory, remote=False)
        return found

    def _sweep(self) -> None:
        """Free the identifiers of connections that are over."""
        for key, connection in tuple(self._connections.items()):
            if connection.ended:
                del self._connections[key]
                connection.identifier.close()
