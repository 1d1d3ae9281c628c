"""Where hidden rows lie in memory: rows that never meet share a place."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HiddenRows:
    """Rows that are kept in memory from the stage that writes them to the last one that reads."""

    stage: int
    last_reader: int
    nbytes: int
    lanes: int = 0


def place_hidden(rows: Sequence[HiddenRows]) -> tuple[dict[int, int], int]:
    """Return the first byte of each stage's rows, and the bytes of the whole device."""
    places: dict[int, int] = {}
    put: list[HiddenRows] = []
    total = 0
    for new in sorted(rows, key=lambda r: r.stage):
        meanwhile = sorted(
            (places[r.stage], places[r.stage] + r.nbytes)
            for r in put
            if r.stage <= new.last_reader and new.stage <= r.last_reader
        )
        at = 0
        for begin, end in meanwhile:
            if at + new.nbytes <= begin:
                break
            at = max(at, end)
        places[new.stage] = at
        put.append(new)
        total = max(total, at + new.nbytes)
    return places, total
