"""What a volume holds: objects, the graph's facts, runs; stored as JSON.

`parse_catalog` trusts nothing: whatever the bytes say, it returns a catalog whose addresses lie
inside the device, do not overlap and agree with the shapes, or raises DataError.
"""

import math
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from hyades.common.errors import DataError, UsageError
from hyades.common.layout import BLOCK, DIRECTORY, PAGE_ENTRY
from hyades.common.pages import MAX_PAGE, MIN_PAGE, PageShape
from hyades.common.units import round_up

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
Crc = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
Kind = Literal["rows", "table", "pages"]
FIRST_LBA = 2  # after the two superblock copies

_RECORDS = {"directory": DIRECTORY, "page_entry": PAGE_ENTRY}
_SCALARS = {
    name: np.dtype(name).newbyteorder("<")
    for name in (
        "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
        "float16", "float32", "float64",
    )
}  # fmt: skip


def dtype_name(dtype: DTypeLike) -> str:
    """Return the name under which the catalog stores *dtype*; UsageError for one it cannot."""
    found: np.dtype[Any] = np.dtype(dtype)
    for name, record in _RECORDS.items():
        if found == record:
            return name
    if found.name not in _SCALARS:
        raise UsageError(f"a volume cannot hold {found}: use one of {', '.join(_SCALARS)}")
    return found.name


class Extent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A run of blocks."""

    lba: Count
    nblocks: Count

    @property
    def end(self) -> int:
        """First block after the extent."""
        return self.lba + self.nblocks


class ObjectInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One object: its shape, where its pages lie, and where its page table lies.

    rows: a matrix [rows, width] cut at ranges (PageShape).  table: flat records [rows].
    pages: opaque pages, `rows` counts them.  Replaced, never changed, when its table is stored.
    """

    name: str
    kind: Kind
    dtype: str
    rows: Count
    width: Count
    range_rows: Count
    rows_per_page: Count
    page_bytes: Count
    pages: Count
    extents: tuple[Extent, ...]
    table: tuple[Extent, ...]
    table_crc: Crc  # of the page table padded with zeros to whole blocks
    attributes: dict[str, int | float | str] = {}

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Little-endian numpy dtype of one element or record."""
        return _RECORDS[self.dtype] if self.dtype in _RECORDS else _SCALARS[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one element or record."""
        return self.numpy_dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; of one page for opaque pages."""
        return self.page_bytes if self.kind == "pages" else self.itemsize * self.width

    @property
    def page_blocks(self) -> int:
        """Blocks that a page occupies."""
        return self.page_bytes // BLOCK

    @property
    def nbytes(self) -> int:
        """Bytes that the pages occupy on the device, padding included."""
        return self.pages * self.page_bytes

    @property
    def table_blocks(self) -> int:
        """Blocks that the page table occupies."""
        return -(-self.pages * PAGE_ENTRY.itemsize // BLOCK)

    def shape(self) -> PageShape:
        """Return how rows are cut into pages."""
        return PageShape(
            self.rows, self.row_bytes, self.range_rows, self.rows_per_page, self.page_bytes
        )

    def lba(self, page: int) -> int:
        """Return the first block of *page*; UsageError outside the object."""
        if 0 <= page < self.pages:
            offset = page * self.page_blocks
            for extent in self.extents:
                if offset < extent.nblocks:
                    return extent.lba + offset
                offset -= extent.nblocks
        raise UsageError(f"object {self.name!r} has no page {page}: it has {self.pages} pages")


class GraphInfo(msgspec.Struct, forbid_unknown_fields=True):
    """The graph's facts; spans are total distances |position(u) - position(v)| over the edges."""

    vertices: Count
    edges: Count  # without self loops
    loops: Count
    range_rows: Count
    chunks: Count
    weighted: bool = False
    reorder: str = "none"
    span_before: Count = 0
    span_after: Count = 0
    max_in_degree: Count = 0
    features: str = "features"
    undirected: bool = False


class RunInfo(msgspec.Struct, forbid_unknown_fields=True):
    """One refresh: whether it ended and what it was asked, so that only the same is resumed."""

    name: str
    state: Literal["running", "done"] = "running"
    fingerprint: str = ""
    notes: dict[str, str] = {}


class Catalog(msgspec.Struct, forbid_unknown_fields=True):
    """Everything a volume holds, by name."""

    page_size: Count
    objects: dict[str, ObjectInfo] = {}
    graph: GraphInfo | None = None
    runs: dict[str, RunInfo] = {}
    attributes: dict[str, str] = {}

    def extents(self) -> list[Extent]:
        """Return every extent of every object, page tables included."""
        return [e for info in self.objects.values() for e in (*info.extents, *info.table)]


def encode_catalog(catalog: Catalog) -> bytes:
    """Return *catalog* as JSON; UsageError for values that JSON cannot hold."""
    try:
        return msgspec.json.encode(catalog, enc_hook=_plain)
    except (TypeError, ValueError) as error:
        raise UsageError(f"the catalog cannot be stored: {error}") from error


