"""A local block device: ``blk:/dev/nvme1n1`` or ``blk:///dev/nvme1n1?depth=128``.

The file transport on a raw SSD, or on a namespace that ``nvme connect`` brought here, with what a
device needs on top: nothing but a block device is opened, one that is read-only or mounted is not
written to, and its logical blocks may be of 512 bytes.  Its length counts in whole blocks of 4096
bytes; what is left at the end is not used.
"""

import errno
import fcntl
import os
import stat
import struct
from pathlib import Path
from typing import Any

from hyades.common.errors import UsageError
from hyades.common.units import format_size
from hyades.proxy.transports.file import FileTransport, open_file
from hyades.proxy.urls import Url

_BLKROGET, _BLKSSZGET = 0x125E, 0x1268
_SECTOR = 512  # unit of /sys/block/*/size
_LISTED = 6  # disks that `detail` names
_NO_DISKS = ("loop", "ram", "zram")  # they work, but nobody looks for them


class BlkTransport(FileTransport):
    """A FileTransport that knows the size of the device's logical blocks."""

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        """Open *path*; the options are those of FileTransport."""
        super().__init__(path, **options)
        self.logical_block = _number(self._fd, _BLKSSZGET, "I")  # bytes of a logical block (LBA)

    def describe(self) -> str:
        """Return one line for people."""
        return f"{super().describe()}, logical blocks of {self.logical_block} bytes"


def open_url(url: Url, *, create: bool, writable: bool) -> BlkTransport:  # noqa: ARG001
    """Open ``blk:/dev/NAME?engine=&direct=&depth=&max_transfer=``; there is nothing to create."""
    check_device(url.path, writable=writable)
    return open_file(url, BlkTransport, create=False, writable=writable)


def check_device(path: str | os.PathLike[str], *, writable: bool) -> None:
    """Raise UsageError unless *path* is a block device, and one that may be written if need be."""
    name = os.fspath(path)
    if not name:
        raise UsageError("blk: names no device: write blk:/dev/NAME (lsblk lists devices)")
    try:
        mode = Path(name).stat().st_mode
    except OSError as error:
        raise UsageError(f"cannot open {name}: {error.strerror} (lsblk lists devices)") from error
    if not stat.S_ISBLK(mode):
        raise UsageError(f"{name} is no block device: for a file, use a plain path without blk:")
    try:
        # Exclusively, and for a moment only: the kernel refuses what is mounted or part of a set.
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_EXCL if writable else 0)
        fd = os.open(name, flags)
    except OSError as error:
        raise UsageError(_refusal(name, error)) from error
    try:
        if writable and _number(fd, _BLKROGET, "i"):
            raise UsageError(
                f"{name} is read-only: set it writable (blockdev --setrw {name}) or use another"
            )
    finally:
        os.close(fd)


def probe() -> str | None:
    """Return None: whatever the kernel calls a block device will do."""
    return None


def detail(root: Path = Path("/")) -> str:
    """Return the disks of this machine, with sizes and logical blocks."""
    found = []
    for entry in sorted((root / "sys/block").glob("*")):
        try:
            size = int((entry / "size").read_text()) * _SECTOR
            lba = (entry / "queue/logical_block_size").read_text().strip()
        except FileNotFoundError:
            continue  # it was taken away in this moment
        if size and not entry.name.startswith(_NO_DISKS):
            found.append(f"/dev/{entry.name} {format_size(size)} (LBA {lba})")
    more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
    return (", ".join(found[:_LISTED]) or "no disks") + more


def _refusal(name: str, error: OSError) -> str:
    if error.errno == errno.EBUSY:
        return f"{name} is mounted or part of another device: unmount it, or use another"
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"cannot open {name}: {error.strerror}: run as root, or join the group disk"
    return f"cannot open {name}: {error.strerror}"


def _number(fd: int, request: int, form: str) -> int:
    found = fcntl.ioctl(fd, request, bytes(struct.calcsize(form)))
    return int(struct.unpack(form, found)[0])
