"""From trace events to the report's phases, timeline and counters."""

from hyades.common.trace import Advance, ScanCounters, Span
from hyades.deploy.report.build import counters_of, phases_of, spans_of
from hyades.deploy.report.model import Phase
from hyades.deploy.report.model import Span as Bar


def scan(stage: int, **changes: int | float) -> ScanCounters:
    counts: dict[str, int | float] = {
        "items": 10, "edges": 100, "segments": 50, "parks": 3, "resumes": 3, "misses": 4,
        "posted": 8, "landed": 8, "logged_rows": 2, "idle_rounds": 5,
        "busy_seconds": 1.5, "idle_seconds": 0.5,
    }  # fmt: skip
    return ScanCounters(stage=stage, pass_index=0, **counts | changes)  # type: ignore[arg-type]


EVENTS = [
    Span("commit", -1, -1, 100.0, 100.5),
    Span("land", 0, 0, 101.0, 101.5),
    Span("land", 0, 1, 101.0, 101.25),
    Advance(0, "convs.0", 0, 2, 5, 10, "page"),
    Span("scan", 0, 0, 101.5, 103.5),
    Span("scan", 0, 1, 101.5, 103.5),
    Span("land", 1, 0, 103.0, 104.0),
    Span("scan", 2, 0, 103.0, 104.0),
    scan(0),
    scan(0, parks=1),
    scan(1, busy_seconds=2.0),
]


def test_phases_add_up_and_the_kernel_is_split_as_its_workers_counted() -> None:
    assert phases_of(EVENTS) == [
        Phase(stage=0, name="land", seconds=0.75, workers=2),
        Phase(stage=0, name="tiles", seconds=3.0, workers=2),
        Phase(stage=0, name="idle", seconds=1.0, workers=2),
        Phase(stage=1, name="land", seconds=1.0, workers=1),
        Phase(stage=2, name="scan", seconds=1.0, workers=1),
    ]


def test_the_timeline_counts_from_the_start() -> None:
    assert spans_of(EVENTS, 100.0)[:2] == [
        Bar(name="commit", worker="main", t0=0.0, t1=0.5),
        Bar(name="land", worker="worker 0", t0=1.0, t1=1.5),
    ]


def test_counters_are_summed_over_passes() -> None:
    found = counters_of(EVENTS, requests=77, retries=1)
    assert (found.items, found.edges, found.misses) == (30, 300, 12)
    assert (found.parks, found.resumes, found.logged_rows) == (7, 9, 6)
    assert (found.requests, found.retries) == (77, 1)
    assert found.other == {"segments": 150, "posted": 24, "landed": 24, "idle_rounds": 15}
