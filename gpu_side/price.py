"""Price the ways to run one stage: exact bytes, from the directory, and the memory they take.

Must stay in sync: scan.py and lanestream.py read and write exactly the pages that are counted here.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from hyades.common.catalog import GraphInfo, ObjectInfo
from hyades.common.pages import PageShape
from hyades.common.units import MIB, format_size
from hyades.common.views import SparseShape, sparse_bytes
from hyades.gpu_side.buffers import LOG_PAGE, Buffers, ScanSizes, arena_bytes, buffers_for
from hyades.gpu_side.featureview import FeatureView, expected_rows
from hyades.gpu_side.program import FEATURES, Stage
from hyades.gpu_side.shapes import product_orders, shape_conv
from hyades.gpu_side.topology import Topology, Windows, choose_windows

MAX_PASSES = 4096
Pages = PageShape | SparseShape


@dataclass(frozen=True, slots=True)
class Rates:
    """What predicted seconds are made of; measured on two cores of a shared server."""

    storage: float = 1.1e9  # bytes/s, sequential
    adds: float = 7.5e9  # float additions/s of one worker's tile kernel
    products: float = 8e10  # flop/s of one worker's matrix products


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a plan depends on."""

    graph: GraphInfo
    features: ObjectInfo
    tiles: ObjectInfo
    page_size: int
    stages: tuple[Stage, ...]
    memory: int
    workers: int
    fanouts: tuple[int, ...]  # by layer, 0 for all
    output_itemsize: int = 4
    forced: str | None = None  # "resident", "passes:P" or "log"
    rates: Rates = field(default_factory=Rates)
    view: FeatureView | None = None  # what is read in place of the features

    @property
    def decoded(self) -> int:
        """Columns of the features where they are converted as they land, else 0."""
        if self.view is not None:
            return self.view.width
        return 0 if self.features.itemsize == 4 else self.features.width

    def feature_shape(self) -> PageShape | SparseShape:
        """Return the pages that the features are read from."""
        return self.features.shape() if self.view is None else self.view.shape()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a stage, with its exact price."""

    name: str
    project_first: bool
    fits: bool
    memory: int  # bytes that the run holds at once under this candidate
    bytes_read: int
    bytes_written: int
    seconds: float
    arithmetic: float = (
        0.0  # seconds of one worker: the choice must not depend on how many there are
    )
    groups: tuple[tuple[int, int], ...] = ()  # lane ranges, one a pass
    windows: Windows | None = None
    sizes: ScanSizes | None = None
    buffers: Buffers | None = None
    state_slots: int = 0
    pinned: int = 0  # input chunks kept from the first pass for the others
    log_pages: int = 0
    reason: str = ""
    scan_bytes: int = 0  # what one scan of the stage's input and topology reads

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written

    @property
    def pinned_bytes(self) -> int:
        """Bytes of input chunks kept for later passes."""
        return self.pinned * self.sizes.input_chunk if self.sizes else 0


def scan_sizes(
    request: PlanRequest, stage: Stage, source: Pages, output: PageShape, project_first: bool
) -> ScanSizes:
    """Return what the sizes of a conv stage's scans follow from."""
    conv = stage.conv
    assert conv is not None
    weighted = conv.edge_weight and request.graph.weighted
    streams = 1 + int(weighted) + int(request.fanouts[stage.layer] > 0)
    return ScanSizes(
        request.graph.range_rows, source, output, shape_conv(stage, project_first),
        request.tiles.page_bytes, streams, request.workers, stage.width,
    )  # fmt: skip


def object_bytes(shape: Pages) -> int:
    return shape.pages * shape.page_bytes


def kept_bytes(shape: Pages, lanes: int) -> int:
    return shape.first_page(lanes) * shape.page_bytes if lanes else 0


