"""Pages of a view: rows that a target computes when they are read.

Both sides must agree on this.  Rules:
1. No table of checksums can exist before a page is computed, so each page carries its own, in the
   last 4 bytes of its used blocks: CRC32C of all bytes before, XOR tag. The tag is page number XOR
   the view's salt. So the CRC32C of a whole page, trailer included, is `page_crc` of its number:
   who reads pages can check them like those of an object, and a page of another number or another
   view does not pass.
2. A *dense* view holds every row, at fixed places: page and place follow from the row (PageShape).
   All blocks of a page are used.
3. A *sparse* view holds some rows of each range, packed in order of their local ids. A range has
   pages for all its rows; page i of a range holds its rows [i * rows_per_page, ...), pages behind
   the last row are empty. Used are only as many blocks as the content needs: a reader that knows
   the count (it is in the view's head) reads those alone; the blocks behind are zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.checksum import crc32c
from hyades.common.errors import DataError, UsageError
from hyades.common.layout import (
    BLOCK,
    FORMAT_VERSION,
    VIEW_PAGE,
    VIEW_PAGE_MAGIC,
    VIEW_TRAILER,
)
from hyades.common.pages import MAX_PAGE, MIN_PAGE, PageShape
from hyades.common.units import round_up

Bytes = NDArray[np.uint8]
Ids = NDArray[np.uint16]

_TRAILER = VIEW_TRAILER.itemsize
_IDS_AT = VIEW_PAGE.itemsize
_ALIGN = 64


# --- checksums


def page_crc(page: int, salt: int) -> int:
    """Return the CRC32C that all used bytes of *page* have, trailer included."""
    # A CRC register that meets its own value XOR tag is left as one that met the tag alone.
    return crc32c(_tag(page, salt).to_bytes(4, "little"))


def _tag(page: int, salt: int) -> int:
    return (page ^ salt) & 0xFFFFFFFF


def seal(data: Bytes, page: int, salt: int) -> None:
    """Write the trailer of *data*, all used bytes of *page*: nothing changes after this."""
    data[-_TRAILER:].view(VIEW_TRAILER)[0] = crc32c(data[:-_TRAILER]) ^ _tag(page, salt)


def _check_seal(data: Bytes, page: int, salt: int) -> None:
    found, expected = crc32c(data), page_crc(page, salt)
    if found != expected:
        raise DataError(f"view page {page}: CRC32C is {found:#010x}, expected {expected:#010x}")


# --- dense pages


def check_page_size(page_size: int) -> None:
    """Raise UsageError unless *page_size* may bound the pages of a view."""
    if page_size & (page_size - 1) or not MIN_PAGE <= page_size <= MAX_PAGE:
        raise UsageError(f"page size {page_size} is not a power of two from 64 KiB to 4 MiB")


def dense_shape(rows: int, row_bytes: int, range_rows: int, page_size: int) -> PageShape:
    """Cut ranges evenly into pages of at most *page_size* bytes, trailer included; UsageError."""
    check_page_size(page_size)
    most = (page_size - _TRAILER) // row_bytes
    if most < 1:
        raise UsageError(f"a row of {row_bytes} bytes does not fit in a page of {page_size} bytes")
    rows_per_page = -(-range_rows // -(-range_rows // most))
    page_bytes = round_up(rows_per_page * row_bytes + _TRAILER, BLOCK)
    return PageShape(rows, row_bytes, range_rows, rows_per_page, page_bytes)


def build_dense(shape: PageShape, page: int, rows: Bytes, salt: int) -> Bytes:
    """Return *page* [page_bytes] with its *rows* [n, row_bytes]."""
    data, places = open_dense(shape, page)
    places[...] = rows
    seal(data, page, salt)
    return data


def open_dense(shape: PageShape, page: int) -> tuple[Bytes, Bytes]:
    """Return *page* [page_bytes] and the places [n, row_bytes] of its rows in it, to be filled.

    Its rows have any content, the rest is zeros; `seal` ends it.
    """
    start, stop = shape.page_rows(page)
    used = (stop - start) * shape.row_bytes
    data = np.empty(shape.page_bytes, np.uint8)
    data[used:] = 0
    return data, data[:used].reshape(stop - start, shape.row_bytes)


def parse_dense(shape: PageShape, page: int, data: Any, salt: int) -> Bytes:
    """Return the rows [n, row_bytes] of *page*, not copied; DataError."""
    view = _bytes_of(data, shape.page_bytes, page)
    _check_seal(view, page, salt)
    start, stop = shape.page_rows(page)
    return view[: (stop - start) * shape.row_bytes].reshape(stop - start, shape.row_bytes)


def _bytes_of(data: Any, nbytes: int, page: int) -> Bytes:
    view = np.frombuffer(data, np.uint8)
    if len(view) < nbytes:
        raise DataError(f"view page {page}: {len(view)} bytes of {nbytes}")
    return view[:nbytes]


# --- sparse pages


@dataclass(frozen=True, slots=True)
class SparseShape:
    """Pages that have room for every row of every range, and hold some."""

    rows: int  # of the source
    row_bytes: int
    range_rows: int
    rows_per_page: int
    page_bytes: int  # a page's place: multiple of BLOCK

    @property
    def pages_per_range(self) -> int:
        """Pages of every range, the last one included."""
        return -(-self.range_rows // self.rows_per_page)

    @property
    def ranges(self) -> int:
        """Number of ranges, the last one perhaps short."""
        return -(-self.rows // self.range_rows)

    @property
    def pages(self) -> int:
        """Number of pages of the view."""
        return self.ranges * self.pages_per_range

    def first_page(self, index: int) -> int:
        """Return the first page of range *index*; ``first_page(ranges)`` is the page count."""
        return index * self.pages_per_range

    def range_size(self, index: int) -> int:
        """Return the rows of the source in range *index*."""
        return min(self.range_rows, self.rows - index * self.range_rows)

    def used_pages(self, total: int) -> int:
        """Return how many pages *total* rows of a range fill."""
        return -(-total // self.rows_per_page)

    def page_count(self, page: int, total: int) -> int:
        """Return the rows of *page* where its range has *total*."""
        first = page % self.pages_per_range * self.rows_per_page
        return max(0, min(self.rows_per_page, total - first))

    def used_bytes(self, count: int) -> int:
        """Return the bytes that matter of a page with *count* rows: whole blocks."""
        return round_up(rows_at(count) + count * self.row_bytes + _TRAILER, BLOCK)


def sparse_bytes(shape: SparseShape, counts: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
    """Return the bytes that hold something of each page, int64 [pages]; *counts* by range."""
    totals = np.repeat(counts.astype(np.int64), shape.pages_per_range)
    first = np.arange(shape.pages) % shape.pages_per_range * shape.rows_per_page
    rows = np.clip(totals - first, 0, shape.rows_per_page)
    at = -(-(_IDS_AT + 2 * rows) // _ALIGN) * _ALIGN
    used = -(-(at + rows * shape.row_bytes + _TRAILER) // BLOCK) * BLOCK
    return np.where(rows > 0, used, 0)


def rows_at(count: int) -> int:
    """Return where the rows of a sparse page with *count* rows begin."""
    return round_up(_IDS_AT + 2 * count, _ALIGN)


def sparse_shape(rows: int, row_bytes: int, range_rows: int, page_size: int) -> SparseShape:
    """Return pages of at most *page_size* bytes, as full as they can be; UsageError."""
    check_page_size(page_size)
    count = min(range_rows, (page_size - _IDS_AT - _TRAILER) // (row_bytes + 2))
    while count > 0 and rows_at(count) + count * row_bytes + _TRAILER > page_size:
        count -= 1
    if count < 1:
        raise UsageError(f"a row of {row_bytes} bytes does not fit in a page of {page_size} bytes")
    shape = SparseShape(rows, row_bytes, range_rows, count, page_size)
    return SparseShape(rows, row_bytes, range_rows, count, shape.used_bytes(count))


def build_sparse(shape: SparseShape, page: int, ids: Ids, rows: Bytes, salt: int) -> Bytes:
    """Return the used bytes of *page*, given *ids* [total] and *rows* [total, row_bytes] of its
    whole range.
    """
    index, place = divmod(page, shape.pages_per_range)
    count = shape.page_count(page, len(ids))
    first = min(place * shape.rows_per_page, len(ids))
    data = np.zeros(shape.used_bytes(count), np.uint8)
    header = (VIEW_PAGE_MAGIC, FORMAT_VERSION, page, index, first, count, len(ids), shape.row_bytes)
    data[:_IDS_AT].view(VIEW_PAGE)[0] = header
    data[_IDS_AT : _IDS_AT + 2 * count].view("<u2")[...] = ids[first : first + count]
    at = rows_at(count)
    part = rows[first : first + count]
    data[at : at + part.size] = part.reshape(-1)
    seal(data, page, salt)
    return data


@dataclass(frozen=True, slots=True)
class SparsePage:
    """What a sparse page holds: ids [count] ascending and rows [count, row_bytes], not copied."""

    first: int
    total: int
    ids: Ids
    rows: Bytes


def parse_sparse(shape: SparseShape, page: int, data: Any, salt: int) -> SparsePage:
    """Return what *page* holds; *data* are its used bytes or more of its place. DataError."""
    head = _bytes_of(data, _IDS_AT, page).view(VIEW_PAGE)[0]
    names = VIEW_PAGE.names or ()
    magic, version, number, index, first, count, total, row_bytes = (int(head[n]) for n in names)
    if magic != VIEW_PAGE_MAGIC or version != FORMAT_VERSION:
        raise DataError(f"view page {page}: magic {magic:#010x}, version {version}")
    if count > shape.rows_per_page:
        raise DataError(f"view page {page}: {count} rows, at most {shape.rows_per_page} fit")
    view = _bytes_of(data, shape.used_bytes(count), page)
    _check_seal(view, page, salt)
    own, place = divmod(page, shape.pages_per_range)
    size = shape.range_size(own)
    if (number, index, row_bytes) != (page, own, shape.row_bytes) or total > size:
        raise DataError(
            f"view page {page}: calls itself page {number} of range {index} with {total} rows of "
            f"{row_bytes} bytes, not range {own} with at most {size} of {shape.row_bytes}"
        )
    fits = (min(place * shape.rows_per_page, total), shape.page_count(page, total))
    if (first, count) != fits:
        raise DataError(
            f"view page {page}: {count} rows from {first} on of {total}, expected {fits[1]} from "
            f"{fits[0]} on"
        )
    ids = view[_IDS_AT : _IDS_AT + 2 * count].view("<u2")
    if count and (int(ids[-1]) >= size or np.any(ids[1:] <= ids[:-1])):
        raise DataError(f"view page {page}: local ids do not ascend below {size}")
    at = rows_at(count)
    rows = view[at : at + count * row_bytes].reshape(count, row_bytes)
    return SparsePage(first, total, ids, rows)


def join_sparse(
    shape: SparseShape, index: int, pages: Sequence[Any], salt: int
) -> list[SparsePage]:
    """Return the parsed *pages* that hold range *index*, its first ones in order; DataError.

    Their ids ascend over pages, and they hold all rows of the range.
    """
    parsed: list[SparsePage] = []
    last, held = -1, 0
    for place, data in enumerate(pages):
        number = index * shape.pages_per_range + place
        page = parse_sparse(shape, number, data, salt)
        if parsed and page.total != parsed[0].total:
            raise DataError(f"view page {number}: {page.total} rows, {parsed[0].total} before")
        if len(page.ids):
            if int(page.ids[0]) <= last:
                raise DataError(f"view page {number}: local ids do not ascend from {last}")
            last = int(page.ids[-1])
        held += len(page.ids)
        parsed.append(page)
    if parsed and held != parsed[0].total:
        raise DataError(f"view range {index}: {held} rows in pages of {parsed[0].total}")
    return parsed
