"""What a long ingest says about itself while it runs."""

from typing import Protocol


class Progress(Protocol):
    """Called often, from the thread that works; must return quickly."""

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None:
        """Say that *done* of *total* units of *phase* are behind; a phase ends at done == total."""


def silent(phase: str, done: int, total: int, unit: str) -> None:
    """Do nothing: the progress of a caller who did not ask for any."""
