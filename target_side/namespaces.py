"""What a namespace's blocks lie in: a file, a block device, or memory.

Rules:
1. Offsets and lengths are bytes within the namespace; whoever calls has checked them against the
   size (`refuse` does).  Calls may come from several threads at once.
2. An operation returns an NVMe status code, 0 for success: an I/O error is the command's, not the
   connection's.  Nothing raises once the namespace is open.
3. A read is by reference where that is possible: `view` is memory that may be sent from and
   received into, `reference` is a range of a file for os.sendfile.  Else `read_into`.
4. A file is locked (flock) while it is open: exclusively when it may be written, shared when not,
   as hyades.common.blocks does; so one volume is never written locally and remotely at once.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from hyades.common.errors import UsageError
from hyades.common.nvme.status import DNR, StatusCode
from hyades.common.units import MIB, format_size

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_SUCH_CALL = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV)
_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 0x01, 0x02, 0x10  # fallocate(2)
_ZEROS = memoryview(bytes(MIB))


@dataclass(slots=True)
class FileRange:
    """A range of a file that is sent by reference; `status` says what went wrong in sending."""

    fd: int
    offset: int
    nbytes: int
    cid: int = 0
    status: int = 0
    begin: float = field(default=0.0, compare=False)


class Namespace(Protocol):
    """See the module; `identity` tells namespaces apart that may stand under one id, else ""."""

    name: str
    identity: str
    block_bytes: int
    blocks: int
    read_only: bool

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """Return the memory that these bytes lie in, or None where they lie in a file."""
        ...

    def reference(self, offset: int, nbytes: int) -> FileRange | None:
        """Return these bytes as a range of a file, or None where they must be read."""
        ...

    def expect(self, offset: int, nbytes: int) -> None:
        """Start to fetch what will be read soon."""
        ...

    def read_into(self, offset: int, into: memoryview) -> int:
        """Fill *into*; return a status code."""
        ...

    def write(self, offset: int, data: memoryview) -> int:
        """Write *data*; return a status code."""
        ...

    def zero(self, offset: int, nbytes: int) -> int:
        """Write zeroes; return a status code."""
        ...

    def flush(self) -> int:
        """Make what was written durable; return a status code."""
        ...

    def close(self) -> None:
        """Let go of it."""
        ...


class FileNamespace:
    """A regular file or block device, through the page cache."""

    def __init__(
        self, path: str | os.PathLike[str], *, block_bytes: int = 4096, read_only: bool = False,
        create: int = 0,
    ) -> None:  # fmt: skip
        """Open and lock *path*; where it is absent and *create* is not 0, make it that long."""
        self.path = Path(path)
        self.name, self.identity = str(self.path), ""
        self.block_bytes, self.read_only = check_block(block_bytes, self.name), read_only
        self._fd = self._open(create)
        try:
            self._lock()
            size = self._measure()
            self.blocks = size // block_bytes
            if not self.blocks:
                raise UsageError(
                    f"{self.name} holds {size} bytes, less than a block of {block_bytes}: make it"
                    " with --create SIZE, or name a file that hyades ingest has written"
                )
        except BaseException:
            self.close()
            raise

    def view(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        """Return None: the bytes lie in a file."""
        return None

    def reference(self, offset: int, nbytes: int) -> FileRange | None:
        """Return the range."""
        return FileRange(self._fd, offset, nbytes)

    def expect(self, offset: int, nbytes: int) -> None:
        """Ask the kernel to read ahead."""
        os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def read_into(self, offset: int, into: memoryview) -> int:
        """Fill *into*; a file that was cut meanwhile is a read error."""
        try:
            while into:
                count = os.preadv(self._fd, [into], offset)
                if not count:
                    return StatusCode.READ_ERROR
                into, offset = into[count:], offset + count
        except OSError as error:
            return status_of(error, StatusCode.READ_ERROR)
        return 0

    def write(self, offset: int, data: memoryview) -> int:
        """Write *data* into the page cache."""
        try:
            while data:
                count = os.pwrite(self._fd, data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            return status_of(error, StatusCode.WRITE_FAULT)
        return 0

    def zero(self, offset: int, nbytes: int) -> int:
        """Write zeroes, by fallocate where the file system can."""
        for mode in (_ZERO_RANGE | _KEEP_SIZE, _PUNCH_HOLE | _KEEP_SIZE):
            try:
                _fallocate(self._fd, mode, offset, nbytes)
                return 0
            except OSError as error:
                if error.errno not in _NO_SUCH_CALL:
                    return status_of(error, StatusCode.WRITE_FAULT)
        end = offset + nbytes
        while offset < end:
            step = min(len(_ZEROS), end - offset)
            if status := self.write(offset, _ZEROS[:step]):
                return status
            offset += step
        return 0

    def flush(self) -> int:
        """Write what is dirty to the disk."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            return status_of(error, StatusCode.WRITE_FAULT)
        return 0

    def close(self) -> None:
        """Release the file and its lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, create: int) -> int:
        flags = (os.O_RDONLY if self.read_only else os.O_RDWR) | os.O_CLOEXEC
        try:
            if create and not self.path.exists():
                if self.read_only:
                    raise UsageError(f"{self.name} does not exist, and read-only makes no file")
                return self._make(flags, create)
            mode = self.path.stat().st_mode
            if stat.S_ISBLK(mode) and not self.read_only:
                flags |= os.O_EXCL  # refuses what is mounted
            elif not stat.S_ISBLK(mode) and not stat.S_ISREG(mode):
                raise UsageError(f"{self.name} is neither a file nor a block device")
            return os.open(self.path, flags)
        except FileNotFoundError:
            raise UsageError(
                f"{self.name} does not exist: make it with --create SIZE, for example --create"
                " 10GiB"
            ) from None
        except OSError as error:
            busy = " (is it mounted?)" if error.errno == errno.EBUSY else ""
            raise UsageError(f"cannot open {self.name}: {error.strerror}{busy}") from error

    def _make(self, flags: int, nbytes: int) -> int:
        if nbytes < self.block_bytes:
            raise UsageError(f"--create {nbytes} is less than a block of {self.block_bytes} bytes")
        if not self.path.parent.is_dir():
            raise UsageError(f"{self.name}: there is no folder {self.path.parent}")
        fd = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.ftruncate(fd, nbytes)
        except BaseException:
            os.close(fd)
            self.path.unlink(missing_ok=True)
            raise
        return fd

    def _measure(self) -> int:
        try:
            return os.lseek(self._fd, 0, os.SEEK_END)
        except OSError as error:  # files of /proc
            raise UsageError(f"{self.name} has no size: {error.strerror}") from error

    def _lock(self) -> None:
        kind = fcntl.LOCK_SH if self.read_only else fcntl.LOCK_EX
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            doing = "written" if self.read_only else "used"
            raise UsageError(
                f"{self.name} is being {doing} by another process; wait for it to end, or find it"
                f" with: fuser -v {self.name}"
            ) from error


class MemoryNamespace:
    """Memory that is gone when the target ends."""

    def __init__(self, nbytes: int, *, block_bytes: int = 4096, read_only: bool = False) -> None:
        self.name, self.identity = f"mem:{format_size(nbytes).replace(' ', '')}", ""
        self.block_bytes, self.read_only = check_block(block_bytes, self.name), read_only
        self.blocks = nbytes // block_bytes
        if not self.blocks:
            raise UsageError(f"{self.name} is less than a block of {block_bytes} bytes")
        try:
            self._map = mmap.mmap(-1, self.blocks * block_bytes)
        except (OSError, OverflowError) as error:
            raise UsageError(f"{self.name} is more memory than can be had: {error}") from error
        self._memory = memoryview(self._map)

    def view(self, offset: int, nbytes: int) -> memoryview | None:
        """Return the memory."""
        return self._memory[offset : offset + nbytes]

    def reference(self, offset: int, nbytes: int) -> FileRange | None:  # noqa: ARG002
        """Return None: there is no file."""
        return None

    def expect(self, offset: int, nbytes: int) -> None:
        """Do nothing: it is there."""

    def read_into(self, offset: int, into: memoryview) -> int:
        """Copy the bytes out."""
        into[:] = self._memory[offset : offset + len(into)]
        return 0

    def write(self, offset: int, data: memoryview) -> int:
        """Copy *data* in."""
        self._memory[offset : offset + len(data)] = data
        return 0

    def zero(self, offset: int, nbytes: int) -> int:
        """Write zeroes."""
        end = offset + nbytes
        while offset < end:
            step = min(len(_ZEROS), end - offset)
            self._memory[offset : offset + step] = _ZEROS[:step]
            offset += step
        return 0

    def flush(self) -> int:
        """Do nothing: it is as durable as it will be."""
        return 0

    def close(self) -> None:
        """Forget it; the memory goes with the last command that refers to it."""
        self._memory = memoryview(b"")


def check_block(block_bytes: int, name: str) -> int:
    """Return *block_bytes* if a logical block can have that size; UsageError."""
    if block_bytes not in (512, 1024, 2048, 4096):
        raise UsageError(f"{name}: a logical block has 512 or 4096 bytes, not {block_bytes}")
    return block_bytes


def status_of(error: OSError, otherwise: StatusCode) -> int:
    """Return the status code for *error*; *otherwise* is the medium's own fault."""
    if error.errno in _FULL:
        return StatusCode.CAPACITY_EXCEEDED | DNR
    if error.errno in (errno.EROFS, errno.EPERM, errno.EACCES):
        return StatusCode.WRITE_PROTECTED | DNR
    return otherwise


def _fallocate(fd: int, mode: int, offset: int, nbytes: int) -> None:
    """Call fallocate(2), which os lacks (posix_fallocate takes no mode)."""
    libc = ctypes.CDLL(None, use_errno=True)
    call = libc.fallocate64 if hasattr(libc, "fallocate64") else libc.fallocate
    call.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if call(fd, mode, offset, nbytes):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