def _plain(value: object) -> object:
    """Return a numpy scalar as the Python number it stands for."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{value!r} is neither a number nor a text")


def parse_catalog(data: bytes, nblocks: int, reserved: tuple[Extent, ...] = ()) -> Catalog:
    """Return the catalog in *data*, for a device of *nblocks*; DataError says what is wrong."""
    try:
        catalog = msgspec.json.decode(data, type=Catalog)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"not a catalog: {error}") from error
    problem = find_problem(catalog, nblocks, reserved)
    if problem:
        raise DataError(problem)
    return catalog


def find_problem(catalog: Catalog, nblocks: int, reserved: tuple[Extent, ...] = ()) -> str | None:
    """Return the first contradiction in *catalog*, or None."""
    size = catalog.page_size
    if size & (size - 1) or not MIN_PAGE <= size <= MAX_PAGE:
        return f"page size {size} is not a power of two from 64 KiB to 4 MiB"
    for name, info in catalog.objects.items():
        wrong = _object_problem(info)
        if wrong is None and name != info.name:
            wrong = f"it calls itself {info.name!r}"
        if wrong is not None:
            return f"object {name!r}: {wrong}"
    graph = catalog.graph
    if graph is not None and (
        graph.range_rows == 0 or graph.chunks != -(-graph.vertices // graph.range_rows)
    ):
        return (
            f"graph: {graph.vertices} vertices in ranges of {graph.range_rows} rows do not make "
            f"{graph.chunks} chunks"
        )
    for name, run in catalog.runs.items():
        if name != run.name:
            return f"run {name!r} calls itself {run.name!r}"
    return _extent_problem(catalog, nblocks, reserved)


def _object_problem(info: ObjectInfo) -> str | None:
    """Return why the shape of *info* is impossible, or None."""
    if info.kind != "rows" and (info.width != 1 or info.range_rows != info.rows_per_page):
        return f"width or range_rows do not fit a {info.kind!r} object"
    if info.dtype in _RECORDS and info.kind != "table":
        return f"records of {info.dtype!r} in a {info.kind!r} object"
    if info.dtype not in _RECORDS and info.dtype not in _SCALARS:
        return f"unknown dtype {info.dtype!r}"
    if info.page_bytes == 0 or info.page_bytes % BLOCK or info.page_bytes > MAX_PAGE:
        return f"pages of {info.page_bytes} bytes are not blocks of {BLOCK} up to {MAX_PAGE}"
    if 0 in (info.width, info.range_rows, info.rows_per_page):
        return "width, range_rows or rows_per_page is 0"
    if info.rows_per_page * info.row_bytes > info.page_bytes:
        return f"{info.rows_per_page} rows of {info.row_bytes} bytes do not fit in a page"
    if info.pages != info.shape().pages:
        return f"{info.rows} rows make {info.shape().pages} pages, not {info.pages}"
    if any(extent.nblocks == 0 or extent.nblocks % info.page_blocks for extent in info.extents):
        return "an extent is not a whole number of pages"
    if sum(extent.nblocks for extent in info.extents) != info.pages * info.page_blocks:
        return f"its extents do not hold {info.pages} pages of {info.page_blocks} blocks"
    if any(extent.nblocks == 0 for extent in info.table):
        return "an extent of its page table is empty"
    if sum(extent.nblocks for extent in info.table) != info.table_blocks:
        return f"its page table does not have {info.table_blocks} blocks"
    return None


def _extent_problem(catalog: Catalog, nblocks: int, reserved: tuple[Extent, ...]) -> str | None:
    """Return which extent leaves the device or overlaps another one, or None."""
    owned = [(extent, "the catalog") for extent in reserved]
    for info in catalog.objects.values():
        owned += [(extent, f"object {info.name!r}") for extent in (*info.extents, *info.table)]
    owned.sort(key=lambda pair: pair[0].lba)
    end, before = FIRST_LBA, "the superblocks"
    for extent, owner in owned:
        if extent.lba < end:
            return f"{owner} at LBA {extent.lba} overlaps {before}, which ends at LBA {end}"
        if extent.end > nblocks:
            return f"{owner} ends at LBA {extent.end}, outside the volume of {nblocks} blocks"
        end, before = extent.end, owner
    return None


def new_object(
    name: str, kind: Kind, dtype: str, width: int, shape: PageShape, attributes: dict[str, Any]
) -> ObjectInfo:
    """Return an object without extents; UsageError for attributes that JSON would change."""
    check_name(name)
    plain = {key: _attribute(name, key, value) for key, value in attributes.items()}
    return ObjectInfo(
        name=name, kind=kind, dtype=dtype, rows=shape.rows, width=width,
        range_rows=shape.range_rows, rows_per_page=shape.rows_per_page,
        page_bytes=shape.page_bytes, pages=shape.pages,
        extents=(), table=(), table_crc=0, attributes=plain,
    )  # fmt: skip


def check_name(name: str) -> None:
    """Raise UsageError unless *name* can be an object's: printable, 1 to 200 characters."""
    if not name or len(name) > 200 or not name.isprintable():
        raise UsageError(f"{name!r} cannot be the name of an object")


def _attribute(name: str, key: str, value: Any) -> int | float | str:
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float) and not math.isfinite(value):
        raise UsageError(f"attribute {key!r} of {name!r} is {value}, which JSON cannot hold")
    if not isinstance(value, int | float | str):
        raise UsageError(f"attribute {key!r} of {name!r} is a {type(value).__name__}")
    return int(value) if isinstance(value, bool) else value


def table_shape(rows: int, itemsize: int, page_size: int) -> PageShape:
    """Return pages for *rows* flat records: of *page_size*, or one short page."""
    page_bytes = max(min(page_size, round_up(rows * itemsize, BLOCK)), BLOCK)
    per_page = page_bytes // itemsize
    return PageShape(rows, itemsize, per_page, per_page, page_bytes)
