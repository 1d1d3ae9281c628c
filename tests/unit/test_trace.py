"""Trace events and sinks."""

import threading

import msgspec
import pytest

from hyades.common.trace import Advance, Event, ListSink, NullSink, ScanCounters, Span

SPAN = Span("land", 1, 0, 2.5, 2.75)
ADVANCE = Advance(1, "convs.1 (GCNConv)", 0, 3, 7, 9, "page")
COUNTERS = ScanCounters(1, 0, 9, 100, 60, 4, 4, 2, 30, 5, 0, 8, 1.5, 0.25)


def test_a_list_sink_keeps_arrival_order():
    sink = ListSink()
    for event in (ADVANCE, SPAN, COUNTERS, SPAN):
        sink.emit(event)
    assert sink.events == [ADVANCE, SPAN, COUNTERS, SPAN]


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_a_list_sink_bounds_spans_and_nothing_else(limit):
    """A long run emits spans without end; progress and counters are few and all wanted."""
    sink = ListSink(limit)
    for _ in range(5):
        sink.emit(SPAN)
        sink.emit(ADVANCE)
    sink.emit(COUNTERS)
    assert sum(isinstance(event, Span) for event in sink.events) == limit
    assert sink.events.count(ADVANCE) == 5
    assert sink.events[-1] == COUNTERS


def test_threads_lose_nothing():
    sink = ListSink(limit=10)
    each, threads = 3000, 4

    def emit(worker):
        for done in range(each):
            sink.emit(Advance(0, "s", 0, 1, done, worker, "page"))

    running = [threading.Thread(target=emit, args=(n,)) for n in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    for worker in range(threads):
        own = [event.done for event in sink.events if event.total == worker]
        assert own == list(range(each))


def test_a_null_sink_takes_everything():
    sink = NullSink()
    for event in (SPAN, ADVANCE, COUNTERS):
        sink.emit(event)
    assert not vars(sink)


def test_events_are_told_apart_when_stored():
    events = [SPAN, ADVANCE, COUNTERS]
    assert msgspec.json.decode(msgspec.json.encode(events), type=list[Event]) == events


@pytest.mark.parametrize("event", [SPAN, ADVANCE, COUNTERS], ids=lambda e: type(e).__name__)
def test_events_cannot_change(event):
    with pytest.raises(AttributeError, match="immutable"):
        event.stage = 9
