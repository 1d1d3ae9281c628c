"""A power-law graph with locality, generated in bounded memory; one seed, one graph.

In-degrees follow a Pareto distribution (alpha 1.8, clipped) scaled to exactly `vertices * degree`
edges, rounded; about 2 % of the vertices have no in-edges.  Of a vertex's sources 60 % lie within
`vertices / 32` ids of it, at log-uniform distance; the others are hubs drawn by popularity.  With
`shuffled` the same graph (and the same feature rows) gets random ids, so no locality is left.

Every vertex has its own counter-based stream, so a block of the files depends on nothing before it.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.jit import jit
from hyades.common.units import format_size

_FORMAT = 1  # raise when the same spec would give other bytes: stored graphs are then made again
_LOCAL = 0.6
_ISOLATED = 0.02
_PARETO, _PARETO_MAX = 1.8, 2000.0
_BLOCK_EDGES = 1 << 22
_BLOCK_FEATURE_BYTES = 32 << 20
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_INT32_VERTICES = 1 << 31


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """What to generate: `vertices * degree` edges, features float32 [vertices, width]."""

    vertices: int
    degree: float
    width: int
    seed: int = 7
    shuffled: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.vertices < _INT32_VERTICES or self.degree < 0 or self.width < 1:
            raise UsageError(
                f"cannot generate {self.vertices} vertices of degree {self.degree} and width "
                f"{self.width}: vertices must be 1 to 2^31 - 1, degree >= 0, width >= 1"
            )

    @property
    def edges(self) -> int:
        """Number of directed edges."""
        return round(self.vertices * self.degree)

    @property
    def feature_bytes(self) -> int:
        """Size of the features in bytes."""
        return self.vertices * self.width * 4


GRAPHS = {
    "toy": GraphSpec(3000, 8, 24),
    "demo": GraphSpec(200_000, 16, 64),
    "1M16M": GraphSpec(1_000_000, 16, 128),
    "4M64M": GraphSpec(4_000_000, 16, 128),
    "wide": GraphSpec(300_000, 16, 1024),
}


def named_graph(name: str) -> GraphSpec:
    """Return the spec of ``"1M16M"``, ``"toy-shuffled"`` and the like; raise UsageError."""
    base, _, suffix = name.partition("-")
    if base not in GRAPHS or suffix not in ("", "shuffled"):
        known = ", ".join(GRAPHS)
        raise UsageError(f"no graph {name!r}: take one of {known}, with or without -shuffled")
    spec = GRAPHS[base]
    return GraphSpec(spec.vertices, spec.degree, spec.width, spec.seed, bool(suffix))


@dataclass(frozen=True, slots=True)
class GraphFiles:
    """Where a generated graph lies: CSC by destination, and its features."""

    directory: Path
    spec: GraphSpec

    @property
    def indptr(self) -> Path:
        """int64 [vertices + 1]: the in-edges of v are indices[indptr[v] : indptr[v + 1]]."""
        return self.directory / "indptr.npy"

    @property
    def indices(self) -> Path:
        """int32 [edges]: source vertices, ascending for each destination."""
        return self.directory / "indices.npy"

    @property
    def features(self) -> Path:
        """float32 [vertices, width]."""
        return self.directory / "features.npy"


def write_graph(spec: GraphSpec, directory: Path | str) -> GraphFiles:
    """Write indptr.npy, indices.npy and features.npy, or keep those that *spec* already made.

    Memory: about 40 bytes a vertex plus two blocks.  Raises UsageError when the disk is full.
    """
    files = GraphFiles(Path(directory), spec)
    stamp = files.directory / "graph.json"
    wanted = {"format": _FORMAT, **asdict(spec)}
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return files
    try:
        files.directory.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        layout = _Layout(spec)
        _write_npy(files.indptr, np.int64, (spec.vertices + 1,), iter((layout.indptr,)))
        _write_npy(files.indices, np.int32, (spec.edges,), layout.index_blocks())
        _write_npy(files.features, np.float32, (spec.vertices, spec.width), layout.feature_blocks())
    except OSError as error:
        need = format_size(spec.feature_bytes + 4 * spec.edges + 8 * spec.vertices)
        raise UsageError(
            f"cannot write the graph to {files.directory} ({need} needed): {error.strerror}"
        ) from error
    stamp.write_text(json.dumps(wanted))
    return files


def make_csc(spec: GraphSpec) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return indptr int64 [vertices + 1] and indices int32 [edges] as `write_graph` writes them."""
    layout = _Layout(spec)
    blocks = list(layout.index_blocks())
    return layout.indptr, np.concatenate(blocks) if blocks else np.empty(0, np.int32)


def make_features(spec: GraphSpec) -> NDArray[np.float32]:
    """Return the features float32 [vertices, width] as `write_graph` writes them."""
    return np.concatenate(list(_Layout(spec).feature_blocks()))


