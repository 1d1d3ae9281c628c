"""sample: of each range only the rows that a sampled layer needs."""

import threading
from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np
from numpy.typing import NDArray

from hyades.common.catalog import GraphInfo
from hyades.common.errors import DataError, UsageError
from hyades.common.sampled_rows import mark_sampled
from hyades.common.sampling import count_kept_loops
from hyades.common.viewspec import SampleSpec
from hyades.target_side.stage.ahead import Ahead
from hyades.target_side.stage.blocks import Block, Bytes, Ids
from hyades.target_side.stage.meter import OperatorCounts
from hyades.target_side.stage.source import Source


class Sample:
    """Needed rows by range; found once from the tiles, then kept as a bit a row.

    In memory: a bit a row, 16 bytes a vertex of tables and 24 a tile page.
    """

    name = "sample"

    def __init__(
        self, source: Source, spec: SampleSpec, *, pool: Executor | None = None, window: int = 0
    ) -> None:
        """Read the tables of *source*; up to *window* pairs of tile pages are read ahead."""
        self._source, self._spec, self._meter = source, spec, source.meter
        self._graph = self._graph_of(source)
        self._asked = spec.asked(self._graph.chunks)
        self._tiles = source.object("tiles", "pages")
        self._ranks = source.object("ranks", "pages")
        if (self._tiles.pages, self._tiles.page_bytes) != (
            self._ranks.pages, self._ranks.page_bytes
        ):  # fmt: skip
            raise DataError(f"{source.name}: {self._tiles.pages} pages of tiles do not match ranks")
        self._tables = self._read_vertices(source)
        self._chunk_pages, self._page_asked = self._read_directory(source)
        self._lock = threading.Lock()
        self._bits: dict[int, Bytes] = {}
        self.ahead: Ahead[tuple[Bytes, Bytes]] = Ahead(
            self._read_pair, self._tiles.pages, pool, window
        )

    @staticmethod
    def memory(graph: GraphInfo, tile_pages: int) -> int:
        """Return the bytes that a Sample keeps, tile pages in flight not counted."""
        return graph.vertices * 16 + -(-graph.vertices // 8) + tile_pages * 24

    def counts(self) -> NDArray[np.uint32]:
        """Return how many rows each range has; looks at all tiles at the first call."""
        sizes = [len(self.ids(index)) for index in range(self._graph.chunks)]
        return np.array(sizes, np.uint32)

    def ids(self, index: int) -> Ids:
        """Return the local ids of the rows of range *index* that are needed, ascending."""
        with self._lock:
            bits = self._bits.get(index)
        if bits is None:
            with self._meter.span("sample"):
                bits = np.packbits(self._needed(index))
            with self._lock:
                self._bits[index] = bits
        rows = self._rows(index)
        return np.flatnonzero(np.unpackbits(bits, count=rows)).astype(np.uint16)

    def run(self, index: int, blocks: Iterator[Block]) -> Iterator[Block]:
        """Return the needed rows of each block."""
        ids = self.ids(index)
        for block in blocks:
            with self._meter.span("sample"):
                low, high = np.searchsorted(ids, (block.start, block.stop))
                own = ids[low:high]
                data = block.data
                if len(own) < len(data):
                    data = data[own.astype(np.int64) - block.start]
            self._meter.add(
                self.name, OperatorCounts(len(block.data), len(own), block.data.size, data.size)
            )
            if len(own):
                yield Block(block.start, block.stop, own, data, block.encoding, block.width)

    def _rows(self, index: int) -> int:
        rows = self._graph.range_rows
        return min(rows, self._graph.vertices - index * rows)

    def _needed(self, index: int) -> NDArray[np.bool_]:
        rows, spec = self._rows(index), self._spec
        if self._asked[index] and spec.own == "all":
            return np.ones(rows, np.bool_)
        needed = np.zeros(rows, np.bool_)
        if self._asked[index] and spec.own == "loops":
            first = index * self._graph.range_rows
            originals, degrees, loops = (
                table[first : first + rows] if len(table) else table for table in self._tables
            )
            if len(originals) == 0:
                originals = np.arange(first, first + rows, dtype=np.int64)
            kept = np.zeros(rows, np.uint32)
            count_kept_loops(spec.seed, spec.layer, originals, degrees, loops, spec.fanout, kept)
            needed |= kept > 0
        rule = (spec.fanout, spec.seed, spec.layer)
        for page in range(int(self._chunk_pages[index]), int(self._chunk_pages[index + 1])):
            if not self._page_asked[page]:
                continue
            tiles, ranks = self.ahead.get(page)
            try:
                mark_sampled(
                    tiles.view(np.uint32), ranks.view(np.uint32), index, self._graph.range_rows,
                    self._asked, self._tables, rule, needed,
                )  # fmt: skip
            except DataError as error:
                where = f"object 'tiles' page {page} (LBA {self._tiles.lba(page)})"
                raise DataError(f"{self._source.name}: {where}: {error}") from error
        return needed

    def _read_pair(self, page: int) -> tuple[Bytes, Bytes]:
        return self._source.read(self._tiles, page), self._source.read(self._ranks, page)

    @staticmethod
    def _graph_of(source: Source) -> GraphInfo:
        graph = source.catalog.graph
        if graph is None:
            raise UsageError(f"{source.name} has no graph: nothing to sample by; ingest edges")
        return graph

    def _read_vertices(
        self, source: Source
    ) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32]]:
        originals = np.zeros(0, np.int64)
        if "order" in source.catalog.objects:
            originals = source.read_table("order").astype(np.int64, copy=False)
        degrees = source.read_table("in_degrees").astype(np.uint32, copy=False)
        loops = source.read_table("self_loops").astype(np.uint32, copy=False)
        expected = self._graph.vertices
        lengths = {len(degrees), len(loops), len(originals) or expected}
        if lengths != {expected}:
            raise DataError(f"{source.name}: tables of {lengths} vertices in a graph of {expected}")
        return originals, degrees, loops

    def _read_directory(self, source: Source) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return the first tile page of each chunk, and which pages hold an asked lane."""
        lanes = source.read_table("directory")["lane"].astype(np.int64)
        pieces = source.read_table("page_pieces").astype(np.int64)
        first = source.read_table("chunk_pages").astype(np.int64)
        sound = (
            len(pieces) == self._tiles.pages + 1
            and len(first) == self._graph.chunks + 1
            and (first[0], first[-1], pieces[0]) == (0, self._tiles.pages, 0)
            and pieces[-1] == len(lanes)
            and bool(np.all(np.diff(pieces) > 0) and np.all(np.diff(first) > 0))
            and (len(lanes) == 0 or int(lanes.max()) < self._graph.chunks)
        )
        if not sound:
            raise DataError(f"{source.name}: directory, page_pieces and chunk_pages contradict")
        asked = np.add.reduceat(self._asked[lanes].astype(np.int64), pieces[:-1])
        return first, asked > 0
