"""The tile builder: what it writes decodes to the graph that went in, whatever the budget."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference.tiles import Edge, decode_tiles, expected_edges

from hyades.common.blocks import MemoryBlocks
from hyades.common.errors import DataError, UsageError
from hyades.common.units import KIB, MIB
from hyades.common.volume import Volume
from hyades.deploy.ingest import budget as budget_module
from hyades.deploy.ingest import build as build_module
from hyades.deploy.ingest.budget import Budget
from hyades.deploy.ingest.build import BuildOptions, build_graph
from hyades.deploy.ingest.sources import ArrayEdges, ArrayFeatures, Undirected


def build(source, destination, *, weight=None, features=None, **options) -> Volume:
    volume = Volume.create(MemoryBlocks(), page_size=64 * KIB)
    edges = ArrayEdges(
        np.array(source, np.int64),
        np.array(destination, np.int64),
        None if weight is None else np.array(weight, np.float32),
    )
    if features is not None:
        features = ArrayFeatures(features)
    build_graph(volume, edges, features, BuildOptions(**options))
    volume.commit()
    return volume


def ordered(edges: list[Edge], rows: int) -> list[Edge]:
    return sorted(edges, key=lambda e: (e.source // rows, e.destination, e.source, e.rank))


@st.composite
def graphs(draw):
    vertices = draw(st.integers(1, 70))
    vertex = st.integers(0, vertices - 1)
    pairs = draw(st.lists(st.tuples(vertex, vertex), max_size=300))
    weight = None
    if draw(st.booleans()):
        weight = [draw(st.floats(-2, 2, width=32)) for _ in pairs]
    return vertices, [p[0] for p in pairs], [p[1] for p in pairs], weight


@pytest.fixture
def tiny_loads(monkeypatch):
    """Blocks and loads of a few edges, so that small graphs take every path."""

    def plan(memory, vertices, edges, *, weighted, reordered):
        return Budget(block_edges=7, load_edges=max(memory, 1), in_memory=False)

    monkeypatch.setattr(build_module, "plan_memory", plan)


@settings(max_examples=60, deadline=None)
@given(graph=graphs(), rows=st.sampled_from([1, 16, 4096]))
def test_decode_is_the_inverse_of_build(graph, rows):
    vertices, source, destination, weight = graph
    volume = build(source, destination, weight=weight, vertices=vertices, range_rows=rows)
    edges, _ = decode_tiles(volume)
    assert edges == ordered(expected_edges(source, destination, weight), rows)
    check_vertex_tables(volume, vertices, source, destination, weight)


def check_vertex_tables(volume, vertices, source, destination, weight):
    plain = [(s, d) for s, d in zip(source, destination, strict=True) if s != d]
    ins, outs = Counter(d for _, d in plain), Counter(s for s, _ in plain)
    loops = Counter(s for s, d in zip(source, destination, strict=True) if s == d)
    for name, counts in (("in_degrees", ins), ("out_degrees", outs), ("self_loops", loops)):
        assert volume.read_table(name).tolist() == [counts[v] for v in range(vertices)], name
    graph = volume.catalog.graph
    assert (graph.vertices, graph.edges, graph.loops) == (
        vertices,
        len(plain),
        sum(loops.values()),
    )
    assert graph.max_in_degree == max(ins.values(), default=0)
    assert graph.span_before == sum(abs(s - d) for s, d in plain) == graph.span_after
    if weight is None:
        assert "weighted_in" not in volume.catalog.objects
        return
    total = [0.0] * vertices
    own = [[] for _ in range(vertices)]
    for s, d, w in zip(source, destination, np.float32(weight), strict=True):
        if s == d:
            own[s].append(w)
        else:
            total[d] += float(w)
    assert volume.read_table("weighted_in").tolist() == np.float32(total).tolist()
    if loops:
        flat = [w for ws in own for w in ws]
        assert volume.read_table("loop_weights").tolist() == np.float32(flat).tolist()


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), limit=st.integers(1, 40))
def test_spilled_build_writes_the_same_pages(graph, limit):
    vertices, source, destination, weight = graph
    kept = Counter((s // 16, d) for s, d in zip(source, destination, strict=True) if s != d)
    limit = max(limit, max(kept.values(), default=1))  # these must be in memory together
    options = {"weight": weight, "vertices": vertices, "range_rows": 16}
    whole = build(source, destination, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            build_module,
            "plan_memory",
            lambda *_, **__: Budget(block_edges=7, load_edges=limit, in_memory=False),
        )
        spilled = build(source, destination, **options)
    for name in whole.catalog.objects:
        a, b = whole.object(name), spilled.object(name)
        assert a.pages == b.pages
        assert whole.page_table(name).tolist() == spilled.page_table(name).tolist(), name


def test_star_with_more_edges_than_one_piece_holds():
    leaves = 70_000
    center, leaf = np.zeros(leaves), np.arange(1, leaves + 1)
    for page in (64 * KIB, 256 * KIB):
        volume = build(leaf, center, vertices=leaves + 1, range_rows=65536, tile_page_bytes=page)
        edges, pieces = decode_tiles(volume)
        assert edges == expected_edges(leaf.tolist(), [0] * leaves)
        assert volume.catalog.graph.max_in_degree == leaves
        assert max(p.edges for p in pieces) == (65_535 if page == 256 * KIB else 16_384)
        back = build(center, leaf, vertices=leaves + 1, range_rows=65536, tile_page_bytes=page)
        edges, _ = decode_tiles(back)
        assert edges == expected_edges([0] * leaves, leaf.tolist())


def test_many_copies_of_one_edge_fill_a_piece_of_65535():
    count = 65_535 * 2 + 7
    volume = build(
        np.zeros(count), np.ones(count), vertices=2, range_rows=16, tile_page_bytes=256 * KIB
    )
    edges, pieces = decode_tiles(volume)
    assert [edge.rank for edge in edges] == list(range(count))
    assert max(piece.edges for piece in pieces) == 65_535


def test_no_edges_still_gives_every_chunk_its_diagonal():
    volume = build([], [], vertices=50, range_rows=16)
    edges, pieces = decode_tiles(volume)
    assert edges == []
    assert [(p.chunk, p.lane, p.self_flag) for p in pieces] == [(c, c, True) for c in range(4)]


def test_one_vertex():
    volume = build([0, 0], [0, 0], range_rows=16)
    assert decode_tiles(volume)[0] == []
    assert volume.read_table("self_loops").tolist() == [2]


def test_reordered_build_keeps_ranks_and_moves_ids():
    rng = np.random.default_rng(3)
    source, destination = rng.integers(0, 40, (2, 500))
    new = rng.permutation(40).astype(np.uint32)
    features = rng.standard_normal((40, 3)).astype(np.float32)
    volume = build(
        source, destination, features=features, new_index=new, range_rows=16, reorder="test"
    )
    edges, _ = decode_tiles(volume)
    moved = [
        edge._replace(source=int(new[edge.source]), destination=int(new[edge.destination]))
        for edge in expected_edges(source.tolist(), destination.tolist())
    ]
    assert edges == ordered(moved, 16)
    order = volume.read_table("order")
    assert order[new].tolist() == list(range(40))
    assert np.array_equal(volume.read_rows("features"), features[order])


def test_undirected_adds_reversed_copies_after_all_originals():
    volume = Volume.create(MemoryBlocks(), page_size=64 * KIB)
    edges = Undirected(ArrayEdges(np.array([0, 1, 2, 2]), np.array([1, 0, 2, 0])))
    build_graph(volume, edges, None, BuildOptions(range_rows=16, undirected=True))
    found, _ = decode_tiles(volume)
    both = expected_edges([0, 1, 2, 1, 0, 0], [1, 0, 0, 0, 1, 2])
    assert found == ordered(both, 16)
    assert volume.read_table("self_loops").tolist() == [0, 0, 1]


@pytest.mark.parametrize("memory", [1, 17 * 5, 1000])
def test_permuted_features_do_not_depend_on_memory(memory, tmp_path):
    from hyades.deploy.ingest import features as features_module

    rng = np.random.default_rng(5)
    rows = rng.standard_normal((700, 5)).astype(np.float32)
    new = rng.permutation(700).astype(np.uint32)
    volume = Volume.create(MemoryBlocks(), page_size=64 * KIB)
    features_module.store_features(
        volume, ArrayFeatures(rows), new, 4, memory=memory, scratch=tmp_path,
        progress=lambda *_: None, allow_nonfinite=False,
    )  # fmt: skip
    assert np.array_equal(volume.read_rows("features")[new], rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [("f2", "float16"), ("f4", "float32"), ("f8", "float32"), ("i4", "float32"), ("?", "float32")],
)
def test_feature_dtypes(dtype, stored):
    rows = np.arange(12).reshape(4, 3).astype(dtype)
    volume = build([0], [1], features=rows)
    found = volume.read_rows("features")
    assert found.dtype.name == stored
    assert np.array_equal(found, rows.astype(stored))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_nonfinite_features_are_counted_and_named(dtype):
    rows = np.zeros((30, 4), dtype)
    rows[7, 2], rows[9, 0], rows[29, 3] = np.nan, np.inf, -np.inf
    with pytest.raises(DataError, match=r"3 of 30 rows hold NaN or inf .*row 7 column 2 = nan"):
        build([0], [1], features=rows)
    volume = build([0], [1], features=rows, allow_nonfinite=True)
    assert np.array_equal(volume.read_rows("features"), rows.astype("f4"), equal_nan=True)


def test_float64_that_overflows_float32_is_reported():
    with pytest.raises(DataError, match=r"1 of 2 rows .*row 1 column 0 = inf"):
        build([0], [1], features=np.array([[1.0], [1e300]]))


def test_bad_ids_are_counted_and_the_first_is_named():
    with pytest.raises(DataError, match=r"2 of 4 edges .* 0 to 2; the first is edge 1: 3 -> 0"):
        build([0, 3, 1, 1], [1, 0, -1, 2], vertices=3)


def test_bad_ids_in_later_blocks_are_counted_too(tiny_loads):
    source = [0] * 30
    source[10] = source[25] = -5
    with pytest.raises(DataError, match=r"2 of 30 edges .* edge 10: -5 -> 1"):
        build(source, [1] * 30, vertices=2, memory=100)


def test_nonfinite_weights_are_refused():
    with pytest.raises(DataError, match="edge 1 has weight nan"):
        build([0, 1], [1, 0], weight=[1.0, np.nan])


def test_contradicting_vertex_counts_are_refused():
    with pytest.raises(UsageError, match=r"--vertices has 3 vertices, features has 2"):
        build([0], [1], features=np.zeros((2, 1), np.float32), vertices=3)


@pytest.mark.parametrize("rows", [0, 3, 131072])
def test_bad_range_rows(rows):
    with pytest.raises(UsageError, match="power of two"):
        build([0], [1], range_rows=rows)


def test_nothing_at_all_is_refused():
    with pytest.raises(UsageError, match="no vertices"):
        build([], [])


def test_too_small_a_budget_names_what_is_needed():
    with pytest.raises(UsageError, match=r"need at least .* raise --memory"):
        build([0], [1], vertices=10, memory=MIB)
    plan = budget_module.plan_memory(64 * MIB, 10, 10, weighted=False, reordered=False)
    assert plan.in_memory


def test_one_destination_that_does_not_fit_says_so(tiny_loads):
    with pytest.raises(UsageError, match=r"30 edges .* to vertex 1 .*--dedup"):
        build([0] * 30, [1] * 30, vertices=2, memory=8)
