"""Output volumes: where a refresh writes when the volume that it reads is not to be touched.

Rules:
1. An output volume belongs to one source, by its uuid; nothing else may be written to it.
2. It holds what export needs: the graph's facts, and the tables that lead back to the user's ids.
3. One that is empty, or that was being made when the power went, counts as blank.
"""

from pathlib import Path

import msgspec

from hyades.common.blocks import BlockDevice, FileBlocks, is_blank
from hyades.common.errors import DataError, UsageError
from hyades.common.superblock import is_superblock
from hyades.common.volume import Volume
from hyades.deploy.original import ORDER, ORIGINAL_IDS
from hyades.deploy.volumes import local_files, open_device
from hyades.proxy.urls import Url

SOURCE, SOURCE_UUID = "source", "source_uuid"  # attributes in the catalog of an output volume


def open_outputs(url: str, source: Volume, source_url: str) -> Volume:
    """Return the output volume at *url* open for writing, made if there is none.

    UsageError where *url* holds anything else than outputs of *source*.
    """
    _refuse_source(url, source_url)
    new = [path for path in local_files(url) if not path.exists()]
    try:
        volume = _open_or_create(url, source.catalog.page_size)
        try:
            take_outputs(volume, source, source_url)
        except BaseException:
            volume.close()
            raise
    except BaseException:
        for path in new:
            path.unlink(missing_ok=True)
        raise
    return volume


def take_outputs(volume: Volume, source: Volume, source_url: str) -> None:
    """Make the empty *volume* an output volume of *source*, or check that it is one."""
    catalog = volume.catalog
    if volume.uuid == source.uuid:
        raise UsageError(
            f"{volume.name} is the volume that is read, too: leave --output-volume out"
        )
    if SOURCE_UUID not in catalog.attributes:
        if catalog.objects or catalog.runs or catalog.graph is not None:
            raise UsageError(
                f"{volume.name} is a volume with a graph of its own: name a blank device, a new"
                f" file, or an output volume of {source.name}"
            )
        _fill(volume, source, source_url)
        return
    belongs = catalog.attributes[SOURCE_UUID]
    if belongs != str(source.uuid):
        raise UsageError(
            f"{volume.name} holds outputs of {catalog.attributes.get(SOURCE, '?')} (uuid"
            f" {belongs}), not of {source.name} (uuid {source.uuid}): name another output volume"
        )
    if catalog.graph != source.catalog.graph:
        raise DataError(f"{volume.name} and {source.name} describe the same graph differently")


def source_of(volume: Volume) -> tuple[str, str] | None:
    """Return URL and uuid of the volume whose outputs these are, or None."""
    attributes = volume.catalog.attributes
    if SOURCE_UUID not in attributes:
        return None
    return attributes.get(SOURCE, "?"), attributes[SOURCE_UUID]


def _open_or_create(url: str, page_size: int) -> Volume:
    device = _open_device(url)
    try:
        blank = is_blank(device)
        known = blank or any(is_superblock(device.read(lba, 1)) for lba in range(2))
    except BaseException:
        device.close()
        raise
    if blank:
        return Volume.create(device, page_size)
    if not known:
        device.close()
        raise UsageError(
            f"{url} holds something that is no volume: name a blank device or a new file"
        )
    return Volume.open(device, writable=True)


def _open_device(url: str) -> BlockDevice:
    parsed = Url(url)
    if parsed.scheme != "file":
        return open_device(url, writable=True, create=True)
    path = Path(parsed.path)
    return FileBlocks(path, create=not path.exists())


def _fill(volume: Volume, source: Volume, source_url: str) -> None:
    """Copy what export needs and commit it."""
    graph = source.catalog.graph
    if graph is None:
        raise UsageError(f"{source.name} holds no graph: run `hyades ingest` first")
    volume.catalog.graph = msgspec.structs.replace(graph)
    for name in (ORDER, ORIGINAL_IDS):
        if name in source.catalog.objects:
            _copy_table(volume, source, name)
    volume.catalog.attributes |= {SOURCE: source_url, SOURCE_UUID: str(source.uuid)}
    volume.commit()


def _copy_table(volume: Volume, source: Volume, name: str) -> None:
    info = source.object(name)
    copy = volume.allocate_table(name, info.numpy_dtype, info.rows, **info.attributes)
    if copy.shape() != info.shape():
        raise UsageError(
            f"{volume.name} has pages of {volume.catalog.page_size} bytes, {source.name} of"
            f" {source.catalog.page_size}: name another output volume"
        )
    shape = info.shape()
    for page in range(info.pages):
        first, end = shape.page_rows(page)
        volume.write_page(copy, page, source.read_page(info, page), end - first)


def _refuse_source(url: str, source_url: str) -> None:
    """Raise UsageError where both are one file: the lock's message would not say so."""
    for path in local_files(url):
        for other in local_files(source_url):
            if path.exists() and other.exists() and path.samefile(other):
                raise UsageError(
                    f"{path} belongs to the volume that is read, {source_url}: leave"
                    " --output-volume out to write there, or name another place"
                )
