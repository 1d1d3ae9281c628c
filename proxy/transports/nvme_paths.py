"""The ways to one namespace: each path has a thread that connects, keeps alive, and reconnects.

States of a path: CONNECTING -> LIVE -> CONNECTING ..., and CLOSED at the end.  Rules:
1. A path's thread makes one session after the other.  It offers each to the transport, which takes
   it in `changes`; see nvme_session.py for who touches what.
2. Between two attempts it waits: reconnect_delay, doubled each time up to 5 s, and from the
   beginning again after a session that lasted four times as long as the wait.
3. Every session must lead to the same namespace: NGUID, size and block size are compared with
   those of the first one.  A path that leads elsewhere stays unused, and says why.  Views are made
   anew for each session, under ids and NGUIDs that may differ: what they are of is compared, which
   their heads say.
4. An error that nobody foresaw ends its path, and is raised in the transport's thread: nobody waits
   for a path that has no thread.
"""

import threading
import time
from dataclasses import replace

import numpy as np

from hyades.common.errors import BackendMissing, HyadesError, UsageError
from hyades.common.interrupts import undisturbed
from hyades.common.nvme.bringup import ViewDeferred, ViewRefused
from hyades.common.nvme.identify import NamespaceInfo
from hyades.common.viewspec import ViewHead
from hyades.proxy.transports.nvme_discovery import offers
from hyades.proxy.transports.nvme_session import MakeSession, Session
from hyades.proxy.transports.nvme_talk import Stopped, Waker
from hyades.proxy.transports.nvme_url import Address, Options
from hyades.proxy.transports.nvme_wire import Unreachable

_LONGEST_DELAY = 5.0
_OTHERS = 1.0  # seconds that opening waits for the other paths once one is live
_JOIN = 5.0


class OtherNamespace(UsageError):  # noqa: N818
    """A path leads to another namespace than the first one."""


class ViewChanged(OtherNamespace):
    """The volume of a view is at another commit than when the view was opened."""


class Path:
    """One address and its thread."""

    def __init__(self, owner: "Paths", index: int, address: Address) -> None:
        self.address, self.index = address, index
        self.problem: HyadesError | None = None  # why it is not live
        self.tried = False  # the first attempt is over
        self.connects = 0
        self.connect_seconds = 0.0  # of the last session
        self.session: Session | None = None  # of the last attempt
        self.waker = Waker()
        self._owner = owner
        self.thread = threading.Thread(target=self._run, name=f"hyades-nvme-{address}", daemon=True)

    def _run(self) -> None:
        try:
            self._connect_again_and_again()
        except BaseException as error:  # the transport's thread raises it
            self._owner.broke(error)

    def _connect_again_and_again(self) -> None:
        owner, options = self._owner, self._owner.options
        delay = options.reconnect_delay
        while not owner.stopping:
            session = owner.session(options, self.address, self.waker, owner.is_stopping)
            self.session = session
            begin = time.monotonic()
            try:
                session.open()
                owner.check(session)
            except HyadesError as error:
                session.close()
                where = options.place(self.address)
                known = str(self.address) in str(error)
                owner.failed(self, error if known else type(error)(f"{where}: {error}"))
            else:
                owner.offer(self, session)
                session.keep_alive()
                session.close()
                owner.failed(self, session.reason or Stopped("closed"))
                if time.monotonic() - begin > 4 * delay:
                    delay = options.reconnect_delay
            owner.pause(delay)
            delay = min(2 * delay, _LONGEST_DELAY)


