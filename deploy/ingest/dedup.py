"""Equal edges removed: the first of each (source, destination) stays, with its weight.

Edges are spooled once more, grouped by destination, in input order within a destination; ranks and
tiles depend on nothing else.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyades.common.units import MIB
from hyades.deploy.ingest import kernels
from hyades.deploy.ingest.checks import refuse_ids
from hyades.deploy.ingest.progress import Progress
from hyades.deploy.ingest.sources import EdgeBlock, EdgeSource
from hyades.deploy.ingest.spill import SpillFile

_BLOCK = 1 << 17
_MOST = 128  # open files


class UniqueEdges:
    """The different edges of a source, spooled."""

    def __init__(
        self, inner: EdgeSource, vertices: int, memory: int, scratch: Path, progress: Progress
    ) -> None:
        """Read *inner* once; DataError for ids outside 0 to V-1."""
        self.name = inner.name
        self.vertices: int | None = vertices
        self.weighted = inner.weighted
        self._width = 4 if inner.weighted else 3
        self._spool = SpillFile(scratch)
        # Records, their sorted copy and the scratch of the sort, as in a load of the tile builder.
        most = max((memory - 8 * MIB) // (self._width * 8 + 24), 1 << 12)
        parts = min(max(-(-4 * inner.edges // most), 1), _MOST, vertices)
        self._rows = -(-vertices // parts)
        buckets: list[SpillFile | None] = [None] * parts
        try:
            self._spread(inner, vertices, buckets, scratch, progress)
            for at, bucket in enumerate(buckets):
                if bucket is not None:
                    self._keep_first(bucket, vertices)
                    bucket.close()
                    buckets[at] = None
                progress("removing duplicates", at + 1, parts, "part")
        except BaseException:
            self._spool.close()
            raise
        finally:
            for bucket in buckets:
                if bucket is not None:
                    bucket.close()

    def _spread(
        self,
        inner: EdgeSource,
        vertices: int,
        buckets: list[SpillFile | None],
        scratch: Path,
        progress: Progress,
    ) -> None:
        done = 0
        blocks = inner.blocks(_BLOCK)
        for block in blocks:
            source, destination, weight = block
            if source.size and (
                min(source.min(), destination.min()) < 0
                or max(source.max(), destination.max()) >= vertices
            ):
                refuse_ids(self.name, vertices, done, block, blocks)
            part = destination // self._rows
            order = np.argsort(part, kind="stable")
            records = np.zeros((source.size, self._width), np.uint32)
            records[:, kernels.SOURCE] = source[order]
            records[:, kernels.DESTINATION] = destination[order]
            if weight is not None:
                records[:, kernels.WEIGHT] = weight.view(np.uint32)[order]
            ends = np.cumsum(np.bincount(part, minlength=len(buckets)))
            start = 0
            for at, end in enumerate(ends.tolist()):
                if end > start:
                    bucket = buckets[at]
                    if bucket is None:
                        bucket = buckets[at] = SpillFile(scratch)
                    bucket.append(records[start:end])
                start = end
            done += source.size
            progress("reading edges for --dedup", done, max(inner.edges, done), "edge")

    def _keep_first(self, bucket: SpillFile, vertices: int) -> None:
        records = bucket.read_all(np.uint32).reshape(-1, self._width)
        count = len(records)
        # The rank's place holds the position: the sort is stable, so a run begins with its first.
        records[:, kernels.RANK] = np.arange(count, dtype=np.uint32)
        ordered = np.empty_like(records)
        keys, order = np.empty((2, count), np.int64), np.empty((2, count), np.uint32)
        bits = max(vertices - 1, 1).bit_length()
        kernels.sort_chunk(records, bits, vertices, keys, order, ordered)
        first = np.ones(count, np.bool_)
        same = ordered[1:, : kernels.RANK] == ordered[:-1, : kernels.RANK]
        first[1:] = ~same.all(axis=1)
        keep = np.zeros(count, np.bool_)
        keep[ordered[first, kernels.RANK]] = True
        self._spool.append(np.ascontiguousarray(records[keep]))

    @property
    def edges(self) -> int:
        """Number of different edges."""
        return self._spool.size // (4 * self._width)

    def blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield all edges, at most *size* at a time."""
        for start in range(0, self.edges, size):
            records = np.empty((min(size, self.edges - start), self._width), np.uint32)
            self._spool.read(start * 4 * self._width, records)
            yield EdgeBlock(
                records[:, kernels.SOURCE].astype(np.int64),
                records[:, kernels.DESTINATION].astype(np.int64),
                self._weights(records),
            )

    def _weights(self, records: NDArray[np.uint32]) -> NDArray[np.float32] | None:
        if not self.weighted:
            return None
        return np.ascontiguousarray(records[:, kernels.WEIGHT]).view(np.float32)
