"""Feature rows into the volume: converted, checked, and permuted out of core when reordered."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.catalog import ObjectInfo
from hyades.common.errors import DataError, UsageError
from hyades.common.units import MIB
from hyades.common.volume import Volume
from hyades.deploy.ingest.progress import Progress
from hyades.deploy.ingest.sources import FeatureSource
from hyades.deploy.ingest.spill import SpillFile

NAME = "features"
_BLOCK_BYTES = 8 * MIB
_SHOWN = 5
# An exponent of all ones is inf or NaN.
_EXPONENT = {2: (np.uint16, 0x7C00), 4: (np.uint32, 0x7F800000)}


def stored_dtype(source: FeatureSource) -> np.dtype[Any]:
    """Return float16 for float16, else float32; UsageError for what is no number."""
    dtype = source.dtype
    if dtype.kind not in "fiub" or dtype.itemsize > 8:
        raise UsageError(
            f"{source.name}: features of dtype {dtype} are no real numbers: convert them to float32"
        )
    return np.dtype("<f2" if dtype.kind == "f" and dtype.itemsize == 2 else "<f4")


def conversion_note(source: FeatureSource) -> str | None:
    """Return what storing the rows changes, or None."""
    stored = stored_dtype(source)
    if source.dtype.newbyteorder("<") == stored:
        return None
    return f"{source.name}: {source.dtype} features are stored as {stored.name}"


@dataclass
class _Check:
    """Counts rows that hold NaN or inf."""

    name: str
    allowed: bool
    rows: int = 0
    first: list[str] = field(default_factory=list)

    def look(self, block: NDArray[Any], start: int) -> None:
        if self.allowed:
            return
        word, mask = _EXPONENT[block.dtype.itemsize]
        bad = (block.view(word) & word(mask)) == mask
        if not bad.any():
            return
        found = np.flatnonzero(bad.any(axis=1))
        self.rows += len(found)
        for row in found[: _SHOWN - len(self.first)]:
            column = int(np.argmax(bad[row]))
            self.first.append(f"row {start + row} column {column} = {block[row, column]}")

    def finish(self, total: int) -> None:
        if self.rows:
            raise DataError(
                f"{self.name}: {self.rows:,} of {total:,} rows hold NaN or inf (as float32): "
                f"{', '.join(self.first)}; repair them or pass --allow-nonfinite"
            )


def store_features(
    volume: Volume,
    source: FeatureSource,
    new_index: NDArray[np.uint32] | None,
    shift: int,
    *,
    memory: int,
    scratch: Path,
    progress: Progress,
    allow_nonfinite: bool,
) -> ObjectInfo:
    """Write all rows as the object "features", row i of the input as row new_index[i]."""
    dtype = stored_dtype(source)
    if source.width < 1 or source.rows < 1:
        raise UsageError(f"{source.name}: {source.rows} rows of {source.width} columns: empty")
    row_bytes = source.width * dtype.itemsize
    info = volume.allocate_rows(NAME, dtype, source.rows, source.width, 1 << shift)
    wide = source.width * max(source.dtype.itemsize, dtype.itemsize)
    size = max(min(_BLOCK_BYTES, memory // 8) // wide, 1)
    check = _Check(source.name, allow_nonfinite)
    writer: _InOrder | _Permuted
    if new_index is None:
        writer = _InOrder(volume, info)
    else:
        # The whole of it once as rows and once as the records they are read as.
        limit = max(memory // 4 // row_bytes, info.rows_per_page)
        writer = _Permuted(volume, info, new_index, limit, scratch)
    try:
        done = 0
        for block in source.blocks(size):
            with np.errstate(over="ignore"):
                rows = np.ascontiguousarray(block, dtype=dtype)
            check.look(rows, done)
            if not check.rows:
                writer.add(rows)
            done += len(rows)
            progress("reading features", done * row_bytes, source.rows * row_bytes, "B")
        check.finish(done)
        if done != source.rows:
            raise DataError(f"{source.name}: {done:,} rows came, {source.rows:,} were expected")
        writer.finish(progress)
    finally:
        writer.close()
    return info


class _InOrder:
    """Cuts a stream of rows into pages."""

    def __init__(self, volume: Volume, info: ObjectInfo) -> None:
        self._volume = volume
        self._info = info
        self._shape = info.shape()
        self._buffer = np.zeros(info.page_bytes // info.itemsize, info.numpy_dtype)
        self._page = 0
        self._filled = 0

    def add(self, rows: NDArray[Any]) -> None:
        """Take the next rows."""
        at = 0
        width = self._info.width
        while at < len(rows):
            first, stop = self._shape.page_rows(self._page)
            take = min(len(rows) - at, stop - first - self._filled)
            to = self._filled * width
            self._buffer[to : to + take * width] = rows[at : at + take].reshape(-1)
            self._filled += take
            at += take
            if self._filled == stop - first:
                self._buffer[self._filled * width :] = 0
                self._volume.write_page(self._info, self._page, self._buffer, self._filled)
                self._page += 1
                self._filled = 0

    def finish(self, progress: Progress) -> None:
        """Nothing is left: the last page is full."""

    def close(self) -> None:
        """Nothing to give back."""


class _Permuted:
    """Sorts rows by new index: into groups of pages on disk, then each group in memory."""

    def __init__(
        self,
        volume: Volume,
        info: ObjectInfo,
        new_index: NDArray[np.uint32],
        limit: int,
        scratch: Path,
    ) -> None:
        self._pages = _InOrder(volume, info)
        self._new_index = new_index
        self._seen = 0
        self._record = np.dtype([("to", "<u4"), ("row", info.numpy_dtype, (info.width,))])
        groups = -(-info.rows // limit)
        self._starts = np.linspace(0, info.rows, groups + 1).astype(np.int64)
        self._place = self._starts[:-1].copy()  # in records of the spill file
        self._whole = np.empty((info.rows, info.width), info.numpy_dtype) if groups == 1 else None
        self._spill = None if groups == 1 else SpillFile(scratch)

    def add(self, rows: NDArray[Any]) -> None:
        """Take the next rows in input order."""
        to = self._new_index[self._seen : self._seen + len(rows)]
        self._seen += len(rows)
        if self._whole is not None:
            self._whole[to] = rows
            return
        assert self._spill is not None
        group = np.searchsorted(self._starts, to, side="right") - 1
        order = np.argsort(group, kind="stable")
        records = np.empty(len(rows), self._record)
        records["to"] = to[order]
        records["row"] = rows[order]
        counts = np.bincount(group, minlength=len(self._place))
        at = 0
        for index in np.flatnonzero(counts):
            part = records[at : at + counts[index]]
            self._spill.write(int(self._place[index]) * self._record.itemsize, part)
            self._place[index] += len(part)
            at += len(part)

    def finish(self, progress: Progress) -> None:
        """Write the pages."""
        if self._whole is not None:
            self._pages.add(self._whole)
            return
        assert self._spill is not None
        total, row_bytes = int(self._starts[-1]), self._record["row"].itemsize
        for start, stop in zip(self._starts[:-1], self._starts[1:], strict=True):
            records = np.empty(stop - start, self._record)
            self._spill.read(int(start) * self._record.itemsize, records)
            rows = np.empty_like(records["row"], order="C")
            rows[records["to"] - start] = records["row"]
            del records
            self._pages.add(rows)
            progress("reordering features", int(stop) * row_bytes, total * row_bytes, "B")

    def close(self) -> None:
        """Give the temporary file back."""
        if self._spill is not None:
            self._spill.close()
