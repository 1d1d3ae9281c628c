"""Typed trace events and the sinks that take them: the only way that hot code reports times.

Times are seconds of time.perf_counter, the clock that all threads of a process share.
"""

from typing import Protocol

import msgspec


class Span(msgspec.Struct, frozen=True, tag=True):
    """One piece of work of one worker."""

    name: str  # "land", "finalise", "scan", "scores", "rows", "merge", "commit", ...
    stage: int
    worker: int  # -1 is the coordinating thread
    begin: float
    end: float


class Advance(msgspec.Struct, frozen=True, tag=True):
    """How far a pass of a stage has come; `unit` says in what."""

    stage: int
    name: str
    pass_index: int
    passes: int
    done: int
    total: int
    unit: str


class ScanCounters(msgspec.Struct, frozen=True, tag=True):
    """What the workers counted in one pass."""

    stage: int
    pass_index: int
    items: int
    edges: int
    segments: int
    parks: int
    resumes: int
    misses: int
    posted: int
    landed: int
    logged_rows: int
    idle_rounds: int
    busy_seconds: float
    idle_seconds: float


Event = Span | Advance | ScanCounters


class Sink(Protocol):
    """Takes events from any thread; must be quick and must not raise."""

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...


class NullSink:
    """Forgets every event."""

    def emit(self, event: Event) -> None:
        """Forget it."""


class ListSink:
    """Keeps up to *limit* spans and all other events, in arrival order."""

    def __init__(self, limit: int = 20_000) -> None:
        self.events: list[Event] = []
        self._spans_left = limit

    def emit(self, event: Event) -> None:
        """Keep the event while there is room."""
        if isinstance(event, Span):
            self._spans_left -= 1
            if self._spans_left < 0:
                return
        self.events.append(event)  # list.append is atomic
