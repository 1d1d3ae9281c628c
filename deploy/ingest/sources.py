"""Where edges and features come from, as the tile builder sees them.

Both are read in blocks from the start, as often as asked: an undirected graph is read twice.
Readers of one-way inputs (text, gzip) spool them to disk first, so the rest need not care.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyades.common.errors import UsageError


class EdgeBlock(NamedTuple):
    """Consecutive edges: source and destination [n], weight [n] or None."""

    source: NDArray[np.int64]
    destination: NDArray[np.int64]
    weight: NDArray[np.float32] | None


class EdgeSource(Protocol):
    """A list of edges in a fixed order."""

    @property
    def name(self) -> str:
        """What error messages call it."""
        ...

    @property
    def edges(self) -> int:
        """Number of edges, self loops and duplicates included."""
        ...

    @property
    def vertices(self) -> int | None:
        """Number of vertices if the format states it."""
        ...

    @property
    def weighted(self) -> bool:
        """Whether blocks carry weights."""
        ...

    def blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield all edges from the first, at most *size* at a time."""
        ...


class FeatureSource(Protocol):
    """A matrix of one row a vertex."""

    @property
    def name(self) -> str:
        """What error messages call it."""
        ...

    @property
    def rows(self) -> int:
        """Number of rows."""
        ...

    @property
    def width(self) -> int:
        """Number of columns."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """What the rows are, as stored by the user."""
        ...

    def blocks(self, size: int) -> Iterator[NDArray[Any]]:
        """Yield all rows from the first as [n, width], at most *size* rows at a time."""
        ...


@dataclass(frozen=True)
class ArrayEdges:
    """Edges that are already in memory."""

    source: NDArray[Any]
    destination: NDArray[Any]
    weight: NDArray[Any] | None = None
    vertices: int | None = None
    name: str = "edges"

    def __post_init__(self) -> None:
        if self.source.shape != self.destination.shape or self.source.ndim != 1:
            raise UsageError(
                f"{self.name}: sources {self.source.shape} and destinations "
                f"{self.destination.shape} must be two vectors of one length"
            )
        if self.weight is not None and self.weight.shape != self.source.shape:
            raise UsageError(
                f"{self.name}: {self.weight.shape} weights for {self.source.size} edges"
            )

    @property
    def edges(self) -> int:
        """Number of edges."""
        return int(self.source.size)

    @property
    def weighted(self) -> bool:
        """Whether there are weights."""
        return self.weight is not None

    def blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield all edges from the first, at most *size* at a time."""
        for start in range(0, self.edges, size):
            part = slice(start, start + size)
            weight = None if self.weight is None else to_float32(self.weight[part])
            yield EdgeBlock(to_int64(self.source[part]), to_int64(self.destination[part]), weight)


@dataclass(frozen=True)
class ArrayFeatures:
    """Rows that are already in memory (or memory-mapped by the caller)."""

    array: NDArray[Any]
    name: str = "features"

    def __post_init__(self) -> None:
        if self.array.ndim != 2:
            raise UsageError(
                f"{self.name}: shape {self.array.shape} is not a matrix [vertices, width]"
            )

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.array.shape[0])

    @property
    def width(self) -> int:
        """Number of columns."""
        return int(self.array.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        """What the rows are."""
        return self.array.dtype

    def blocks(self, size: int) -> Iterator[NDArray[Any]]:
        """Yield all rows from the first, at most *size* rows at a time."""
        for start in range(0, self.rows, size):
            yield self.array[start : start + size]


@dataclass(frozen=True)
class Undirected:
    """Edges followed by their reversed copies; self loops are not doubled.

    `edges` counts the copies of self loops too (they are known only after reading), so it is an
    upper bound.
    """

    inner: EdgeSource

    @property
    def name(self) -> str:
        """What error messages call it."""
        return self.inner.name

    @property
    def edges(self) -> int:
        """Upper bound of the number of edges."""
        return 2 * self.inner.edges

    @property
    def vertices(self) -> int | None:
        """Number of vertices if the format states it."""
        return self.inner.vertices

    @property
    def weighted(self) -> bool:
        """Whether blocks carry weights."""
        return self.inner.weighted

    def blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield all edges, then all edges that are not loops reversed."""
        yield from self.inner.blocks(size)
        for source, destination, weight in self.inner.blocks(size):
            keep = source != destination
            if keep.all():
                yield EdgeBlock(destination, source, weight)
            else:
                kept = None if weight is None else weight[keep]
                yield EdgeBlock(destination[keep], source[keep], kept)


def to_int64(values: ArrayLike) -> NDArray[np.int64]:
    """Return ids as int64."""
    return np.ascontiguousarray(values, dtype=np.int64)


def to_float32(values: ArrayLike) -> NDArray[np.float32]:
    """Return weights as float32."""
    with np.errstate(over="ignore"):  # what overflows becomes inf, and inf is reported
        return np.ascontiguousarray(values, dtype=np.float32)
