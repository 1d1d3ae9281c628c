"""The tile builder: edges and features from anywhere into the graph objects of a volume.

Pass 1 reads the edges once, checks them, counts degrees and ranks and spreads records over buckets;
pass 2 loads the buckets in chunk order, sorts them and packs pages.  Only per-vertex arrays are
held; everything else is bounded by the budget.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.catalog import GraphInfo
from hyades.common.errors import DataError, UsageError
from hyades.common.layout import MAX_RANGE_ROWS
from hyades.common.pages import range_rows_for
from hyades.common.units import GIB, KIB
from hyades.common.volume import Volume
from hyades.deploy.ingest import kernels
from hyades.deploy.ingest.buckets import KeySpace, MemoryRecords, SpilledRecords
from hyades.deploy.ingest.budget import Budget, plan_memory
from hyades.deploy.ingest.checks import refuse_ids
from hyades.deploy.ingest.features import store_features
from hyades.deploy.ingest.progress import Progress, silent
from hyades.deploy.ingest.sources import EdgeSource, FeatureSource
from hyades.deploy.ingest.spill import SpillFile
from hyades.deploy.ingest.tiles import TileWriter

SMALL_PAGE, LARGE_PAGE = 64 * KIB, 256 * KIB
LARGE_FROM = 64 * 10**6  # edges
MAX_CHUNKS = 1 << 16


@dataclass(frozen=True)
class BuildOptions:
    """How a graph is built.

    vertices: number of vertices where neither features nor edges state it.
    new_index: [V] uint32, the new index of each vertex, or None to keep the order.
    tile_page_bytes: size of a tile page; None takes 64 KiB, above 64 M edges 256 KiB.
    """

    memory: int = GIB
    vertices: int | None = None
    range_rows: int | None = None
    tile_page_bytes: int | None = None
    new_index: NDArray[np.uint32] | None = None
    reorder: str = "none"
    undirected: bool = False
    allow_nonfinite: bool = False
    scratch: Path | None = None


def build_graph(
    volume: Volume,
    edges: EdgeSource,
    features: FeatureSource | None = None,
    options: BuildOptions | None = None,
    progress: Progress = silent,
) -> GraphInfo:
    """Write the graph objects to *volume*, uncommitted, and return what is now catalog.graph.

    UsageError or DataError with one line for whatever is wrong with the input.
    """
    options = options or BuildOptions()
    vertices = count_vertices(edges, features, options.vertices, progress)
    builder = _Builder(volume, edges, vertices, options, progress)
    try:
        builder.read_edges()
        if features is not None:
            # Before the tiles: a bad feature is worth knowing before the longest phase.
            store_features(volume, features, options.new_index, builder.keys.shift,
                           memory=options.memory, scratch=builder.scratch, progress=progress,
                           allow_nonfinite=options.allow_nonfinite)  # fmt: skip
        builder.sort_edges()
        builder.store_vertices()
    finally:
        builder.close()
    volume.catalog.graph = builder.info()
    return builder.info()


def count_vertices(
    edges: EdgeSource,
    features: FeatureSource | None,
    stated: int | None,
    progress: Progress = silent,
) -> int:
    """Return V as the inputs state it, else from the largest id; UsageError on contradiction."""
    claims = [
        (stated, "--vertices"),
        (features.rows if features is not None else None, features.name if features else ""),
        (edges.vertices, edges.name),
    ]
    known = [(count, where) for count, where in claims if count is not None]
    for count, where in known[1:]:
        if count != known[0][0]:
            raise UsageError(
                f"{known[0][1]} has {known[0][0]:,} vertices, {where} has {count:,}: "
                "they must describe the same vertices"
            )
    vertices = known[0][0] if known else _largest_id(edges, progress) + 1
    if vertices < 1:
        raise UsageError(f"{edges.name}: there are no vertices: give features or --vertices")
    if vertices >= 1 << 32:
        raise UsageError(f"{vertices:,} vertices are more than the format's 4,294,967,295")
    return vertices


def _largest_id(edges: EdgeSource, progress: Progress) -> int:
    largest, done = -1, 0
    for block in edges.blocks(1 << 18):
        if block.source.size:
            largest = max(largest, int(block.source.max()), int(block.destination.max()))
        done += block.source.size
        progress("counting vertices", done, edges.edges, "edge")
    return largest


def choose_range(vertices: int, asked: int | None) -> int:
    """Return the rows of a range; UsageError unless *asked* is a power of two that can be used."""
    if asked is None:
        return range_rows_for(vertices)
    if asked < 1 or asked & (asked - 1) or asked > MAX_RANGE_ROWS:
        raise UsageError(f"--range-rows {asked} is not a power of two up to {MAX_RANGE_ROWS}")
    if vertices > asked * MAX_CHUNKS:
        raise UsageError(
            f"--range-rows {asked} makes {-(-vertices // asked):,} ranges of {vertices:,} vertices,"
            f" more than {MAX_CHUNKS}: the default is {range_rows_for(vertices)}"
        )
    return asked


class _Builder:
    """State of one build: what pass 1 leaves for pass 2."""

    def __init__(
        self,
        volume: Volume,
        edges: EdgeSource,
        vertices: int,
        options: BuildOptions,
        progress: Progress,
    ) -> None:
        self._volume = volume
        self._edges = edges
        self._options = options
        self._progress = progress
        self.scratch = options.scratch or Path(tempfile.gettempdir())
        self.keys = KeySpace(vertices, choose_range(vertices, options.range_rows).bit_length() - 1)
        self._width = 4 if edges.weighted else 3
        self._budget: Budget = plan_memory(
            options.memory, vertices, edges.edges,
            weighted=edges.weighted, reordered=options.new_index is not None,
        )  # fmt: skip
        self._degrees = np.zeros((3, vertices), np.uint32)
        self._weighted_in = np.zeros(vertices if edges.weighted else 0, np.float64)
        self._records = self._make_records()
        self._loops = SpillFile(self.scratch)
        self._span = np.zeros(2, np.int64)
        self._kept = 0
        self._pages: TileWriter | None = None

    def _make_records(self) -> MemoryRecords | SpilledRecords:
        if self._budget.in_memory:
            return MemoryRecords(self.keys, self._width, self._edges.edges)
        loads = -(-self._edges.edges // self._budget.load_edges)
        return SpilledRecords(self.keys, self._width, self.scratch, loads)

    def read_edges(self) -> None:
        """Pass 1; DataError for ids or weights that cannot be."""
        none = np.empty(0, np.float32)
        new_index = self._options.new_index
        if new_index is None:
            new_index = np.empty(0, np.uint32)
        block_size = self._budget.block_edges
        loops = np.empty((block_size, 2), np.uint32)
        buckets = np.empty(block_size, np.int32)
        bucket_of_chunk = self._records.bucket_of_chunk
        counts = np.zeros(int(bucket_of_chunk[-1]) + 1, np.int64)
        totals = np.zeros(kernels.TOTALS, np.int64)
        done = 0
        blocks = self._edges.blocks(block_size)
        for block in blocks:
            size = block.source.size
            space = self._records.space(size)
            weight = none if block.weight is None else block.weight
            kernels.scan_block(
                block.source, block.destination, weight, new_index, self._degrees,
                self._weighted_in, bucket_of_chunk, self.keys.shift, space, loops, buckets,
                counts, totals, self._span,
            )  # fmt: skip
            if totals[kernels.BAD]:
                refuse_ids(self._edges.name, self.keys.vertices, done, block, blocks)
            if totals[kernels.NONFINITE] and not self._options.allow_nonfinite:
                at = done + int(totals[kernels.FIRST_NONFINITE])
                raise DataError(
                    f"{self._edges.name}: edge {at} has weight "
                    f"{weight[totals[kernels.FIRST_NONFINITE]]}: repair the weights, or pass "
                    "--allow-nonfinite"
                )
            kept = int(totals[kernels.KEPT])
            self._records.append(space[:kept], buckets[:kept], counts)
            self._kept += kept
            if self._edges.weighted:
                self._loops.append(loops[: totals[kernels.LOOPS]])
            done += size
            self._progress("reading edges", done, max(self._edges.edges, done), "edge")
        self._progress("reading edges", done, done, "edge")

    def sort_edges(self) -> None:
        """Pass 2: pages, directory, and the tables that go with them."""
        page_bytes = self._options.tile_page_bytes
        if page_bytes is None:
            page_bytes = SMALL_PAGE if self._kept <= LARGE_FROM else LARGE_PAGE
        self._pages = TileWriter(self.keys, self._width, page_bytes, self.scratch)
        done = 0
        for load in self._records.loads(self._budget.load_edges):
            done += len(load.records)
            self._pages.add(load)
            del load  # before the next one is made
            self._progress("sorting edges", done, max(self._kept, 1), "edge")
        self._pages.store(self._volume, self._progress)

    def store_vertices(self) -> None:
        """Write the per-vertex tables."""
        write = self._volume.write_table
        write("in_degrees", self._degrees[0])
        write("out_degrees", self._degrees[1])
        write("self_loops", self._degrees[2])
        if self._edges.weighted:
            with np.errstate(over="ignore"):
                write("weighted_in", self._weighted_in.astype(np.float32))
            if self._loops.size:
                write("loop_weights", self._sorted_loops())
        new_index = self._options.new_index
        if new_index is not None:
            order = np.empty(self.keys.vertices, np.int64)
            order[new_index] = np.arange(self.keys.vertices, dtype=np.int64)
            write("order", order)

    def _sorted_loops(self) -> NDArray[Any]:
        place = np.zeros(self.keys.vertices + 1, np.int64)
        np.cumsum(self._degrees[2], out=place[1:])
        out = np.empty((self._loops.size // 8, 1), np.uint32)
        block = np.empty((1 << 16, 2), np.uint32)
        for start in range(0, self._loops.size, block.nbytes):
            part = block[: min(block.nbytes, self._loops.size - start) // 8]
            self._loops.read(start, part)
            kernels.scatter(part[:, 1:], part[:, 0].astype(np.int64), place, out)
        return out.reshape(-1).view(np.float32)

    def info(self) -> GraphInfo:
        """Return the graph's facts."""
        before, after = (int(value) for value in self._span)
        return GraphInfo(
            vertices=self.keys.vertices,
            edges=self._kept,
            loops=int(self._degrees[2].sum(dtype=np.int64)),
            range_rows=1 << self.keys.shift,
            chunks=self.keys.chunks,
            weighted=self._edges.weighted,
            reorder=self._options.reorder,
            span_before=before,
            span_after=after,
            max_in_degree=int(self._degrees[0].max()),
            undirected=self._options.undirected,
        )

    def close(self) -> None:
        """Give the temporary files back."""
        self._records.close()
        self._loops.close()
        if self._pages is not None:
            self._pages.close()
