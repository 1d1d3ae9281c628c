"""Starting and ending the commands of one connection.

A command is *pending* until it is started, in order; then it ends at once, or it is a write that
awaits its data, a read whose data is on its way out, a view that is being made (view_commands.py),
or an Asynchronous Event Request that stays.
Each is counted when it ends.  Rules and threads: connection.py.
"""

import time
from collections import deque

from hyades.common.errors import DataError, PeerError
from hyades.common.nvme.commands import Command, parse_connect
from hyades.common.nvme.layout import (
    CONNECT_BYTES,
    FABRICS,
    Admin,
    Fabrics,
    Opcode,
    PduFlag,
    Sgl,
    Vendor,
)
from hyades.common.nvme.status import DNR, StatusCode, describe
from hyades.common.units import KIB
from hyades.target_side.controller import Reply
from hyades.target_side.events import Failed
from hyades.target_side.execution import Extent, capsule_data, forces_unit_access, locate
from hyades.target_side.view_commands import ViewCommands
from hyades.target_side.work import Owner, Work

SMALL = 32 * KIB  # reads up to here are cheaper through a buffer than by sendfile
_BATCH = 256 * KIB  # bytes of answers that are gathered before they are sent
_MEDIUM = (StatusCode.READ_ERROR, StatusCode.WRITE_FAULT, StatusCode.CAPACITY_EXCEEDED)


