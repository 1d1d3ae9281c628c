"""The file that becomes the volume: written beside its name, renamed when it is whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyades.common.blocks import FileBlocks
from hyades.common.errors import UsageError
from hyades.common.volume import Volume
from hyades.deploy.ingest.options import PathLike


def as_path(target: PathLike) -> Path:
    """Return *target* as a path; UsageError for a URL."""
    if "://" in os.fspath(target):
        raise UsageError(f"{target}: ingest writes a local file or block device, not a URL")
    return Path(target)


@contextmanager
def new_volume(target: Path, page_size: int, *, force: bool) -> Iterator[Volume]:
    """Give a new volume that takes the name *target* if the block ends well, else vanishes.

    A block device is written in place: it must be blank, or *force* given.
    """
    check_target(target, force=force)
    if target.is_block_device():
        with Volume.create(FileBlocks(target), page_size, overwrite=force) as volume:
            yield volume
            volume.commit()
        return
    partial = target.with_name(target.name + ".partial")
    _remove_stale(partial)
    blocks = FileBlocks(partial, create=True)
    try:
        with Volume.create(blocks, page_size) as volume:
            yield volume
            volume.commit()
        check_target(target, force=force)
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _flush_folder(target.parent)


def check_target(target: Path, *, force: bool) -> None:
    """Raise UsageError unless *target* can be made, or replaced with *force*."""
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
