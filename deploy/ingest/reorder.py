"""A new order of the vertices in which a scan of the sources meets few lanes at a time.

Reverse Cuthill-McKee brings neighbours together; the hyades iteration then moves each source to
where the destinations it feeds are being summed.  The compiled loops are close to linear in the
edges: scipy's Cuthill-McKee sorts by insertion, quadratic in the neighbours of a hub.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.jit import jit
from hyades.common.units import format_size
from hyades.deploy.ingest.checks import refuse_ids
from hyades.deploy.ingest.progress import Progress
from hyades.deploy.ingest.sources import EdgeSource

METHODS = ("none", "rcm", "hyades")
ROUNDS = 5
_SWEEPS = 4  # of the iteration before positions become ranks again; fewer need more rounds
_BLOCK = 1 << 18
_VERTEX_BYTES = 96  # offsets, degrees, positions, orders and their sorts
# A hub has at least so many times the mean in-degree; at most so much of the vertices are hubs.
_HUB, _HUB_SHARE = 16, 16


class Adjacency(NamedTuple):
    """The neighbours of v: in-neighbours from starts[v], out-neighbours from middle[v]."""

    starts: NDArray[np.int64]  # [V + 1]
    middle: NDArray[np.int64]  # [V]
    neighbours: NDArray[np.uint32]  # [2 E]


class Order(NamedTuple):
    """The new index of each vertex [V] uint32, or None for the order of the input; a note."""

    new_index: NDArray[np.uint32] | None
    note: str | None


def find_order(
    edges: EdgeSource, vertices: int, method: str, memory: int, progress: Progress
) -> Order:
    """Return the order that *method* finds; UsageError when its memory exceeds the budget."""
    if method not in METHODS:
        raise UsageError(f"--reorder {method}: choose one of {', '.join(METHODS)}")
    if method == "none":
        return Order(None, None)
    need = 8 * edges.edges + _VERTEX_BYTES * vertices + 64 * _BLOCK
    if need > memory:
        raise UsageError(
            f"--reorder {method} holds {edges.edges:,} edges in memory and needs {need:,} bytes "
            f"({format_size(need)}); the budget is {format_size(memory)}: raise --memory or pass "
            "--reorder none"
        )
    graph = _read(edges, vertices, progress)
    if method == "rcm":
        return Order(reverse_cuthill_mckee(graph), None)
    return _iterate(graph, progress)


def _read(edges: EdgeSource, vertices: int, progress: Progress) -> Adjacency:
    degrees = np.zeros((2, vertices), np.int64)
    done = 0
    blocks = edges.blocks(_BLOCK)
    for block in blocks:
        if count_edges(block.source, block.destination, degrees):
            refuse_ids(edges.name, vertices, done, block, blocks)
        done += block.source.size
        progress("reading edges to reorder", done, max(2 * edges.edges, done), "edge")
    starts = np.zeros(vertices + 1, np.int64)
    np.cumsum(degrees[0] + degrees[1], out=starts[1:])
    middle = starts[:-1] + degrees[0]
    place = np.stack((starts[:-1], middle))
    del degrees
    neighbours = np.empty(int(starts[-1]), np.uint32)
    for block in edges.blocks(_BLOCK):
        place_edges(block.source, block.destination, place, neighbours)
        done += block.source.size
        progress("reading edges to reorder", done, max(2 * edges.edges, done), "edge")
    return Adjacency(starts, middle, neighbours)


def _iterate(graph: Adjacency, progress: Progress) -> Order:
    vertices = len(graph.middle)
    in_degree = graph.middle - graph.starts[:-1]
    kept = np.arange(vertices, dtype=np.uint32)
    least = total_span(*graph, kept)
    best: NDArray[np.uint32] | None = None
    position = reverse_cuthill_mckee(graph).astype(np.float64)
    centre = np.empty(vertices, np.float64)
    before = -1
    for turn in range(ROUNDS + 1):
        for _ in range(_SWEEPS if turn else 0):
            set_centres(*graph, position, centre)
            set_positions(*graph, centre, position)
        by_position = np.argsort(position, kind="stable")
        position[by_position] = np.arange(vertices)
        candidate = _hubs_first(by_position, in_degree)
        span = total_span(*graph, candidate)
        progress("reordering", turn + 1, ROUNDS + 1, "round")
        if span < least:
            least, best = span, candidate
        if before >= 0 and span > before - before // 100:
            break
        before = span
    progress("reordering", ROUNDS + 1, ROUNDS + 1, "round")
    if best is None:
        return Order(None, "reorder hyades: no order beats that of the input, which is kept")
    return Order(best, None)


def _hubs_first(by_position: NDArray[np.int64], in_degree: NDArray[np.int64]) -> NDArray[np.uint32]:
    """Return new indices: hubs by falling in-degree, then the others by position."""
    vertices = len(in_degree)
    bar = max(_HUB * float(in_degree.mean()), 1.0)
    hubs = np.flatnonzero(in_degree >= bar)
    hubs = hubs[np.argsort(-in_degree[hubs], kind="stable")][: vertices // _HUB_SHARE]
    is_hub = np.zeros(vertices, np.bool_)
    is_hub[hubs] = True
    new_index = np.empty(vertices, np.uint32)
    new_index[hubs] = np.arange(len(hubs), dtype=np.uint32)
    others = by_position[~is_hub[by_position]]
    new_index[others] = np.arange(len(hubs), vertices, dtype=np.uint32)
    return new_index


def reverse_cuthill_mckee(graph: Adjacency) -> NDArray[np.uint32]:
    """Return the new index of each vertex: breadth first from low degrees, reversed."""
    vertices = len(graph.middle)
    seeds = np.argsort(np.diff(graph.starts), kind="stable").astype(np.uint32)
    found = breadth_first(graph.starts, graph.neighbours, seeds)
    new_index = np.empty(vertices, np.uint32)
    new_index[found] = np.arange(vertices - 1, -1, -1, dtype=np.uint32)
    return new_index


@jit
def count_edges(
    source: NDArray[np.int64], destination: NDArray[np.int64], degrees: NDArray[np.int64]
) -> int:
    """Add to in-degrees and out-degrees, loops left out; return how many ids are out of range."""
    vertices = degrees.shape[1]
    bad = 0
    for i in range(source.size):
        s = source[i]
        d = destination[i]
        if s < 0 or d < 0 or s >= vertices or d >= vertices:
            bad += 1
        elif s != d:
            degrees[0, d] += 1
            degrees[1, s] += 1
    return bad


@jit
def place_edges(
    source: NDArray[np.int64],
    destination: NDArray[np.int64],
    place: NDArray[np.int64],
    neighbours: NDArray[np.uint32],
) -> None:
    """Write each edge at both of its ends; *place* is advanced."""
    for i in range(source.size):
        s = source[i]
        d = destination[i]
        if s != d:
            neighbours[place[0, d]] = s
            place[0, d] += 1
            neighbours[place[1, s]] = d
            place[1, s] += 1


@jit
def breadth_first(
    starts: NDArray[np.int64], neighbours: NDArray[np.uint32], seeds: NDArray[np.uint32]
) -> NDArray[np.uint32]:
    """Return the vertices as found from each unseen seed, new neighbours by rising degree."""
    vertices = seeds.size
    found = np.empty(vertices, np.uint32)
    seen = np.zeros(vertices, np.bool_)
    keys = np.empty(vertices, np.int64)
    end = 0
    at = 0
    for seed in seeds:
        if seen[seed]:
            continue
        seen[seed] = True
        found[end] = seed
        end += 1
        while at < end:
            v = np.int64(found[at])
            at += 1
            new = 0
            for e in range(starts[v], starts[v + 1]):
                u = np.int64(neighbours[e])
                if not seen[u]:
                    seen[u] = True
                    keys[new] = (min(starts[u + 1] - starts[u], 0x7FFFFFFF) << 32) | u
                    new += 1
            keys[:new].sort()
            for i in range(new):
                found[end] = int(keys[i] & 0xFFFFFFFF)
                end += 1
    return found


@jit
def set_centres(
    starts: NDArray[np.int64],
    middle: NDArray[np.int64],
    neighbours: NDArray[np.uint32],
    position: NDArray[np.float64],
    centre: NDArray[np.float64],
) -> None:
    """Set the centre of each vertex: the mean position of its in-neighbours, else its own."""
    for v in range(middle.size):
        total = 0.0
        for e in range(starts[v], middle[v]):
            total += position[neighbours[e]]
        count = middle[v] - starts[v]
        centre[v] = total / count if count > 0 else position[v]


@jit
def set_positions(
    starts: NDArray[np.int64],
    middle: NDArray[np.int64],
    neighbours: NDArray[np.uint32],
    centre: NDArray[np.float64],
    position: NDArray[np.float64],
) -> None:
    """Set each position to the mean centre of the out-neighbours, weighted by 1 / in-degree.

    The weight is the share that the vertex has in the neighbour's centre: a hub is fed from
    everywhere, and no source can be near all of them.
    """
    for u in range(middle.size):
        total = 0.0
        weights = 0.0
        for e in range(middle[u], starts[u + 1]):
            v = np.int64(neighbours[e])
            weight = 1.0 / (middle[v] - starts[v])
            total += weight * centre[v]
            weights += weight
        if weights > 0.0:
            position[u] = total / weights


@jit
def total_span(
    starts: NDArray[np.int64],
    middle: NDArray[np.int64],
    neighbours: NDArray[np.uint32],
    new_index: NDArray[np.uint32],
) -> int:
    """Return the sum of |source - destination| over the edges, in new indices."""
    total = 0
    for v in range(middle.size):
        own = np.int64(new_index[v])
        for e in range(starts[v], middle[v]):
            total += int(abs(np.int64(new_index[neighbours[e]]) - own))
    return total