class Executor:
    """See the module."""

    def __init__(self, connection: Owner) -> None:
        self._connection = connection
        self._service = connection.service
        self._queue = connection.queue
        self._output = connection.output
        self._pending: deque[Work] = deque()
        self._writes: dict[int, Work] = {}  # they await their data
        self._ranges: dict[int, Work] = {}  # their data is on its way
        self._events = 0  # Asynchronous Event Requests that are out
        self._views = ViewCommands(connection, self._end)

    @property
    def idle(self) -> bool:
        """Whether no command but an event request is out."""
        return not (self._pending or self._writes or self._ranges or self._views.busy)

    @property
    def only_events(self) -> bool:
        """Whether nothing but event requests is out."""
        return self.idle and self._events == self._queue.outstanding

    @property
    def awaits_data(self) -> bool:
        """Whether the host owes data."""
        return bool(self._writes)

    def take(self, now: float) -> None:
        """Take the commands and the data that have come."""
        queue = self._queue
        for cid in queue.superseded:
            self._forget_event(cid)
        queue.superseded.clear()
        for command, data, intact in queue.commands:
            work = Work(command, data, intact, now)
            self._pending.append(work)
            if command.opcode == Opcode.READ and self._connection.qid:
                self._prefetch(work)
        queue.commands.clear()
        for cid, intact in queue.arrived:
            self._finish_write(self._writes.pop(cid), intact)
        queue.arrived.clear()

    def pump(self) -> bool:
        """Start commands and send until nothing is left (True) or the socket takes no more."""
        pending, output, queue = self._pending, self._output, self._queue
        self._views.finish()
        while True:
            output.push(queue.take_output())
            waiting = False
            while pending and not waiting and output.nbytes < _BATCH:
                waiting = not self._start(pending[0])
                if not waiting:
                    pending.popleft()
                output.push(queue.take_output())
            through = output.send()
            for part in output.sent():
                self._range_sent(part.cid, part.status)
            if not through:
                return False
            output.push(queue.take_output())
            if not output.nbytes and (waiting or not pending):
                return True

    def abandon(self) -> None:
        """Give back what the commands that are out hold; the connection is over."""
        self._views.abandon()
        for work in self._writes.values():
            if work.buffer is not None:
                self._service.pool.release(work.buffer)
        self._pending.clear()
        self._writes.clear()
        self._ranges.clear()

    def _forget_event(self, cid: int) -> None:
        """Drop an event request, which may not have been started, for the command with its id."""
        for work in self._pending:
            if work.command.cid == cid:
                self._pending.remove(work)
                return
        controller = self._connection.controller
        if controller is not None:
            self._events -= 1
            with self._service.lock:
                controller.forget_event(cid)

    # -- starting

    def _prefetch(self, work: Work) -> None:
        found = self._locate(work.command)
        if isinstance(found, Extent):
            work.extent = found
            if found.nbytes > SMALL:
                found.namespace.expect(found.offset, found.nbytes)

    def _locate(self, command: Command) -> Extent | int:
        controller = self._connection.controller
        if controller is None or controller.subsystem is None:
            return StatusCode.SEQUENCE_ERROR | DNR
        if not controller.ready:
            return StatusCode.SEQUENCE_ERROR | DNR
        return locate(command, controller.namespaces, self._service.limits)

    def _start(self, work: Work) -> bool:
        """Start a command; return False where it must wait for a buffer."""
        connection, command = self._connection, work.command
        if connection.draining:
            self._end(work, StatusCode.ABORTED_QUEUE_DELETED)
        elif not work.intact:
            self._end(work, StatusCode.TRANSIENT_TRANSPORT)
        elif connection.controller is None or (
            command.opcode == FABRICS and command.fctype == Fabrics.CONNECT
        ):
            self._connect(work)
        elif connection.qid == 0:
            if command.opcode in (Vendor.CREATE_VIEW, Vendor.DELETE_VIEW):
                return self._start_view(work)
            self._administer(work)
        else:
            return self._start_io(work)
        return True

    def _connect(self, work: Work) -> None:
        command, data, connection = work.command, work.data, self._connection
        if command.opcode != FABRICS or command.fctype != Fabrics.CONNECT:
            self._end(work, StatusCode.SEQUENCE_ERROR | DNR)
            return
        if data is None or len(data) != CONNECT_BYTES:
            connection.refused("a Connect without its 1024 bytes of data in the capsule")
            self._end(work, StatusCode.SGL_LENGTH_INVALID | DNR)
            return
        try:
            want = parse_connect(command.raw, data)
        except DataError as error:
            connection.refused(str(error))
            self._end(work, StatusCode.CONNECT_INVALID | DNR)
            return
        if not connection.speaks_for(want.hostnqn, want.subnqn):
            connection.refused(f"the TLS key is not that of host {want.hostnqn} for {want.subnqn}")
            self._end(work, StatusCode.CONNECT_INVALID_HOST | DNR)
            return
        with self._service.lock:
            controller, reply = self._service.target.connect(want, connection, work.begin)
        if controller is None:
            connection.refused(
                f"queue {want.qid} of host {want.hostnqn or '(no name)'} to {want.subnqn}:"
                f" {describe(reply.status)}, result {reply.result:#x}"
            )
        else:
            self._queue.configure(want.qid, want.depth, flow_control=not want.no_flow_control)
            connection.joined(controller)
        self._end(work, reply.status, reply.result)

    def _start_view(self, work: Work) -> bool:
        into = self._views.start(work)
        if isinstance(into, memoryview):
            self._writes[work.command.cid] = work
            self._queue.request_data(work.command.cid, into)
            return True
        return into

    def _administer(self, work: Work) -> None:
        controller = self._connection.controller
        assert controller is not None
        was_shut_down = controller.shut_down
        with self._service.lock:
            reply = controller.execute(work.command, work.begin)
            ended = controller.take_ended()
        for cid, other in ended:
            self._events -= 1
            self._queue.complete(cid, other.status, other.result)
        if reply is None:
            self._events += 1
        else:
            self._reply(work, reply)
        if controller.shut_down and not was_shut_down:
            self._flush_all()  # before the answer goes out

    def _reply(self, work: Work, reply: Reply) -> None:
        if reply.data and not reply.status:
            cid = work.command.cid
            self._queue.send_data(cid, memoryview(reply.data), success=False)
            self._count(work, 0)
        else:
            self._end(work, reply.status, reply.result)

    def _start_io(self, work: Work) -> bool:
        command = work.command
        opcode = command.opcode
        if self._service.faults is not None and self._service.faults.drops():
            raise PeerError("cut on purpose (fault drop)")
        if opcode == Admin.KEEP_ALIVE:  # SPDK sends them on I/O queues, too
            self._end(work, 0)
            return True
        if command.raw[1] & 0xC3 != 0x40:
            self._end(work, StatusCode.INVALID_FIELD | DNR)
            return True
        if opcode == Opcode.FLUSH:
            self._end(work, self._flush(command.nsid))
            return True
        if opcode not in (Opcode.READ, Opcode.WRITE, Opcode.WRITE_ZEROES):
            self._end(work, StatusCode.INVALID_OPCODE | DNR)
            return True
        extent = work.extent or self._locate(command)
        if not isinstance(extent, Extent):
            self._end(work, extent)
            return True
        work.extent = extent
        if opcode == Opcode.READ:
            return self._read(work, extent)
        if opcode == Opcode.WRITE:
            return self._write(work, extent)
        status = extent.namespace.zero(extent.offset, extent.nbytes)
        self._end(work, status or self._settle(work, extent))
        return True

    def _read(self, work: Work, extent: Extent) -> bool:
        cid, namespace = work.command.cid, extent.namespace
        offset, nbytes = extent.offset, extent.nbytes
        payload = namespace.view(offset, nbytes)
        if payload is not None:
            self._send(work, payload)
            return True
        if nbytes > SMALL and not self._needs_memory():
            part = namespace.reference(offset, nbytes)
            if part is not None:
                part.cid = cid
                self._ranges[cid] = work
                # Answered when it is through: the medium may fail half-way.
                self._queue.send_data(cid, part, success=False, answer=False)
                return True
        buffer = self._service.pool.acquire(nbytes, self._connection)
        if buffer is None:
            return False
        status = namespace.read_into(offset, buffer.view)
        if status:
            self._service.pool.release(buffer)
            self._end(work, status)
            return True
        self._send(work, buffer.view)
        self._output.hold(buffer)
        return True

    def _send(self, work: Work, data: memoryview) -> None:
        self._queue.send_data(work.command.cid, data, success=True)
        segments = self._queue.take_output()
        faults = self._service.faults
        if faults is not None and self._queue.digests & PduFlag.DDGST and faults.spoils():
            segments[2] = bytes(byte ^ 0xFF for byte in segments[2])  # type: ignore[union-attr]
        self._output.push(segments)
        self._count(work, 0)

    def _needs_memory(self) -> bool:
        return self._output.memory_only or bool(self._queue.digests & PduFlag.DDGST)

    def _write(self, work: Work, extent: Extent) -> bool:
        command = work.command
        if command.sgl == Sgl.IN_CAPSULE:
            data = capsule_data(command, work.data)
            if data is None:
                self._end(work, StatusCode.INVALID_OFFSET | DNR)
                return True
            status = extent.namespace.write(extent.offset, data)
            self._end(work, status or self._settle(work, extent))
            return True
        into = extent.namespace.view(extent.offset, extent.nbytes)
        if into is None:
            work.buffer = self._service.pool.acquire(extent.nbytes, self._connection)
            if work.buffer is None:
                return False
            into = work.buffer.view
        self._writes[command.cid] = work
        self._queue.request_data(command.cid, into)
        return True

    # -- ending

    def _finish_write(self, work: Work, intact: bool) -> None:
        extent, status = work.extent, 0 if intact else int(StatusCode.TRANSIENT_TRANSPORT)
        if extent is None:  # of an admin command
            self._views.arrived(work, intact=intact)
            return
        if work.buffer is not None:
            if not status:
                status = extent.namespace.write(extent.offset, work.buffer.view)
            self._service.pool.release(work.buffer)
        self._end(work, status or self._settle(work, extent))

    def _settle(self, work: Work, extent: Extent) -> int:
        """Make a write durable where the host wants that with each one."""
        controller = self._connection.controller
        assert controller is not None
        if controller.write_through or forces_unit_access(work.command):
            return extent.namespace.flush()
        return 0

    def _flush(self, nsid: int) -> int:
        controller = self._connection.controller
        if controller is None or controller.subsystem is None or not controller.ready:
            return StatusCode.SEQUENCE_ERROR | DNR
        namespaces = controller.namespaces
        if nsid == 0xFFFFFFFF:
            return max((space.flush() for space in namespaces.values()), default=0)
        if nsid not in namespaces:
            return StatusCode.INVALID_NAMESPACE | DNR
        return namespaces[nsid].flush()

    def _flush_all(self) -> None:
        controller = self._connection.controller
        if controller is not None and controller.subsystem is not None:
            for namespace in controller.subsystem.namespaces.values():
                namespace.flush()

    def _range_sent(self, cid: int, status: int) -> None:
        self._end(self._ranges.pop(cid), status)

    def _end(self, work: Work, status: int, result: int = 0) -> None:
        self._queue.complete(work.command.cid, status, result)
        self._count(work, status)

    def _count(self, work: Work, status: int) -> None:
        connection, command, extent = self._connection, work.command, work.extent
        io = bool(connection.qid)
        connection.counters.count(not io, command.opcode, status, time.monotonic() - work.begin)
        if not status:
            if extent is not None and command.opcode == Opcode.READ:
                connection.counters.bytes_read += extent.nbytes
            elif extent is not None and command.opcode == Opcode.WRITE:
                connection.counters.bytes_written += extent.nbytes
        elif io:
            self._report(work, status)

    def _report(self, work: Work, status: int) -> None:
        connection, command = self._connection, work.command
        if connection.controller is not None:
            connection.controller.errors.add(
                connection.qid, command.cid, status, nsid=command.nsid, lba=command.slba
            )
        if status & ~DNR in _MEDIUM and work.extent is not None:
            self._service.sink.emit(
                Failed(
                    connection.peer, Opcode(command.opcode).name.lower(),
                    work.extent.namespace.name, command.slba, command.blocks, describe(status),
                )
            )  # fmt: skip
