"""The progress bar: one line a phase on stderr, with rate and ETA."""

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

from tqdm import tqdm

Report = Callable[[str, int, int, str], None]  # phase, done, total, unit

# Units that are shown as sizes; the others are counted (k, M, G).
_BYTES = {"B", "byte", "bytes"}
_COUNTED_UP_TO = 10_000  # beyond that 12.3k is easier to read


class ProgressBar:
    """Called as ``bar(phase, done, total, unit)``; a new phase gets a new line.

    Quiet where *stream* is no terminal, unless *force*.
    """

    def __init__(self, *, force: bool | None = None, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stderr
        self.enabled = self.stream.isatty() if force is None else force
        self._phase = ""
        self._finished: tuple[str, int] | None = None
        self._bar: tqdm[Any] | None = None

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None:
        """Show that *done* of *total* units of *phase* are behind."""
        if not self.enabled or (done >= total and (phase, total) == self._finished):
            return
        if self._bar is None or phase != self._phase or total != self._bar.total:
            self._start(phase, total, unit, done)
        assert self._bar is not None
        self._bar.update(done - self._bar.n)
        self._finished = None
        if done >= total:
            self.close()
            self._finished = phase, total

    def close(self) -> None:
        """End the line of the current phase."""
        if self._bar is not None:
            self._bar.close()
            self._bar, self._phase = None, ""

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self, phase: str, total: int, unit: str, done: int) -> None:
        self.close()
        size = unit in _BYTES
        self._phase = phase
        self._bar = tqdm(
            desc=phase,
            total=total,
            initial=done,
            unit="B" if size else f" {unit}",
            unit_scale=size or total >= _COUNTED_UP_TO,
            unit_divisor=1024 if size else 1000,
            file=self.stream,
            mininterval=0.2,
            dynamic_ncols=True,
        )


class Counted:
    """Turns "n more units" calls into those of a ProgressBar."""

    def __init__(self, bar: Report, phase: str, total: int, unit: str = "B") -> None:
        self._bar, self._phase, self._total, self._unit = bar, phase, total, unit
        self._done = 0

    def __call__(self, more: int) -> None:
        """Say that *more* units are behind."""
        self._done += more
        self._bar(self._phase, self._done, self._total, self._unit)
