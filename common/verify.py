"""Checking every byte that a committed state refers to."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hyades.common.blocks import BlockDevice
from hyades.common.catalog import Catalog, ObjectInfo
from hyades.common.errors import DataError, DeviceLost, UsageError
from hyades.common.layout import PAGE_ENTRY
from hyades.common.pagestore import expected_rows, read_extents, read_page_of, read_table_of
from hyades.common.superblock import Superblock, read_copies

Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something wrong; *object* is "superblock", "catalog" or a name, *page* None for no page."""

    object: str
    page: int | None
    lba: int
    text: str


def verify_volume(
    blocks: BlockDevice,
    head: Superblock,
    catalog: Catalog,
    names: list[str] | None,
    progress: Progress | None,
) -> Iterator[Finding]:
    """Yield what is wrong on *blocks* with the committed state *head* and *catalog*."""
    for name in names or ():
        if name not in catalog.objects:
            raise UsageError(f"no committed object {name!r} in {blocks.name}")
    for slot, copy in enumerate(read_copies(blocks)):
        if isinstance(copy, str):
            text = f"{blocks.name}: superblock copy {slot} (LBA {slot}) {copy}"
            yield Finding("superblock", None, slot, text)
    try:
        where = f"catalog of generation {head.generation} (LBA {head.catalog.lba})"
        read_extents(blocks, [head.catalog], head.catalog_crc, where)
    except (DataError, DeviceLost) as error:
        yield Finding("catalog", None, head.catalog.lba, str(error))
    for name in catalog.objects if names is None else names:
        yield from _verify_object(blocks, catalog, catalog.objects[name], progress)


def _verify_object(
    blocks: BlockDevice, catalog: Catalog, info: ObjectInfo, progress: Progress | None
) -> Iterator[Finding]:
    try:
        table = read_table_of(blocks, info).view(PAGE_ENTRY)[: info.pages]
    except (DataError, DeviceLost) as error:
        yield Finding(info.name, None, info.table[0].lba, str(error))
        return
    unfinished = _is_unfinished(catalog, info.name)
    for page in range(info.pages):
        if table[page]["rows"] == 0 and unfinished:
            continue
        try:
            read_page_of(blocks, info, page, table[page], expected_rows(info, page))
        except (DataError, DeviceLost) as error:
            yield Finding(info.name, page, info.lba(page), str(error))
        if progress is not None:
            progress(info.page_bytes)


def _is_unfinished(catalog: Catalog, name: str) -> bool:
    """Return whether *name* belongs to a run that has not ended, so that pages may be missing."""
    runs = (run for run in catalog.runs.values() if run.state == "running")
    return any(run.name in name.split("/")[1:] for run in runs)
