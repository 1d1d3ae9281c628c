"""Edge sources over stored arrays: [2, E], [E, 2], separate vectors, CSC and CSR."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import DataError, UsageError
from hyades.deploy.ingest.readers.storage import StoredArray, describe
from hyades.deploy.ingest.sources import EdgeBlock, EdgeSource, to_float32

Layout = Literal["source-target", "pairs"]


def to_ids(values: NDArray[Any], name: str, first_edge: int) -> NDArray[np.int64]:
    """Return ids as int64; DataError for floats that are not whole numbers."""
    if values.dtype.kind in "iu":
        if values.dtype.kind == "u" and values.dtype.itemsize == 8:
            large = np.flatnonzero(values > np.iinfo(np.int64).max)
            if large.size:
                at = int(large[0])
                raise DataError(
                    f"{name}: edge {first_edge + at} has id {values[at]}, more than 2^63 - 1"
                )
        return np.ascontiguousarray(values, dtype=np.int64)
    whole = np.rint(values)
    with np.errstate(invalid="ignore"):
        wrong = np.flatnonzero(~(whole == values) | (np.abs(values) >= 2.0**53))
    if wrong.size:
        at = int(wrong[0])
        raise DataError(f"{name}: edge {first_edge + at} has id {values[at]}, not a whole number")
    return np.ascontiguousarray(whole, dtype=np.int64)


def check_id_dtype(dtype: np.dtype[Any], name: str) -> None:
    """Raise UsageError unless *dtype* can hold ids."""
    if dtype.kind not in "iuf":
        raise UsageError(f"{name}: ids of dtype {dtype} are not integers")


@dataclass(frozen=True)
class IndexEdges:
    """edge_index [2, E], or pairs [E, 2], in one stored array."""

    array: StoredArray
    pairs: bool
    vertices: int | None = None
    weighted: bool = False

    @property
    def name(self) -> str:
        """Path of the file."""
        return self.array.name

    @property
    def edges(self) -> int:
        """Number of edges."""
        return self.array.shape[0] if self.pairs else self.array.shape[1]

    def blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield all edges from the first, at most *size* at a time."""
        interleaved = self.pairs != self.array.fortran
        for start in range(0, self.edges, size):
            count = min(size, self.edges - start)
            if interleaved:
                both = self.array.elements(2 * start, 2 * count)
                source, destination = both[::2], both[1::2]
            else:
                source = self.array.elements(start, count)
                destination = self.array.elements(self.edges + start, count)
            yield EdgeBlock(
                to_ids(source, self.name, start), to_ids(destination, self.name, start), None
            )


def index_edges(
    array: StoredArray, layout: Layout | None, vertices: int | None = None
) -> IndexEdges:
    """Return the edges in *array*; UsageError when its shape does not tell how they lie."""
    check_id_dtype(array.dtype, array.name)
    fits = _layouts(array.shape)
    if not fits:
        raise UsageError(
            f"{array.name}: {describe(array)} is no edge list: it must be [2, E] or [E, 2]"
        )
    if layout is None and len(fits) > 1:
        raise UsageError(
            f"{array.name}: {describe(array)} could be either [2, E] or [E, 2]: pass --edge-layout "
            "source-target (one row of sources, one of targets) or --edge-layout pairs"
        )
    if layout is not None and layout not in fits:
        raise UsageError(f"{array.name}: {describe(array)} cannot have --edge-layout {layout}")
    return IndexEdges(array, (layout or fits[0]) == "pairs", vertices)


def _layouts(shape: tuple[int, ...]) -> list[Layout]:
    if len(shape) != 2:
        return []
    found: list[Layout] = []
    if shape[0] == 2:
        found.append("source-target")
    if shape[1] == 2:
        found.append("pairs")
    return found


