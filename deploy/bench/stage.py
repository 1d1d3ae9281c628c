"""hyades bench stage: what each operator of the stage costs a GB of rows, on one core."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from hyades.common.blocks import FileBlocks
from hyades.common.encodings import Encoding
from hyades.common.errors import UsageError
from hyades.common.units import MIB
from hyades.common.views import SparseShape
from hyades.common.viewspec import SampleSpec
from hyades.common.volume import Volume
from hyades.deploy.bench.graphs import GraphSpec, write_graph
from hyades.deploy.bench.output import plot_bars, write_json
from hyades.deploy.bench.peers import DEFAULT_OUT, report_progress
from hyades.deploy.commands.common import Size, table
from hyades.deploy.ingest.api import ingest
from hyades.target_side.stage.meter import SpanTimes
from hyades.target_side.stage.options import StageOptions
from hyades.target_side.stage.viewpages import ViewPages, open_volume_view

OPERATORS = ("read", "sample", "decode", "project", "quantise", "pages")


@dataclass(frozen=True, slots=True)
class Case:
    """A view to measure; `own` as in SampleSpec, fanout 0 is unsampled, width 0 unprojected."""

    name: str
    encoding: Encoding
    fanout: int = 0
    width: int = 0


@dataclass(slots=True)
class Cost:
    """What one view cost: CPU seconds as a whole, and spans by operator; the least of the turns.

    Spans are wall time: on a busy machine their sum exceeds the CPU time.
    """

    case: Case
    source_bytes: int
    view_bytes: int  # of the pages' used blocks: what travels
    rows: int  # of the view
    seconds: dict[str, float] = field(default_factory=dict)
    whole: float = 0.0
    index: float = 0.0  # finding the sampled rows, when the view is made

    @property
    def rate(self) -> float:
        """Source bytes a second through the pages of the view, without `index`."""
        return self.source_bytes / self.whole

    @property
    def share(self) -> float:
        """Bytes that travel for each byte of the source."""
        return self.view_bytes / self.source_bytes


def cases(fanout: int, width: int) -> list[Case]:
    """Return each operator by itself, and two that belong together."""
    return [
        Case("float32", "float32"),
        Case("float16", "float16"),
        Case("bfloat16", "bfloat16"),
        Case("int8", "int8"),
        Case(f"sample {fanout}", "float32", fanout),
        Case(f"project {width}", "float32", 0, width),
        Case(f"project {width}, float16", "float16", 0, width),
        Case(f"sample {fanout}, float16", "float16", fanout),
        Case(f"sample {fanout}, project {width}, int8", "int8", fanout, width),
    ]


def measure(
    volume: Volume, chosen: Sequence[Case], turns: int, options: StageOptions,
    progress: Callable[[str], None],
) -> list[Cost]:  # fmt: skip
    """Read every page of each view in order, *turns* times; the views take turns."""
    found: dict[str, Cost] = {}
    for turn in range(-1, turns):  # turn -1 compiles what is not compiled, and is not counted
        for case in chosen:
            progress(f"{case.name}, turn {turn + 1}")
            cost = _read_view(volume, case, options)
            if turn < 0:
                continue
            best = found.setdefault(case.name, cost)
            best.whole, best.index = min(best.whole, cost.whole), min(best.index, cost.index)
            for name, seconds in cost.seconds.items():
                best.seconds[name] = min(best.seconds[name], seconds)
    return list(found.values())


def _read_view(volume: Volume, case: Case, options: StageOptions) -> Cost:
    times, info = SpanTimes(), volume.object("features")
    sample: SampleSpec | None = None
    weights: tuple[NDArray[np.float32], ...] = ()
    if case.fanout:
        sample = SampleSpec(case.fanout, 0, 0, ((0, info.shape().ranges),), "none")
    if case.width:
        matrix = np.random.default_rng(1).standard_normal((case.width, info.width))
        weights = (matrix.astype(np.float32),)
    begin = time.thread_time()
    view = open_volume_view(
        volume, "features", encoding=case.encoding, sample=sample, weights=weights,
        options=options, sink=times,
    )  # fmt: skip
    try:
        index = time.thread_time() - begin
        times.seconds.clear()
        begin = time.thread_time()
        used = sum(len(view.page(number)) for number in _used_pages(view))
        whole = time.thread_time() - begin
        seconds = {name: times.seconds.get(name, 0.0) for name in OPERATORS}
        rows = view.counts()["pages"].rows_out
    finally:
        view.close()
    return Cost(case, info.nbytes, used, rows, seconds, whole, index if sample else 0.0)


def _used_pages(view: ViewPages) -> list[int]:
    """Return the pages that a reader asks for."""
    shape = view.shape
    if not isinstance(shape, SparseShape):
        return list(range(shape.pages))
    return [
        index * shape.pages_per_range + place
        for index, count in enumerate(view.head.counts.tolist())
        for place in range(shape.used_pages(count))
    ]


def costs_table(costs: Sequence[Cost]) -> str:
    """Return a line a view: seconds a GB of source by operator, and where the view pays."""
    lines = []
    for cost in costs:
        scale = cost.source_bytes / 1e9
        spent = [f"{cost.seconds[name] / scale:.3f}" for name in OPERATORS]
        lines.append([
            cost.case.name, *spent, f"{cost.whole / scale:.3f}", f"{cost.index / scale:.3f}",
            f"{cost.share:.3f}", f"{8 * cost.rate / 1e9:.1f}",
        ])  # fmt: skip
    head = ["view", *OPERATORS, "all cpu", "index cpu", "bytes out/in", "pays below Gbit/s"]
    return table(head, lines)


def prepare(spec: GraphSpec, work: Path, progress: Callable[[str], None]) -> Path:
    """Return a volume of the generated graph, made once."""
    name = f"stage-{spec.vertices}-{spec.degree}-{spec.width}"
    path = work / "volumes" / f"{name}.vol"
    if not path.exists():
        progress(f"ingest of {spec.vertices:,} vertices")
        files = write_graph(spec, work / "graphs" / name)
        path.parent.mkdir(parents=True, exist_ok=True)
        ingest(path, edges=(str(files.indptr), str(files.indices)), features=str(files.features))
    return path


def to_json(costs: Sequence[Cost], graph: GraphSpec) -> dict[str, Any]:
    """Return everything that was measured."""
    rows = [{**asdict(cost), "bytes_per_s": cost.rate, "share": cost.share} for cost in costs]
    return {"graph": asdict(graph), "views": rows}


@click.command()
@click.option("--vertices", default=100_000, show_default=True, type=click.IntRange(min=1))
@click.option("--degree", default=16, show_default=True, type=click.IntRange(min=0))
@click.option("--width", default=256, show_default=True, type=click.IntRange(min=1))
@click.option("--project", default=128, show_default=True, help="Columns of the projection.")
@click.option("--fanout", default=2, show_default=True, type=click.IntRange(min=1))
@click.option("--repeat", default=5, show_default=True, type=click.IntRange(min=1))
@click.option("--core", type=int, help="Run on this core; default: wherever the system likes.")
@click.option(
    "--stage-memory", type=Size(), default=256 * MIB, metavar="SIZE", help="Default 256 MiB."
)
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULT_OUT, show_default=True)
def command(
    vertices: int, degree: int, width: int, project: int, fanout: int, repeat: int,
    core: int | None, stage_memory: int, out: Path,
) -> None:  # fmt: skip
    """Measure what the stage's operators cost, seconds for a GB of float32 rows on one core.

    One thread does everything, from the page cache, so that no time is counted twice. `index` is
    spent once, when a sampled view is made. Operators are spans of wall time, the least of all
    turns; `all` and `index` are CPU time, which other programs hardly change. A view pays on links
    slower than one core makes it (last column): there the link, not the stage, sets the pace, and
    it carries fewer bytes.

    \b
    hyades bench stage
    hyades bench stage --vertices 300000 --width 1024 --core 1
    """
    if project < 1:
        raise UsageError("--project: at least one column")
    graph = GraphSpec(vertices, degree, width)
    path = prepare(graph, out / "work", report_progress)
    before = os.sched_getaffinity(0)
    if core is not None:
        if core not in before:
            raise UsageError(f"--core {core}: this process may use {sorted(before)}")
        os.sched_setaffinity(0, {core})
    try:
        with Volume.open(FileBlocks(path, writable=False)) as volume:
            options = StageOptions(memory=stage_memory, threads=0, readers=0)
            costs = measure(volume, cases(fanout, project), repeat, options, report_progress)
    finally:
        os.sched_setaffinity(0, before)
    text = (
        f"{vertices:,} vertices, {vertices * degree:,} edges, {width} features; "
        f"seconds a GB of rows, one core, least of {repeat} turns\n{costs_table(costs)}\n"
    )
    out.mkdir(parents=True, exist_ok=True)
    (out / "stage.txt").write_text(text)
    write_json(out / "stage.json", to_json(costs, graph))
    plot_bars(
        [cost.case.name for cost in costs],
        [cost.whole / cost.source_bytes * 1e9 for cost in costs],
        "seconds a GB of float32 rows, one core", out / "stage",
    )  # fmt: skip
    click.echo(text)
    click.echo(f"written: {out / 'stage'}.txt, .json, .png, .svg")