class StagePricer:
    """Prices the candidates of one conv stage."""

    def __init__(
        self, request: PlanRequest, topology: Topology, stage: Stage, source: Pages,
        output: PageShape, budget: int, kept_input: int,
    ) -> None:  # fmt: skip
        self.request = request
        self.topology = topology
        self.stage = stage
        self.source = source
        self.output = output
        self.budget = budget
        self.kept_input = kept_input  # chunks that are in memory from the start
        assert stage.conv is not None
        self.conv = stage.conv
        self.view = request.view if stage.inputs[0].stage == FEATURES else None
        self.sampled = self.view is not None and self.view.sampled  # bytes are then estimates
        self.always = request.memory - budget  # bytes held in every stage
        lanes = np.arange(topology.chunks)
        graph = request.graph
        ends = np.minimum((lanes + 1) * graph.range_rows, graph.vertices)
        self.lane_rows = ends - lanes * graph.range_rows

    def sizes(self, project_first: bool) -> ScanSizes:
        return scan_sizes(self.request, self.stage, self.source, self.output, project_first)

    def _input_bytes(self, chunks: NDArray[np.int64]) -> int:
        """Return the bytes of the input pages of *chunks* (all but the last are full)."""
        chunks = chunks[chunks >= self.kept_input]
        pages = len(chunks) * self.source.pages_per_range
        last = self.source.ranges - 1
        if len(chunks) and chunks[-1] == last:
            pages -= self.source.pages_per_range
            pages += self.source.pages - self.source.first_page(last)
        return pages * self.source.page_bytes

    def price(
        self, name: str, project_first: bool, groups: tuple[tuple[int, int], ...],
        windows: Windows | None = None,
    ) -> Candidate:  # fmt: skip
        sizes = self.sizes(project_first)
        widest = max(high - low for low, high in groups)
        slots = windows.slot_count if windows else widest
        log_groups = -(-self.topology.chunks // slots) if windows else 0
        full = buffers_for(sizes, False, log_groups)
        lean = buffers_for(sizes, True, log_groups)
        states = slots * sizes.state
        buffers = full
        memory = arena_bytes(sizes, full) + states
        if memory > self.budget:
            buffers = lean
            memory = arena_bytes(sizes, lean) + states
        fits = memory <= self.budget
        spare = self.budget - memory
        pinned = 0
        if len(groups) > 1 and fits and not self.sampled:  # every pass needs other rows of a chunk
            more = self.topology.chunks - self.kept_input
            pinned = max(0, min(spare // max(sizes.input_chunk, 1), more))
        read, chunks_read = self._bytes_read(groups, pinned, sizes)
        written = object_bytes(self.output)
        log_pages = 0
        if windows:
            log_pages = self._log_pages(windows, sizes, log_groups)
            read += log_pages * LOG_PAGE
            written += log_pages * LOG_PAGE
        candidate = Candidate(
            name, project_first, fits, memory + pinned * sizes.input_chunk, read, written, 0.0, 0.0,
            groups, windows, sizes, buffers, slots, pinned, log_pages,
            "" if fits else f"needs {format_size(memory + self.always)} of memory",
        )  # fmt: skip
        arithmetic = self._arithmetic(candidate, chunks_read)
        storage = candidate.bytes_moved / self.request.rates.storage
        seconds = max(arithmetic / self.request.workers, storage)
        if self.sampled:
            once = self._sampled_bytes(0, self.topology.chunks)
        else:
            once = self._input_bytes(np.arange(self.topology.chunks))
        once += self.topology.pages * self.request.tiles.page_bytes * sizes.tile_streams
        return replace(candidate, seconds=seconds, arithmetic=arithmetic, scan_bytes=once)

    def _bytes_read(
        self, groups: tuple[tuple[int, int], ...], pinned: int, sizes: ScanSizes
    ) -> tuple[int, int]:
        tile_bytes = self.request.tiles.page_bytes * sizes.tile_streams
        read = chunks_read = 0
        held = np.zeros(self.topology.chunks, bool)
        for low, high in groups:
            pages = self.topology.pages_of(low, high)
            chunks = np.unique(self.topology.page_chunk[pages])
            read += len(pages) * tile_bytes
            if self.sampled:
                read += self._sampled_bytes(low, high)
            else:
                read += self._input_bytes(chunks[~held[chunks]])
            held[chunks[chunks < self.kept_input + pinned]] = True
            chunks_read += len(chunks)
        sampled = sizes.tile_streams == 3
        if sampled and self.conv.norm == "gcn":  # the pass that sums the kept edges' weights
            read += self.topology.pages * tile_bytes
        if self.conv.attention is not None:  # the pass that computes the destinations' scores
            read += self._input_bytes(np.arange(self.topology.chunks))
        return read, chunks_read

    def _sampled_bytes(self, low: int, high: int) -> int:
        """Return about what a sampled view has for the lanes [low, high)."""
        view, shape, directory = self.view, self.source, self.topology.directory
        assert view is not None
        assert isinstance(shape, SparseShape)
        into = (directory["lane"] >= low) & (directory["lane"] < high)
        chunks = self.topology.chunks
        edges = np.bincount(
            directory["chunk"][into], weights=directory["edges"][into], minlength=chunks
        ).astype(np.float64)
        lanes = np.arange(chunks)
        own = (lanes >= low) & (lanes < high)
        degree = max(self.request.graph.edges / max(self.request.graph.vertices, 1), 1e-9)
        kept = min(1.0, view.fanout / degree)
        rows = expected_rows(view, self.lane_rows, edges, own, kept)
        return int(sparse_bytes(shape, rows).sum())

    def _log_pages(self, windows: Windows, sizes: ScanSizes, log_groups: int) -> int:
        per_group = -(-self.topology.chunks // log_groups)
        starts = np.arange(0, self.topology.chunks, per_group)
        rows = np.add.reduceat(windows.logged_rows, starts)
        return int(np.sum(-(-rows // sizes.log_rows)))

    def _arithmetic(self, candidate: Candidate, chunks_read: int) -> float:
        rates, graph = self.request.rates, self.request.graph
        sizes = candidate.sizes
        assert sizes is not None
        shape = sizes.shape
        adds = graph.edges * shape.aggregate
        rows = chunks_read * graph.range_rows
        flops = 0.0
        if self.view is not None and self.view.columns is not None:
            return adds / rates.adds
        if shape.project_first and self.conv.neighbour is not None:
            flops += 2.0 * rows * self.conv.neighbour.weight.numel()
        elif self.conv.neighbour is not None:
            flops += 2.0 * graph.vertices * self.conv.neighbour.weight.numel()
        if self.conv.root is not None:
            flops += 2.0 * graph.vertices * self.conv.root.weight.numel()
        return adds / rates.adds + flops / rates.products

    def groups(self, passes: int) -> tuple[tuple[int, int], ...]:
        """Return *passes* runs of lanes of nearly equal length."""
        lanes = self.topology.chunks
        size = -(-lanes // passes)
        return tuple((low, min(low + size, lanes)) for low in range(0, lanes, size))

    def candidates(self) -> list[Candidate]:
        """Return every candidate worth showing, those that were forced alone where one was."""
        forced = self.request.forced
        found: list[Candidate] = []
        multiplied = self.view is not None and self.view.columns is not None
        for order in (True,) if multiplied else product_orders(self.stage):
            if forced is None or forced == "resident":
                found.append(self.price("resident", order, self.groups(1)))
            if forced is None or forced.startswith("passes"):
                found += self._passes(order, forced)
            if forced is None or forced.startswith("log"):
                found += self._logs(order, forced)
        return found

    def _passes(self, order: bool, forced: str | None) -> list[Candidate]:
        lanes = self.topology.chunks
        if forced is not None:
            asked = int(forced.partition(":")[2])
            return [self.price(f"passes:{asked}", order, self.groups(min(asked, lanes)))]
        found: list[Candidate] = []
        best: Candidate | None = None
        worse = 0
        for passes in range(2, min(lanes, MAX_PASSES) + 1):
            groups = self.groups(passes)
            if len(groups) != passes:
                continue
            candidate = self.price(f"passes:{passes}", order, groups)
            found.append(candidate)
            if not candidate.fits:
                if len(found) > 3:
                    found.pop(-2)
                continue
            if best is None or candidate.bytes_moved < best.bytes_moved:
                best, worse = candidate, 0
            else:
                worse += 1
            # Smaller groups leave room to keep more input chunks from the first pass.
            if worse == 3 or candidate.pinned + self.kept_input == lanes:
                break
        return found

    def _logs(self, order: bool, forced: str | None) -> list[Candidate]:
        lanes = self.topology.chunks
        asked = int(forced.partition(":")[2]) if forced and ":" in forced else 0
        lengths = [asked] if asked else sorted({max(1, lanes // n) for n in (32, 16, 8, 4, 3, 2)})
        found = []
        for length in lengths:
            windows = choose_windows(self.topology, min(length, lanes), self.lane_rows)
            found.append(self.price(f"log:{length}", order, self.groups(1), windows))
        return found


def price_rows(
    request: PlanRequest, stage: Stage, shapes: dict[int, PageShape], output: PageShape,
    kept: dict[int, int], budget: int,
) -> Candidate:  # fmt: skip
    read = memory = 0
    for source in stage.inputs:
        shape = shapes[source.stage]
        read += object_bytes(shape) - kept_bytes(shape, kept.get(source.stage, 0))
        memory += 2 * shape.pages_per_range * shape.page_bytes
    memory += 2 * output.pages_per_range * output.page_bytes
    memory = memory * request.workers + 2 * MIB
    written = object_bytes(output)
    seconds = (read + written) / request.rates.storage
    fits = memory <= budget
    always = request.memory - budget
    reason = "" if fits else f"needs {format_size(memory + always)} of memory"
    return Candidate(
        "rows", False, fits, memory, read, written, seconds, reason=reason, scan_bytes=read
    )
