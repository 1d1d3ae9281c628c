"""The layer loop: run the stages of a plan, keep what is done, commit what can be resumed.

Rules:
1. Before the first stage, one commit makes room: the output, hidden objects and logs are
   preallocated, and the run is in the catalog as "running" with its fingerprint.
2. A lane is done when all its pages are written; its page-table entries are set only then. A commit
   every few seconds makes done lanes durable; a resumed run does only the others.
3. Rows kept in memory are gone after a crash: their stage runs again when a reader is not done.
4. The last commit renames the output into place and drops everything else of the run.

Lanes depend only on the stage's input and plan: a resumed run has the bits of an undisturbed one.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hyades.common.catalog import RunInfo
from hyades.common.port import Port
from hyades.common.trace import Advance, ScanCounters, Sink, Span
from hyades.common.volume import Volume
from hyades.gpu_side import words as W
from hyades.gpu_side.buffers import LOG_PAGE
from hyades.gpu_side.devices.cpu import CpuDevice, short_switch_interval, single_threaded_torch
from hyades.gpu_side.factors import Factors, Sample, VertexTables
from hyades.gpu_side.failure import VOLUME_DEVICE, explain_failure
from hyades.gpu_side.lanestream import LaneStream, ReadFailed
from hyades.gpu_side.merge import LogMerge, finish_log
from hyades.gpu_side.plan import RunPlan, StagePlan
from hyades.gpu_side.price import PlanRequest
from hyades.gpu_side.program import FEATURES
from hyades.gpu_side.rowops import Moments, apply_row_ops
from hyades.gpu_side.scan import MomentSums, PassScan
from hyades.gpu_side.scores import score_weights
from hyades.gpu_side.stores import PageStoreInfo, keep_ranges, memory_store, volume_store
from hyades.gpu_side.tables import PassInputs, TileStores
from hyades.gpu_side.topology import Topology
from hyades.gpu_side.vertices import sampled_factors


@dataclass(slots=True)
class RunOptions:
    """What a run is called and how it behaves."""

    name: str
    seed: int = 0
    check: bool = True
    checkpoint_seconds: float = 2.0


@dataclass(slots=True)
class RunCounters:
    """Seconds and lanes by stage, for the report."""

    stage_seconds: list[float] = field(default_factory=list)
    stage_bytes: list[tuple[int, int]] = field(default_factory=list)  # read, written
    lanes_resumed: int = 0
    commits: int = 0


def running_name(run: str, stage: int, last: int) -> str:
    """Return the name of a stage's object while the run goes on."""
    return f"running/{run}/output" if stage == last else f"running/{run}/hidden-{stage}"


def reserve_run(volume: Volume, plan: RunPlan, name: str, fingerprint: str) -> None:
    """Make room for every object of a run and commit it as running; UsageError on a full disk.

    A resumed run has its objects, but for hidden rows that had a place in more memory before.
    """
    graph, has = volume.catalog.graph, volume.catalog.objects
    assert graph is not None
    last = len(plan.stages) - 1
    try:
        for stage in plan.stages:
            thing = running_name(name, stage.stage.index, last)
            if not stage.keeps_output and thing not in has:
                volume.allocate_rows(
                    thing, f"float{8 * stage.output_itemsize}", graph.vertices, stage.stage.width,
                    graph.range_rows,
                )  # fmt: skip
        log_pages = max(s.chosen.log_pages for s in plan.stages)
        if log_pages and f"running/{name}/log" not in has:
            volume.allocate_pages(f"running/{name}/log", log_pages, LOG_PAGE)
        volume.catalog.runs[name] = RunInfo(name, "running", fingerprint)
        volume.commit()
    except BaseException:
        volume.rollback()
        raise


