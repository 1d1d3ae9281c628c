"""A regular file or block device: ``path`` or ``file:///path?engine=threads``.

O_DIRECT through io_uring where both are to be had.  Where io_uring is refused, preadv on a few
threads; where O_DIRECT is refused, the page cache: `describe` and `probe` say which and why.
There is no lock on the file here: whoever opens the volume for writing holds one.
"""

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import BackendMissing, UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import MIB, format_size
from hyades.proxy.arena import allocate_arena, check_arena
from hyades.proxy.records import completion_words, counter_dict, request_words
from hyades.proxy.transport import Limits, Records
from hyades.proxy.transports.engines import Engine, Geometry
from hyades.proxy.transports.thread_engine import ThreadEngine
from hyades.proxy.transports.uring import open_rings
from hyades.proxy.transports.uring_engine import UringEngine
from hyades.proxy.urls import Url

EngineName = Literal["auto", "io_uring", "threads"]
_BLKGETSIZE64 = 0x80081272
_REFUSED = (errno.ENOSYS, errno.EPERM, errno.EACCES, errno.ENOMEM, errno.EOPNOTSUPP)


class FileTransport:
    """Moves pages between an arena and a file, without the page cache where that is possible."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        writable: bool = True,
        engine: EngineName = "auto",
        direct: bool = True,
        depth: int = 64,
        max_transfer: int = 4 * MIB,
        step: int = 1024 * MIB,
    ) -> None:
        """Open *path*; *step* bounds the bytes of one system call (tests make it small)."""
        self.path = Path(path)
        self._writable = writable
        self._limits = Limits(max_transfer, depth, BLOCK)
        self._notes: list[str] = []
        self._arena: NDArray[np.uint8] | None = None
        self._closed = False
        self._fd = self._open(create, direct)
        try:
            mode = os.fstat(self._fd).st_mode
            self._is_block = stat.S_ISBLK(mode)
            if not self._is_block and not stat.S_ISREG(mode):
                raise UsageError(f"{self.path} is neither a file nor a block device")
            self._nblocks = self._measure()
            geometry = Geometry(self._fd, depth, max_transfer, writable, max(BLOCK, step))
            self._engine = self._start(engine, geometry)
        except BaseException:
            os.close(self._fd)
            raise

    @property
    def limits(self) -> Limits:
        """What one request and the queue may hold."""
        return self._limits

    @property
    def nblocks(self) -> int:
        """Whole blocks of the file."""
        return self._nblocks

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the uint8 *arena* that request offsets index and pin it where that is allowed."""
        self._refuse_closed()
        check_arena(arena, BLOCK, registered=self._arena is not None)
        self._arena = arena
        self._engine.register(arena)

    def submit(self, requests: Records) -> int:
        """Start a prefix of REQUEST[n]; return its length."""
        self._refuse_closed()
        if self._arena is None:
            raise UsageError(f"{self.path} has no arena: call register first")
        return self._engine.submit(request_words(requests), self._nblocks)

    def poll(self, completions: Records) -> int:
        """Fill COMPLETION[n] with finished requests; return how many."""
        return self._engine.poll(completion_words(completions))

    def wait(self, timeout: float) -> None:
        """Sleep until a request has finished, at most *timeout* seconds."""
        self._engine.wait(timeout)

    def grow(self, nblocks: int) -> None:
        """Allocate space up to *nblocks*; UsageError where there is none."""
        self._refuse_closed()
        if nblocks <= self._nblocks:
            return
        size, wanted = self._nblocks * BLOCK, nblocks * BLOCK
        if self._is_block:
            raise UsageError(
                f"{self.path} is a block device of {format_size(size)}; {format_size(wanted)}"
                f" are needed: {wanted - size} bytes are missing, use a larger device"
            )
        if not self._writable:
            raise UsageError(f"{self.path} is open for reading only")
        self._allocate(size, wanted)
        self._nblocks = nblocks

    def close(self) -> None:
        """Let transfers that run finish, cancel the rest, close the file."""
        if self._closed:
            return
        self._closed = True
        try:
            self._engine.close()
        finally:
            os.close(self._fd)

    def stats(self) -> dict[str, Any]:
        """Return the counters and what `describe` says."""
        return {**counter_dict(self._engine.counters), "describe": self.describe()}

    def describe(self) -> str:
        """Return one line for people: engine, page cache or not, and why not the fast way."""
        cache = "O_DIRECT" if self._direct else "page cache"
        notes = "".join(f"; {note}" for note in self._notes)
        return f"{self.path}: {self._engine.describe()}, {cache}{notes}"

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError(f"{self.path} is closed")

    def _open(self, create: bool, direct: bool) -> int:
        flags = (os.O_RDWR if self._writable else os.O_RDONLY) | os.O_CLOEXEC
        if create:
            flags |= os.O_CREAT
        self._direct = direct
        try:
            if direct:
                try:
                    fd = os.open(self.path, flags | os.O_DIRECT, 0o666)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._use_page_cache("the file system refuses O_DIRECT")
                    return os.open(self.path, flags, 0o666)
                return self._try_direct(fd, flags)
            return os.open(self.path, flags, 0o666)
        except OSError as error:
            raise UsageError(f"cannot open {self.path}: {error.strerror}") from error

    def _try_direct(self, fd: int, flags: int) -> int:
        """Keep *fd* if a block can be read through it: some file systems refuse only then."""
        try:
            os.preadv(fd, [allocate_arena(BLOCK).data], 0)
        except OSError as error:
            os.close(fd)
            if error.errno != errno.EINVAL:
                raise
            self._use_page_cache("O_DIRECT does not work in blocks of 4096 bytes")
            return os.open(self.path, flags, 0o666)
        return fd

    def _use_page_cache(self, why: str) -> None:
        self._direct = False
        self._notes.append(why)

    def _measure(self) -> int:
        if self._is_block:
            found = fcntl.ioctl(self._fd, _BLKGETSIZE64, bytes(8))
            return int(struct.unpack("<Q", found)[0]) // BLOCK
        return os.fstat(self._fd).st_size // BLOCK

    def _start(self, engine: EngineName, geometry: Geometry) -> Engine:
        if engine == "threads":
            return ThreadEngine(geometry)
        try:
            return UringEngine(geometry)
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            problem = _refusal(error)
            if engine == "io_uring":
                raise BackendMissing(f"{self.path}: {problem}") from error
            self._notes.append(problem)
            return ThreadEngine(geometry)

    def _allocate(self, size: int, wanted: int) -> None:
        # Not through our own descriptor: where the C library has to emulate the call it writes
        # single bytes, which O_DIRECT refuses.
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            before = os.fstat(fd).st_size
            try:
                os.posix_fallocate(fd, size, wanted - size)
            except OSError as error:
                os.ftruncate(fd, before)  # give back what was allocated before space ran out
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise UsageError(
                        f"{self.path}: cannot grow to {format_size(wanted)}: {error.strerror}"
                    ) from error
                free = os.fstatvfs(fd)
                raise UsageError(
                    f"{self.path} must grow by {format_size(wanted - size)} to"
                    f" {format_size(wanted)}, but {format_size(free.f_bavail * free.f_frsize)}"
                    f" are free ({error.strerror}): free space or use another disk"
                ) from error
        finally:
            os.close(fd)


