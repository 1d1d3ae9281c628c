import numpy as np
import pytest

from hyades.common.sampling import keeps, sample_key
from hyades.deploy.bench.batches import count_fetched
from hyades.deploy.bench.graphs import GraphSpec, make_csc


def slow_count(indptr, indices, fanouts, batch, seed=0):
    """Return the same from sets of vertices."""
    vertices = len(indptr) - 1
    order = np.random.default_rng(seed).permutation(vertices)
    total = 0
    for first in range(0, vertices, batch):
        seen = set(order[first : first + batch].tolist())
        for hop, fanout in enumerate(fanouts):
            new = set()
            for v in seen:
                degree = indptr[v + 1] - indptr[v]
                key = np.uint64(sample_key(seed, hop, v))
                new |= {
                    int(indices[indptr[v] + rank])
                    for rank in range(degree)
                    if fanout < 0 or keeps(key, rank, degree, fanout)
                }
            seen |= new
        total += len(seen)
    return total


@pytest.mark.parametrize("fanouts", [(-1, -1), (3, 2), (2,), (-1,), (4, 1, 2)])
def test_rows_of_all_batches(fanouts):
    indptr, indices = make_csc(GraphSpec(300, 6, 1))
    found = count_fetched(indptr, indices, fanouts, batch=64)
    assert found == slow_count(indptr, indices, fanouts, 64)
    assert found >= 300


def test_some_batches_stand_for_all() -> None:
    indptr, indices = make_csc(GraphSpec(300, 6, 1))
    whole = count_fetched(indptr, indices, (3,), batch=10)
    some = count_fetched(indptr, indices, (3,), batch=10, most=10)
    assert 0.7 * whole < some < 1.4 * whole
    assert count_fetched(indptr, indices, (3,), batch=10, most=99) == whole


def test_a_graph_without_edges_fetches_every_row_once():
    assert count_fetched(np.zeros(11, np.int64), np.zeros(0, np.int32), (5, 5), batch=4) == 10
