"""How many rows of features a trainer on mini-batches would fetch: counted on the graph, not run.

A batch is a set of vertices; their neighbourhood, as deep as there are fanouts, is fetched whole,
once a batch, own rows included, as PyG's NeighborLoader does.  Batches are drawn without repetition
over all vertices.  The sample of a vertex follows hyades.common.sampling, a layer for each hop; a
sampler that draws anew for each batch fetches about as many.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.jit import jit
from hyades.common.sampling import keeps, sample_key
from hyades.deploy.bench.published import Fanouts

BATCH = 1024  # LGNNIC's


def count_fetched(
    indptr: NDArray[np.int64], indices: NDArray[np.int32], fanouts: Fanouts, *,
    batch: int = BATCH, seed: int = 0, most: int | None = None,
) -> int:  # fmt: skip
    """Return the rows that an epoch fetches; *fanouts* from a vertex outward, -1 for every edge.

    With *most* that many batches are counted, and stand for all.
    """
    vertices = len(indptr) - 1
    order = np.random.default_rng(seed).permutation(vertices)
    limits = np.array([k if k > 0 else keep_all(indptr) for k in fanouts], np.int64)
    starts = range(0, vertices, batch)[:most]
    total = seeds = 0
    for first in starts:
        chosen = order[first : first + batch]
        reached = np.zeros(vertices, np.int8)  # 0: not yet, else the hop that reached it, plus 1
        reached[chosen] = 1
        for hop in range(len(limits)):
            reach(indptr, indices, limits[hop], hop, seed, reached)
        total, seeds = total + int(np.count_nonzero(reached)), seeds + len(chosen)
    return round(total * vertices / seeds)


def keep_all(indptr: NDArray[np.int64]) -> int:
    """Return a fanout that keeps every edge: the largest in-degree."""
    return int(np.diff(indptr).max(initial=1))


@jit
def reach(
    indptr: Any, indices: Any, fanout: Any, hop: Any, seed: Any, reached: Any
) -> None:  # fmt: skip
    """Mark the sources of kept edges into all that was reached by *hop* hops or fewer."""
    for vertex in range(reached.size):
        if reached[vertex] == 0 or reached[vertex] > hop + 1:
            continue
        first, degree = indptr[vertex], indptr[vertex + 1] - indptr[vertex]
        key = sample_key(seed, hop, vertex)
        for rank in range(degree):
            source = indices[first + rank]
            if reached[source] == 0 and keeps(key, rank, degree, fanout):
                reached[source] = hop + 2