class Refresh:
    """One run over a volume; see the module."""

    def __init__(
        self, volume: Volume, port: Port, request: PlanRequest, plan: RunPlan, topology: Topology,
        vertices: VertexTables, options: RunOptions, sink: Sink,
        traffic: Callable[[], tuple[int, int]],
    ) -> None:  # fmt: skip
        assert volume.catalog.graph is not None
        self.volume = volume
        self.port = port
        self.request = request
        self.plan = plan
        self.topology = topology
        self.vertices = vertices
        self.options = options
        self.sink = sink
        self.graph = volume.catalog.graph
        self.device = CpuDevice(request.workers, sink)
        self.last = len(plan.stages) - 1
        self.counters = RunCounters()
        self.stores: dict[int, PageStoreInfo] = {}
        self.moments: dict[int, Moments] = {}
        self.finished = False
        self._traffic = traffic
        self._partial_sums = MomentSums.empty(topology.chunks)
        self._commit_due = 0.0
        self._open_stores()

    # --- objects

    def _open_stores(self) -> None:
        features = self.volume.object(self.graph.features)
        table = self.volume.page_table(self.graph.features)
        self.stores[FEATURES] = volume_store(features, 0, VOLUME_DEVICE, table)
        for stage in self.plan.stages:
            self.stores[stage.stage.index] = self._output_store(stage)

    def _output_store(self, stage: StagePlan) -> PageStoreInfo:
        index = stage.stage.index
        at = self.plan.arena_bytes + stage.hidden_at
        if stage.keeps_output:
            return memory_store(
                f"hidden rows of stage {index}", stage.stage.width, stage.output, at
            )
        info = self.volume.object(running_name(self.options.name, index, self.last))
        return keep_ranges(volume_store(info, 0, VOLUME_DEVICE, None), stage.kept, at)

    def _tile_stores(self, stage: StagePlan) -> TileStores:
        def store(name: str, number: int) -> PageStoreInfo:
            info = self.volume.object(name)
            return volume_store(info, number, VOLUME_DEVICE, self.volume.page_table(name))

        conv = stage.stage.conv
        assert conv is not None
        sampled = self.request.fanouts[stage.stage.layer] > 0
        weighted = conv.edge_weight and self.graph.weighted
        return TileStores(
            store("tiles", 1),
            store("ranks", 2) if sampled else None,
            store("weights", 3) if weighted else None,
        )

    def _checked_source(self, index: int) -> PageStoreInfo:
        """Return the store of a stage's input with the checksums that are now known."""
        store = self.stores[index]
        if index == FEATURES or self.plan.stages[index].keeps_output:
            return store
        table = self.volume.page_table(store.name)
        return replace(store, crcs=table["crc"].astype(np.int64))

    # --- the loop

    def run(self) -> None:
        """Run every stage that is not done; the output is complete and committed afterwards."""
        with single_threaded_torch(), short_switch_interval():
            for stage in self.plan.stages:
                begin, before = time.perf_counter(), self._traffic()
                todo = self._todo(stage)
                self.counters.lanes_resumed += int(np.count_nonzero(~todo))
                try:
                    if np.any(todo):
                        self._run_stage(stage, todo)
                    if stage.stage.moments and self._is_read(stage):
                        self._find_moments(stage)
                except ReadFailed:
                    error = explain_failure(self.port, self.volume)
                    raise error from error.__cause__
                self.counters.stage_seconds.append(time.perf_counter() - begin)
                after = self._traffic()
                self.counters.stage_bytes.append((after[0] - before[0], after[1] - before[1]))
        self._complete()
        self.finished = True

    def _todo(self, stage: StagePlan) -> NDArray[np.bool_]:
        """Return which lanes of a stage are not done."""
        store = self.stores[stage.stage.index]
        lanes = self.topology.chunks
        if stage.keeps_output:
            return np.full(lanes, self._is_read(stage))
        rows = self.volume.page_table(store.name)["rows"] > 0
        per_lane = store.shape.pages_per_range
        padded = np.ones(lanes * per_lane, bool)
        padded[: len(rows)] = rows
        todo = np.logical_not(padded.reshape(lanes, per_lane).all(axis=1))
        if stage.kept:
            todo[: stage.kept] = self._is_read(stage)
        return todo

    def _is_read(self, stage: StagePlan) -> bool:
        """Say whether a stage that reads this one's output has something to do."""
        readers = [
            s for s in self.plan.stages if any(i.stage == stage.stage.index for i in s.stage.inputs)
        ]
        return any(bool(np.any(self._todo(s))) for s in readers)

    def _run_stage(self, stage: StagePlan, todo: NDArray[np.bool_]) -> None:
        sources = [self._checked_source(i.stage) for i in stage.stage.inputs]
        if stage.stage.conv is None:
            self._run_rows(stage, sources, todo)
        else:
            self._run_conv(stage, sources[0], todo)

    def _run_conv(self, stage: StagePlan, source: PageStoreInfo, todo: NDArray[np.bool_]) -> None:
        conv, chosen = stage.stage.conv, stage.chosen
        assert conv is not None
        tiles = self._tile_stores(stage)
        sample = Sample(
            self.request.fanouts[stage.stage.layer], self.options.seed, stage.stage.layer
        )
        factors: Factors = sampled_factors(
            conv, self.vertices, sample, self.volume, self.graph.range_rows
        )
        scores = self._scores(stage, source) if conv.attention else None
        heads = conv.attention.heads if conv.attention else 0
        width = int(conv.attention.att_src.shape[1]) if conv.attention else 0
        sums = MomentSums.empty(self.topology.chunks) if stage.stage.moments else None
        target = replace(self.stores[stage.stage.index], number=4)
        held = np.zeros(self.topology.chunks, bool)
        for index in range(len(chosen.groups)):
            low, high = chosen.groups[index]
            if not np.any(todo[low:high]):
                continue
            inputs = PassInputs(
                chosen, self.topology, self.graph.vertices, source, tiles, target, self._log(stage),
                factors, self.vertices, scores, heads, width, sample, index, held, todo,
                self.request.workers, self.options.check,
            )  # fmt: skip
            scan = PassScan(
                stage.stage, inputs, self.port, self.moments.get(stage.stage.inputs[0].stage), sums
            )
            self._run_pass(stage, scan, index)
            pinned = scan.tables.chunks[scan.tables.chunks < source.kept + chosen.pinned]
            held[pinned] = True
        if sums is not None:
            self._partial_sums = sums

    def _log(self, stage: StagePlan) -> PageStoreInfo | None:
        if stage.chosen.windows is None or not stage.chosen.log_pages:
            return None
        return volume_store(
            self.volume.object(f"running/{self.options.name}/log"), 5, VOLUME_DEVICE, None
        )

    def _run_pass(self, stage: StagePlan, scan: PassScan, index: int) -> None:
        total = scan.pages_left()
        name, passes = stage.stage.name, len(stage.chosen.groups)

        def pulse() -> None:
            done = total - scan.pages_left()
            self.sink.emit(Advance(stage.stage.index, name, index, passes, done, total, "page"))
            self._checkpoint(stage, scan.durable, scan.page_crcs)

        begin = time.perf_counter()
        self.device.run(scan, pulse, self.port.ring.stop)
        self._raise_for(scan)
        if scan.inputs.log is not None:
            self._merge_log(stage, scan, pulse)
        while not scan.drained():
            self._raise_for(scan)
            time.sleep(1e-4)
        self._raise_for(scan)
        self._record(stage, scan.durable(), scan.page_crcs())
        pulse()
        emit_counters(self.sink, stage.stage.index, index, scan, time.perf_counter() - begin)

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
        from hyades.gpu_side.rowstage import combine_rows

        target = replace(self.stores[stage.stage.index], number=4)
        numbered = [replace(s, number=0) for s in sources]
        sums = MomentSums.empty(self.topology.chunks) if stage.stage.moments else None

        def function(lane: int, blocks: list[Tensor]) -> Tensor:
            y = combine_rows(stage.stage, blocks, self.moments)
            if sums is not None:
                sums.add(lane, y)
            return y

        stream = LaneStream(
            self.port, numbered, target, np.flatnonzero(todo), self.request.workers,
            self.options.check,
        )  # fmt: skip
        self._stream(stage, stream, function, lambda: stream.durable, lambda: stream.crcs)
        self._record(stage, stream.durable, stream.crcs)
        if sums is not None:
            self._partial_sums = sums

    def _scores(self, stage: StagePlan, source: PageStoreInfo) -> NDArray[np.float32]:
        """Return the destinations' attention scores, float32 [V, heads], in one more pass."""
        conv = stage.stage.conv
        assert conv is not None
        assert conv.attention is not None
        scores = np.zeros((self.graph.vertices, conv.attention.heads), np.float32)
        before = stage.stage.inputs[0].before
        moments = self.moments.get(stage.stage.inputs[0].stage)
        weight = score_weights(conv)

        def function(lane: int, blocks: list[Tensor]) -> None:
            x = apply_row_ops(conv.source, apply_row_ops(before, blocks[0], moments))
            first = lane * self.graph.range_rows
            scores[first : first + len(x)] = (x @ weight).numpy()

        stream = LaneStream(
            self.port, [source], None, np.arange(self.topology.chunks), self.request.workers,
            self.options.check,
        )  # fmt: skip
        begin = time.perf_counter()
        self._stream(stage, stream, function, None, None)
        self.sink.emit(Span("scores", stage.stage.index, -1, begin, time.perf_counter()))
        return scores

    def _stream(
        self, stage: StagePlan, stream: LaneStream, function: Any,
        durable: Callable[[], NDArray[np.bool_]] | None, crcs: Callable[[], Any] | None,
    ) -> None:  # fmt: skip
        total = len(stream.lanes)

        def pulse() -> None:
            index, name = stage.stage.index, stage.stage.name
            self.sink.emit(Advance(index, name, 0, 1, stream.finished, total, "lane"))
            if durable is not None and crcs is not None:
                self._checkpoint(stage, durable, crcs)

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
                self.port, [self._checked_source(index)], None, missing, self.request.workers,
                self.options.check,
            )  # fmt: skip
            self._stream(stage, stream, function, None, None)
        self.moments[index] = sums.moments()
        self._partial_sums = MomentSums.empty(self.topology.chunks)

    # --- what is durable

    def _record(self, stage: StagePlan, durable: NDArray[np.bool_], crcs: NDArray[Any]) -> None:
        """Set the page-table entries of durable lanes."""
        if stage.keeps_output:
            return
        store = self.stores[stage.stage.index]
        table = self.volume.page_table(store.name)
        per_lane = store.shape.pages_per_range
        flags = np.repeat(durable, per_lane)[: store.shape.pages]
        flags[: store.shape.first_page(stage.kept)] = False
        pages = np.flatnonzero(flags & (table["rows"] == 0))
        if not len(pages):
            return
        starts = (pages // per_lane) * store.shape.range_rows
        starts += (pages % per_lane) * store.shape.rows_per_page
        range_end = np.minimum((pages // per_lane + 1) * store.shape.range_rows, store.shape.rows)
        rows = np.minimum(starts + store.shape.rows_per_page, range_end) - starts
        table["crc"][pages] = crcs.reshape(-1)[pages]
        table["rows"][pages] = rows

    def _checkpoint(
        self, stage: StagePlan, durable: Callable[[], NDArray[np.bool_]], crcs: Callable[[], Any]
    ) -> None:
        now = time.perf_counter()
        if stage.keeps_output or now < self._commit_due:
            return
        self._record(stage, durable(), crcs())
        self._commit()

    def _commit(self) -> None:
        begin = time.perf_counter()
        self.volume.commit()
        end = time.perf_counter()
        self.sink.emit(Span("commit", -1, -1, begin, end))
        self.counters.commits += 1
        # A slow device must not spend its time on commits.
        self._commit_due = end + max(self.options.checkpoint_seconds, 10 * (end - begin))

    def _complete(self) -> None:
        volume, name = self.volume, self.options.name
        final = f"output/{name}"
        if final in volume.catalog.objects:
            volume.remove(final)
        volume.rename(running_name(name, self.last, self.last), final)
        drop_run(volume, name)
        volume.catalog.runs[name] = replace_run(volume.catalog.runs[name])
        self._commit()


def replace_run(run: RunInfo) -> RunInfo:
    """Return *run* as done."""
    return RunInfo(run.name, "done", run.fingerprint, run.notes)


def drop_run(volume: Volume, name: str) -> None:
    """Remove the working objects of a run, uncommitted."""
    for thing in [n for n in volume.catalog.objects if n.startswith(f"running/{name}/")]:
        volume.remove(thing)


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
