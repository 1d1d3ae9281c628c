"""How the rows of an object are cut into pages.

A page holds whole rows and never straddles a range (chunk or lane), so a lane's output is a whole
number of pages and a chunk lands without its neighbours.  `page_size` bounds a page; what a page
occupies on the device is `page_bytes`, its rows rounded up to a block: odd widths waste no space.
"""

from dataclasses import dataclass

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, MAX_RANGE_ROWS
from hyades.common.units import KIB, MIB, round_up

MIN_PAGE, MAX_PAGE, DEFAULT_PAGE = 64 * KIB, 4 * MIB, MIB


@dataclass(frozen=True, slots=True)
class PageShape:
    """Pages of a matrix of `rows` x `row_bytes` cut at multiples of `range_rows`."""

    rows: int
    row_bytes: int
    range_rows: int
    rows_per_page: int
    page_bytes: int  # multiple of BLOCK

    @property
    def pages_per_range(self) -> int:
        """Pages of a full range."""
        return -(-self.range_rows // self.rows_per_page)

    @property
    def ranges(self) -> int:
        """Number of ranges, the last one perhaps short."""
        return -(-self.rows // self.range_rows)

    @property
    def pages(self) -> int:
        """Number of pages of the object."""
        return self.first_page(self.ranges)

    def first_page(self, index: int) -> int:
        """Return the first page of range *index*; ``first_page(ranges)`` is the page count."""
        if index < self.ranges:
            return index * self.pages_per_range
        if self.rows == 0:
            return 0
        rest = self.rows - (self.ranges - 1) * self.range_rows
        return (self.ranges - 1) * self.pages_per_range + -(-rest // self.rows_per_page)

    def page_rows(self, page: int) -> tuple[int, int]:
        """Return the half-open range of rows that *page* holds."""
        index, place = divmod(page, self.pages_per_range)
        start = index * self.range_rows + place * self.rows_per_page
        end = min(start + self.rows_per_page, (index + 1) * self.range_rows, self.rows)
        return start, end


def range_rows_for(rows: int) -> int:
    """Return R: 4,096 unless that makes more than 4,096 ranges; a power of two up to 65,536."""
    size = 4096
    while size < MAX_RANGE_ROWS and rows > size * 4096:
        size *= 2
    return size


def shape_pages(
    rows: int, row_bytes: int, range_rows: int, page_size: int = DEFAULT_PAGE
) -> PageShape:
    """Cut ranges evenly into pages of at most *page_size* bytes; UsageError for giant rows."""
    if page_size & (page_size - 1) or not MIN_PAGE <= page_size <= MAX_PAGE:
        raise UsageError(f"page size {page_size} is not a power of two from 64 KiB to 4 MiB")
    while page_size < row_bytes and page_size < MAX_PAGE:
        page_size *= 2
    if row_bytes > page_size:
        raise UsageError(f"a row of {row_bytes} bytes does not fit in a page of {page_size} bytes")
    pages = -(-range_rows // (page_size // row_bytes))
    rows_per_page = -(-range_rows // pages)
    return PageShape(
        rows, row_bytes, range_rows, rows_per_page, round_up(rows_per_page * row_bytes, BLOCK)
    )
