"""A volume: named objects in a block space, changed by crash-safe commits.

Nothing that the last commit refers to is ever overwritten: changed page tables and catalogs go to
free space, and free space excludes what the last commit or the working catalog uses.  A commit is
refused where the device holds one that is not ours: two writers would lose each other's work.
"""

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any
from uuid import UUID, uuid4

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

from hyades.common import superblock
from hyades.common.allocator import Space
from hyades.common.blocks import BlockDevice, FileBlocks, is_blank
from hyades.common.catalog import (
    FIRST_LBA,
    Catalog,
    Extent,
    ObjectInfo,
    check_name,
    dtype_name,
    encode_catalog,
    new_object,
    parse_catalog,
    table_shape,
)
from hyades.common.checksum import crc32c
from hyades.common.errors import DataError, HyadesError, UsageError
from hyades.common.interrupts import undisturbed
from hyades.common.layout import BLOCK, PAGE_ENTRY
from hyades.common.pages import DEFAULT_PAGE, MAX_PAGE, MIN_PAGE, PageShape, shape_pages
from hyades.common.pagestore import PageStore, read_extents
from hyades.common.superblock import Superblock
from hyades.common.units import round_up
from hyades.common.verify import Finding, verify_volume

_NEVER = np.zeros(0, np.uint8)


