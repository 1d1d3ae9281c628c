"""The embedded target: listeners, a thread per connection, and an orderly end.

    with Server([Subsystem(nqn, {1: FileNamespace(path)})], [("127.0.0.1", 0)]) as server:
        host, port = server.addresses[0]

Rules:
1. `start` returns when every listener accepts connections; `stop` closes them first, lets each
   connection finish what is in flight for `Limits.grace` seconds, then cuts what is left.
2. A housekeeping thread expires controllers (keep-alive), and closes the views of those that ended.
3. The namespaces are the server's: `stop` flushes and closes them.
"""

import hashlib
import random
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hyades.common.addresses import resolve
from hyades.common.errors import UsageError
from hyades.common.nvme.identify import DiscoveryEntry
from hyades.common.nvme.psk import Keyring
from hyades.common.units import format_size
from hyades.target_side.admission import MAX_CONTROLLER_ID, Target
from hyades.target_side.connection import Connection
from hyades.target_side.controller import NO_VIEWS, Offer
from hyades.target_side.edge import Edge
from hyades.target_side.events import (
    AT_STOP,
    Expired,
    Listening,
    NullSink,
    Refused,
    Sink,
    Stopped,
    Stopping,
)
from hyades.target_side.faulty import Faults
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import MemoryNamespace, Namespace
from hyades.target_side.pool import BufferPool
from hyades.target_side.rdma_listener import MAX_TRANSFER, RdmaListener
from hyades.target_side.service import Service
from hyades.target_side.subsystem import Subsystem
from hyades.target_side.view_service import ViewService

if TYPE_CHECKING:
    from hyades.target_side.dma_listener import DmaListener

Address = tuple[str, int]
_BACKLOG = 512
_TICK = 0.25  # seconds between looks at keep-alive
_RDMA, _TCP, _INTRA_HOST = 1, 3, 254  # TRTYPE
_WILDCARDS = ("0.0.0.0", "::", "")