class Paths:
    """All paths of one transport."""

    def __init__(self, options: Options, session: MakeSession = Session) -> None:
        self.options, self.session = options, session
        self.waker = Waker()  # wakes the transport's thread
        self.stopping = False
        self.news = False  # set before the waker is used, cleared by the transport's thread
        self.namespace: NamespaceInfo
        self.head: ViewHead | None = None  # of the view that was asked for
        self.max_transfer = 0  # bytes; 0: the controller sets no limit
        self._known = False
        self._broken: BaseException | None = None  # what ended a path's thread
        self._changed = threading.Condition()
        self._offered: list[tuple[Path, Session]] = []
        self.paths = [Path(self, i, a) for i, a in enumerate(options.addresses)]

    def open(self) -> None:
        """Return when one path is live; the error of the first path where none can be.

        A target that does not answer yet has connect_timeout seconds to come.
        """
        with undisturbed():
            for path in self.paths:
                path.thread.start()
        try:
            with self._changed:
                patience = self.options.connect_timeout
                self._changed.wait_for(lambda: self._live() or self._hopeless(), patience)
                self._changed.wait_for(lambda: self._live() or self._tried())
                self._changed.wait_for(self._tried, _OTHERS)
            self._raise_broken()
            self._refuse()
        except BaseException:
            self.close()
            raise

    def changes(self) -> list[tuple[Path, Session]]:
        """Return the sessions that became live since the last call, and take them."""
        with self._changed:
            offered, self._offered = self._offered, []
        self._raise_broken()
        return [(path, session) for path, session in offered if session.take()]

    def stop(self) -> None:
        """Tell every path to end."""
        self.stopping = True
        for path in self.paths:
            path.waker.wake()
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """End every path; its sessions leave in order."""
        self.stop()
        for path in self.paths:
            if path.thread.ident is not None:
                path.thread.join(_JOIN)
            if not path.thread.is_alive():
                path.waker.close()
        if not any(path.thread.is_alive() for path in self.paths):
            self.waker.close()

    # -- what the paths call

    def is_stopping(self) -> bool:
        """Return whether the transport is being closed."""
        return self.stopping

    def check(self, session: Session) -> None:
        """Take what the first session says; UsageError where a later one says something else."""
        with self._changed:
            if not self._known:
                self.namespace, self.head = session.namespace, session.head
                self.max_transfer = session.controller.max_transfer
                self._known = True
                return
        ours, theirs = self.namespace, session.namespace
        if self.head is not None and session.head is not None:
            _check_view(self.options.place(session.address), self.head, session.head)
            theirs = replace(theirs, guid=ours.guid)
        if ours != theirs:
            first = self.options.place(self.paths[0].address)
            raise OtherNamespace(
                f"{self.options.place(session.address)} is another namespace than {first}:"
                f" {_say(theirs)}, not {_say(ours)}"
            )
        limit = session.controller.max_transfer
        used = min(self.max_transfer or self.options.max_transfer, self.options.max_transfer)
        if limit and limit < used:
            raise OtherNamespace(
                f"{self.options.place(session.address)} takes {limit} bytes at a time, another"
                f" path {used}: write max_transfer={limit}"
            )

    def refused(self) -> bool:
        """Return whether every target refuses the view, so that trying again is of no use."""
        return all(
            isinstance(path.problem, ViewRefused | ViewChanged)
            and not isinstance(path.problem, ViewDeferred)
            for path in self.paths
        )

    def alive_until(self) -> float:
        """Return by when a target that is making a view owes a sign of life; 0: none makes one."""
        sessions = [path.session for path in self.paths]
        return max(
            (s.alive_until for s in sessions if s is not None and s.reason is None), default=0.0
        )

    def offer(self, path: Path, session: Session) -> None:
        """Hand *session* to the transport."""
        with self._changed:
            path.problem, path.tried = None, True
            path.connects += 1
            path.connect_seconds = session.connect_seconds
            # Nobody may have asked for a long time: what is over meanwhile is of no use.
            self._offered = [offer for offer in self._offered if offer[1].reason is None]
            self._offered.append((path, session))
            self._tell()

    def failed(self, path: Path, error: HyadesError) -> None:
        """Note why *path* is not live."""
        with self._changed:
            path.problem, path.tried = error, True
            self._tell()

    def broke(self, error: BaseException) -> None:
        """Note what ended a path's thread."""
        with self._changed:
            self._broken = self._broken or error
            self._tell()

    def pause(self, seconds: float) -> None:
        """Let *seconds* pass, fewer where the transport is closed."""
        with self._changed:
            self._changed.wait_for(self.is_stopping, seconds)

    def _tell(self) -> None:
        self.news = True
        self.waker.wake()
        self._changed.notify_all()

    def _refuse(self) -> None:
        """Raise what keeps this transport from being opened, if anything does."""
        live = self._live()
        for path in self.paths:
            problem = path.problem
            if problem is None:
                continue
            if not live and f"{self.options.subnqn} refused queue 0" in str(problem):
                raise UsageError(f"{problem}; {self._offers(path)}") from problem
            if not live or isinstance(problem, BackendMissing | OtherNamespace):
                raise problem

    def _offers(self, path: Path) -> str:
        return offers(self.options, path.address, self.session)

    def _hopeless(self) -> bool:
        """Return whether every path has failed for a reason that waiting does not mend."""
        problems = [path.problem for path in self.paths]
        return self._broken is not None or all(
            isinstance(p, UsageError | BackendMissing) and not isinstance(p, Unreachable)
            for p in problems
        )

    def _tried(self) -> bool:
        return self._broken is not None or all(path.tried for path in self.paths)

    def _raise_broken(self) -> None:
        if self._broken is not None:
            raise self._broken

    def _live(self) -> bool:
        return any(path.connects for path in self.paths)


def _check_view(place: str, ours: ViewHead, theirs: ViewHead) -> None:
    """Raise ViewChanged unless both are the same view of the same commit."""
    if ours.spec == theirs.spec and np.array_equal(ours.counts, theirs.counts):
        return
    if ours.spec.volume != theirs.spec.volume:
        raise ViewChanged(
            f"{place}: another volume than when the run began lies there: {theirs.spec.volume}, not"
            f" {ours.spec.volume}"
        )
    raise ViewChanged(
        f"{place}: the volume has changed since the run began: it is at commit"
        f" {theirs.spec.generation}, it was at {ours.spec.generation}"
    )


def _say(info: NamespaceInfo) -> str:
    guid = f", NGUID {info.guid.hex()}" if any(info.guid) else ""
    return f"{info.blocks} blocks of {info.block_bytes} bytes{guid}"
