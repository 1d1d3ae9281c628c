"""An association over RDMA: nvme_session.Session, whose connections are made by rdma_cm.

Connecting: address -> route -> request with the private data of NVMe/RDMA -> response -> queue pair
ready -> established; each step waits with the deadline of the session.
"""

import mmap
import select
import time
from collections.abc import Callable

from hyades.common.errors import PeerError, UsageError
from hyades.common.nvme import bringup
from hyades.common.nvme.layout import ANY_CONTROLLER
from hyades.common.nvme.rdma import RESPONSE_BYTES, CmRequest, parse_accept, parse_reject
from hyades.common.nvme.rdma_host import RdmaHostQueue
from hyades.common.rdma.cm import Channel, Event, Identifier, Kind, socket_address
from hyades.common.rdma.device import Device, Devices, address_of
from hyades.common.rdma.endpoint import Endpoint
from hyades.proxy.transports.nvme_rdma_wire import CAPSULE_ROOM, RdmaWire
from hyades.proxy.transports.nvme_session import Session
from hyades.proxy.transports.nvme_talk import Waker
from hyades.proxy.transports.nvme_url import Address, Options
from hyades.proxy.transports.nvme_wire import Wire

_BY_PEER = 28  # status of a rejection by whoever listens; others come from below
_NOBODY = 8  # nobody listens
_FAILED = (
    Kind.ADDRESS_ERROR, Kind.ROUTE_ERROR, Kind.CONNECT_ERROR, Kind.UNREACHABLE, Kind.DISCONNECTED,
    Kind.DEVICE_REMOVAL,
)  # fmt: skip


class RdmaSession(Session):
    """See the module."""

    def __init__(
        self, devices: Devices, options: Options, address: Address, waker: Waker,
        stopping: Callable[[], bool],
    ) -> None:  # fmt: skip
        super().__init__(options, address, waker, stopping)
        self._devices = devices

    def _connect(self, depth: int) -> Wire:
        """Return a wire whose queue is ready for Connect."""
        channel = Channel()
        try:
            identifier = Identifier(channel)
            try:
                return self._join(channel, identifier, depth)
            except BaseException:
                identifier.close()
                raise
        except OSError as error:
            channel.close()
            raise UsageError(
                f"{self.address}: no RDMA device leads there ({error.strerror}): rdma link lists"
                " those of this machine"
            ) from error
        except BaseException:
            channel.close()
            raise

    def _join(self, channel: Channel, identifier: Identifier, depth: int) -> Wire:
        left = self._deadline - time.monotonic()
        where = socket_address(self.address.host, self.address.port)
        identifier.resolve_address(where, max(left, 0.001))
        self._await(channel, Kind.ADDRESS_RESOLVED)
        identifier.resolve_route(max(left, 0.001))
        self._await(channel, Kind.ROUTE_RESOLVED)
        device = self._devices.open(identifier.device)
        endpoint = Endpoint(
            device, sends=min(2 * depth + 8, device.max_work), receives=depth + 1,
            receive_bytes=RESPONSE_BYTES,
        )  # fmt: skip
        try:
            qid = 0 if self._admin is None else len(self.wires) + 1
            cntlid = self.controller.cntlid if qid else 0
            assert cntlid != ANY_CONTROLLER
            want = CmRequest(qid, depth + 1, depth + 1, cntlid)
            identifier.connect(endpoint.number, want.pack(), device.reads)
            response = self._await(channel, Kind.CONNECT_RESPONSE)
            receives = parse_accept(response.private)
            have = min(response.initiator_depth or device.reads, device.reads)
            endpoint.connect(identifier, serve=device.reads, have=have)
            identifier.establish()
            queue = RdmaHostQueue(depth, lambda m: _describe(device, m), room=CAPSULE_ROOM)
            queue.accepted(receives, time.monotonic())
            return RdmaWire(channel, identifier, endpoint, queue)
        except BaseException:
            endpoint.close()
            raise

    def _await(self, channel: Channel, wanted: Kind) -> Event:
        """Return the event that is *wanted*."""
        while True:
            event = channel.take()
            if event is None:
                self._wait(channel.fd, select.POLLIN)
            elif event.kind == wanted:
                return event
            elif event.kind == Kind.REJECTED:
                raise self._rejected(event)
            elif event.kind in _FAILED:
                name = Kind(event.kind).name.lower().replace("_", " ")
                raise PeerError(f"{self.address}: RDMA connection: {name} ({event.status})")

    def _rejected(self, event: Event) -> Exception:
        if event.status == _BY_PEER:
            return parse_reject(event.private)
        if event.status == _NOBODY:
            return UsageError(
                f"{self.address}: no NVMe/RDMA target listens there: start one: hyades serve"
                f" --listen rdma:{self.address}"
            )
        return PeerError(f"{self.address}: the connection was rejected (status {event.status})")

    def _execute(self, wire: Wire, call: bringup.Call, *, heed: bool) -> bringup.Answer:
        """Run one command whose data goes through memory that is registered for it."""
        reads, writes = call.reads, len(call.source)
        if not reads and not writes:
            return super()._execute(wire, call, heed=heed)
        assert isinstance(wire, RdmaWire)
        memory = memoryview(mmap.mmap(-1, max(reads, writes)))
        device = wire.endpoint.device
        region = device.register(memory, remote=True)
        try:
            memory[:writes] = call.source
            cid = wire.queue.submit(
                call.sqe, into=memory[:reads] if reads else None,
                source=memory[:writes] if writes else None, now=time.monotonic(),
            )  # fmt: skip
            code, result = self._answer(wire, cid, slow=call.slow, heed=heed)
            return code, result, bytes(memory[:reads])
        finally:
            device.forget(region)


def _describe(device: Device, memory: memoryview) -> tuple[int, int]:
    address = address_of(memory)
    region = device.find(address, memory.nbytes)
    if region is None:
        raise UsageError(f"{memory.nbytes} bytes at {address:#x} are not registered for RDMA")
    return region.translate(address), region.rkey
