"""A pipeline: operators from the pages of a source to the rows of a view, one range at a time."""

from collections.abc import Iterator, Sequence

import numpy as np

from hyades.common.encodings import Encoding, encoded_row_bytes
from hyades.common.errors import UsageError
from hyades.target_side.stage.blocks import Block, Ids, Operator, Rows

ORDER = ("stream", "sample", "project", "quantise")


class Pipeline:
    """`run_range` may be called for any range, in any order, by several threads.

    The rows of a range are the same bytes whoever asks, in whatever order, and however the source
    is cut into pages.
    """

    def __init__(self, ops: Sequence[Operator], encoding: Encoding, width: int) -> None:
        """Chain *ops*, whose last one gives rows of *width* values in *encoding*."""
        places = [ORDER.index(op.name) if op.name in ORDER else -1 for op in ops]
        if not places or places[0] != 0 or places != sorted(set(places)):
            names = ", ".join(op.name for op in ops) or "nothing"
            raise UsageError(f"a pipeline of {names}: begin with stream, then {', '.join(ORDER)}")
        self.ops = tuple(ops)
        self.encoding, self.width = encoding, width
        self._row_bytes = encoded_row_bytes(encoding, width)

    def run_range(self, index: int) -> Rows:
        """Return the rows of range *index*; raises what a page reader raised."""
        parts = list(self.blocks(index))
        if len(parts) == 1:
            return Rows(index, parts[0].ids, parts[0].data)
        data = np.empty((sum(len(part.data) for part in parts), self._row_bytes), np.uint8)
        at, ids = 0, []
        for part in parts:
            data[at : at + len(part.data)] = part.data
            at += len(part.data)
            if part.ids is not None:
                ids.append(part.ids)
        return Rows(index, self._joined(ids), data)

    def blocks(self, index: int) -> Iterator[Block]:
        """Return the rows of range *index* in blocks as they are made, in order."""
        blocks: Iterator[Block] = iter(())
        for op in self.ops:
            blocks = op.run(index, blocks)
        return self._checked(blocks)

    def _joined(self, ids: list[Ids]) -> Ids | None:
        if ids:
            return np.concatenate(ids)
        return np.zeros(0, np.uint16) if self.sparse else None

    @property
    def sparse(self) -> bool:
        """Whether some rows are left out."""
        return any(op.name == "sample" for op in self.ops)

    def _checked(self, blocks: Iterator[Block]) -> Iterator[Block]:
        for block in blocks:
            if (block.encoding, block.width) != (self.encoding, self.width):
                raise UsageError(
                    f"the pipeline gives {block.width} x {block.encoding}, the view has "
                    f"{self.width} x {self.encoding}"
                )
            yield block
