"""The project's goals for speed, judged from the rows of one run.

Times are medians after imports.  A goal whose rows are missing or went wrong is not judged and says
why; none is ever left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hyades.common.units import GIB, MIB
from hyades.deploy.bench.graphs import named_graph
from hyades.deploy.bench.runner import Row
from hyades.deploy.bench.seqread import SequentialRate

TIGHT, TIGHTER = GIB, 768 * MIB
_COMPUTE = "hyades-mem"


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal; `met` is None when it could not be judged, `text` then says why."""

    name: str
    target: str
    measured: str
    met: bool | None


def judge(rows: Sequence[Row], rate: SequentialRate | None) -> list[Goal]:
    """Return every goal that the cases in *rows* concern, in their order."""
    found = _Rows(rows)
    goals: list[Goal] = []
    for title in found.titles:
        own = found.get(title, "hyades")
        if own is None:
            continue
        if own.case.limit is None:
            goals += _in_memory(found, title, own)
        elif own.case.limit == TIGHT:
            goals += _in_a_gibibyte(found, title, own)
        elif own.case.limit == TIGHTER and own.case.graph.endswith("-shuffled"):
            goals.append(_shuffled(title, own))
        if own.case.limit is not None:
            goals.append(_overlap(found, title, own, rate))
    return [*goals, *_linear(found)]


class _Rows:
    def __init__(self, rows: Sequence[Row]) -> None:
        self.titles = list(dict.fromkeys(row.case.title for row in rows))
        self._rows = {(row.case.title, row.system): row for row in rows}

    def get(self, title: str, system: str) -> Row | None:
        return self._rows.get((title, system))


def _why(row: Row | None, name: str) -> str | None:
    """Return why *row* has no time, or None when it has."""
    if row is None or not row.runs:
        return f"{name} was not run"
    if row.seconds is None:
        return f"{name}: {row.median.measured.detail}"
    return None


def _faster(
    found: _Rows, title: str, own: Row, peers: tuple[str, ...], factor: float, *, aim: bool = False
) -> Goal:
    """Compare with the fastest of *peers* that ended well."""
    name = f"{title}: faster than {peers[0]}"
    target = f"{'aim for' if aim else 'at least'} {factor:g}x"
    rows = [row for peer in peers if (row := found.get(title, peer)) is not None]
    timed = [row for row in rows if row.seconds is not None]
    other = min(timed, key=lambda row: row.seconds or 0.0, default=found.get(title, peers[0]))
    reason = _why(own, "hyades") or _why(other, peers[0])
    if reason is not None or other is None or own.seconds is None or other.seconds is None:
        return Goal(name, target, reason or "", None)
    ratio = other.seconds / own.seconds
    text = f"{ratio:.2f}x ({other.system} {other.seconds:.2f} s / {own.seconds:.2f} s)"
    return Goal(name, target, text, ratio > factor if factor == 1 else ratio >= factor)


def _in_memory(found: _Rows, title: str, own: Row) -> list[Goal]:
    return [
        _faster(found, title, own, ("dgl-full",), 1),
        _faster(found, title, own, ("pyg-full", "pyg-full-csr"), 2),
        _faster(found, title, own, ("dgl-layerwise",), 3, aim=True),
    ]


def _in_a_gibibyte(found: _Rows, title: str, own: Row) -> list[Goal]:
    name, target = f"{title}: bytes read", "at most 1.1x the plan's minimum"
    detail = own.median.detail
    if detail is None or not detail.planned_read:
        read = Goal(name, target, _why(own, "hyades") or "no planned bytes in the report", None)
    else:
        ratio = detail.read_bytes / detail.planned_read
        text = f"{ratio:.3f}x ({_gb(detail.read_bytes)} / {_gb(detail.planned_read)})"
        read = Goal(name, target, text, ratio <= 1.1)
    return [_faster(found, title, own, ("dgl-layerwise",), 4), read]


def _shuffled(title: str, own: Row) -> Goal:
    name, target = f"{title}: finishes; bytes read plus written", "at most 3 GB"
    detail = own.median.detail
    if detail is None:
        measured = own.median.measured
        return Goal(name, target, measured.detail, None if measured.outcome == "skipped" else False)
    moved = detail.read_bytes + detail.written_bytes
    return Goal(name, target, _gb(moved), moved <= 3e9)


def _overlap(found: _Rows, title: str, own: Row, rate: SequentialRate | None) -> Goal:
    name = f"{title}: I/O and compute overlap"
    target = "wall at most 1.25x the larger of bytes / sequential rate and compute alone"
    alone = found.get(title, _COMPUTE)
    reason = _why(own, "hyades") or _why(alone, _COMPUTE)
    if reason is None and rate is None:
        reason = "the sequential rate was not measured"
    detail = own.median.detail if own.runs else None
    if reason is not None or rate is None or detail is None or alone is None:
        return Goal(name, target, reason or "", None)
    transfer = (detail.read_bytes + detail.written_bytes) / rate.bytes_per_s
    compute = alone.seconds or 0.0
    ratio = detail.seconds / max(transfer, compute)
    text = f"{ratio:.2f}x ({detail.seconds:.2f} s; I/O {transfer:.2f} s, compute {compute:.2f} s)"
    return Goal(name, target, text, ratio <= 1.25)


def _linear(found: _Rows) -> list[Goal]:
    """Compare each model's time per edge on 4M/64M with that on 1M/16M, for `hyades` in memory."""
    goals = []
    for title in found.titles:
        small = found.get(title, "hyades")
        if small is None or small.case.graph != "1M16M" or small.case.limit is not None:
            continue
        large = found.get(title.replace("1M16M", "4M64M"), "hyades")
        name = f"{small.case.model.title}: time per edge-row, 4M/64M against 1M/16M"
        reason = _why(small, "hyades on 1M16M") or _why(large, "hyades on 4M64M")
        if reason is not None or large is None or not small.seconds or not large.seconds:
            goals.append(Goal(name, "at most 1.15x", reason or "", None))
            continue
        times = [
            seconds / named_graph(row.case.graph).edges
            for row, seconds in ((small, small.seconds), (large, large.seconds))
        ]
        ratio = times[1] / times[0]
        text = f"{ratio:.3f}x ({1e9 * times[1]:.1f} ns / {1e9 * times[0]:.1f} ns an edge)"
        goals.append(Goal(name, "at most 1.15x", text, ratio <= 1.15))
    return goals


def _gb(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB"
