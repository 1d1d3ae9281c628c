"""What a view is: which rows of which volume, sampled, projected and stored how.

The target makes it from what a host asked for, and puts it into the head of the view's blocks:
VIEW_HEAD, the spec as JSON and, for a sparse view, how many rows each range has. Page p lies at
LBA `blocks of the head + p * page_blocks`. The salt of the pages is the CRC32C of the spec, which
names the volume and its generation: pages of anything else do not pass their check.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hyades.common.checksum import crc32c
from hyades.common.encodings import Encoding, encoded_row_bytes
from hyades.common.errors import DataError, UsageError
from hyades.common.layout import BLOCK, FORMAT_VERSION, MAX_RANGE_ROWS, VIEW_HEAD, VIEW_MAGIC
from hyades.common.pages import MAX_PAGE, MIN_PAGE, PageShape
from hyades.common.units import round_up
from hyades.common.views import SparseShape, dense_shape, sparse_shape

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
Small = Annotated[int, msgspec.Meta(ge=1, le=1 << 22)]
Word = Annotated[int, msgspec.Meta(ge=0, le=0xFFFFFFFF)]
Own = Literal["all", "loops", "none"]
MAX_HEAD = 1 << 24  # bytes


class SampleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which rows a layer needs: those with a kept edge into the asked lanes, and own rows.

    own: of the asked lanes' own vertices all rows, those with a kept self loop, or none.
    """

    fanout: Small
    seed: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
    layer: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    lanes: Annotated[tuple[tuple[Word, Word], ...], msgspec.Meta(min_length=1, max_length=65_536)]
    own: Own = "all"

    def asked(self, lanes: int) -> NDArray[np.bool_]:
        """Return which of *lanes* are asked for; UsageError where a span is none of them."""
        asked = np.zeros(lanes, np.bool_)
        for first, last in self.lanes:
            if not first < last <= lanes:
                raise UsageError(f"lanes [{first}, {last}) are asked for, there are {lanes}")
            asked[first:last] = True
        return asked


class ViewSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A view of one `rows` object; `width` is what is stored, after a projection."""

    volume: str  # UUID
    generation: Count
    source: str
    rows: Count
    width: Small
    range_rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANGE_ROWS)]
    block_rows: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANGE_ROWS)]  # see landing_rows
    page_size: Annotated[int, msgspec.Meta(ge=MIN_PAGE, le=MAX_PAGE)]
    encoding: Encoding = "float32"
    sample: SampleSpec | None = None
    projections: tuple[tuple[Small, Word], ...] = ()  # width and CRC32C of each weight, in order

    @property
    def row_bytes(self) -> int:
        """Bytes of a stored row."""
        return encoded_row_bytes(self.encoding, self.width)

    @property
    def salt(self) -> int:
        """What the tags of this view's pages are mixed with."""
        return crc32c(msgspec.json.encode(self))

    def shape(self) -> PageShape | SparseShape:
        """Return how the rows lie in pages; UsageError where none fits."""
        make = dense_shape if self.sample is None else sparse_shape
        return make(self.rows, self.row_bytes, self.range_rows, self.page_size)


def landing_rows(shape: PageShape) -> int:
    """Return the rows of the blocks that landing multiplies: a range, or a page where it has gaps.

    A product's bits depend on the shape of its block, so a view that is to give the bits of the raw
    rows is multiplied in the blocks that the raw rows would have.
    """
    whole = shape.rows_per_page * shape.row_bytes == shape.page_bytes
    return shape.range_rows if whole else shape.rows_per_page


