"""One association with a controller: admin queue, I/O queues, keep-alive.

States: NEW -open-> LIVE -end-> OVER.  Rules:
1. Two threads share a session.  Its path's thread opens it and keeps it alive, and is the only one
   that touches the admin wire.  The I/O wires belong to that thread until the transport's thread
   has taken the session (`take`), and to the transport's from then on.
2. Either thread ends a session with `end`; the first reason counts.  The path's thread is woken by
   its own waker.  Whoever owns wires closes them.
3. Everything waits with a deadline, and for the waker, so that closing is quick.
"""

import contextlib
import dataclasses
import errno
import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator
from typing import TypeVar

from hyades.common.addresses import resolve
from hyades.common.errors import HyadesError, PeerError, UsageError
from hyades.common.nvme import bringup, commands
from hyades.common.nvme.host import HostQueue, State
from hyades.common.nvme.identify import ControllerInfo, NamespaceInfo
from hyades.common.nvme.layout import DISCOVERY_NQN
from hyades.common.nvme.status import describe
from hyades.common.nvme.tls import PskSocket, wrap_client
from hyades.proxy.transports.nvme_url import Address, Options
from hyades.proxy.transports.nvme_wire import Gone, Unreachable, Wire

_T = TypeVar("_T")
_ADMIN_DEPTH = 31
_FAREWELL = 0.5  # seconds that an orderly end may take


class Stopped(Gone):
    """The transport is being closed."""


class Waker:
    """Wakes a thread that waits for descriptors; any thread may call `wake`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def wake(self) -> None:
        """Make the descriptor readable."""
        os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make it quiet again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Free the descriptor; nobody may use it any more."""
        os.close(self.fd)


