"""The Python API: open a volume, refresh it with a model, read rows in original ids.

Everything that needs more than one side of the ring is put together here: the plan (gpu_side), the
transports and the proxy (proxy), the volume (common).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hyades.common.catalog import Catalog
from hyades.common.errors import UsageError
from hyades.common.ring import Ring
from hyades.common.trace import Advance, Event, ListSink, Sink
from hyades.common.units import parse_size
from hyades.common.volume import Volume
from hyades.deploy import assemble
from hyades.deploy.machine import cores
from hyades.deploy.original import read_original
from hyades.deploy.outage import out_of_reach
from hyades.deploy.outputs import open_outputs, source_of, take_outputs
from hyades.deploy.report.build import candidates_of
from hyades.deploy.report.model import Candidate, Report
from hyades.deploy.report.write import write_report
from hyades.deploy.signals import one_signal_at_a_time
from hyades.deploy.volumes import open_volume
from hyades.deploy.warm import warmed_up
from hyades.gpu_side.fingerprint import fingerprint_run
from hyades.gpu_side.models.checks import check_fanouts, check_graph
from hyades.gpu_side.models.ir import Model
from hyades.gpu_side.models.loader import load_model
from hyades.gpu_side.plan import RunPlan, parse_forced, plan_run
from hyades.gpu_side.price import PlanRequest
from hyades.gpu_side.program import lower_model
from hyades.gpu_side.refresh import Refresh, RunOptions
from hyades.gpu_side.runobjects import drop_run, reserve_run
from hyades.gpu_side.topology import Topology, load_topology
from hyades.gpu_side.vertices import load_vertices
from hyades.proxy.arena import release_arena
from hyades.proxy.proxy import Proxy
from hyades.proxy.transport import Transport

ProgressCallback = Callable[[str, int, int, str], None]
ModelSource = torch.nn.Module | Model | Path | str
RING_SLOTS = 1 << 15
_DTYPES = {"float32": 4, "float16": 2}


class VolumeHandle:
    """An open volume; a context manager.  `volume` is the Volume itself, `url` its name."""

    def __init__(self, volume: Volume, url: str) -> None:
        self.volume = volume
        self.url = url

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the volume open for writing inside the block, whatever it was opened for."""
        if self.volume.writable:
            yield
            return
        self.volume.close()
        try:
            self.volume = open_volume(self.url, writable=True)
            yield
        finally:
            self.volume.close()
            self.volume = open_volume(self.url)

    @property
    def catalog(self) -> Catalog:
        """What the volume holds: graph, objects, runs."""
        return self.volume.catalog

    def read(self, name: str, rows: ArrayLike | slice | None = None) -> NDArray[Any]:
        """Return rows [n, D] of an output (or of any rows object, such as "features").

        *rows* are original ids, in any order, or a slice; None reads all in original order.
        """
        return read_original(self.volume, name, rows)

    def close(self) -> None:
        """Close the volume and unlock its file."""
        self.volume.close()

    def __enter__(self) -> "VolumeHandle":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.volume.__exit__(kind, error, trace)


