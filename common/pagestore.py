"""Reading and writing the pages of objects, each under the CRC32C that its page table holds."""

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.blocks import BlockDevice, as_bytes
from hyades.common.catalog import Catalog, Extent, ObjectInfo
from hyades.common.checksum import crc32c
from hyades.common.errors import DataError, UsageError
from hyades.common.layout import PAGE_ENTRY

Bytes = NDArray[np.uint8]


def read_extents(blocks: BlockDevice, extents: Sequence[Extent], crc: int, what: str) -> Bytes:
    """Return the bytes of *extents*; read once more on a wrong CRC32C, then DataError."""
    found = 0
    for _ in range(2):
        data = bytearray()
        for extent in extents:
            data += blocks.read(extent.lba, extent.nblocks)
        found = crc32c(data)
        if found == crc:
            return np.frombuffer(data, np.uint8)
    raise DataError(f"{blocks.name}: {what}: CRC32C is {found:#010x}, expected {crc:#010x}")


def read_table_of(blocks: BlockDevice, info: ObjectInfo) -> Bytes:
    """Return the page table of *info* from the device, padded to whole blocks; DataError."""
    if not info.table:
        return np.zeros(0, np.uint8)
    what = f"object {info.name!r} page table (LBA {info.table[0].lba}) of {info.pages} pages"
    return read_extents(blocks, info.table, info.table_crc, what)


def read_page_of(
    blocks: BlockDevice, info: ObjectInfo, page: int, entry: np.void, expected_rows: int
) -> Bytes:
    """Return *page* checked against its page-table *entry*; one re-read, then DataError."""
    lba, crc = info.lba(page), int(entry["crc"])
    where = f"{blocks.name}: object {info.name!r} page {page} (LBA {lba})"
    if entry["rows"] == 0:
        raise DataError(f"{where} was never written")
    if expected_rows and entry["rows"] != expected_rows:
        raise DataError(f"{where}: the page table says {entry['rows']} rows, not {expected_rows}")
    found = 0
    for _ in range(2):
        data = blocks.read(lba, info.page_blocks)
        found = crc32c(data)
        if found == crc:
            return np.frombuffer(data, np.uint8)
    raise DataError(f"{where}: CRC32C is {found:#010x}, the page table says {crc:#010x}")