@dataclass(frozen=True, slots=True)
class ViewHead:
    """The first blocks of a view."""

    spec: ViewSpec
    counts: NDArray[np.uint32]  # rows by range; empty where every row is there
    blocks: int

    def page_lba(self, page: int) -> int:
        """Return the first block of *page*."""
        return self.blocks + page * (self.spec.shape().page_bytes // BLOCK)

    @property
    def nblocks(self) -> int:
        """Blocks of the whole view."""
        return self.page_lba(self.spec.shape().pages)


def build_head(spec: ViewSpec, counts: NDArray[np.uint32]) -> bytes:
    """Return the head of a view, whole blocks."""
    text = msgspec.json.encode(spec)
    sizes = np.ascontiguousarray(counts, "<u4").tobytes()
    used = VIEW_HEAD.itemsize + len(text) + len(sizes)
    nbytes = round_up(used, BLOCK)
    head = np.zeros(1, VIEW_HEAD)
    fields = (VIEW_MAGIC, FORMAT_VERSION, BLOCK, len(text), len(counts), nbytes // BLOCK, 0)
    head[0] = (*fields, b"")
    body = text + sizes + bytes(nbytes - used)
    head["crc"] = crc32c(body, crc32c(head.tobytes()))
    return head.tobytes() + body


def head_blocks(first: bytes) -> int:
    """Return how many blocks the head has, by its *first* block; DataError."""
    if len(first) < BLOCK:
        raise DataError(f"view head: {len(first)} bytes of {BLOCK}")
    head = np.frombuffer(first, VIEW_HEAD, 1)[0]
    if head["magic"] != VIEW_MAGIC or head["version"] != FORMAT_VERSION or head["block"] != BLOCK:
        raise DataError(
            f"not a view: magic {bytes(head['magic'])!r}, version {int(head['version'])}, "
            f"block {int(head['block'])}"
        )
    used = VIEW_HEAD.itemsize + int(head["spec_bytes"]) + 4 * int(head["counts"])
    if used > MAX_HEAD or int(head["blocks"]) != round_up(used, BLOCK) // BLOCK:
        raise DataError(f"view head: {int(head['blocks'])} blocks for {used} bytes")
    return int(head["blocks"])


def parse_head(data: bytes) -> ViewHead:
    """Return the head in *data*, all its blocks; DataError says what is wrong."""
    blocks = head_blocks(data)
    if len(data) < blocks * BLOCK:
        raise DataError(f"view head: {len(data)} bytes of {blocks * BLOCK}")
    head = np.frombuffer(data, VIEW_HEAD, 1).copy()
    expected, head["crc"] = int(head["crc"][0]), 0
    size = VIEW_HEAD.itemsize
    found = crc32c(data[size : blocks * BLOCK], crc32c(head.tobytes()))
    if found != expected:
        raise DataError(f"view head: CRC32C is {found:#010x}, it says {expected:#010x}")
    middle = size + int(head["spec_bytes"][0])
    spec = parse_spec(data[size:middle])
    counts = np.frombuffer(data, "<u4", int(head["counts"][0]), middle).astype(np.uint32)
    shape = spec.shape()
    if isinstance(shape, SparseShape):
        sizes = [shape.range_size(index) for index in range(min(shape.ranges, len(counts)))]
        if len(counts) != shape.ranges or np.any(counts > np.array(sizes, np.uint32)):
            raise DataError(f"view head: {len(counts)} counts do not fit {shape.ranges} ranges")
    elif len(counts):
        raise DataError(f"view head: {len(counts)} counts in a view that holds every row")
    return ViewHead(spec, counts, blocks)


def parse_spec(text: bytes) -> ViewSpec:
    """Return the spec in *text*; DataError for anything that no view can be."""
    try:
        spec = msgspec.json.decode(text, type=ViewSpec)
        spec.shape()
        if spec.sample is not None:
            spec.sample.asked(min(-(-spec.rows // spec.range_rows), 1 << 24))
    except (msgspec.MsgspecError, RecursionError, UsageError) as error:
        raise DataError(f"view spec: {error}") from error
    if spec.block_rows > spec.range_rows:
        raise DataError(f"view spec: blocks of {spec.block_rows} rows in {spec.range_rows}")
    return spec
