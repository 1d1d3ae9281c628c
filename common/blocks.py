"""Devices of 4096-byte blocks with synchronous I/O: what a volume keeps its metadata on.

Bulk pages of a refresh go through Transports to the same addresses; both see the same bytes.
"""

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import DataError, DeviceLost, UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import format_size

BLANK_BLOCKS = 32  # at the beginning, where file systems and other formats keep their signatures
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class BlockDevice(Protocol):
    """Blocks at addresses 0 to nblocks - 1; a write is durable after the next flush."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""
        ...

    @property
    def nblocks(self) -> int: ...
    def read(self, lba: int, count: int) -> bytearray:
        """Return *count* blocks; DataError where the device ends first, DeviceLost on I/O error."""
        ...

    def write(self, lba: int, data: Any) -> None:
        """Write the buffer *data*, a whole number of blocks."""
        ...

    def flush(self) -> None:
        """Return when every write that returned before is durable."""
        ...

    def grow(self, nblocks: int) -> None:
        """Make the device at least *nblocks* long; UsageError when there is no space."""
        ...

    def close(self) -> None: ...


def as_bytes(data: Any) -> memoryview:
    """Return *data* (contiguous array or buffer) as a flat view of bytes."""
    if isinstance(data, np.ndarray):
        data = data.reshape(-1).view(np.uint8).data
    return memoryview(data).cast("B")


def check_span(device: BlockDevice, lba: int, nbytes: int) -> None:
    """Raise UsageError unless *nbytes* are whole blocks inside *device*."""
    if nbytes % BLOCK:
        raise UsageError(f"{device.name}: {nbytes} bytes are not a whole number of blocks")
    if lba < 0 or lba + nbytes // BLOCK > device.nblocks:
        raise UsageError(
            f"{device.name}: LBA {lba} + {nbytes // BLOCK} blocks is outside the device of "
            f"{device.nblocks} blocks"
        )


def is_blank(device: BlockDevice) -> bool:
    """Say whether the first blocks, where anything would have a signature, are zero."""
    return not any(device.read(0, min(device.nblocks, BLANK_BLOCKS)))


def make_blank(device: BlockDevice) -> None:
    """Zero the first blocks, durably."""
    device.write(0, bytes(min(device.nblocks, BLANK_BLOCKS) * BLOCK))
    device.flush()


class MemoryBlocks:
    """Blocks in memory; *maximum* bounds growth.  Content survives close, so it can be reopened."""

    def __init__(self, nblocks: int = 0, *, maximum: int | None = None, name: str = "mem:") -> None:
        self.name = name
        self.data: NDArray[np.uint8] = np.zeros(nblocks * BLOCK, np.uint8)
        self._maximum = maximum

    @property
    def nblocks(self) -> int:
        """Length in blocks."""
        return len(self.data) // BLOCK

    def read(self, lba: int, count: int) -> bytearray:
        """Return *count* blocks from *lba*."""
        if lba + count > self.nblocks:
            raise _ends_early(self.name, self.nblocks * BLOCK, lba, count)
        return bytearray(self.data[lba * BLOCK : (lba + count) * BLOCK])

    def write(self, lba: int, data: Any) -> None:
        """Write whole blocks at *lba*."""
        view = as_bytes(data)
        check_span(self, lba, len(view))
        self.data[lba * BLOCK : lba * BLOCK + len(view)] = view

    def flush(self) -> None:
        """Nothing to do."""

    def grow(self, nblocks: int) -> None:
        """Extend with zeros; UsageError beyond *maximum*."""
        if self._maximum is not None and nblocks > self._maximum:
            raise UsageError(
                f"{self.name}: no space for {nblocks * BLOCK} bytes: "
                f"{(nblocks - self._maximum) * BLOCK} bytes are missing"
            )
        if nblocks > self.nblocks:
            data = np.zeros(nblocks * BLOCK, np.uint8)
            data[: len(self.data)] = self.data
            self.data = data

    def close(self) -> None:
        """Nothing to do."""


class FileBlocks:
    """A regular file or block device, locked: exclusively by a writer, shared by readers.

    With *create* a regular file must not exist yet; a block device is opened as it is.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, create: bool = False, writable: bool = True
    ) -> None:
        self.name = os.fspath(path)
        self.writable = writable or create
        self._fd = -1
        self._fd = _open(Path(path), create=create, writable=self.writable)
        mode = os.fstat(self._fd).st_mode
        self.regular = stat.S_ISREG(mode)
        try:
            if not self.regular and not stat.S_ISBLK(mode):
                raise UsageError(f"{self.name} is neither a file nor a block device")
            self._lock()
            self._nblocks = os.lseek(self._fd, 0, os.SEEK_END) // BLOCK
        except BaseException:
            self.close()
            raise

    @property
    def nblocks(self) -> int:
        """Length in whole blocks."""
        return self._nblocks

    def read(self, lba: int, count: int) -> bytearray:
        """Return *count* blocks from *lba*."""
        data = bytearray(count * BLOCK)
        view, done = memoryview(data), 0
        while done < len(data):
            try:
                got = os.preadv(self._fd, [view[done:]], lba * BLOCK + done)
            except OSError as error:
                raise self._lost("read", lba, error) from error
            if got == 0:
                raise _ends_early(self.name, lba * BLOCK + done, lba, count)
            done += got
        return data

    def write(self, lba: int, data: Any) -> None:
        """Write whole blocks at *lba*, inside the device."""
        if not self.writable:
            raise UsageError(f"{self.name} is open for reading only")
        view, done = as_bytes(data), 0
        check_span(self, lba, len(view))
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], lba * BLOCK + done)
            except OSError as error:
                if error.errno in _FULL:
                    raise UsageError(f"{self.name}: no space left for LBA {lba}") from error
                raise self._lost("write", lba, error) from error

    def flush(self) -> None:
        """Return when written data is durable."""
        if not self.writable:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise DeviceLost(f"{self.name}: flush failed: {error.strerror}") from error

    def grow(self, nblocks: int) -> None:
        """Allocate space up to *nblocks*; UsageError with the missing bytes, nothing changed."""
        old = os.lseek(self._fd, 0, os.SEEK_END)
        add = nblocks * BLOCK - old
        if add <= 0:
            self._nblocks = old // BLOCK
            return
        if not self.regular:
            raise UsageError(
                f"{self.name}: the device is full: {add} bytes are missing; "
                "remove an object or use a larger device"
            )
        try:
            os.posix_fallocate(self._fd, old, add)
        except OSError as error:
            os.ftruncate(self._fd, old)
            if error.errno not in _FULL:
                raise DeviceLost(f"{self.name}: cannot grow: {error.strerror}") from error
            raise UsageError(self._no_space(add, error)) from error
        self._nblocks = nblocks

    def truncate(self, nblocks: int) -> None:
        """Give what lies beyond *nblocks* back to the file system (regular files only)."""
        # Somebody else may have cut the file: then it must not be made longer again.
        if self.regular and nblocks * BLOCK < os.fstat(self._fd).st_size:
            os.ftruncate(self._fd, nblocks * BLOCK)
            self._nblocks = nblocks

    def close(self) -> None:
        """Release the file and its lock."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()

    def _lock(self) -> None:
        kind = fcntl.LOCK_EX if self.writable else fcntl.LOCK_SH
        try:
            fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise DeviceLost(f"{self.name}: cannot lock: {error.strerror}") from error
            doing = "written" if not self.writable else "used"
            raise UsageError(
                f"{self.name} is being {doing} by {_holder(self._fd)}; wait for it to end"
            ) from error

    def _lost(self, what: str, lba: int, error: OSError) -> DeviceLost:
        return DeviceLost(f"{self.name}: {what} at LBA {lba} failed: {error.strerror}")

    def _no_space(self, add: int, error: OSError) -> str:
        need = f"{self.name}: no space for {format_size(add)} more"
        if error.errno == errno.EFBIG:
            return f"{need}: the file size limit stops {add} bytes (see ulimit -f)"
        found = os.fstatvfs(self._fd)
        missing = max(add - found.f_bavail * found.f_frsize, 1)
        return f"{need}: {missing} bytes are missing on the file system; free them or move it"


def _ends_early(name: str, at: int, lba: int, count: int) -> DataError:
    return DataError(
        f"{name}: ends at byte {at}, but {count} blocks were expected at LBA {lba}: truncated"
    )


def _open(path: Path, *, create: bool, writable: bool) -> int:
    flags = os.O_RDWR if writable else os.O_RDONLY
    if create and not path.is_block_device():
        flags |= os.O_CREAT | os.O_EXCL
    try:
        if path.is_dir():
            raise UsageError(f"{path} is a directory, not a volume")
        fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
        if flags & os.O_CREAT:
            _sync_folder(path.parent)  # or the file itself could be lost with the power
        return fd
    except FileExistsError as error:
        raise UsageError(f"{path} exists; remove it or choose another name") from error
    except FileNotFoundError as error:
        what = f"no folder {path.parent} for the volume {path}" if create else f"no volume {path}"
        raise UsageError(what) from error
    except OSError as error:
        raise UsageError(f"cannot open {path}: {error.strerror}") from error


def _sync_folder(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _holder(fd: int) -> str:
    """Return who holds a lock on the file behind *fd*, as far as /proc tells."""
    found = os.fstat(fd)
    where = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if "FLOCK" in fields and "->" not in fields and where in fields:
                pid = fields[fields.index(where) - 1]
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                return f"process {pid} ({command.decode(errors='replace').strip()[:80]})"
    return "another process"
