"""One association with a controller: admin queue, I/O queues, keep-alive.

States: NEW -open-> LIVE -end-> OVER.  Rules:
1. Two threads share a session.  Its path's thread opens it and keeps it alive, and is the only one
   that touches the admin wire.  The I/O wires belong to that thread until the transport's thread
   has taken the session (`take`), and to the transport's from then on.
2. Either thread ends a session with `end`; the first reason counts.  The path's thread is woken by
   its own waker.  Whoever owns wires closes them.
3. Where the options have a request for a view, each session asks for its own, which ends with the
   controller: the same blocks as long as the volume is at the same commit.
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
from hyades.common.layout import BLOCK
from hyades.common.nvme import bringup, commands
from hyades.common.nvme.host import HostQueue, State
from hyades.common.nvme.identify import ControllerInfo, NamespaceInfo
from hyades.common.nvme.layout import DISCOVERY_NQN
from hyades.common.nvme.tls import PskSocket, wrap_client
from hyades.common.units import KIB, MIB
from hyades.common.viewspec import ViewHead
from hyades.proxy.transports.nvme_talk import Stopped, Talker, Waker
from hyades.proxy.transports.nvme_url import Address, Options
from hyades.proxy.transports.nvme_wire import Gone, Unreachable, Wire

_T = TypeVar("_T")
_ADMIN_DEPTH = 31
_PART = 256 * KIB  # bytes of a request that go in one command
_FAREWELL = 0.5  # seconds that an orderly end may take


class Session(Talker):
    """One controller of one subsystem; see the module."""

    def __init__(
        self, options: Options, address: Address, waker: Waker, stopping: Callable[[], bool]
    ) -> None:
        super().__init__(options, address, waker, stopping)
        self.wires: list[Wire] = []
        self.ended_at = 0.0
        self.connect_seconds = 0.0
        self.controller: ControllerInfo
        self.nsid = options.nsid  # that commands name: the view's, where one was asked for
        self.namespace: NamespaceInfo
        self.head: ViewHead | None = None  # of the view
        self._lock = threading.Lock()
        self._taken = False

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
        try:
            while True:
                self._idle(self.options.kato / 2)
                self._keep_alive()
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
        self.namespace = self._identify(options.nsid)
        if options.view:
            self._open_view()
        limit = min(found.max_depth, max(2, found.info.max_commands)) - 1
        depth = min(options.depth, limit)
        for qid in range(1, found.queues + 1):
            wire = self._connect(depth)
            self.wires.append(wire)
            wire.queue.in_capsule = found.info.in_capsule
            self._converse(wire, bringup.connect_queue(self._want(qid, depth, found.cntlid)))
        if options.view:
            self.head = self._read_head()

    def _identify(self, nsid: int) -> NamespaceInfo:
        found = self._talk(bringup.read_namespace(nsid))
        if any(found.guid):
            return found
        return dataclasses.replace(found, guid=self._talk(bringup.read_uuid(nsid)))

    def _open_view(self) -> None:
        """Ask for the view, and make it the namespace of this session."""
        options = self.options
        part = min(self.controller.max_transfer or _PART, _PART)
        self.nsid = self._talk(bringup.open_view(options.nsid, options.view, part))
        try:
            self.namespace = self._identify(self.nsid)
        except UsageError as error:
            raise PeerError(f"the view that the target made is not there: {error}") from error

    def _read_head(self) -> ViewHead:
        most = min(self.options.max_transfer, self.controller.max_transfer or MIB) // BLOCK * BLOCK
        reading = bringup.read_view_head(self.nsid, self.namespace, self.options.view, most)
        return self._converse(self.wires[0], reading)

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


# From options, address, the waker of its thread, and whether the transport is being closed.
MakeSession = Callable[[Options, Address, Waker, Callable[[], bool]], Session]
