"""Checks that more than one pass over the edges makes."""

from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from hyades.common.errors import DataError
from hyades.deploy.ingest.sources import EdgeBlock


def refuse_ids(
    name: str, vertices: int, before: int, block: EdgeBlock, rest: Iterator[EdgeBlock]
) -> NoReturn:
    """Raise DataError for ids outside 0 to V-1: the first is in *block*, *before* edges precede it.

    The rest of the input is read to say how many there are.
    """
    bad = np.flatnonzero(_outside(block, vertices))
    count, at, seen = len(bad), int(bad[0]), before + block.source.size
    for more in rest:
        count += int(np.count_nonzero(_outside(more, vertices)))
        seen += more.source.size
    raise DataError(
        f"{name}: {count:,} of {seen:,} edges have an id outside 0 to {vertices - 1:,}; the first "
        f"is edge {before + at}: {block.source[at]} -> {block.destination[at]} (use --relabel for "
        "ids that are not 0 to V-1)"
    )


def _outside(block: EdgeBlock, vertices: int) -> np.typing.NDArray[np.bool_]:
    low = (block.source < 0) | (block.destination < 0)
    outside: np.typing.NDArray[np.bool_] = (
        low | (block.source >= vertices) | (block.destination >= vertices)
    )
    return outside
