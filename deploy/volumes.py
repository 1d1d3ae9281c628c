"""Opening the volume that a user names, and making one in place on a device."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyades.common.blocks import BlockDevice, FileBlocks, is_blank, make_blank
from hyades.common.errors import HyadesError, UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import format_size
from hyades.common.volume import Volume
from hyades.proxy.registry import open_transport
from hyades.proxy.stripes import erase_members, split_members
from hyades.proxy.transport_blocks import TransportBlocks
from hyades.proxy.transports.blk import check_device
from hyades.proxy.urls import Url


def open_volume(url: str, *, writable: bool = False) -> Volume:
    """Return the volume at a path or URL; UsageError, DataError or BackendMissing."""
    parsed = Url(url)
    if parsed.scheme == "file":
        # A file is locked, so that two programs cannot write to it.  Options are for pages, which
        # transports move; what is wrong with them is said now.
        blocks = FileBlocks(parsed.path, writable=writable)
        try:
            if parsed.original != parsed.path:
                open_transport(parsed, writable=False).close()
        except BaseException:
            blocks.close()
            raise
        return Volume.open(blocks, writable=writable)
    return Volume.open(open_device(url, writable=writable), writable=writable)


def open_device(
    url: str, *, writable: bool, create: bool = False, erase: bool = False
) -> BlockDevice:
    """Return the blocks behind a URL, its local files locked.

    With *create* files and members of a stripe that are absent or blank are made; with *erase*
    a stripe is made anew whatever its members hold.
    """
    with contextlib.ExitStack() as stack:
        _refuse_repeated(url, paths := local_files(url, writable=writable))
        for path in paths:
            new = create and not path.exists()  # a device is there: `local_files` has looked
            lock = FileBlocks(path, create=new, writable=writable)
            stack.callback(lock.close)
        if erase and Url(url).scheme == "stripe":
            erase_members(Url(url))
        transport = open_transport(url, create=create, writable=writable)
        return TransportBlocks(transport, url, closing=stack.pop_all().close)


def _refuse_repeated(url: str, paths: list[Path]) -> None:
    """Raise UsageError where two of *paths* are one file: its lock would blame this process."""
    for second, path in enumerate(paths):
        for other in paths[:second]:
            same = path.exists() and other.exists() and path.samefile(other)
            if same or path.absolute() == other.absolute():
                raise UsageError(f"{url}: {path} and {other} are one file; name each member once")


def parts_of(url: str) -> tuple[str, ...]:
    """Return the members of a stripe, or *url* itself."""
    parsed = Url(url)
    return split_members(parsed)[0] if parsed.scheme == "stripe" else (url,)


def local_files(url: str, *, writable: bool = False) -> list[Path]:
    """Return the local files and block devices among what *url* names; they are locked."""
    parsed = [Url(part) for part in parts_of(url)]
    for part in parsed:
        if part.scheme == "blk":
            check_device(part.path, writable=writable)
    return [Path(part.path) for part in parsed if part.scheme in ("file", "blk", "gds")]


def check_blank(url: str, *, force: bool) -> None:
    """Raise UsageError where a device of *url* holds something and *force* is not given.

    Each device is opened, so that one that cannot be reached is known before any work is done.
    """
    for part in parts_of(url):
        parsed = Url(part)
        if parsed.scheme == "file" and not Path(parsed.path).exists():
            if not Path(parsed.path).parent.is_dir():
                raise UsageError(f"{part}: there is no folder {Path(parsed.path).parent}")
            continue
        blocks = TransportBlocks(open_transport(part, create=True), part)
        try:
            if not force and not is_blank(blocks):
                raise UsageError(
                    f"{part} already holds data: pass --force to replace it, or name another"
                )
        finally:
            blocks.close()


@contextmanager
def new_in_place(url: str, page_size: int, *, force: bool, least: int = 0) -> Iterator[Volume]:
    """Give a new volume on the device *url* (no plain file); it is blank again if the block fails.

    UsageError where it is not blank, unless *force*, or cannot hold *least* bytes.
    """
    made = [path for path in local_files(url) if not path.exists()]
    begun = False
    try:
        blocks = open_device(url, writable=True, create=True, erase=force)
        with Volume.create(blocks, page_size, overwrite=force) as volume:
            begun = True
            try:
                _make_room(blocks, url, least)
                yield volume
                volume.commit()
            except BaseException:
                begun = _is_ours(volume)
                if begun:
                    _make_blank(blocks)
                else:
                    made.clear()
                raise
    except BaseException:
        if begun and Url(url).scheme == "stripe":
            with contextlib.suppress(HyadesError):
                erase_members(Url(url))
        for path in made:
            path.unlink(missing_ok=True)
        raise


def _is_ours(volume: Volume) -> bool:
    """Return False where another program has made a volume in the place of this one."""
    try:
        return volume.foreign() is None
    except HyadesError:  # the device may be what failed
        return True


def _make_blank(blocks: BlockDevice) -> None:
    """Make *blocks* look as before, as far as the device, which may be what failed, lets it."""
    with contextlib.suppress(HyadesError):
        blocks.flush()  # reports a write that failed before; the next ones would do it again
    with contextlib.suppress(HyadesError):
        make_blank(blocks)


def _make_room(blocks: BlockDevice, url: str, least: int) -> None:
    needed = -(-least // BLOCK)
    try:
        if needed > blocks.nblocks:
            blocks.grow(needed)
    except UsageError as error:
        has = blocks.nblocks * BLOCK
        raise UsageError(
            f"{url} holds {format_size(has)}, this graph needs at least {format_size(least)}:"
            f" {needed * BLOCK - has} bytes are missing: {error}"
        ) from error
