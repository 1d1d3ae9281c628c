"""Ids that are not 0 to V-1: which vertex each one means."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import DataError, UsageError
from hyades.deploy.ingest.progress import Progress
from hyades.deploy.ingest.sources import EdgeBlock, EdgeSource

_BLOCK = 1 << 18
_UNKNOWN = np.uint32(0xFFFFFFFF)


@dataclass(frozen=True)
class _Lookup:
    """From id to vertex: by a table over the range of ids, or by search in the sorted ids."""

    ids: NDArray[np.int64]  # sorted
    vertex: NDArray[np.int64] | None  # of ids[i]; None: i
    table: NDArray[np.uint32] | None  # by id - ids[0]

    def find(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the vertex of each id, -1 for unknown ones."""
        if self.table is not None:
            inside = (wanted >= self.ids[0]) & (wanted <= self.ids[-1])
            found = self.table[np.where(inside, wanted - self.ids[0], 0)].astype(np.int64)
            return np.where(inside & (found != _UNKNOWN), found, -1)
        at = np.minimum(np.searchsorted(self.ids, wanted), len(self.ids) - 1)
        known = self.ids[at] == wanted
        return np.where(known, at if self.vertex is None else self.vertex[at], -1)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        arrays = (self.ids, self.vertex, self.table)
        return sum(array.nbytes for array in arrays if array is not None)


@dataclass(frozen=True)
class RelabelledEdges:
    """Edges whose ids are translated to vertices."""

    inner: EdgeSource
    lookup: _Lookup
    source_of_ids: str

    @property
    def name(self) -> str:
        """What error messages call it."""
        return self.inner.name

    @property
    def edges(self) -> int:
        """Number of edges."""
        return self.inner.edges

    @property
    def vertices(self) -> int:
        """Number of different ids."""
        return len(self.lookup.ids)

    @property
    def weighted(self) -> bool:
        """Whether blocks carry weights."""
        return self.inner.weighted

    def blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield all edges from the first, at most *size* at a time; DataError for unknown ids."""
        start = 0
        for block in self.inner.blocks(size):
            source, destination = (self.lookup.find(ids) for ids in block[:2])
            unknown = np.flatnonzero((source < 0) | (destination < 0))
            if unknown.size:
                at = int(unknown[0])
                raise DataError(
                    f"{self.name}: edge {start + at}: {block.source[at]} -> "
                    f"{block.destination[at]} has an id that is not in {self.source_of_ids}"
                )
            yield EdgeBlock(source, destination, block.weight)
            start += source.size


class Relabelling(NamedTuple):
    """Translated edges, the user's id of each vertex [V] int64, and bytes held in memory."""

    edges: RelabelledEdges
    original_ids: NDArray[np.int64]
    nbytes: int


def relabel(edges: EdgeSource, memory: int, progress: Progress) -> Relabelling:
    """Make vertex i the i-th smallest id that an edge has."""
    ids = _collect(edges, memory, progress)
    if not ids.size:
        raise UsageError(f"{edges.name}: no edges, so no ids to relabel: give --ids")
    lookup = _Lookup(ids, None, _table(ids, None, memory))
    return Relabelling(RelabelledEdges(edges, lookup, edges.name), ids, lookup.nbytes)


def relabel_by(edges: EdgeSource, ids: NDArray[np.int64], name: str, memory: int) -> Relabelling:
    """Make vertex i the one with id ids[i]; UsageError for ids that occur twice."""
    order = np.argsort(ids, kind="stable")
    in_order = ids[order]
    twice = np.flatnonzero(in_order[1:] == in_order[:-1])
    if twice.size:
        raise DataError(f"{name}: id {in_order[twice[0]]} occurs twice")
    if not ids.size:
        raise UsageError(f"{name}: no ids")
    lookup = _Lookup(in_order, order, _table(in_order, order, memory))
    return Relabelling(RelabelledEdges(edges, lookup, name), ids, lookup.nbytes + ids.nbytes)


def _table(
    ids: NDArray[np.int64], vertex: NDArray[np.int64] | None, memory: int
) -> NDArray[np.uint32] | None:
    span = int(ids[-1]) - int(ids[0]) + 1
    if span * 4 > memory // 4:
        return None
    table = np.full(span, _UNKNOWN, np.uint32)
    table[ids - ids[0]] = np.arange(len(ids)) if vertex is None else vertex
    return table


def _collect(edges: EdgeSource, memory: int, progress: Progress) -> NDArray[np.int64]:
    """Return the sorted different ids."""
    low, high = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    done = 0
    for block in edges.blocks(_BLOCK):
        for ids in block[:2]:
            if ids.size:
                low, high = min(low, int(ids.min())), max(high, int(ids.max()))
        done += block.source.size
        progress("finding ids", done, 2 * edges.edges, "edge")
    if low > high:
        return np.empty(0, np.int64)
    flags = np.zeros(high - low + 1, np.bool_) if high - low < memory // 4 else None
    runs: list[NDArray[np.int64]] = []
    for block in edges.blocks(_BLOCK):
        done += block.source.size
        progress("finding ids", done, max(2 * edges.edges, done), "edge")
        if flags is not None:
            flags[block.source - low] = True
            flags[block.destination - low] = True
            continue
        runs.append(np.unique(np.concatenate(block[:2])))
        # Runs of similar size are merged, so that an id is merged a few times, not once a block.
        while len(runs) > 1 and len(runs[-2]) <= 2 * len(runs[-1]):
            runs.append(np.union1d(runs.pop(), runs.pop()))
    if flags is not None:
        return np.flatnonzero(flags) + low
    return np.unique(np.concatenate(runs))