class _Layout:
    """The O(vertices) part of a graph: degrees, popularity and ids."""

    def __init__(self, spec: GraphSpec) -> None:
        self.spec = spec
        degrees = _in_degrees(spec)
        rng = np.random.default_rng([spec.seed, 2])
        self.popular = rng.permutation(spec.vertices).astype(np.int32)
        # `place[v]` is the id under which vertex v is written, `vertex` its inverse.
        self.place = np.arange(spec.vertices, dtype=np.int32)
        if spec.shuffled:
            self.place = np.random.default_rng([spec.seed, 3]).permutation(self.place)
        self.vertex = np.empty_like(self.place)
        self.vertex[self.place] = np.arange(spec.vertices, dtype=np.int32)
        self.indptr = np.zeros(spec.vertices + 1, np.int64)
        np.cumsum(degrees[self.vertex], out=self.indptr[1:])

    def index_blocks(self) -> Iterator[NDArray[np.int32]]:
        """Yield the sources of successive runs of whole vertices, int32 [edges of the run]."""
        start, indptr = 0, self.indptr
        while start < self.spec.vertices:
            stop = int(np.searchsorted(indptr, indptr[start] + _BLOCK_EDGES, side="right")) - 1
            stop = min(max(stop, start + 1), self.spec.vertices)
            out = np.empty(int(indptr[stop] - indptr[start]), np.int32)
            seed = np.uint64(self.spec.seed)
            _fill_sources(out, start, stop, indptr, self.vertex, self.place, self.popular, seed)
            yield out
            start = stop

    def feature_blocks(self) -> Iterator[NDArray[np.float32]]:
        """Yield successive blocks of rows, float32 [n, width], uniform with unit variance."""
        rows = max(1, _BLOCK_FEATURE_BYTES // (4 * self.spec.width))
        for start in range(0, self.spec.vertices, rows):
            vertices = self.vertex[start : start + rows]
            out = np.empty((vertices.size, self.spec.width), np.float32)
            _fill_features(out, vertices, np.uint64(self.spec.seed))
            yield out


def _in_degrees(spec: GraphSpec) -> NDArray[np.int64]:
    rng = np.random.default_rng([spec.seed, 1])
    weight = np.minimum(rng.pareto(_PARETO, spec.vertices) + 1.0, _PARETO_MAX)
    weight *= spec.degree / weight.mean()
    degrees = np.floor(weight + rng.random(spec.vertices)).astype(np.int64)
    degrees[rng.random(spec.vertices) < _ISOLATED] = 0
    missing = spec.edges - int(degrees.sum())
    if missing > 0:
        chosen = rng.integers(0, spec.vertices, missing)
        degrees += np.bincount(chosen, minlength=spec.vertices)
    while missing < 0:
        candidates = np.flatnonzero(degrees)
        chosen = rng.choice(candidates, min(candidates.size, -missing), replace=False)
        degrees[chosen] -= 1
        missing += chosen.size
    return degrees


@jit
def _hash(state: Any) -> Any:
    """Return the splitmix64 finaliser of a uint64."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@jit
def _unit(state: Any) -> Any:
    """Return a float64 in [0, 1) made of the top 53 bits of the hash of *state*."""
    return np.float64(_hash(state) >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@jit
def _fill_sources(
    out: Any, start: Any, stop: Any, indptr: Any, vertex: Any, place: Any, popular: Any, seed: Any
) -> None:
    n = vertex.size
    reach = np.log(max(n / 32.0, 2.0))
    at = 0
    for row in range(start, stop):
        v = np.int64(vertex[row])
        state = _hash(_hash(seed + _GOLDEN) ^ np.uint64(v))
        first = at
        for _ in range(indptr[row + 1] - indptr[row]):
            kind = _unit(state + _GOLDEN)
            draw = _unit(state + _GOLDEN + _GOLDEN)
            state += _GOLDEN + _GOLDEN
            if kind < _LOCAL:
                offset = np.int64(np.exp(draw * reach))
                source = v + offset if kind < _LOCAL / 2 else v - offset
                source %= n
            else:  # cubing makes a few vertices the source of most long edges
                source = np.int64(popular[np.int64(n * draw * draw * draw)])
            out[at] = place[source]
            at += 1
        out[first:at].sort()


@jit
def _fill_features(out: Any, vertices: Any, seed: Any) -> None:
    root3 = np.float32(np.sqrt(3.0))
    for row in range(vertices.size):
        state = _hash(_hash(seed + _GOLDEN + _GOLDEN) ^ np.uint64(vertices[row]))
        for column in range(out.shape[1]):
            state += _GOLDEN
            # 24 bits: exact in float32, in [0, 2)
            value = np.float32(_hash(state) >> np.uint64(40)) * np.float32(2.0**-23)
            out[row, column] = (value - np.float32(1.0)) * root3


def _write_npy(
    path: Path, dtype: type[np.generic], shape: tuple[int, ...], blocks: Iterator[NDArray[Any]]
) -> None:
    """Write an .npy of *shape* by blocks: on a full disk this raises, a memmap would get SIGBUS."""
    header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for block in blocks:
            file.write(np.ascontiguousarray(block, dtype).data)
