"""What a connection counts, and the sum over all of them.

A connection's counters are written by its own thread only; whoever reads them may be a moment
behind, never wrong.
"""

import threading
from bisect import bisect_left
from collections import Counter

# Upper bounds of the latency histogram's buckets, seconds.
BOUNDS = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 0.5, 1.0, 5.0
)  # fmt: skip


class Counters:
    """Commands by (is admin, opcode), failures by status code, bytes and latencies."""

    def __init__(self) -> None:
        self.commands: Counter[tuple[bool, int]] = Counter()
        self.failures: Counter[int] = Counter()
        self.bytes_read = self.bytes_written = 0
        self.latency = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def count(self, admin: bool, opcode: int, status: int, seconds: float) -> None:
        """Count a command that has ended."""
        self.commands[admin, opcode] += 1
        if status:
            self.failures[status & 0x7FF] += 1
        if not admin:
            self.latency[bisect_left(BOUNDS, seconds)] += 1
            self.seconds += seconds

    def add(self, other: "Counters") -> None:
        """Add *other*'s counts."""
        self.commands.update(dict(other.commands))
        self.failures.update(dict(other.failures))
        self.bytes_read += other.bytes_read
        self.bytes_written += other.bytes_written
        self.latency = [a + b for a, b in zip(self.latency, other.latency, strict=True)]
        self.seconds += other.seconds


class Totals:
    """The counters of all connections, those that are over included."""

    def __init__(self) -> None:
        self.accepted = self.refused = self.violations = self.expired = self.stalled = 0
        self._past = Counters()
        self._live: set[Counters] = set()
        self._lock = threading.Lock()

    def open(self) -> Counters:
        """Return the counters of a new connection."""
        counters = Counters()
        with self._lock:
            self._live.add(counters)
        return counters

    def close(self, counters: Counters) -> None:
        """Keep what a connection that is over has counted."""
        with self._lock:
            self._live.discard(counters)
            self._past.add(counters)

    def sum(self) -> Counters:
        """Return the counts of all."""
        total = Counters()
        with self._lock:
            total.add(self._past)
            for counters in self._live:
                total.add(counters)
        return total