class PageStore:
    """The pages of the objects in a catalog.  Several threads may touch disjoint pages."""

    blocks: BlockDevice
    catalog: Catalog

    def __init__(self, blocks: BlockDevice, catalog: Catalog, *, writable: bool) -> None:
        self.blocks = blocks
        self.catalog = catalog
        self.writable = writable
        # By object name: the page table padded to blocks, what of it lies on the device (nothing
        # for a new object), and which of its pages are committed.
        self._loading = threading.Lock()
        self._tables: dict[str, Bytes] = {}
        self._stored: dict[str, Bytes] = {}
        self._fixed: dict[str, NDArray[np.bool_]] = {}

    @property
    def name(self) -> str:
        """Path or URL of the volume."""
        return self.blocks.name

    def object(self, name: str) -> ObjectInfo:
        """Return the object called *name*; UsageError lists what there is."""
        try:
            return self.catalog.objects[name]
        except KeyError:
            has = ", ".join(sorted(self.catalog.objects)) or "nothing"
            raise UsageError(f"no object {name!r} in {self.name}; it has: {has}") from None

    def page_table(self, name: str) -> NDArray[np.void]:
        """Return the page table [pages] of PAGE_ENTRY: the cached copy, to be changed in place.

        Set an entry only after its page's write has completed: the next commit stores the table.
        """
        info = self.object(name)
        if name not in self._tables:
            with self._loading:  # two threads must not load two copies and set entries in both
                if name not in self._tables:
                    self._load_table(info)
        return self._tables[name].view(PAGE_ENTRY)[: info.pages]

    def read_page(self, info: ObjectInfo, page: int) -> Bytes:
        """Return the bytes [page_bytes] of *page*, checked; one re-read, then DataError."""
        self._check_current(info)
        table = self.page_table(info.name)
        if not 0 <= page < info.pages:
            raise UsageError(f"object {info.name!r} has no page {page}: it has {info.pages} pages")
        return read_page_of(self.blocks, info, page, table[page], expected_rows(info, page))

    def write_page(self, info: ObjectInfo, page: int, data: Any, rows: int) -> None:
        """Write *page* from the buffer *data* (shorter: padded with zeros) and set its entry.

        A page that is part of the committed state cannot be written again: allocate a new object.
        """
        self._check_writable()
        self._check_current(info)
        table = self.page_table(info.name)
        lba = info.lba(page)
        if self._fixed[info.name][page]:
            raise UsageError(
                f"{self.name}: object {info.name!r} page {page} is committed; write a new object"
            )
        expected = expected_rows(info, page)
        if rows < 1 or (expected and rows != expected):
            raise UsageError(f"object {info.name!r} page {page} holds {expected} rows, not {rows}")
        view = as_bytes(data)
        if len(view) != info.page_bytes:
            if len(view) > info.page_bytes:
                raise UsageError(
                    f"object {info.name!r}: {len(view)} bytes do not fit in a page of "
                    f"{info.page_bytes}"
                )
            view = memoryview(bytes(view) + bytes(info.page_bytes - len(view)))
        self.blocks.write(lba, view)
        table[page] = (rows, crc32c(view))

    def read_rows(self, name: str, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Return rows *start* to *stop*: [n, width] of a matrix, [n] of a table; volume order."""
        info = self.object(name)
        stop = info.rows if stop is None else stop
        if info.kind == "pages":
            raise UsageError(f"object {name!r} holds opaque pages, not rows")
        if not 0 <= start <= stop <= info.rows:
            raise UsageError(f"object {name!r} has {info.rows} rows, not rows {start} to {stop}")
        out = np.empty((stop - start, *_tail(info)), info.numpy_dtype)
        shape, at = info.shape(), start
        while at < stop:
            index, place = divmod(at, shape.range_rows)
            page = index * shape.pages_per_range + place // shape.rows_per_page
            first, end = shape.page_rows(page)
            rows = self._rows(info, page, end - first)
            end = min(end, stop)
            out[at - start : end - start] = rows[at - first : end - first]
            at = end
        return out

    def iter_rows(self, name: str) -> Iterator[tuple[int, NDArray[Any]]]:
        """Yield (first row, rows of one page) in volume order, shaped as by `read_rows`."""
        info = self.object(name)
        if info.kind == "pages":
            raise UsageError(f"object {name!r} holds opaque pages, not rows")
        shape = info.shape()
        for page in range(info.pages):
            start, stop = shape.page_rows(page)
            yield start, self._rows(info, page, stop - start)

    def read_table(self, name: str) -> NDArray[Any]:
        """Return all records [rows] of a table."""
        if self.object(name).kind != "table":
            raise UsageError(f"object {name!r} is no table: it has kind {self.object(name).kind!r}")
        return self.read_rows(name)

    def _rows(self, info: ObjectInfo, page: int, rows: int) -> NDArray[Any]:
        data = self.read_page(info, page)[: rows * info.row_bytes]
        return data.view(info.numpy_dtype).reshape(rows, *_tail(info))

    def _load_table(self, info: ObjectInfo) -> None:
        table = read_table_of(self.blocks, info)
        self._stored[info.name] = table.copy()
        self._fixed[info.name] = table.view(PAGE_ENTRY)["rows"] > 0
        self._tables[info.name] = table

    def _forget(self, name: str) -> None:
        self._tables.pop(name, None)
        self._stored.pop(name, None)
        self._fixed.pop(name, None)

    def _check_writable(self) -> None:
        if not self.writable:
            raise UsageError(f"{self.name} is open for reading only")

    def _check_current(self, info: ObjectInfo) -> None:
        current = self.catalog.objects.get(info.name)
        if current is None or current.extents != info.extents:
            raise UsageError(f"object {info.name!r} of {self.name} was removed or replaced")


def expected_rows(info: ObjectInfo, page: int) -> int:
    """Return the rows that a written *page* has; 0 for opaque pages, where any count goes."""
    if info.kind == "pages":
        return 0
    start, stop = info.shape().page_rows(page)
    return stop - start


def _tail(info: ObjectInfo) -> tuple[int, ...]:
    return (info.width,) if info.kind == "rows" else ()
