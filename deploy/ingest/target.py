"""What becomes the volume: a file is written beside its name, a device in place."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hyades.common.blocks import FileBlocks
from hyades.common.errors import UsageError
from hyades.common.volume import Volume
from hyades.deploy.ingest.options import PathLike
from hyades.deploy.volumes import check_blank, new_in_place
from hyades.proxy.urls import Url


@dataclass(frozen=True, slots=True)
class Target:
    """Where a volume goes: a local file or block device, or what a URL names, written in place."""

    name: str
    path: Path | None  # None: a URL

    @property
    def scratch(self) -> Path:
        """Folder for temporary files where the user names none: beside the volume."""
        # A device node's folder is no place for files.
        beside = self.path is not None and not self.path.is_block_device()
        return self.path.parent if self.path is not None and beside else Path("/var/tmp")


def find_target(target: PathLike) -> Target:
    """Return what *target* means; UsageError for a URL that no volume can be at."""
    name = os.fspath(target)
    parsed = Url(name)
    return Target(name, Path(parsed.path) if parsed.scheme == "file" else None)


def check_target(target: Target, *, force: bool) -> None:
    """Raise UsageError unless *target* can be made, or replaced with *force*."""
    if target.path is None:
        check_blank(target.name, force=force)
    else:
        check_path(target.path, force=force)


@contextmanager
def new_volume(target: Target, page_size: int, *, force: bool, least: int = 0) -> Iterator[Volume]:
    """Give a new volume that takes the name *target* if the block ends well, else vanishes.

    A device is written in place: it must be blank, or *force* given, and hold *least* bytes.
    """
    path = target.path
    if path is None:
        with new_in_place(target.name, page_size, force=force, least=least) as volume:
            yield volume
        return
    check_path(path, force=force)
    if path.is_block_device():
        with Volume.create(FileBlocks(path), page_size, overwrite=force) as volume:
            yield volume
            volume.commit()
    else:
        with _new_file(path, page_size, force=force) as volume:
            yield volume


@contextmanager
def _new_file(target: Path, page_size: int, *, force: bool) -> Iterator[Volume]:
    partial = target.with_name(target.name + ".partial")
    _remove_stale(partial)
    blocks = FileBlocks(partial, create=True)
    try:
        with Volume.create(blocks, page_size) as volume:
            yield volume
            volume.commit()
        check_path(target, force=force)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def check_path(target: Path, *, force: bool) -> None:
    """Raise UsageError unless the file or device *target* can be made, or replaced."""
    if target.is_dir():
        raise UsageError(f"{target} is a directory: name a file in it")
    if target.exists() and not (target.is_file() or target.is_block_device()):
        raise UsageError(f"{target} is neither a file nor a block device: name a file")
    if not target.parent.is_dir():
        raise UsageError(f"{target}: there is no folder {target.parent}")
    if target.exists() and not target.is_block_device() and not force:
        raise UsageError(f"{target} exists: choose another name or pass --force to replace it")


def _remove_stale(partial: Path) -> None:
    """Remove what a killed ingest left; UsageError while another one is writing it."""
    if partial.exists():
        FileBlocks(partial).close()
        partial.unlink()


def _flush_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
