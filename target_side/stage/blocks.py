"""What flows between the operators of a stage.

Rules:
1. The blocks of a range come in order of their rows and do not overlap; together they cover the
   range, except where no row is wanted.
2. An operator looks only at a block's rows, so how a source is cut into pages changes no bit. The
   one exception is `project`, which puts the rows of a landing block together first.
3. `data` may be a view of what a page reader returned: operators never write into it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hyades.common.encodings import Encoding

Bytes = NDArray[np.uint8]
Ids = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Block:
    """Rows [start, stop) of a range, or some of them.

    data [n, row_bytes]: the rows as bytes; ids [n]: their places in the range, ascending, or None
    where all are there.
    """

    start: int
    stop: int
    ids: Ids | None
    data: Bytes
    encoding: Encoding
    width: int

    @property
    def places(self) -> "slice | NDArray[np.int64]":
        """Where the rows lie between start and stop."""
        if self.ids is None:
            return slice(0, self.stop - self.start)
        return self.ids.astype(np.int64) - self.start


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one range at the end of a pipeline: data [n, row_bytes], ids [n] or None."""

    index: int
    ids: Ids | None
    data: Bytes


class Operator(Protocol):
    """One step: takes the blocks of a range as they come and gives blocks."""

    name: str

    def run(self, index: int, blocks: Iterator[Block]) -> Iterator[Block]:
        """Return the blocks of range *index* after this step."""
        ...