@dataclass(frozen=True, slots=True)
class RefreshResult:
    """What a refresh did."""

    out: str
    report: Report
    plan: RunPlan


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What a refresh and an explanation have in common."""

    model: Model
    request: PlanRequest
    topology: Topology
    plan: RunPlan


def open(url: str | Path, writable: bool = False) -> VolumeHandle:  # noqa: A001 - the API's name
    """Open the volume at a path or URL; UsageError, DataError or BackendMissing."""
    return VolumeHandle(open_volume(str(url), writable=writable), str(url))


def open_output(url: str | Path, source: VolumeHandle) -> VolumeHandle:
    """Open, or make, the volume for outputs of *source* at a path or URL."""
    return VolumeHandle(open_outputs(str(url), source.volume, source.url), str(url))


@contextmanager
def _opened(volume: VolumeHandle | str | Path, writable: bool) -> Iterator[VolumeHandle]:
    if isinstance(volume, VolumeHandle):
        with volume.writing() if writable else nullcontext():
            yield volume
        return
    with open(volume, writable) as handle:
        yield handle


@contextmanager
def _target(
    place: VolumeHandle | str | Path | None, source: VolumeHandle
) -> Iterator[VolumeHandle]:
    """Give the volume that takes outputs: *source* where no other *place* is named."""
    if place is None or place is source:
        with source.writing():
            yield source
    elif isinstance(place, VolumeHandle):
        with place.writing():
            take_outputs(place.volume, source.volume, source.url)
            yield place
    else:
        with open_output(place, source) as handle:
            yield handle


def _fanouts(fanout: Sequence[int] | None, layers: int) -> tuple[int, ...]:
    if fanout is None:
        return (0,) * layers
    if isinstance(fanout, str) or not isinstance(fanout, Sequence):
        raise UsageError(f"fanout {fanout!r}: one number for each layer, such as [10, 10]")
    values = tuple(int(k) for k in fanout)
    if len(values) != layers:
        raise UsageError(f"--fanout has {len(values)} numbers, the model has {layers} layers")
    if any(k == 0 or k < -1 or k >= 1 << 62 for k in values):
        raise UsageError(f"--fanout {','.join(map(str, values))}: positive numbers, or -1 for all")
    return tuple(max(k, 0) for k in values)


def _prepare(
    handle: VolumeHandle, source: ModelSource, memory: str | int, fanout: Sequence[int] | None,
    threads: int | None, dtype: str, plan: str | None,
) -> _Prepared:  # fmt: skip
    volume = handle.volume
    graph = volume.catalog.graph
    if graph is None:
        raise UsageError(f"{handle.url} holds no graph: run `hyades ingest` first")
    read = source_of(volume)
    if read is not None:
        raise UsageError(f"{handle.url} holds only outputs: refresh from {read[0]}")
    if graph.features not in volume.catalog.objects:
        raise UsageError(f"{handle.url} holds no features: ingest again with --features")
    if dtype not in _DTYPES:
        raise UsageError(f"dtype {dtype!r}: outputs are stored as float32 or float16")
    workers = cores() if threads is None else int(threads)
    if not 1 <= workers <= 256:
        raise UsageError(f"--threads {workers}: from 1 to 256")
    model = source if isinstance(source, Model) else load_model(source)
    features = volume.object(graph.features)
    check_graph(model, graph, features.width)
    fanouts = _fanouts(fanout, len(model.layers))
    check_fanouts(model, fanouts)
    request = PlanRequest(
        graph, features, volume.object("tiles"), volume.catalog.page_size, lower_model(model),
        parse_size(memory), workers, (*fanouts, 0), _DTYPES[dtype],
        parse_forced(plan),
    )  # fmt: skip
    topology = load_topology(volume)
    return _Prepared(model, request, topology, plan_run(request, topology))


def explain(
    volume: VolumeHandle | str | Path, model: ModelSource, *, memory: str | int = "2GiB",
    fanout: Sequence[int] | None = None, seed: int = 0, threads: int | None = None,
    dtype: str = "float32", plan: str | None = None,
) -> list[Candidate]:  # fmt: skip
    """Return every plan that the planner weighs, with predicted bytes, seconds and memory."""
    del seed  # does not change the plan
    with _opened(volume, False) as handle:
        return candidates_of(_prepare(handle, model, memory, fanout, threads, dtype, plan).plan)


class _ProgressSink:
    """Passes progress on and keeps everything for the report."""

    def __init__(self, progress: ProgressCallback | None, sink: Sink | None, layers: int) -> None:
        self.kept = ListSink()
        self._progress = progress
        self._sink = sink
        self._layers = layers
        self._last: Advance | None = None
        self.devices: Sequence[Transport] = ()

    def emit(self, event: Event) -> None:
        """Take one event."""
        self.kept.emit(event)
        if self._sink is not None:
            self._sink.emit(event)
        if self._progress is not None and isinstance(event, Advance):
            passes = f" pass {event.pass_index + 1}/{event.passes}" if event.passes > 1 else ""
            phase = f"{event.stage + 1}/{self._layers} {event.name}{passes}"
            if event == self._last:  # no progress: it may wait for a target
                away = next(filter(None, (out_of_reach(d.stats()) for d in self.devices)), "")
                phase += f", waiting for {away}" if away else ""
            self._last = event
            self._progress(phase, event.done, event.total, event.unit)


def _check_name(volume: Volume, out: str, resume: bool, force: bool) -> None:
    if not out or "/" in out or out != out.strip() or not out.isprintable() or len(out) > 128:
        shown = out if len(out) <= 128 else f"{out[:40]}..."
        raise UsageError(
            f"--out {shown!r}: a printable name of up to 128 characters, without slashes or"
            " spaces around it"
        )
    run = volume.catalog.runs.get(out)
    running = run is not None and run.state == "running"
    if resume and not running:
        state = "is finished" if run is not None else "does not exist"
        raise UsageError(
            f"cannot resume {out!r}: that run {state} in {volume.name}; leave --resume out"
        )
    if running and not (resume or force):
        raise UsageError(
            f"run {out!r} in {volume.name} was interrupted: --resume continues it,"
            " --force starts over"
        )
    if f"output/{out}" in volume.catalog.objects and not force and not resume:
        raise UsageError(f"{volume.name} already has an output {out!r}: --force replaces it")


def _take_up(volume: Volume, out: str, mark: str, resume: bool) -> None:
    """Check that a resumed run is the same, or clear what an abandoned one left."""
    if resume:
        if volume.catalog.runs[out].fingerprint != mark:
            raise UsageError(
                f"run {out!r} was started with another model, options or plan: give the same"
                " (--memory and --threads shape the plan), or --force to start over"
            )
        return
    if any(name.startswith(f"running/{out}/") for name in volume.catalog.objects):
        drop_run(volume, out)
        del volume.catalog.runs[out]
        volume.commit()  # its space is free for the new run


def _put_together(
    source: Volume, store: Volume, prepared: _Prepared, options: RunOptions,
    devices: Sequence[Transport], events: _ProgressSink,
) -> tuple[Refresh, Proxy]:  # fmt: skip
    """Return a run and its proxy, not started."""
    events.devices = devices
    proxy = Proxy(
        Ring.create(RING_SLOTS), np.zeros(RING_SLOTS, np.int64),
        assemble.make_arena(prepared.plan, devices), devices, events,
    )  # fmt: skip
    run = Refresh(
        source, store, proxy.port(), prepared.request, prepared.plan, prepared.topology,
        load_vertices(source), options, events, lambda: assemble.volume_traffic(proxy),
    )  # fmt: skip
    return run, proxy


def refresh(
    volume: VolumeHandle | str | Path, model: ModelSource, *, out: str, memory: str | int = "2GiB",
    fanout: Sequence[int] | None = None, seed: int = 0, threads: int | None = None,
    dtype: str = "float32", plan: str | None = None, resume: bool = False, force: bool = False,
    progress: ProgressCallback | None = None, report_dir: str | Path | None = None,
    sink: Sink | None = None, checkpoint_seconds: float = 2.0,
    output_volume: VolumeHandle | str | Path | None = None,
) -> RefreshResult:  # fmt: skip
    """Compute *model* for every vertex; store the rows [V, D] as output *out*; see docs/api.md."""
    if not 0 <= seed < 1 << 63:
        raise UsageError(f"--seed {seed}: from 0 to 2^63 - 1")
    with (
        one_signal_at_a_time(), _opened(volume, output_volume is None) as handle,
        _target(output_volume, handle) as target, warmed_up(handle.url, progress),
        assemble.MemoryWatch() as watch,
    ):  # fmt: skip
        began, started = time.perf_counter(), datetime.now(UTC)
        store, urls = target.volume, [handle.url]
        if target is not handle:
            urls.append(target.url)
        _check_name(store, out, resume, force)
        prepared = _prepare(handle, model, memory, fanout, threads, dtype, plan)
        mark = fingerprint_run(prepared.plan, seed, prepared.request.fanouts)
        _take_up(store, out, mark, resume)
        events = _ProgressSink(progress, sink, len(prepared.plan.stages))
        reserve_run(store, prepared.plan, out, mark)
        settings = RunOptions(out, seed, checkpoint_seconds=checkpoint_seconds)
        with assemble.opened_devices(*urls) as devices:
            run, proxy = _put_together(handle.volume, store, prepared, settings, devices, events)
            try:
                proxy.start()
                run.run()
            finally:
                # An interrupted run leaves nothing behind that still writes.
                proxy.stop(drain=run.finished)
                release_arena(proxy.arena)
                if not run.finished:
                    store.rollback()
        options = {
            "memory": str(memory), "threads": str(prepared.request.workers), "dtype": dtype,
            "fanout": "all" if fanout is None else ",".join(map(str, fanout)), "seed": str(seed),
            "plan": plan or "auto",
        }  # fmt: skip
        report = assemble.make_report(
            assemble.Finished(
                urls, out, prepared.model, prepared.request, prepared.plan, run, proxy, watch,
                events.kept.events, options, started.isoformat(timespec="seconds"), began, resume,
            )
        )  # fmt: skip
    if report_dir is not None:
        write_report(report, Path(report_dir))
    return RefreshResult(out, report, prepared.plan)
