"""What the operators of a stage cost and moved."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hyades.common.encodings import Counts
from hyades.common.trace import Event, NullSink, Sink, Span


@dataclass(frozen=True, slots=True)
class OperatorCounts:
    """What one operator has taken and given; `values` are of quantise alone."""

    rows_in: int = 0
    rows_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    values: Counts = Counts()  # noqa: RUF009 - it cannot change

    def __add__(self, other: "OperatorCounts") -> "OperatorCounts":
        return OperatorCounts(
            self.rows_in + other.rows_in,
            self.rows_out + other.rows_out,
            self.bytes_in + other.bytes_in,
            self.bytes_out + other.bytes_out,
            self.values + other.values,
        )


class Meter:
    """Takes counts and spans of one stage, from any thread.

    Spans are named after their operator; `stage` in them is the stage's number, `worker` the number
    of the thread.
    """

    def __init__(self, sink: Sink | None = None, number: int = 0) -> None:
        self._sink = sink if sink is not None else NullSink()
        self._number = number
        self._lock = threading.Lock()
        self._counts: dict[str, OperatorCounts] = {}
        self._local = threading.local()

    def enter_thread(self, worker: int) -> None:
        """Say which worker the calling thread is; -1 where nobody said."""
        self._local.worker = worker

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Report the time inside the block as *name*'s."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            worker = getattr(self._local, "worker", -1)
            self._sink.emit(Span(name, self._number, worker, begin, time.perf_counter()))

    def add(self, name: str, counts: OperatorCounts) -> None:
        """Add what operator *name* has just done."""
        with self._lock:
            self._counts[name] = self._counts.get(name, OperatorCounts()) + counts

    def counts(self) -> dict[str, OperatorCounts]:
        """Return what every operator has done so far."""
        with self._lock:
            return dict(self._counts)


class SpanTimes:
    """A sink that adds up the seconds of spans by name, and hands every event on."""

    def __init__(self, then: Sink | None = None) -> None:
        self._then = then if then is not None else NullSink()
        self._lock = threading.Lock()
        self.seconds: dict[str, float] = {}

    def emit(self, event: Event) -> None:
        """Add a span's time."""
        if isinstance(event, Span):
            with self._lock:
                spent = self.seconds.get(event.name, 0.0)
                self.seconds[event.name] = spent + event.end - event.begin
        self._then.emit(event)

    def totals(self) -> dict[str, float]:
        """Return the seconds by name, a copy that does not change."""
        with self._lock:
            return dict(self.seconds)