@dataclass(frozen=True)
class VectorEdges:
    """Sources, destinations and perhaps weights, each a stored vector [E]."""

    source: StoredArray
    destination: StoredArray
    weight: StoredArray | None = None
    vertices: int | None = None

    def __post_init__(self) -> None:
        for array in (self.source, self.destination):
            check_id_dtype(array.dtype, array.name)
        for array in (self.destination, self.weight or self.source):
            if array.shape != self.source.shape or len(array.shape) != 1:
                raise DataError(
                    f"{array.name}: {describe(array)} does not match {describe(self.source)}"
                )

    @property
    def name(self) -> str:
        """Path of the file."""
        return self.source.name

    @property
    def edges(self) -> int:
        """Number of edges."""
        return self.source.shape[0]

    @property
    def weighted(self) -> bool:
        """Whether there are weights."""
        return self.weight is not None

    def blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield all edges from the first, at most *size* at a time."""
        for start in range(0, self.edges, size):
            count = min(size, self.edges - start)
            source, destination = (
                to_ids(array.elements(start, count), self.name, start)
                for array in (self.source, self.destination)
            )
            weight = None
            if self.weight is not None:
                weight = to_float32(self.weight.elements(start, count))
            yield EdgeBlock(source, destination, weight)


@dataclass(frozen=True)
class CompressedEdges:
    """Neighbours of each vertex in turn: indptr [V + 1], indices [E].

    The neighbours are sources of edges into the vertex (CSC by destination), or, if *outgoing*,
    destinations of edges out of it (CSR by source).
    """

    indptr: StoredArray
    indices: StoredArray
    values: StoredArray | None = None
    outgoing: bool = False

    def __post_init__(self) -> None:
        name = self.indptr.name
        for array in (self.indptr, self.indices):
            if len(array.shape) != 1:
                raise UsageError(f"{array.name}: {describe(array)} must be a vector")
            if array.dtype.kind not in "iu":
                raise UsageError(f"{array.name}: {describe(array)} must be integers")
        if self.indptr.shape[0] < 2:
            raise DataError(f"{name}: {describe(self.indptr)}: indptr has V + 1 values")
        ends = [int(self.indptr.elements(at, 1)[0]) for at in (0, self.indptr.shape[0] - 1)]
        if ends != [0, self.edges]:
            raise DataError(
                f"{name}: goes from {ends[0]:,} to {ends[1]:,}, but {self.indices.name} has "
                f"{self.edges:,} values: it must go from 0 to that"
            )
        if self.values is not None and self.values.shape != self.indices.shape:
            raise DataError(
                f"{self.values.name}: {describe(self.values)} weights for {self.edges:,} edges"
            )

    @property
    def name(self) -> str:
        """Path of the indices."""
        return self.indices.name

    @property
    def edges(self) -> int:
        """Number of edges."""
        return self.indices.shape[0]

    @property
    def vertices(self) -> int:
        """Number of vertices."""
        return self.indptr.shape[0] - 1

    @property
    def weighted(self) -> bool:
        """Whether the matrix has values."""
        return self.values is not None

    def blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield all edges from the first, at most *size* at a time."""
        # A window of offsets ahead of the edges; both advance together.
        base, offsets = 0, self._offsets(0, size)
        for start in range(0, self.edges, size):
            count = min(size, self.edges - start)
            owner = np.empty(count, np.int64)
            filled = 0
            while filled < count:
                if offsets[-1] <= start + filled:
                    base += len(offsets) - 1
                    offsets = self._offsets(base, size)
                    continue
                end = min(int(offsets[-1]) - start, count)
                edges = np.arange(start + filled, start + end)
                owner[filled:end] = np.searchsorted(offsets, edges, side="right") - 1 + base
                filled = end
            other = to_ids(self.indices.elements(start, count), self.name, start)
            weight = None
            if self.values is not None:
                weight = to_float32(self.values.elements(start, count))
            source, destination = (owner, other) if self.outgoing else (other, owner)
            yield EdgeBlock(source, destination, weight)

    def _offsets(self, base: int, size: int) -> NDArray[np.int64]:
        count = min(size, self.vertices - base) + 1
        offsets = self.indptr.elements(base, count).astype(np.int64)
        wrong = np.flatnonzero(np.diff(offsets) < 0)
        if wrong.size:
            at = base + int(wrong[0])
            raise DataError(f"{self.indptr.name}: decreases after position {at}: not an indptr")
        return offsets


class Values(Protocol):
    """Numbers, one an edge."""

    @property
    def name(self) -> str:
        """What error messages call it."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """[E], or a matrix of one row or column."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """What they are."""
        ...

    def elements(self, start: int, count: int) -> NDArray[Any]:
        """Return *count* numbers from *start*."""
        ...


@dataclass(frozen=True)
class ArrayValues:
    """Numbers in memory."""

    array: NDArray[Any]
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """What they are."""
        return self.array.dtype

    def elements(self, start: int, count: int) -> NDArray[Any]:
        """Return *count* numbers from *start*."""
        return self.array.reshape(-1)[start : start + count]


@dataclass(frozen=True)
class WithWeights:
    """Edges with weights from elsewhere, [E] or [E, 1]."""

    inner: EdgeSource
    values: Values

    def __post_init__(self) -> None:
        name, shape, edges = self.values.name, self.values.shape, self.inner.edges
        what = f"{name}: [{', '.join(str(n) for n in shape)}] {self.values.dtype.name}"
        if self.inner.weighted:
            raise UsageError(f"{self.inner.name} has weights already, and {name} gives others")
        if self.values.dtype.kind not in "fiu":
            raise UsageError(f"{what} are no weights")
        if shape not in ((edges,), (edges, 1), (1, edges)):
            raise UsageError(f"{what}: weights do not match the {edges:,} edges of {self.name}")

    @property
    def name(self) -> str:
        """Path of the edges."""
        return self.inner.name

    @property
    def edges(self) -> int:
        """Number of edges."""
        return self.inner.edges

    @property
    def vertices(self) -> int | None:
        """Number of vertices if the edges state it."""
        return self.inner.vertices

    @property
    def weighted(self) -> bool:
        """True."""
        return True

    def blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield all edges from the first, at most *size* at a time."""
        start = 0
        for source, destination, _ in self.inner.blocks(size):
            weight = to_float32(self.values.elements(start, source.size))
            yield EdgeBlock(source, destination, weight)
            start += source.size
