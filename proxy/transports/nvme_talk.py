"""Conversations with a controller: what a path's thread says on its queues, one command at a time.

Rules:
1. Everything waits with a deadline, and for the waker, so that closing is quick.
2. A slow command (`Call.slow`) has no deadline of its own: while it is out, keep-alives go out on
   the same queue, and the target must answer each in time.  So only the admin queue runs one.
"""

import contextlib
import os
import select
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeVar

from hyades.common.errors import HyadesError, PeerError
from hyades.common.nvme import bringup, commands
from hyades.common.nvme.status import describe
from hyades.proxy.transports.nvme_url import Address, Options
from hyades.proxy.transports.nvme_wire import Gone, Wire

_T = TypeVar("_T")
_IN_CAPSULE = 8192  # bytes of data that every NVMe/TCP controller takes in an admin capsule
_NEVER = float("inf")


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


class Talker:
    """See the module."""

    def __init__(
        self, options: Options, address: Address, waker: Waker, stopping: Callable[[], bool]
    ) -> None:
        self.options, self.address = options, address
        self.reason: HyadesError | None = None  # why the session is over
        self.alive_until = 0.0  # by when a target with a slow command owes a sign of life
        self._waker, self._stopping = waker, stopping
        self._admin: Wire | None = None
        self._deadline = 0.0
        self._alive_at = 0.0  # when the controller was told last that this host is there

    def _keep_alive(self) -> None:
        """Tell the controller that this host is there; PeerError where it does not answer."""
        self._deadline = time.monotonic() + min(self.options.timeout, self.options.kato)
        self._talk(_keep_alive())

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
        data = bytearray(call.reads)
        cid = wire.queue.submit(
            call.sqe,
            into=memoryview(data) if data else None,
            source=memoryview(call.source) if call.source else None,
            in_capsule=len(call.source) <= _IN_CAPSULE,
            now=time.monotonic(),
        )
        code, result = self._answer(wire, cid, slow=call.slow, heed=heed)
        return code, result, bytes(data)

    def _answer(self, wire: Wire, cid: int, *, slow: bool, heed: bool) -> tuple[int, int]:
        """Return how command *cid* ended, which was submitted just now."""
        queue = wire.queue

        def ended() -> bool:
            return any(found == cid for found, _, _ in queue.completions)

        if slow:
            self._outlast(wire, ended)
        else:
            self._exchange(wire, ended, heed=heed)
        code, result = next(end for found, *end in queue.completions if found == cid)
        queue.completions.clear()  # another one is of a command that nobody waits for any more
        return code, result

    def _outlast(self, wire: Wire, ended: Callable[[], bool]) -> None:
        """Wait until *ended*, as long as the controller answers keep-alives."""
        options = self.options
        patience = min(options.timeout, options.kato)
        # At once where none was sent lately: this command may be one of many.
        self._alive_at = max(self._alive_at, time.monotonic() - patience / 2)
        while True:
            due = self._alive_at + patience / 2
            self._deadline = due + patience
            self._exchange(wire, ended, until=due)
            if ended():
                break
            self._alive_at = now = time.monotonic()
            self._deadline = now + patience
            beat = wire.queue.submit(commands.keep_alive(), now=now)
            self._exchange(wire, partial(self._beaten, wire, beat))
            self.alive_until = now + patience / 2 + patience
        self.alive_until = self._deadline = time.monotonic() + options.timeout

    @staticmethod
    def _beaten(wire: Wire, cid: int) -> bool:
        """Take the answer to keep-alive *cid*; PeerError where it was refused."""
        completions = wire.queue.completions
        for end in completions:
            if end[0] == cid:
                completions.remove(end)
                check_alive(end[1])
                return True
        return False

    def _exchange(
        self, wire: Wire, done: Callable[[], bool], *, heed: bool = True, until: float = _NEVER
    ) -> None:
        """Send and receive until *done*, or until the time has come."""
        wire.send()
        while not done() and time.monotonic() < until:
            events = select.POLLIN | (select.POLLOUT if wire.blocked else 0)
            if not wire.buffered:
                self._wait(wire.fd, events, heed=heed, until=until)
            wire.receive(time.monotonic())
            wire.send()

    def _wait(self, fd: int, events: int, *, heed: bool = True, until: float = _NEVER) -> None:
        """Return when *fd* shows one of *events* or *until* is now; Stopped, Gone when too late."""
        poll = select.poll()
        poll.register(fd, events)
        if heed:
            poll.register(self._waker.fd, select.POLLIN)
        while (now := time.monotonic()) < until:
            left = min(self._deadline, until) - now
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


def check_alive(code: int) -> None:
    """Raise PeerError where a keep-alive was answered with a status *code* other than success."""
    if code:
        raise PeerError(f"keep-alive was refused: {describe(code)}")


def _keep_alive() -> Generator[bringup.Call, bringup.Answer, None]:
    code, _, _ = yield bringup.Call(commands.keep_alive())
    check_alive(code)
