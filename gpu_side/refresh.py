"""The layer loop: run the stages of a plan, each in its passes, and keep what is done.

Lanes depend only on the stage's input and plan: a resumed run has the bits of an undisturbed one.
runobjects.py has the rules of what is durable when.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hyades.common.port import Port
from hyades.common.trace import Advance, ScanCounters, Sink, Span
from hyades.common.viewspec import ViewHead
from hyades.common.volume import Volume
from hyades.gpu_side import words as W
from hyades.gpu_side.decode import landing_blocks
from hyades.gpu_side.devices.cpu import (
    CpuDevice,
    give_back_free_memory,
    short_switch_interval,
    single_threaded_torch,
)
from hyades.gpu_side.factors import Factors, Sample, VertexTables, conv_factors
from hyades.gpu_side.failure import explain_failure
from hyades.gpu_side.featureview import FeatureView
from hyades.gpu_side.lanestream import LaneStream, ReadFailed
from hyades.gpu_side.merge import LogMerge, finish_log
from hyades.gpu_side.plan import RunPlan, StagePlan
from hyades.gpu_side.price import PlanRequest
from hyades.gpu_side.program import FEATURES
from hyades.gpu_side.rowops import Moments, apply_row_ops
from hyades.gpu_side.rowstage import combine_rows
from hyades.gpu_side.runobjects import RunObjects
from hyades.gpu_side.scan import MomentSums, PassScan
from hyades.gpu_side.scores import score_weights
from hyades.gpu_side.stores import PageStoreInfo, page_by_page, view_store
from hyades.gpu_side.tables import PassInputs, TileStores, VertexFloats
from hyades.gpu_side.temporaries import scratch_bytes
from hyades.gpu_side.topology import Topology
from hyades.gpu_side.vertices import KeptWeights, needs_kept_weights


@dataclass(slots=True)
class RunOptions:
    """What a run is called and how it behaves."""

    name: str
    seed: int = 0
    check: bool = True
    checkpoint_seconds: float = 2.0


class ViewOpener(Protocol):
    """Opens views of the features on a device of the port, one at a time.

    A view stays until the next one is opened; nothing of it is in flight by then.
    """

    @property
    def device(self) -> int:
        """The port's device whose blocks are those of the view."""
        ...

    def open(self, view: FeatureView, seed: int, lanes: tuple[int, int]) -> ViewHead:
        """Open *view*, a sampled one for the lanes [first, last), and return its head."""
        ...