class Session:
    """One controller of one subsystem; see the module."""

    def __init__(
        self, options: Options, address: Address, waker: Waker, stopping: Callable[[], bool]
    ) -> None:
        self.options, self.address = options, address
        self.wires: list[Wire] = []
        self.reason: HyadesError | None = None  # why it is over
        self.ended_at = 0.0
        self.connect_seconds = 0.0
        self.controller: ControllerInfo
        self.namespace: NamespaceInfo
        self._waker, self._stopping = waker, stopping
        self._lock = threading.Lock()
        self._taken = False
        self._admin: Wire | None = None
        self._deadline = 0.0

    @property
    def granularity(self) -> float:
        """Seconds by which the target may be late in ending an association."""
        return self.controller.keep_alive * 0.1

    # -- either thread

    def end(self, reason: HyadesError) -> None:
        """Make this session over; the first *reason* stays."""
        with self._lock:
            if self.reason is None:
                self.reason, self.ended_at = reason, time.monotonic()
        self._waker.wake()

    def take(self) -> bool:
        """Make the I/O wires the caller's; False where the session is over already."""
        with self._lock:
            self._taken = self._taken or self.reason is None
            return self._taken

    # -- the path's thread

    def open(self) -> None:
        """Connect every queue; UsageError or PeerError, and then everything is closed again."""
        begin = time.monotonic()
        self._deadline = begin + self.options.timeout
        try:
            self._open()
        except BaseException:
            self.close()
            raise
        self.connect_seconds = time.monotonic() - begin

    def keep_alive(self) -> None:
        """Return when the session is over, with `reason` set."""
        options = self.options
        try:
            while True:
                self._idle(options.kato / 2)
                self._deadline = time.monotonic() + min(options.timeout, options.kato)
                self._talk(_keep_alive())
        except (PeerError, UsageError) as error:
            self.end(error)

    def close(self) -> None:
        """Leave in order where that is possible, and close what this thread owns."""
        self.end(Stopped("closed"))
        if not self._taken:
            for wire in self.wires:
                wire.close(reset=not isinstance(self.reason, Stopped))
        admin = self._admin
        if admin is None:
            return
        if isinstance(self.reason, Stopped) and admin.queue.state is State.READY:
            self._deadline = time.monotonic() + _FAREWELL
            with contextlib.suppress(PeerError):  # a target that is gone needs no farewell
                self._converse(admin, bringup.shut_down(), heed=False)
        admin.close()

    def converse(self, conversation: Generator[bringup.Call, bringup.Answer, _T]) -> _T:
        """Run *conversation* with a controller without I/O queues, and leave."""
        self._deadline = time.monotonic() + self.options.timeout
        try:
            self._admin = self._connect(_ADMIN_DEPTH)
            self._talk(bringup.bring_up(self._want(0, _ADMIN_DEPTH), 0))
            return self._talk(conversation)
        finally:
            self.close()

    # -- the parts

    def _open(self) -> None:
        options = self.options
        self._admin = self._connect(_ADMIN_DEPTH)
        found = self._talk(bringup.bring_up(self._want(0, _ADMIN_DEPTH), options.queues))
        self.controller = found.info
        active = self._talk(bringup.read_namespaces())
        if options.nsid not in active:
            raise UsageError(
                f"{options.place(self.address)}: there is no such namespace; active are"
                f" {', '.join(map(str, active)) or 'none'}: write ?ns=N"
            )
        self.namespace = self._talk(bringup.read_namespace(options.nsid))
        if not any(self.namespace.guid):
            uuid = self._talk(bringup.read_uuid(options.nsid))
            self.namespace = dataclasses.replace(self.namespace, guid=uuid)
        limit = min(found.max_depth, max(2, found.info.max_commands)) - 1
        depth = min(options.depth, limit)
        for qid in range(1, found.queues + 1):
            wire = self._connect(depth)
            self.wires.append(wire)
            wire.queue.in_capsule = found.info.in_capsule
            self._converse(wire, bringup.connect_queue(self._want(qid, depth, found.cntlid)))

    def _want(self, qid: int, depth: int, cntlid: int = 0xFFFF) -> commands.Connect:
        options = self.options
        return commands.Connect(
            qid, depth + 1, options.subnqn, options.hostnqn, options.hostid, cntlid,
            kato=0 if qid or options.subnqn == DISCOVERY_NQN else round(options.kato * 1000),
        )  # fmt: skip

    def _connect(self, depth: int) -> Wire:
        """Return a wire whose queue is ready for Connect."""
        options = self.options
        sock: socket.socket = self._dial()
        try:
            if options.psk is not None:
                sock = self._shake_hands(sock)
            queue = HostQueue(
                depth, header_digest=options.header_digest, data_digest=options.data_digest
            )
            wire = Wire(sock, queue)
            queue.start(time.monotonic())
            self._exchange(wire, lambda: queue.state is State.READY)
        except Gone as error:
            sock.close()
            if error.by_peer and options.psk is None:
                hint = f"{error} before it said anything: does it want TLS, with a key?"
                raise Gone(hint, by_peer=True) from error
            raise
        except BaseException:
            sock.close()
            raise
        return wire

    def _dial(self) -> socket.socket:
        address = self.address
        try:
            found = resolve(address.host, address.port)
        except OSError as error:
            raise UsageError(f"{address}: no such host: {error.strerror}") from error
        problem: OSError | None = None
        for family, kind, protocol, _, where in found:
            sock = self._socket(family, kind | socket.SOCK_CLOEXEC, protocol)
            try:
                self._dial_one(sock, where)
            except OSError as error:
                problem = error
                sock.close()
                continue
            except BaseException:
                sock.close()
                raise
            return sock
        assert problem is not None
        refused = isinstance(problem, ConnectionRefusedError)
        fix = f"start one: hyades serve --listen {address}" if refused else "check the network"
        text = f"{address}: no NVMe/TCP target listens there ({problem.strerror}): {fix}"
        raise Unreachable(text) from problem

    def _socket(self, family: int, kind: int, protocol: int) -> socket.socket:
        try:
            return socket.socket(family, kind, protocol)
        except OSError as error:
            fix = "raise ulimit -n" if error.errno == errno.EMFILE else "check the network"
            raise UsageError(f"{self.address}: no socket: {error.strerror}: {fix}") from error

    def _dial_one(self, sock: socket.socket, where: tuple[object, ...]) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = sock.connect_ex(where)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, os.strerror(code))
        self._wait(sock.fileno(), select.POLLOUT)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def _shake_hands(self, sock: socket.socket) -> PskSocket:
        options = self.options
        assert options.psk is not None
        names = (options.hostnqn, options.subnqn)
        version = options.psk_identity
        wrapped = wrap_client(sock, options.psk, *names, version=version, handshake=False)
        while True:
            try:
                wrapped.do_handshake()
                return wrapped
            except ssl.SSLWantReadError:
                self._wait(wrapped.fileno(), select.POLLIN)
            except ssl.SSLWantWriteError:
                self._wait(wrapped.fileno(), select.POLLOUT)
            except BaseException:
                wrapped.close()
                raise

    def _talk(self, conversation: Generator[bringup.Call, bringup.Answer, _T]) -> _T:
        assert self._admin is not None
        return self._converse(self._admin, conversation)

    def _converse(
        self, wire: Wire, conversation: Generator[bringup.Call, bringup.Answer, _T],
        *, heed: bool = True,
    ) -> _T:  # fmt: skip
        call = next(conversation)
        while True:
            if call.pause:
                self._sleep(call.pause)
            answer = self._execute(wire, call, heed=heed)
            try:
                call = conversation.send(answer)
            except StopIteration as end:
                value: _T = end.value
                return value

    def _execute(self, wire: Wire, call: bringup.Call, *, heed: bool) -> bringup.Answer:
        queue, data = wire.queue, bytearray(call.reads)
        queue.submit(
            call.sqe,
            into=memoryview(data) if data else None,
            source=memoryview(call.source) if call.source else None,
            in_capsule=True,
            now=time.monotonic(),
        )
        self._exchange(wire, lambda: bool(queue.completions), heed=heed)
        ((_, code, result),) = queue.completions
        queue.completions.clear()
        return code, result, bytes(data)

    def _exchange(self, wire: Wire, done: Callable[[], bool], *, heed: bool = True) -> None:
        """Send and receive until *done*."""
        wire.send()
        while not done():
            events = select.POLLIN | (select.POLLOUT if wire.blocked else 0)
            if not wire.buffered:
                self._wait(wire.fd, events, heed=heed)
            wire.receive(time.monotonic())
            wire.send()

    def _wait(self, fd: int, events: int, *, heed: bool = True) -> None:
        """Return when *fd* shows one of *events*; Stopped, or Gone at the deadline."""
        poll = select.poll()
        poll.register(fd, events)
        if heed:
            poll.register(self._waker.fd, select.POLLIN)
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise Gone(f"{self.address}: no answer from the target")
            ready = poll.poll(left * 1000 + 1)
            if heed:
                self._heed()
            if any(which == fd for which, _ in ready):
                return

    def _sleep(self, seconds: float) -> None:
        """Sleep; Stopped or Gone as soon as this session is over."""
        poll = select.poll()
        poll.register(self._waker.fd, select.POLLIN)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            poll.poll(left * 1000 + 1)
            self._heed()

    def _idle(self, seconds: float) -> None:
        """Sleep, and notice when the target closes the admin queue."""
        admin = self._admin
        assert admin is not None
        poll = select.poll()
        poll.register(self._waker.fd, select.POLLIN)
        poll.register(admin.fd, select.POLLIN)
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready = poll.poll(left * 1000 + 1)
            self._heed()
            if any(which == admin.fd for which, _ in ready):
                admin.receive(time.monotonic())

    def _heed(self) -> None:
        self._waker.clear()
        if self._stopping():
            raise Stopped("closed")
        if self.reason is not None:
            raise Gone(str(self.reason))


# From options, address, the waker of its thread, and whether the transport is being closed.
MakeSession = Callable[[Options, Address, Waker, Callable[[], bool]], Session]


def _keep_alive() -> Generator[bringup.Call, bringup.Answer, None]:
    code, _, _ = yield bringup.Call(commands.keep_alive())
    if code:
        raise PeerError(f"keep-alive was refused: {describe(code)}")