def _refusal(error: OSError) -> str:
    fix = {
        errno.ENOSYS: "needs Linux 5.11 or newer with CONFIG_IO_URING",
        errno.ENOMEM: "raise ulimit -l",
    }.get(error.errno or 0, "allow it: sysctl kernel.io_uring_disabled=0, or the seccomp profile")
    return f"io_uring refused ({error.strerror}): {fix}"


_Kind = TypeVar("_Kind", bound=FileTransport)


def open_url(url: Url, *, create: bool, writable: bool) -> FileTransport:
    """Open a path or ``file:///path?engine=&direct=&depth=&max_transfer=``."""
    return open_file(url, FileTransport, create=create, writable=writable)


def open_file(url: Url, kind: type[_Kind], *, create: bool, writable: bool) -> _Kind:
    """Open the path of *url* as a *kind* with the options that the URL gives."""
    engine = url.text("engine", "auto")
    if engine not in ("auto", "io_uring", "threads"):
        raise UsageError(f"{url}: engine is auto, io_uring or threads, not {engine!r}")
    direct, depth = url.flag("direct", True), url.integer("depth", 64, least=1)
    max_transfer = url.size("max_transfer", 4 * MIB)
    url.refuse_unused()
    if not url.path:
        raise UsageError(f"{url} names no file")
    return kind(
        url.path,
        create=create,
        writable=writable,
        engine=engine,  # type: ignore[arg-type]
        direct=direct,
        depth=depth,
        max_transfer=max_transfer,
    )


def probe() -> str | None:
    """Return None: where io_uring is refused, threads do the work; `detail` says so."""
    return None


def detail() -> str:
    """Return how files are read on this machine, and the fix where it is the slow way."""
    try:
        open_rings(2, -1).close()
    except OSError as error:
        return f"preadv on threads, slower: {_refusal(error)}"
    return "O_DIRECT through io_uring"