class Refresh:
    """One run over a volume; see the module."""

    def __init__(
        self, source: Volume, outputs: Volume, port: Port, request: PlanRequest, plan: RunPlan,
        topology: Topology, vertices: VertexTables, options: RunOptions, sink: Sink,
        traffic: Callable[[], tuple[int, int]], views: ViewOpener | None = None,
    ) -> None:  # fmt: skip
        """Read *source*, the port's device 0; write *outputs*: the same volume, or device 1.

        *views* gives what is read in place of the features where the request has a view.
        """
        assert source.catalog.graph is not None
        self.source = source
        self.outputs = outputs
        self.port = port
        self.request = request
        self.plan = plan
        self.topology = topology
        self.vertices = vertices
        self.options = options
        self.sink = sink
        self.graph = source.catalog.graph
        self.device = CpuDevice(
            request.workers, sink,
            scratch_bytes(request.stages, self.graph.range_rows, request.decoded),
        )  # fmt: skip
        self.objects = RunObjects(
            source, outputs, plan, options.name, request.fanouts, options.checkpoint_seconds, sink,
            port,
        )  # fmt: skip
        self.counters = self.objects.counters
        self.moments: dict[int, Moments] = {}
        self.finished = False
        self._views = views
        self._traffic = traffic
        self._partial_sums = MomentSums.empty(topology.chunks)

    # --- the loop

    def run(self) -> None:
        """Run every stage that is not done; the output is complete and committed afterwards."""
        give_back_free_memory()  # planning is over
        try:
            with single_threaded_torch(), short_switch_interval():
                for stage in self.plan.stages:
                    self._measure_stage(stage)
            self.objects.complete()
        except ReadFailed:
            device = self._views.device if self._views is not None else -1
            error = explain_failure(self.port, self.source, self.outputs, device)
            raise error from error.__cause__
        self.finished = True

    def _measure_stage(self, stage: StagePlan) -> None:
        """Run what is not done of a stage, and note what it took."""
        begin, before = time.perf_counter(), self._traffic()
        todo = self.objects.todo(stage)
        self.counters.lanes_resumed += int(np.count_nonzero(~todo))
        if np.any(todo):
            self._run_stage(stage, todo)
        if stage.stage.moments and self.objects.is_read(stage):
            self._find_moments(stage)
        self.counters.stage_seconds.append(time.perf_counter() - begin)
        after = self._traffic()
        self.counters.stage_bytes.append((after[0] - before[0], after[1] - before[1]))

    def _run_stage(self, stage: StagePlan, todo: NDArray[np.bool_]) -> None:
        sources = [self._input(i.stage) for i in stage.stage.inputs]
        if stage.stage.conv is None:
            self._run_rows(stage, sources, todo)
        else:
            self._run_conv(stage, sources[0], todo)

    def _input(self, index: int, lanes: tuple[int, int] | None = None) -> PageStoreInfo:
        """Return the pages of a stage's input; a view is asked for, a sampled one for *lanes*."""
        view = self.request.view
        if index != FEATURES or view is None or (view.sampled and lanes is None):
            return self.objects.checked_source(index)
        assert self._views is not None
        head = self._views.open(view, self.options.seed, lanes or (0, self.topology.chunks))
        return view_store(head, 0, self._views.device)

    def _run_conv(self, stage: StagePlan, source: PageStoreInfo, todo: NDArray[np.bool_]) -> None:
        conv, chosen = stage.stage.conv, stage.chosen
        assert conv is not None
        tiles = self.objects.tile_stores(stage)
        sample = Sample(
            self.request.fanouts[stage.stage.layer], self.options.seed, stage.stage.layer
        )
        heads = conv.attention.heads if conv.attention else 0
        floats = VertexFloats(self._factors(stage, tiles, sample), self.graph.vertices, heads)
        if conv.attention:
            self._find_scores(stage, source, floats.scores)
        width = int(conv.attention.att_src.shape[1]) if conv.attention else 0
        sums = MomentSums.empty(self.topology.chunks) if stage.stage.moments else None
        target = replace(self.objects.stores[stage.stage.index], number=4)
        held = np.zeros(self.topology.chunks, bool)
        view = self.request.view if stage.stage.inputs[0].stage == FEATURES else None
        sampled = view is not None and view.sampled
        for index in range(len(chosen.groups)):
            low, high = chosen.groups[index]
            if not np.any(todo[low:high]):
                continue
            if sampled:
                source = self._input(FEATURES, (low, high))
            inputs = PassInputs(
                chosen, self.topology, self.graph.vertices, source, tiles, target,
                self.objects.log(stage), self.vertices, floats, heads, width, sample, index, held,
                todo, self.request.workers, self.options.check, view.columns if view else None,
            )  # fmt: skip
            scan = PassScan(
                stage.stage, inputs, self.port, self.moments.get(stage.stage.inputs[0].stage), sums
            )
            self._run_pass(stage, scan, index)
            pinned = scan.tables.chunks[scan.tables.chunks < source.kept + chosen.pinned]
            held[pinned] = True
            del scan, inputs  # the next pass makes its own tables
        if sums is not None:
            self._partial_sums = sums

    def _run_pass(self, stage: StagePlan, scan: PassScan, index: int) -> None:
        total = scan.pages_left()
        name, passes = stage.stage.name, len(stage.chosen.groups)

        def pulse() -> None:
            done = total - scan.pages_left()
            self.sink.emit(Advance(stage.stage.index, name, index, passes, done, total, "page"))
            self.objects.checkpoint(stage, scan.durable, scan.page_crcs)

        begin = time.perf_counter()
        try:
            self._work_through(stage, scan, pulse)
        except KeyboardInterrupt:  # keeps what was written since the last commit
            self.objects.keep(stage, scan.durable(), scan.page_crcs())
            raise
        self.objects.record(stage, scan.durable(), scan.page_crcs())
        pulse()
        emit_counters(self.sink, stage.stage.index, index, scan, time.perf_counter() - begin)

    def _work_through(self, stage: StagePlan, scan: PassScan, pulse: Callable[[], None]) -> None:
        """Run a pass until every lane of it is written."""
        self.device.run(scan, pulse, self.port.ring.stop)
        self._raise_for(scan)
        if scan.inputs.log is not None:
            self._merge_log(stage, scan, pulse)
        while not scan.drained():
            self._raise_for(scan)
            time.sleep(1e-4)
        self._raise_for(scan)

    def _merge_log(self, stage: StagePlan, scan: PassScan, pulse: Callable[[], None]) -> None:
        begin = time.perf_counter()
        finish_log(scan)
        merge = LogMerge(scan)
        self.device.run_workers(merge.work, pulse, self.port.ring.stop)
        self._raise_for(scan)
        self.sink.emit(Span("merge", stage.stage.index, -1, begin, time.perf_counter()))

    def _raise_for(self, scan: PassScan) -> None:
        if scan.stopped() != 0 or self.port.death() is not None:
            raise ReadFailed

    # --- stages without edges

    def _run_rows(
        self, stage: StagePlan, sources: list[PageStoreInfo], todo: NDArray[np.bool_]
    ) -> None:
        target = replace(self.objects.stores[stage.stage.index], number=4)
        numbered = [replace(s, number=0) for s in sources]
        sums = MomentSums.empty(self.topology.chunks) if stage.stage.moments else None

        def function(lane: int, blocks: list[Tensor]) -> Tensor:
            y = combine_rows(stage.stage, blocks, self.moments)
            if sums is not None:
                sums.add(lane, y)
            return y

        stream = LaneStream(
            self.port, numbered, target, np.flatnonzero(todo), self.request.workers,
            self.options.check, self.plan.arena_bytes,
        )  # fmt: skip
        self._stream(stage, stream, function, lambda: stream.durable, lambda: stream.crcs)
        self.objects.record(stage, stream.durable, stream.crcs)
        if sums is not None:
            self._partial_sums = sums

    def _factors(self, stage: StagePlan, tiles: TileStores, sample: Sample) -> Factors:
        """Return the factors of a stage; sampled edge weights are summed over all tiles first."""
        conv, stores = stage.stage.conv, (tiles.tiles, tiles.ranks, tiles.weights)
        assert conv is not None
        if not needs_kept_weights(conv, sample, self.graph.weighted):
            return conv_factors(conv, self.vertices, sample)
        kept = KeptWeights(self.vertices, sample, self.graph.range_rows)
        sources = [page_by_page(store) for store in stores if store is not None]
        # One worker: sums take the pages in order, and have the same bits for any number.
        stream = LaneStream(
            self.port, sources, None, np.arange(self.topology.pages), 1, self.options.check,
            self.plan.arena_bytes,
        )  # fmt: skip
        begin = time.perf_counter()
        self._stream(stage, stream, kept.add, None, None)
        self.sink.emit(Span("degrees", stage.stage.index, -1, begin, time.perf_counter()))
        sums = kept.sums
        del kept, stream
        return conv_factors(conv, self.vertices, sample, sums)

    def _find_scores(
        self, stage: StagePlan, source: PageStoreInfo, scores: NDArray[np.float32]
    ) -> None:
        """Fill in the destinations' attention scores [V, heads], in one more pass."""
        conv = stage.stage.conv
        assert conv is not None
        assert conv.attention is not None
        before = stage.stage.inputs[0].before
        moments = self.moments.get(stage.stage.inputs[0].stage)
        weight = score_weights(conv)
        view = self.request.view if stage.stage.inputs[0].stage == FEATURES else None
        columns = None if view is None else view.columns

        def function(lane: int, blocks: list[Tensor]) -> None:
            at = lane * self.graph.range_rows
            for block in landing_blocks(source, blocks[0]):  # a view has the same blocks
                x = apply_row_ops(conv.source, apply_row_ops(before, block, moments))
                found = x @ weight if columns is None else x[:, -columns.scores :]
                scores[at : at + len(x)] = found.numpy()
                at += len(x)

        stream = LaneStream(
            self.port, [source], None, np.arange(self.topology.chunks), self.request.workers,
            self.options.check, self.plan.arena_bytes,
        )  # fmt: skip
        begin = time.perf_counter()
        self._stream(stage, stream, function, None, None)
        self.sink.emit(Span("scores", stage.stage.index, -1, begin, time.perf_counter()))

    def _stream(
        self, stage: StagePlan, stream: LaneStream, function: Any,
        durable: Callable[[], NDArray[np.bool_]] | None, crcs: Callable[[], Any] | None,
    ) -> None:  # fmt: skip
        total = len(stream.lanes)

        def pulse() -> None:
            index, name = stage.stage.index, stage.stage.name
            self.sink.emit(Advance(index, name, 0, 1, stream.finished, total, "lane"))
            if durable is not None and crcs is not None:
                self.objects.checkpoint(stage, durable, crcs)

        self.device.run_workers(
            lambda worker: stream.work(worker, function), pulse, self.port.ring.stop
        )
        pulse()

    def _find_moments(self, stage: StagePlan) -> None:
        """Get mean and deviation of everything a stage wrote, reading lanes done before a crash."""
        index = stage.stage.index
        sums = self._partial_sums
        missing = np.flatnonzero(sums.sums[:, 2] == 0)
        if len(missing):

            def function(lane: int, blocks: list[Tensor]) -> None:
                sums.add(lane, blocks[0])

            stream = LaneStream(
                self.port, [self.objects.checked_source(index)], None, missing,
                self.request.workers, self.options.check, self.plan.arena_bytes,
            )  # fmt: skip
            self._stream(stage, stream, function, None, None)
        self.moments[index] = sums.moments()
        self._partial_sums = MomentSums.empty(self.topology.chunks)


def emit_counters(sink: Sink, stage: int, index: int, scan: PassScan, seconds: float) -> None:
    """Emit what the workers of a pass counted; ticks become shares of *seconds*."""
    stats = scan.stats()
    total = stats.sum(axis=0)
    ticks = max(int(total[W.ST_BUSY_TICKS] + total[W.ST_IDLE_TICKS]), 1)
    idle = float(total[W.ST_IDLE_TICKS]) / ticks
    sink.emit(
        ScanCounters(
            stage, index, int(total[W.ST_ITEMS]), int(total[W.ST_EDGES]), int(total[W.ST_SEGMENTS]),
            int(total[W.ST_PARKS]), int(total[W.ST_RESUMES]), int(total[W.ST_MISSES]),
            int(total[W.ST_POSTED]), len(scan.tables.chunks), int(total[W.ST_LOGGED_ROWS]),
            int(total[W.ST_IDLE]), seconds * (1 - idle), seconds * idle,
        )
    )  # fmt: skip
