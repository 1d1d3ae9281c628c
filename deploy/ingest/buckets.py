"""Records on their way from input order to chunk order.

A bucket is an interval of the key chunk * V + destination.  The first cut is by chunk, into more
buckets than loads so that neighbours can be loaded together; one that is larger than a load is cut
again, by chunk and then by destination.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.units import format_size
from hyades.deploy.ingest import kernels
from hyades.deploy.ingest.spill import SpillFile

_MOST = 128  # open files
_SPREAD = 4  # buckets a load, so that loads come out nearly full
_READ_RECORDS = 1 << 17


@dataclass(frozen=True)
class Load:
    """The records whose key is in [low, high), in input order within the load."""

    low: int
    high: int
    records: NDArray[np.uint32]


@dataclass
class _Bucket:
    low: int
    high: int
    count: int
    file: SpillFile | None = None


@dataclass(frozen=True)
class KeySpace:
    """Keys are chunk * vertices + destination, where chunk = source >> shift."""

    vertices: int
    shift: int

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.vertices >> self.shift)

    @property
    def end(self) -> int:
        """One more than the largest key."""
        return self.chunks * self.vertices


class MemoryRecords:
    """All records at once, where they fit."""

    def __init__(self, keys: KeySpace, width: int, capacity: int) -> None:
        """Make room for *capacity* records of *width* words."""
        self._keys = keys
        self._records = np.empty((capacity, width), np.uint32)
        self._count = 0
        self.bucket_of_chunk = np.zeros(keys.chunks, np.int32)

    def space(self, count: int) -> NDArray[np.uint32]:
        """Return where the next at most *count* records go."""
        return self._records[self._count : self._count + count]

    def append(
        self, records: NDArray[np.uint32], *_: NDArray[np.int64] | NDArray[np.int32]
    ) -> None:
        """Keep *records*, which are the beginning of what `space` returned."""
        self._count += records.shape[0]

    def loads(self, limit: int) -> Iterator[Load]:
        """Yield everything, which is at most *limit* records."""
        assert self._count <= limit
        records = self._records[: self._count]
        self.close()
        yield Load(0, self._keys.end, records)

    def close(self) -> None:
        """Forget the records."""
        self._records = self._records[:0].copy()


class SpilledRecords:
    """Records in temporary files, one a bucket."""

    def __init__(self, keys: KeySpace, width: int, folder: Path, loads: int) -> None:
        """Make buckets in *folder* for about *loads* loads."""
        self._keys = keys
        self._width = width
        self._folder = folder
        parts = max(min(keys.chunks, loads * _SPREAD, _MOST), 1)
        chunks = np.arange(keys.chunks, dtype=np.int64)
        self.bucket_of_chunk = (chunks * parts // max(keys.chunks, 1)).astype(np.int32)
        first = np.searchsorted(self.bucket_of_chunk, np.arange(parts + 1)) * keys.vertices
        self._buckets = deque(_Bucket(int(low), int(high), 0) for low, high in pairwise(first))
        self._open: set[SpillFile] = set()
        self._scratch = self._sorted = np.empty((0, width), np.uint32)

    def space(self, count: int) -> NDArray[np.uint32]:
        """Return where the next at most *count* records go."""
        if self._scratch.shape[0] < count:
            self._scratch = np.empty((count, self._width), np.uint32)
            self._sorted = np.empty((count, self._width), np.uint32)
        return self._scratch[:count]

    def append(
        self, records: NDArray[np.uint32], buckets: NDArray[np.int32], counts: NDArray[np.int64]
    ) -> None:
        """Write each record to the file of its bucket."""
        self._write(self._buckets, records, buckets, counts)

    def _write(
        self,
        targets: Sequence[_Bucket],
        records: NDArray[np.uint32],
        buckets: NDArray[np.int32],
        counts: NDArray[np.int64],
    ) -> None:
        starts = np.zeros(len(targets) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        kernels.scatter(records, buckets, starts[:-1].copy(), self._sorted)
        for index in np.flatnonzero(counts).tolist():
            bucket = targets[index]
            if bucket.file is None:
                bucket.file = SpillFile(self._folder)
                self._open.add(bucket.file)
            bucket.file.append(self._sorted[starts[index] : starts[index + 1]])
            bucket.count += int(counts[index])

    def loads(self, limit: int) -> Iterator[Load]:
        """Yield all records in key order, at most *limit* at a time; files go as they are read."""
        self._scratch = self._sorted = np.empty((0, self._width), np.uint32)
        queue = self._buckets
        while queue:
            if queue[0].count > limit:
                queue.extendleft(reversed(self._cut(queue.popleft(), limit)))
                continue
            group = [queue.popleft()]
            total = group[0].count
            while queue and total + queue[0].count <= limit:
                group.append(queue.popleft())
                total += group[-1].count
            yield Load(group[0].low, group[-1].high, self._read(group, total))

    def _read(self, group: list[_Bucket], total: int) -> NDArray[np.uint32]:
        records = np.empty((total, self._width), np.uint32)
        at = 0
        for bucket in group:
            if bucket.file is not None:
                bucket.file.read(0, records[at : at + bucket.count])
                self._close(bucket.file)
            at += bucket.count
        return records

    def _cut(self, bucket: _Bucket, limit: int) -> list[_Bucket]:
        span = bucket.high - bucket.low
        if span == 1:
            raise UsageError(
                f"{bucket.count:,} edges (duplicates among them) go from one chunk to vertex "
                f"{bucket.low % self._keys.vertices} and must be in memory together: raise "
                f"--memory by {format_size((bucket.count - limit) * 64)} or use --dedup"
            )
        parts = min(max(-(-bucket.count // limit) * _SPREAD, 2), _MOST, span)
        step = -(-span // parts)
        edges = [min(bucket.low + i * step, bucket.high) for i in range(parts + 1)]
        smaller = [_Bucket(low, high, 0) for low, high in pairwise(edges) if low < high]
        places = np.empty(_READ_RECORDS, np.int32)
        counts = np.empty(len(smaller), np.int64)
        self.space(_READ_RECORDS)
        file = bucket.file
        assert file is not None
        for start in range(0, bucket.count, _READ_RECORDS):
            records = self._scratch[: min(_READ_RECORDS, bucket.count - start)]
            file.read(start * self._width * 4, records)
            kernels.assign_buckets(
                records, self._keys.shift, self._keys.vertices, bucket.low, step, places, counts
            )
            self._write(smaller, records, places, counts)
        self._close(file)
        self._scratch = self._sorted = np.empty((0, self._width), np.uint32)
        return smaller

    def _close(self, file: SpillFile) -> None:
        file.close()
        self._open.discard(file)

    def close(self) -> None:
        """Give the temporary files back."""
        for file in list(self._open):
            self._close(file)
