"""From a run's plan and trace events to the parts of a report."""

from collections.abc import Iterable

from hyades.common import trace
from hyades.deploy.report.model import Candidate, Counters, Phase, Span, Stage
from hyades.gpu_side import plan as planner
from hyades.gpu_side import price


def candidates_of(plan: planner.RunPlan) -> list[Candidate]:
    """Return every candidate of every stage, and why each was taken or not."""
    return [_candidate(stage, candidate) for stage in plan.stages for candidate in stage.candidates]


def stage_of(
    plan: planner.StagePlan, *, bytes_read: int, bytes_written: int, seconds: float
) -> Stage:
    """Return a stage's plan beside what was measured."""
    chosen = plan.chosen
    return Stage(
        index=plan.stage.index,
        name=plan.stage.name,
        in_channels=sum(source.width for source in plan.stage.inputs),
        out_channels=plan.stage.width,
        plan=chosen.name,
        order=_order(plan.stage.conv is not None, chosen),
        passes=max(1, len(chosen.groups)),
        predicted_read=chosen.bytes_read,
        predicted_written=chosen.bytes_written,
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        seconds=seconds,
    )


def phases_of(events: Iterable[trace.Event]) -> list[Phase]:
    """Return the time of each kind of span in each stage, in the order of their first end.

    A worker's "scan" is the kernel: it becomes "tiles" and "idle" in the shares that the workers
    counted, since they emit no span for each tile.
    """
    seconds: dict[tuple[int, str], float] = {}
    workers: dict[tuple[int, str], set[int]] = {}
    shares: dict[int, list[float]] = {}
    for event in events:
        if isinstance(event, trace.Span) and event.stage >= 0:
            key = (event.stage, event.name)
            seconds[key] = seconds.get(key, 0.0) + event.end - event.begin
            workers.setdefault(key, set()).add(event.worker)
        elif isinstance(event, trace.ScanCounters):
            share = shares.setdefault(event.stage, [0.0, 0.0])
            share[0] += event.busy_seconds
            share[1] += event.idle_seconds
    found = []
    for (stage, name), spent in seconds.items():
        parts = {name: spent}
        if name == "scan" and sum(shares.get(stage, ())) > 0:
            busy = shares[stage][0] / sum(shares[stage])
            parts = {"tiles": busy * spent, "idle": (1 - busy) * spent}
        count = len(workers[stage, name])
        found += [Phase(stage=stage, name=n, seconds=s, workers=count) for n, s in parts.items()]
    return sorted(found, key=lambda phase: phase.stage)


def spans_of(events: Iterable[trace.Event], began: float) -> list[Span]:
    """Return the timeline; *began* is the perf_counter at the start of the run."""
    return [
        Span(
            name=event.name,
            worker=f"worker {event.worker}" if event.worker >= 0 else "main",
            t0=event.begin - began,
            t1=event.end - began,
        )
        for event in events
        if isinstance(event, trace.Span)
    ]


def counters_of(events: Iterable[trace.Event], *, requests: int, retries: int) -> Counters:
    """Return the scheduler's counters over all passes; the proxy counts requests and retries."""
    scans = [event for event in events if isinstance(event, trace.ScanCounters)]

    def total(name: str) -> int:
        return sum(getattr(scan, name) for scan in scans)

    return Counters(
        items=total("items"),
        edges=total("edges"),
        misses=total("misses"),
        parks=total("parks"),
        resumes=total("resumes"),
        logged_rows=total("logged_rows"),
        requests=requests,
        retries=retries,
        other={name: total(name) for name in ("segments", "posted", "landed", "idle_rounds")},
    )


def _candidate(stage: planner.StagePlan, candidate: price.Candidate) -> Candidate:
    taken = (candidate.name, candidate.project_first) == (
        stage.chosen.name,
        stage.chosen.project_first,
    )
    return Candidate(
        stage=stage.stage.index,
        stage_name=stage.stage.name,
        name=candidate.name,
        order=_order(stage.stage.conv is not None, candidate),
        bytes_read=candidate.bytes_read,
        bytes_written=candidate.bytes_written,
        seconds=candidate.seconds,
        memory=candidate.memory,
        fits=candidate.fits,
        chosen=taken,
        reason=_reason(stage, candidate, taken=taken),
    )


def _order(convolves: bool, candidate: price.Candidate) -> str:
    if not convolves:
        return ""
    return "project first" if candidate.project_first else "aggregate first"


def _reason(stage: planner.StagePlan, candidate: price.Candidate, *, taken: bool) -> str:
    if taken and len(stage.candidates) == 1:
        return candidate.reason or "the only way"
    if taken:
        return "fewest bytes, then least time"
    if candidate.reason:
        return candidate.reason
    least = max(1, stage.chosen.bytes_moved)
    if candidate.bytes_moved > 1.01 * least:
        return f"moves {candidate.bytes_moved / least:.1f} x the bytes"
    return "same bytes, more time"
