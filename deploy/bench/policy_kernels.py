"""Numba kernels that replay a broadcast scan against a bounded set of partial aggregates."""

from typing import Any

import numpy as np

from hyades.common.jit import jit

# Policy codes; `simulate` keeps residents in a heap by (key, vertex) and evicts its least element.
MIN_PENDING, BELADY, LRU, FIFO, RANDOM = range(5)

_ABSENT = -1


@jit
def broadcast_events(indptr: Any, indices: Any, order: Any) -> Any:
    """Return int32 [edges]: the destination of every edge as a scan in source order meets it.

    `order[new]` is the old id; sources and destinations are new ids, destinations of one source
    ascend.
    """
    vertices = indptr.size - 1
    place = np.empty(vertices, np.int32)
    for new in range(vertices):
        place[order[new]] = new
    at = np.zeros(vertices + 1, np.int64)
    for edge in range(indices.size):
        at[place[indices[edge]] + 1] += 1
    for v in range(vertices):
        at[v + 1] += at[v]
    events = np.empty(indices.size, np.int32)
    for new in range(vertices):
        old = order[new]
        for edge in range(indptr[old], indptr[old + 1]):
            source = place[indices[edge]]
            events[at[source]] = new
            at[source] += 1
    return events


@jit
def next_uses(events: Any, vertices: int) -> Any:
    """Return int64 [edges]: for each event, when its destination comes next (edges = never)."""
    edges = events.size
    upcoming = np.full(vertices, edges, np.int64)
    result = np.empty(edges, np.int64)
    for t in range(edges - 1, -1, -1):
        v = events[t]
        result[t] = upcoming[v]
        upcoming[v] = t
    return result


@jit
def _before(key: Any, a: Any, b: Any) -> Any:
    return key[a] < key[b] or (key[a] == key[b] and a < b)


@jit
def _sift_up(heap: Any, where: Any, key: Any, at: Any) -> None:
    v = heap[at]
    while at > 0:
        parent = (at - 1) >> 1
        if not _before(key, v, heap[parent]):
            break
        heap[at] = heap[parent]
        where[heap[at]] = at
        at = parent
    heap[at] = v
    where[v] = at


@jit
def _sift_down(heap: Any, where: Any, key: Any, size: int, at: Any) -> None:
    v = heap[at]
    while True:
        child = 2 * at + 1
        if child >= size:
            break
        if child + 1 < size and _before(key, heap[child + 1], heap[child]):
            child += 1
        if not _before(key, heap[child], v):
            break
        heap[at] = heap[child]
        where[heap[at]] = at
        at = child
    heap[at] = v
    where[v] = at


@jit
def _remove(heap: Any, where: Any, key: Any, size: int, at: Any, ordered: Any) -> int:
    """Take the resident at heap position *at* out and return the new size."""
    where[heap[at]] = _ABSENT
    size -= 1
    if at < size:
        heap[at] = heap[size]
        where[heap[at]] = at
        if ordered:
            _sift_up(heap, where, key, at)
            _sift_down(heap, where, key, size, at)
    return size


@jit
def _splitmix(state: Any) -> Any:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@jit
def simulate(
    events: Any, following: Any, degrees: Any, capacity: int, policy: int, seed: Any
) -> Any:
    """Replay *events* with room for *capacity* partial aggregates and count what moves.

    Returns int64 [4]: evictions, reloads, aggregates opened, most residents at once.  `degrees` are
    int64 in-degrees, `following` is `next_uses` (read for BELADY only, else perhaps empty), `seed`
    uint64 (RANDOM only).
    """
    vertices = degrees.size
    pending = degrees.copy()
    where = np.full(vertices, _ABSENT, np.int32)
    key = np.zeros(vertices, np.int64)
    heap = np.empty(capacity, np.int32)
    opened = np.zeros(vertices, np.bool_)
    size, evictions, reloads, started, peak = 0, 0, 0, 0, 0
    state = seed
    ordered = policy != RANDOM
    for t in range(events.size):
        v = events[t]
        entering = where[v] == _ABSENT
        if entering:
            if size == capacity:
                victim: Any = 0
                if policy == RANDOM:
                    state += np.uint64(0x9E3779B97F4A7C15)
                    victim = np.int64(_splitmix(state) % np.uint64(size))
                size = _remove(heap, where, key, size, victim, ordered)
                evictions += 1
            if opened[v]:
                reloads += 1
            else:
                opened[v] = True
                started += 1
            heap[size] = v
            where[v] = size
            size += 1
            peak = max(peak, size)
        pending[v] -= 1
        if pending[v] == 0:
            size = _remove(heap, where, key, size, where[v], ordered)
            continue
        if policy == MIN_PENDING:
            key[v] = pending[v]
        elif policy == BELADY:
            key[v] = -following[t]
        elif policy == LRU or (policy == FIFO and entering):
            key[v] = t
        if ordered:
            _sift_up(heap, where, key, where[v])
            _sift_down(heap, where, key, size, where[v])
    return np.array([evictions, reloads, started, peak], np.int64)
