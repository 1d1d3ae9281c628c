"""Geometry of the report's plots: the template draws what is computed here, in SVG user units."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from hyades.deploy.report.model import Phase, Span

WIDTH, LABEL, ROW, GAP = 1000.0, 120.0, 18.0, 6.0
_RESOLUTION = 1600  # bars are merged where a screen could not tell them apart
_MOST_BARS = 20_000

# Colour classes by what a bar is; the stylesheet defines c0..c7 for light and dark.
_CLASSES = {
    "read": 0, "rows": 0, "land": 1, "scan": 2, "tiles": 2, "merge": 3, "finalise": 4,
    "write": 5, "commit": 5, "wait": 6, "idle": 6, "scores": 7,
}  # fmt: skip
_OTHER = 7


def colour(name: str) -> int:
    """Return the index of the colour class of a phase or span."""
    return _CLASSES.get(name, _OTHER)


@dataclass(frozen=True, slots=True)
class Bar:
    """One rectangle."""

    x: float
    y: float
    width: float
    colour: int
    title: str


@dataclass(frozen=True, slots=True)
class Row:
    """One labelled line of bars."""

    label: str
    y: float


@dataclass(frozen=True, slots=True)
class Plot:
    """Bars in rows over a time axis."""

    width: float
    height: float
    rows: list[Row]
    bars: list[Bar]
    ticks: list[tuple[float, str]]
    legend: list[tuple[int, str]]


def plot_timeline(spans: Iterable[Span], seconds: float) -> Plot:
    """Return a row for each worker; neighbouring spans of one kind become one bar."""
    thin = thin_spans(spans, seconds)
    workers = list(dict.fromkeys(span.worker for span in thin))
    scale = _scale(seconds)
    bars = [
        Bar(
            LABEL + span.t0 * scale,
            workers.index(span.worker) * (ROW + GAP),
            max(0.4, (span.t1 - span.t0) * scale),
            colour(span.name),
            f"{span.name}: {span.t0:.3f} s to {span.t1:.3f} s",
        )
        for span in thin
    ]
    return _plot(workers, bars, seconds, [span.name for span in thin])


def plot_phases(phases: Sequence[Phase], stages: Sequence[str]) -> Plot:
    """Return a row for each stage: its phases end to end, in seconds of worker time."""
    totals = [sum(p.seconds for p in phases if p.stage == i) for i in range(len(stages))]
    seconds = max(totals, default=0.0)
    scale = _scale(seconds)
    bars = []
    ends = [0.0] * len(stages)
    for phase in phases:
        start, ends[phase.stage] = ends[phase.stage], ends[phase.stage] + phase.seconds
        bars.append(
            Bar(
                LABEL + start * scale,
                phase.stage * (ROW + GAP),
                max(0.4, phase.seconds * scale),
                colour(phase.name),
                f"{phase.name}: {phase.seconds:.3f} s over {phase.workers} workers",
            )
        )
    return _plot(stages, bars, seconds, [phase.name for phase in phases])


def thin_spans(spans: Iterable[Span], seconds: float) -> list[Span]:
    """Merge spans of one worker and name whose gap is below what the plot can show."""
    step = max(seconds, 1e-9) / _RESOLUTION
    merged: list[Span] = []
    last: dict[tuple[str, str], int] = {}
    for span in sorted(spans, key=lambda s: (s.worker, s.t0)):
        key = (span.worker, span.name)
        at = last.get(key)
        if at is not None and span.t0 - merged[at].t1 <= step:
            before = merged[at]
            merged[at] = Span(
                name=before.name, worker=before.worker, t0=before.t0, t1=max(before.t1, span.t1)
            )
        else:
            last[key] = len(merged)
            merged.append(span)
    return merged[:_MOST_BARS]


def _scale(seconds: float) -> float:
    return (WIDTH - LABEL) / max(seconds, 1e-9)


def _plot(labels: Sequence[str], bars: list[Bar], seconds: float, names: Sequence[str]) -> Plot:
    legend = sorted({(colour(name), name) for name in names})
    rows = [Row(label, index * (ROW + GAP)) for index, label in enumerate(labels)]
    scale = _scale(seconds)
    ticks = [(LABEL + at * scale, text) for at, text in _ticks(seconds)]
    return Plot(WIDTH, len(rows) * (ROW + GAP) + 24, rows, bars, ticks, legend)


def _ticks(seconds: float) -> list[tuple[float, str]]:
    """Return about six round times from 0 to *seconds*."""
    if seconds <= 0:
        return [(0.0, "0 s")]
    rough = seconds / 6
    power = 10.0 ** floor(log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough)
    digits = max(0, ceil(-log10(step)))
    return [(i * step, f"{i * step:.{digits}f} s") for i in range(floor(seconds / step + 1e-9) + 1)]