class Server:
    """See the module."""

    def __init__(
        self, subsystems: Sequence[Subsystem], listen: Sequence[Address], *,
        limits: Limits | None = None, sink: Sink | None = None, keys: Keyring | None = None,
        advertise: str = "", first_controller: int = 0, firmware: str = "",
        faults: Faults | None = None, rdma: Sequence[Address] = (), dma: Sequence[str] = (),
        dma_engine: str = "memcpy", views: ViewService | None = None,
    ) -> None:  # fmt: skip
        """Serve *subsystems* at *listen* (port 0: any that is free), over RDMA at *rdma*.

        *dma* are paths of sockets: hosts of this machine share memory there, and *dma_engine*
        (hyades.common.dma.engine) moves the data.
        *views* makes those that hosts ask for, and is closed with the server.

        *advertise* is the address that discovery tells; else that which the host came to.  Without
        *first_controller* ids begin anywhere: hosts that join the paths of several targets under
        one name refuse equal ones.
        """
        self.limits = limits or Limits()
        self.subsystems = list(subsystems)
        first = first_controller or random.randint(1, MAX_CONTROLLER_ID)
        offered = views.limits if views is not None else NO_VIEWS
        offer = Offer(self.limits, self._entries, firmware, offered)
        target = Target(self.subsystems, offer, first_controller=first)
        self.service = Service(
            target,
            self.limits,
            BufferPool(self.limits.buffers),
            sink=sink or NullSink(),
            keys=keys,
            faults=faults,
            views=views,
        )
        self.connections: set[Edge[Any, Any]] = set()
        self.addresses: list[Address] = []  # where it listens, with real ports
        self._listen, self._advertise = list(listen), advertise
        self._rdma, self._listeners = list(rdma), list["RdmaListener | DmaListener"]()
        self._dma, self._dma_engine = list(dma), dma_engine
        if rdma and self.limits.max_transfer > MAX_TRANSFER:
            raise UsageError(f"max-transfer over RDMA: at most {format_size(MAX_TRANSFER)}")
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()

    @property
    def rdma_addresses(self) -> list[Address]:
        """Where it listens over RDMA, with real ports."""
        return [x.address for x in self._listeners if isinstance(x, RdmaListener)]

    @property
    def dma_paths(self) -> list[str]:
        """Where it listens over shared memory."""
        return [x.path for x in self._listeners if not isinstance(x, RdmaListener)]

    def start(self) -> None:
        """Listen; UsageError where an address cannot be had."""
        try:
            for host, port in self._listen:
                self._sockets.append(_listen(host, port))
                self.addresses.append(self._sockets[-1].getsockname()[:2])
            for address in self._rdma:
                found = RdmaListener(address, self.service, self._start, self._refuse)
                self._listeners.append(found)
            for path in self._dma:
                self._listeners.append(self._share(path))
        except BaseException:
            self._close_listeners()
            raise
        for sock in self._sockets:
            self._spawn(self._accept, sock)
        for listener in self._listeners:
            listener.thread.start()
        self._spawn(self._keep_house)
        places = [format_address(address) for address in self.addresses]
        places += [f"rdma:{format_address(address)}" for address in self.rdma_addresses]
        places += [f"dma:{path}" for path in self.dma_paths]
        for place in places:
            for subsystem in self.subsystems:
                names = [namespace.name for namespace in subsystem.namespaces.values()]
                self.service.sink.emit(Listening(place, subsystem.nqn, names))

    def _share(self, path: str) -> "DmaListener":
        # Only here, since it imports numba: most targets have no use for that.
        from hyades.target_side.dma_listener import DmaListener

        return DmaListener(
            path, self.service, self._start, self._refuse, engine=self._dma_engine,
            buffer_bytes=self.limits.dma_buffer,
        )  # fmt: skip

    def stop(self, grace: float | None = None) -> int:
        """Stop as rule 1 says; return how many connections had to be cut."""
        if self._stopping.is_set():
            return 0
        self._stopping.set()
        self._close_listeners()
        open_now = self._snapshot()
        began = bool(self._threads)  # else it could not listen, and there is nothing to tell
        if began:
            self.service.sink.emit(Stopping(len(open_now)))
        for connection in open_now:
            connection.drain()
        deadline = time.monotonic() + (self.limits.grace if grace is None else grace)
        self._await_end(deadline)
        left = self._snapshot()
        for connection in left:
            connection.cut(AT_STOP)
        self._await_end(time.monotonic() + 5)
        for listener in self._listeners:
            listener.close()
        for thread in self._threads:
            thread.join(5)
        if self.service.views is not None:
            self.service.views.close()
        self._close_retired()
        for subsystem in self.subsystems:
            for namespace in reversed(subsystem.namespaces.values()):  # views before their volume
                if not namespace.read_only:
                    namespace.flush()
                namespace.close()
        if began:
            self.service.sink.emit(Stopped(len(left)))
        return len(left)

    def __enter__(self) -> "Server":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.stop()

    # -- threads

    def _spawn(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while not self._stopping.is_set():
            try:
                sock, address = listener.accept()
            except OSError:
                if self._stopping.is_set():
                    return
                time.sleep(0.05)  # out of descriptors: others will be closed
                continue
            peer = format_address(address[:2])
            with self._lock:
                full = len(self.connections) >= self.limits.connections
            if full or self._stopping.is_set():
                self._refuse(peer, self._full if full else "the target stops")
                sock.close()
                continue
            self._begin(sock, peer)

    def _begin(self, sock: socket.socket, peer: str) -> None:
        try:
            _prepare(sock)
            connection = Connection(sock, peer, self.service)
        except OSError as error:
            sock.close()
            self._refuse(peer, error.strerror or str(error))
            return
        problem = self._start(connection)
        if problem:
            connection.discard()
            self._refuse(peer, problem)

    def _start(self, connection: Edge[Any, Any]) -> str:
        """Start a connection's thread; return why not, if not."""
        with self._lock:
            if len(self.connections) >= self.limits.connections:
                return self._full
            self.connections.add(connection)
        thread = threading.Thread(target=self._run, args=(connection,), daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            with self._lock:
                self.connections.discard(connection)
            return str(error)
        return ""

    @property
    def _full(self) -> str:
        return f"{self.limits.connections} connections are open, the limit"

    def _refuse(self, peer: str, reason: str) -> None:
        self.service.totals.refused += 1
        self.service.sink.emit(Refused(peer, reason))

    def _run(self, connection: Edge[Any, Any]) -> None:
        try:
            connection.run()
        finally:
            with self._lock:
                self.connections.discard(connection)

    def _keep_house(self) -> None:
        while not self._stopping.wait(_TICK):
            now = time.monotonic()
            with self.service.lock:
                expired = self.service.target.expire(now)
            for controller, links in expired:
                self.service.totals.expired += 1
                seconds = controller.features.kato / 1000
                host = controller.connected.hostnqn
                self.service.sink.emit(Expired(host, controller.cntlid, seconds))
                for link in links:
                    if isinstance(link, Edge):
                        link.cut(f"keep-alive: nothing heard for {seconds:g} s")
            self._close_retired()

    def _close_retired(self) -> None:
        with self.service.lock:
            retired = self.service.target.take_retired()
        for view in retired:
            view.close()

    # -- the rest

    def _snapshot(self) -> list[Edge[Any, Any]]:
        with self._lock:
            return list(self.connections)

    def _await_end(self, deadline: float) -> None:
        while self._snapshot() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _close_listeners(self) -> None:
        for sock in self._sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # wakes accept
            sock.close()
        for listener in self._listeners:
            listener.stop()

    def _entries(self, hostnqn: str, local: str) -> list[DiscoveryEntry]:
        """Return the discovery log for a host that came to the address *local*."""
        found = []
        for subsystem in self.subsystems:
            if not subsystem.admits(hostnqn):
                continue
            if local in self._dma:  # who came another way cannot open a socket here
                found.append(
                    DiscoveryEntry(
                        subsystem.nqn, local, "", transport=_INTRA_HOST, family=254, port=0,
                        secure=False,
                    )
                )  # fmt: skip
                continue
            tcp = [(where, _TCP) for where in self.addresses]
            rdma = [(where, _RDMA) for where in self.rdma_addresses]
            for port, ((host, number), transport) in enumerate([*tcp, *rdma], 1):
                address = self._advertise or (local if host in _WILDCARDS else host)
                found.append(
                    DiscoveryEntry(
                        subsystem.nqn, address, str(number), transport=transport,
                        family=2 if ":" in address else 1, port=port,
                        secure=transport == _TCP and self.service.keys is not None,
                    )
                )  # fmt: skip
        return found


def cache_epoch(namespaces: Sequence[Namespace]) -> bytes:
    """Return 16 bytes that stay the same while no completed write can have been lost.

    The page cache outlives this process but not the machine; memory outlives neither.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    own = (
        secrets.token_bytes(16) if any(isinstance(n, MemoryNamespace) for n in namespaces) else b""
    )
    return hashlib.sha256(boot + own).digest()[:16]


def format_address(address: Address) -> str:
    """Return host:port, with brackets around an IPv6 host."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = resolve(host, port, passive=True)[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise UsageError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another port, or 0 for any"
        ) from error
    return sock


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that has vanished without a word is found out, also where it set no keep-alive.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 6)
