"""stream: the pages of a matrix in the order of their rows, read ahead of who takes them."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor

import numpy as np

from hyades.common.encodings import Encoding
from hyades.target_side.stage.ahead import Ahead
from hyades.target_side.stage.blocks import Block, Bytes, Ids
from hyades.target_side.stage.meter import OperatorCounts
from hyades.target_side.stage.source import Source, row_encoding


class Stream:
    """Reads a `rows` object; a page in which no row is wanted is not asked for."""

    name = "stream"

    def __init__(
        self, source: Source, name: str, *, pool: Executor | None = None, window: int = 0,
        wanted: Callable[[int], Ids] | None = None,
    ) -> None:  # fmt: skip
        """Keep up to *window* pages ahead on *pool*; *wanted* tells a range's wanted rows."""
        self.info = source.object(name, "rows")
        self.encoding: Encoding = row_encoding(self.info)
        self._meter = source.meter
        self._shape = self.info.shape()
        self._wanted = wanted
        self.ahead: Ahead[Bytes] = Ahead(
            lambda page: source.read(self.info, page), self.info.pages, pool, window
        )

    def run(self, index: int, blocks: Iterator[Block]) -> Iterator[Block]:  # noqa: ARG002
        """Return a block for each page of range *index*; *blocks* is empty, this is the first."""
        shape, info = self._shape, self.info
        ids = None if self._wanted is None else self._wanted(index)
        first_row = index * shape.range_rows
        for page in range(shape.first_page(index), shape.first_page(index + 1)):
            start, stop = (row - first_row for row in shape.page_rows(page))
            if ids is not None:
                low, high = np.searchsorted(ids, (start, stop))
                if low == high:
                    continue
            with self._meter.span("wait"):
                data = self.ahead.get(page)
            data = data[: (stop - start) * info.row_bytes].reshape(stop - start, info.row_bytes)
            self._meter.add(
                self.name, OperatorCounts(len(data), len(data), info.page_bytes, data.size)
            )
            yield Block(start, stop, None, data, self.encoding, info.width)
