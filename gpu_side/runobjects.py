"""The objects of a run in its volumes: what is there, what is done, and commits.

Features and topology are read from the source volume, device 0, and nothing is written to it.
Hidden rows, log and output lie in the output volume: the source itself, or device 1.
Rules:
1. `reserve_run` makes room for everything and commits the run as "running" with its fingerprint.
2. A lane is done when all its pages are written; its page-table entries are set only then. A commit
   every few seconds, after a flush of the device that they went through, makes done lanes durable;
   a resumed run does only the others.
3. Rows kept in memory are gone after a crash: their lanes run again when a reader is not done.
4. `complete` renames the output into place and drops everything else of the run.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.catalog import RunInfo
from hyades.common.port import Port
from hyades.common.trace import Sink, Span
from hyades.common.volume import Volume
from hyades.gpu_side.buffers import LOG_PAGE
from hyades.gpu_side.flush import DeviceFlush
from hyades.gpu_side.plan import RunPlan, StagePlan
from hyades.gpu_side.program import FEATURES
from hyades.gpu_side.stores import PageStoreInfo, keep_ranges, memory_store, volume_store
from hyades.gpu_side.tables import TileStores

SOURCE_DEVICE = 0


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
    """Make room in the output volume for a run and commit it as running; UsageError when full.

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


def replace_run(run: RunInfo) -> RunInfo:
    """Return *run* as done."""
    return RunInfo(run.name, "done", run.fingerprint, run.notes)


def drop_run(volume: Volume, name: str) -> None:
    """Remove the working objects of a run, uncommitted."""
    for thing in [n for n in volume.catalog.objects if n.startswith(f"running/{name}/")]:
        volume.remove(thing)


class RunObjects:
    """The objects of one run; see the module.  *outputs* may be *source* itself."""

    def __init__(
        self, source: Volume, outputs: Volume, plan: RunPlan, name: str, fanouts: tuple[int, ...],
        checkpoint_seconds: float, sink: Sink, port: Port,
    ) -> None:  # fmt: skip
        assert source.catalog.graph is not None
        self.source = source
        self.outputs = outputs
        self.output_device = SOURCE_DEVICE if outputs is source else SOURCE_DEVICE + 1
        self.plan = plan
        self.name = name
        self.fanouts = fanouts
        self.checkpoint_seconds = checkpoint_seconds
        self.sink = sink
        self._flush = DeviceFlush(port, self.output_device)
        self.graph = source.catalog.graph
        self.chunks = self.graph.chunks
        self.last = len(plan.stages) - 1
        self.counters = RunCounters()
        self.stores: dict[int, PageStoreInfo] = {}
        self._due = 0.0
        self._open_stores()

    def _open_stores(self) -> None:
        features = self.source.object(self.graph.features)
        table = self.source.page_table(self.graph.features)
        self.stores[FEATURES] = volume_store(features, 0, SOURCE_DEVICE, table)
        for stage in self.plan.stages:
            self.stores[stage.stage.index] = self._output_store(stage)

    def _output_store(self, stage: StagePlan) -> PageStoreInfo:
        index = stage.stage.index
        at = self.plan.arena_bytes + stage.hidden_at
        if stage.keeps_output:
            return memory_store(
                f"hidden rows of stage {index}", stage.stage.width, stage.output, at
            )
        info = self.outputs.object(running_name(self.name, index, self.last))
        return keep_ranges(volume_store(info, 0, self.output_device, None), stage.kept, at)

    def tile_stores(self, stage: StagePlan) -> TileStores:
        """Return the tile pages that a conv stage reads, and what it reads beside them."""

        def store(name: str, number: int) -> PageStoreInfo:
            info = self.source.object(name)
            return volume_store(info, number, SOURCE_DEVICE, self.source.page_table(name))

        conv = stage.stage.conv
        assert conv is not None
        sampled = self.fanouts[stage.stage.layer] > 0
        weighted = conv.edge_weight and self.graph.weighted
        return TileStores(
            store("tiles", 1),
            store("ranks", 2) if sampled else None,
            store("weights", 3) if weighted else None,
        )

    def checked_source(self, index: int) -> PageStoreInfo:
        """Return the store of a stage's input with the checksums that are now known."""
        store = self.stores[index]
        if index == FEATURES or self.plan.stages[index].keeps_output:
            return store
        table = self.outputs.page_table(store.name)
        return replace(store, crcs=table["crc"].astype(np.int64))

    def log(self, stage: StagePlan) -> PageStoreInfo | None:
        """Return the log of a stage whose plan has one."""
        if stage.chosen.windows is None or not stage.chosen.log_pages:
            return None
        info = self.outputs.object(f"running/{self.name}/log")
        return volume_store(info, 5, self.output_device, None)

    def todo(self, stage: StagePlan) -> NDArray[np.bool_]:
        """Return which lanes of a stage are not done."""
        store = self.stores[stage.stage.index]
        lanes = self.chunks
        if stage.keeps_output:
            return np.full(lanes, self.is_read(stage))
        rows = self.outputs.page_table(store.name)["rows"] > 0
        per_lane = store.shape.pages_per_range
        padded = np.ones(lanes * per_lane, bool)
        padded[: len(rows)] = rows
        todo = np.logical_not(padded.reshape(lanes, per_lane).all(axis=1))
        if stage.kept:
            todo[: stage.kept] = self.is_read(stage)
        return todo

    def is_read(self, stage: StagePlan) -> bool:
        """Say whether a stage that reads this one's output has something to do."""
        readers = [
            s for s in self.plan.stages if any(i.stage == stage.stage.index for i in s.stage.inputs)
        ]
        return any(bool(np.any(self.todo(s))) for s in readers)

    def record(self, stage: StagePlan, durable: NDArray[np.bool_], crcs: NDArray[Any]) -> None:
        """Set the page-table entries of durable lanes."""
        if stage.keeps_output:
            return
        store = self.stores[stage.stage.index]
        table = self.outputs.page_table(store.name)
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

    def checkpoint(
        self, stage: StagePlan, durable: Callable[[], NDArray[np.bool_]], crcs: Callable[[], Any]
    ) -> None:
        """Make what is done durable, unless the last commit was a moment ago."""
        now = time.perf_counter()
        if stage.keeps_output or now < self._due:
            return
        self.keep(stage, durable(), crcs())

    def keep(self, stage: StagePlan, durable: NDArray[np.bool_], crcs: NDArray[Any]) -> None:
        """Make what is done durable now."""
        if not stage.keeps_output:
            self.record(stage, durable, crcs)
            self.commit()

    def commit(self) -> None:
        """Commit the output volume."""
        begin = time.perf_counter()
        self._flush()
        self.outputs.commit()
        end = time.perf_counter()
        self.sink.emit(Span("commit", -1, -1, begin, end))
        self.counters.commits += 1
        # A slow device must not spend its time on commits.
        self._due = end + max(self.checkpoint_seconds, 10 * (end - begin))

    def complete(self) -> None:
        """Put the output in its place and drop everything else of the run, in one commit."""
        volume, name = self.outputs, self.name
        final = f"output/{name}"
        if final in volume.catalog.objects:
            volume.remove(final)
        volume.rename(running_name(name, self.last, self.last), final)
        drop_run(volume, name)
        volume.catalog.runs[name] = replace_run(volume.catalog.runs[name])
        self.commit()
