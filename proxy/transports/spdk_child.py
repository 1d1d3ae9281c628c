"""The caller's hold on the SPDK process: starting it, opening through it, ending it.

Rules:
1. It is spawned, never forked: SPDK's environment pins threads and memory, and ld.so reads
   LD_LIBRARY_PATH only when a program starts.
2. Its stderr, where SPDK logs, is a memory file: the last lines of it explain a failure.
3. It ends with `stop` (asked first, killed after a while), or with this process.
"""

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from typing import TypeVar

import msgspec

from hyades.common import errors
from hyades.common.errors import DeviceLost, HyadesError, PeerError
from hyades.common.ring import STOP, store_word
from hyades.proxy.transports import spdk_memory as shared
from hyades.proxy.transports.spdk_library import VARIABLE, Found

_OPENING = 120.0  # seconds: a target that drops packets takes SPDK's own timeouts
_ENDING = 15.0  # seconds until a process that was asked to end is killed
_MOMENT = 1e-3
_LOG_TAIL = 2048
_LOG_LINES = 4
_Answer = TypeVar("_Answer", shared.Opened, shared.Ready)


class SpdkChild:
    """One SPDK process and what is shared with it."""

    def __init__(self, settings: shared.Settings, found: Found) -> None:
        """Start the process and open the device; raise what it refuses with."""
        self._what = settings.trid()
        self.memory = shared.SharedMemory.create(settings.depth)
        self.bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # rung for this side
        self._other_bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._log = os.memfd_create("hyades-spdk-log", os.MFD_CLOEXEC)
        self._link, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process: subprocess.Popen[bytes] | None = None
        self._poll = select.poll()
        self._poll.register(self.bell, select.POLLIN)
        self._poll.register(self._link, 0)  # only its end
        self.death = ""  # why the process is gone, once it is
        try:
            self._process = self._spawn(other, found)
            other.close()
            self._send(settings)
            self.opened = self._answer(shared.Opened)
        except BaseException:
            other.close()
            self.stop(at_once=True)
            raise

    def register(self, fd: int, offset: int, nbytes: int) -> None:
        """Hand the arena over; return when requests may come."""
        self._send(shared.Register(offset=offset, nbytes=nbytes), fd)
        self._answer(shared.Ready)

    def alive(self) -> bool:
        """Tell whether the process runs; `death` says why not."""
        if not self.death and (self._process is None or self._process.poll() is not None):
            self.death = self._obituary()
        return not self.death

    def ring(self) -> None:
        """Wake the process."""
        os.eventfd_write(self._other_bell, 1)

    def listen(self, timeout: float) -> None:
        """Sleep until the process rings or ends, at most *timeout* seconds."""
        events = dict(self._poll.poll(max(0.0, timeout) * 1000))
        if self._link.fileno() in events and self.alive():
            time.sleep(_MOMENT)  # it is about to end
        with contextlib.suppress(BlockingIOError):  # it was not rung
            os.eventfd_read(self.bell)

    def stop(self, *, at_once: bool = False) -> None:
        """End the process; no buffer changes after this returns."""
        process = self._process
        if process is not None and process.poll() is None:
            if at_once:
                process.kill()
            else:
                store_word(self.memory.requests.control, STOP, 1)
                self.ring()
                self._link.shutdown(socket.SHUT_RDWR)  # it may still be waiting for an arena
            try:
                process.wait(_ENDING)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._link.close()
        for fd in (self.bell, self._other_bell, self._log, self.memory.fd):
            os.close(fd)

    def last_words(self) -> str:
        """Return the end of the process's log as one line."""
        size = os.fstat(self._log).st_size
        tail = os.pread(self._log, _LOG_TAIL, max(0, size - _LOG_TAIL)).decode(errors="replace")
        return " / ".join(line.strip() for line in tail.splitlines()[-_LOG_LINES:] if line.strip())

    def _spawn(self, link: socket.socket, found: Found) -> "subprocess.Popen[bytes]":
        environment = dict(os.environ)
        paths = [*found.search_path(), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
        environment[VARIABLE] = str(found.folder)
        fds = (link.fileno(), self.memory.fd, self._other_bell, self.bell)
        log = os.open(f"/proc/self/fd/{self._log}", os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        module = "hyades.proxy.transports.spdk_process"
        numbers = [str(number) for number in (*fds, os.getpid())]
        try:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", module, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=fds,
                env=environment,
                process_group=0,  # a terminal's signals are the caller's
            )
        finally:
            os.close(log)

    def _send(self, message: msgspec.Struct, *fds: int) -> None:
        try:
            socket.send_fds(self._link, [msgspec.json.encode(message)], fds)
        except OSError as error:
            raise DeviceLost(self._obituary()) from error

    def _answer(self, kind: type[_Answer]) -> _Answer:
        deadline = time.monotonic() + _OPENING
        while not select.select([self._link], [], [], 0.2)[0]:
            if time.monotonic() > deadline:
                self.death = f"{self._what}: the SPDK process did not answer for {_OPENING:.0f} s"
                raise DeviceLost(f"{self.death} ({self.last_words()})")
        message = b""
        with contextlib.suppress(ConnectionResetError):  # it ended with a message unread
            message = self._link.recv(shared.MESSAGE)
        if not message:
            raise DeviceLost(self._obituary())
        try:
            answer = msgspec.json.decode(message, type=shared.Answer)
        except msgspec.DecodeError as error:
            raise PeerError(f"the SPDK process sent {message[:80]!r}: {error}") from error
        if isinstance(answer, shared.Refused):
            raise self._refusal(answer)
        if not isinstance(answer, kind):
            raise PeerError(f"the SPDK process sent {answer} where {kind.__name__} was due")
        return answer

    def _refusal(self, answer: shared.Refused) -> HyadesError:
        kind = getattr(errors, answer.kind, DeviceLost)
        words = self.last_words()
        text = f"{answer.text} (SPDK: {words})" if words else answer.text
        error: HyadesError = kind(text)
        return error

    def _obituary(self) -> str:
        code = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(5.0)
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        words = self.last_words()
        return f"{self._what}: the SPDK process ended ({how})" + (f": {words}" if words else "")
