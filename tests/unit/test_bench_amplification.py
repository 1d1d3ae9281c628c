from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyades.common.errors import UsageError
from hyades.deploy.bench.amplification import gather_amplification
from hyades.deploy.bench.graphs import GraphSpec, make_csc


def counted(indptr, indices, row_bytes, page_bytes, batch_rows, cache_pages):
    """The model of the module's text with sets and an OrderedDict."""
    vertices = len(indptr) - 1
    cache: OrderedDict[int, None] = OrderedDict()
    pages_read = rows_needed = edge_pages = 0

    def pages(row: int) -> range:
        return range(row * row_bytes // page_bytes, ((row + 1) * row_bytes - 1) // page_bytes + 1)

    for start in range(0, vertices, batch_rows):
        own = range(start, min(vertices, start + batch_rows))
        sources = [int(s) for v in own for s in indices[indptr[v] : indptr[v + 1]]]
        edge_pages += sum(len(pages(s)) for s in sources)
        rows = set(own) | set(sources)
        rows_needed += len(rows)
        if cache_pages == 0:
            cache.clear()
        for page in sorted({page for row in rows for page in pages(row)}):
            pages_read += page not in cache
            if cache_pages:
                cache[page] = None
                cache.move_to_end(page)
                if len(cache) > cache_pages:
                    cache.popitem(last=False)
    return pages_read * page_bytes, rows_needed * row_bytes, edge_pages * page_bytes


@given(
    st.integers(1, 50),
    st.integers(0, 6),
    st.integers(1, 300),
    st.sampled_from([1, 64, 100, 256]),
    st.integers(1, 60),
    st.integers(0, 40),
)
@settings(max_examples=150, deadline=None)
def test_the_count_is_that_of_the_model(
    vertices: int, degree: int, row_bytes: int, page_bytes: int, batch_rows: int, cache_pages: int
) -> None:
    indptr, indices = make_csc(GraphSpec(vertices, degree, 1, seed=row_bytes))
    cost = gather_amplification(
        indptr, indices, row_bytes, page_bytes, batch_rows=batch_rows, cache_pages=cache_pages
    )
    expected = counted(indptr, indices, row_bytes, page_bytes, batch_rows, cache_pages)
    assert (cost.gather_bytes, cost.needed_bytes, cost.per_edge_bytes) == expected
    assert cost.broadcast_bytes == -(-vertices * row_bytes // page_bytes) * page_bytes


def test_one_batch_of_everything_reads_what_the_broadcast_reads() -> None:
    indptr, indices = make_csc(GraphSpec(500, 8, 1))
    cost = gather_amplification(indptr, indices, 256, batch_rows=500)
    assert cost.gather_bytes == cost.broadcast_bytes
    assert cost.amplification == 1
    unbounded = gather_amplification(indptr, indices, 256, batch_rows=10, cache_pages=10**9)
    assert unbounded.gather_bytes == cost.broadcast_bytes


def test_shuffled_ids_and_small_batches_read_more() -> None:
    local = make_csc(GraphSpec(20_000, 8, 1))
    shuffled = make_csc(GraphSpec(20_000, 8, 1, shuffled=True))
    costs = [gather_amplification(*local, 512), gather_amplification(*shuffled, 512)]
    assert 1 < costs[0].amplification < costs[1].amplification
    small = gather_amplification(*local, 512, batch_rows=64)
    assert small.amplification > costs[0].amplification
    assert small.gather_bytes < small.per_edge_bytes
    assert small.waste > 1
    cached = gather_amplification(*local, 512, batch_rows=64, cache_pages=500)
    assert cached.gather_bytes < small.gather_bytes


@pytest.mark.parametrize(
    "sizes", [{"row_bytes": 0}, {"page_bytes": 0}, {"batch_rows": 0}, {"cache_pages": -1}]
)
def test_sizes_below_one_are_refused(sizes: dict[str, int]) -> None:
    indptr, indices = make_csc(GraphSpec(4, 1, 1))
    with pytest.raises(UsageError, match="must be at least 1"):
        gather_amplification(indptr, indices, **{"row_bytes": 4, **sizes})
    with pytest.raises(UsageError, match="without vertices"):
        gather_amplification(indptr[:1], indices[:0], 4)