class Volume(PageStore):
    """An open volume; `catalog` is the working copy, which `commit` makes the committed one."""

    def __init__(
        self,
        blocks: BlockDevice,
        committed: Catalog,
        slot: int,
        head: Superblock,
        *,
        writable: bool,
    ) -> None:
        super().__init__(blocks, _copy(committed), writable=writable)
        self.committed = committed
        self.head = head
        self._slot = slot
        self._broken = False

    @classmethod
    def create(
        cls, blocks: BlockDevice, page_size: int = DEFAULT_PAGE, *, overwrite: bool = False
    ) -> "Volume":
        """Return a new, empty, committed volume on *blocks*, which it owns from now on.

        UsageError where the device already holds something, unless *overwrite*.
        """
        try:
            if page_size & (page_size - 1) or not MIN_PAGE <= page_size <= MAX_PAGE:
                raise UsageError(f"page size {page_size} is no power of two from 64 KiB to 4 MiB")
            if not overwrite and not is_blank(blocks):
                raise UsageError(f"{blocks.name} already holds data; remove it or choose another")
            blocks.grow(FIRST_LBA + 1)
            blocks.write(0, bytes(FIRST_LBA * BLOCK))
            blocks.flush()
            head = Superblock(0, uuid4(), Extent(FIRST_LBA, 0), 0, 0, FIRST_LBA)
            volume = cls(blocks, Catalog(page_size=page_size), 1, head, writable=True)
            volume.commit()
        except BaseException:
            blocks.close()
            raise
        return volume

    @classmethod
    def open(cls, blocks: BlockDevice, writable: bool = False) -> "Volume":
        """Return the last committed state of the volume on *blocks*, which it owns from now on.

        DataError when there is no whole superblock, or the newest one's catalog is damaged: an
        older generation is never opened instead, since its space may be in use again.
        """
        try:
            slot, head = superblock.newest(blocks)
            committed = _load_catalog(blocks, slot, head)
        except BaseException:
            blocks.close()
            raise
        return cls(blocks, committed, slot, head, writable=writable)

    @property
    def generation(self) -> int:
        """Number of the last commit, from 1."""
        return self.head.generation

    @property
    def uuid(self) -> UUID:
        """Identity of the volume, kept over commits."""
        return self.head.uuid

    @property
    def free_blocks(self) -> int:
        """Blocks of the device that neither the last commit nor the working catalog uses."""
        return self._space().free

    def allocate_rows(
        self,
        name: str,
        dtype: DTypeLike,
        rows: int,
        width: int,
        range_rows: int,
        **attributes: int | float | str,
    ) -> ObjectInfo:
        """Return a new matrix [rows, width] with space for it, visible after the next commit."""
        element = dtype_name(dtype)
        row_bytes = np.dtype(dtype).itemsize * width
        if rows < 0 or width < 1 or range_rows < 1:
            raise UsageError(f"object {name!r}: {rows} x {width} in ranges of {range_rows} rows")
        shape = shape_pages(rows, row_bytes, range_rows, self.catalog.page_size)
        return self._allocate(new_object(name, "rows", element, width, shape, attributes))

    def allocate_table(
        self, name: str, dtype: DTypeLike, rows: int, **attributes: int | float | str
    ) -> ObjectInfo:
        """Return a new table [rows] of scalars or records, visible after the next commit."""
        if rows < 0:
            raise UsageError(f"object {name!r}: {rows} rows")
        shape = table_shape(rows, np.dtype(dtype).itemsize, self.catalog.page_size)
        return self._allocate(new_object(name, "table", dtype_name(dtype), 1, shape, attributes))

    def allocate_pages(
        self, name: str, pages: int, page_bytes: int, **attributes: int | float | str
    ) -> ObjectInfo:
        """Return *pages* new opaque pages of *page_bytes* each, visible after the next commit."""
        if pages < 0 or page_bytes < BLOCK or page_bytes % BLOCK or page_bytes > MAX_PAGE:
            raise UsageError(f"object {name!r}: {pages} pages of {page_bytes} bytes")
        shape = PageShape(pages, page_bytes, 1, 1, page_bytes)
        return self._allocate(new_object(name, "pages", "uint8", 1, shape, attributes))

    def write_table(
        self, name: str, array: NDArray[Any], **attributes: int | float | str
    ) -> ObjectInfo:
        """Allocate a table and write *array* [rows] of scalars or records to it."""
        if array.ndim != 1:
            raise UsageError(f"table {name!r}: an array of {array.ndim} dimensions")
        info = self.allocate_table(name, array.dtype, len(array), **attributes)
        array = np.ascontiguousarray(array, info.numpy_dtype)
        shape = info.shape()
        for page in range(info.pages):
            start, stop = shape.page_rows(page)
            self.write_page(info, page, array[start:stop], stop - start)
        return self.object(name)

    def remove(self, name: str) -> None:
        """Remove an object; its space is free after the next commit."""
        self._check_writable()
        self.object(name)
        del self.catalog.objects[name]
        self._forget(name)

    def rename(self, old: str, new: str) -> None:
        """Give an object another name; UsageError when that is taken."""
        self._check_writable()
        check_name(new)
        info = self.object(old)
        if new in self.catalog.objects:
            raise UsageError(f"{self.name} already has an object {new!r}; remove it first")
        self.page_table(old)  # loaded under the old name
        self.catalog.objects[new] = msgspec.structs.replace(info, name=new)
        del self.catalog.objects[old]
        self._tables[new] = self._tables.pop(old)
        self._fixed[new] = self._fixed.pop(old)
        if old in self._stored:
            self._stored[new] = self._stored.pop(old)

    def store_page_table(self, name: str) -> ObjectInfo:
        """Write the page table of *name*, not over a committed one; part of the next commit."""
        self._check_writable()
        self.page_table(name)
        info, data = self.catalog.objects[name], self._tables[name]
        extents = info.table
        if any(extent in self._committed_tables() for extent in extents):
            (extents,) = self._take([(info.table_blocks, 1)])
        at = 0
        for extent in extents:
            self.blocks.write(extent.lba, data[at : at + extent.nblocks * BLOCK])
            at += extent.nblocks * BLOCK
        self._stored[name] = data.copy()
        stored = msgspec.structs.replace(info, table=extents, table_crc=crc32c(data))
        self.catalog.objects[name] = stored
        return stored

    def commit(self) -> None:
        """Make the working catalog and every page written before the volume's state, or fail."""
        with undisturbed():
            self._commit()

    def _commit(self) -> None:
        self._check_writable()
        self._refuse_foreign()  # before anything is written: its space may be the other's
        for name, table in self._tables.items():
            if not np.array_equal(table, self._stored.get(name, _NEVER)):
                self.store_page_table(name)
        text = encode_catalog(self.catalog)
        try:
            committed = parse_catalog(text, self.blocks.nblocks)
        except DataError as error:
            raise UsageError(f"{self.name}: cannot commit: {error}") from error
        data = text + bytes(round_up(len(text), BLOCK) - len(text))
        extent = self._take_one(len(data) // BLOCK)
        self.blocks.write(extent.lba, data)
        self.blocks.flush()
        next_lba = max(e.end for e in (extent, *committed.extents()))
        head = Superblock(self.generation + 1, self.uuid, extent, len(text), crc32c(data), next_lba)
        # From here until the superblock is known to be durable the device may hold either state, so
        # nothing that either of them uses may be written: `_check_writable` refuses everything.
        self._broken = True
        self._refuse_foreign()
        target = 1 - self._slot
        self.blocks.write(target, head.pack())
        self.blocks.flush()
        self._broken = False
        mirror, self._slot, self.head, self.committed = self._slot, target, head, committed
        for name, table in self._tables.items():
            self._fixed[name] = table.view(PAGE_ENTRY)["rows"] > 0
        self.blocks.write(mirror, head.pack())  # durable with the next flush

    def rollback(self) -> None:
        """Forget what was not committed and give its space back."""
        self.catalog = _copy(self.committed)
        for name in list(self._tables):
            self._forget(name)
        self._trim()

    def foreign(self) -> Superblock | None:
        """Return the superblock on the device where it is not of our last commit, else None.

        Files are locked; a device that another host reaches, too, is not.
        """
        mine = self.head
        for copy in superblock.read_copies(self.blocks) if mine.generation else ():
            if isinstance(copy, str) or copy == mine:
                continue
            if copy.uuid != mine.uuid or copy.generation >= mine.generation:
                return copy
        return None

    def verify(
        self, names: list[str] | None = None, *, progress: Callable[[int], None] | None = None
    ) -> Iterator[Finding]:
        """Yield what is wrong with the committed state on the device; nothing when all is well.

        Superblocks and catalog always, page tables and pages of *names* (default: all objects).
        *progress* is called with the bytes checked since its last call.
        """
        return verify_volume(self.blocks, self.head, self.committed, names, progress)

    def close(self) -> None:
        """Close the device; what was not committed is forgotten."""
        try:
            self._trim()
            if self.writable:
                self.blocks.flush()
        finally:
            self.writable = False
            self.blocks.close()

    def __enter__(self) -> "Volume":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except HyadesError as failed:
            if error is None:
                raise
            error.add_note(f"Closing the volume failed, too: {failed}")

    def _check_writable(self) -> None:
        super()._check_writable()
        if self._broken:
            raise UsageError(f"{self.name}: an earlier commit failed halfway; open it again")

    def _refuse_foreign(self) -> None:
        if other := self.foreign():
            self._broken = True
            raise UsageError(
                f"{self.name}: another program has written to it meanwhile (generation"
                f" {other.generation} of {other.uuid} is there, not {self.generation} of"
                f" {self.uuid}): one at a time may; run again when the other has ended"
            )

    def _trim(self) -> None:
        # Only a file can give space back; nothing beyond next_lba is committed.
        if isinstance(self.blocks, FileBlocks) and self.writable and not self._broken:
            self.blocks.truncate(self.head.next_lba)

    def _allocate(self, info: ObjectInfo) -> ObjectInfo:
        self._check_writable()
        if info.name in self.catalog.objects:
            raise UsageError(f"{self.name} already has an object {info.name!r}; remove it first")
        extents, table = self._take(
            [(info.pages * info.page_blocks, info.page_blocks), (info.table_blocks, 1)]
        )
        data = np.zeros(info.table_blocks * BLOCK, np.uint8)
        info = msgspec.structs.replace(info, extents=extents, table=table)
        self.catalog.objects[info.name] = info
        self._tables[info.name] = data
        self._fixed[info.name] = np.zeros(len(data) // PAGE_ENTRY.itemsize, np.bool_)
        return info

    def _committed_tables(self) -> set[Extent]:
        return {extent for info in self.committed.objects.values() for extent in info.table}

    def _space(self, *, fixed: bool = False) -> Space:
        used = [*self.committed.extents(), *self.catalog.extents(), self.head.catalog]
        return Space(used, self.blocks.nblocks, fixed=fixed)

    def _take(self, wants: list[tuple[int, int]]) -> list[tuple[Extent, ...]]:
        """Return extents for each (blocks, unit), growing the device once where it must."""
        space = self._space()
        taken = [space.take(nblocks, unit) for nblocks, unit in wants]
        if space.end > self.blocks.nblocks:
            try:
                self.blocks.grow(space.end)
            except UsageError as full:
                return self._take_inside(wants, full)
        return taken

    def _take_inside(
        self, wants: list[tuple[int, int]], full: UsageError
    ) -> list[tuple[Extent, ...]]:
        """Return extents from holes of any size, since the device is *full*."""
        space = self._space(fixed=True)
        try:
            return [space.take(nblocks, unit) for nblocks, unit in wants]
        except UsageError:
            raise full from None

    def _take_one(self, nblocks: int) -> Extent:
        """Return one extent: the superblock points to a catalog in one piece."""
        ((extent, *rest),) = self._take([(nblocks, nblocks)])
        assert not rest
        return extent


def _load_catalog(blocks: BlockDevice, slot: int, head: Superblock) -> Catalog:
    """Return the catalog that *head* points to; DataError names generations and address."""
    where = f"catalog of generation {head.generation} (LBA {head.catalog.lba})"
    try:
        data = read_extents(blocks, [head.catalog], head.catalog_crc, where)
    except DataError as error:
        other = superblock.read_copies(blocks)[1 - slot]
        has = other if isinstance(other, str) else f"has generation {other.generation}"
        raise DataError(
            f"{error}; superblock copy {1 - slot} {has}; nothing older is opened, since its space "
            "may be in use again: restore the volume or ingest it again"
        ) from error
    try:
        return parse_catalog(data[: head.catalog_bytes].tobytes(), head.next_lba, (head.catalog,))
    except DataError as error:
        raise DataError(f"{blocks.name}: {where}: {error}") from error


def _copy(catalog: Catalog) -> Catalog:
    return msgspec.json.decode(encode_catalog(catalog), type=Catalog)
