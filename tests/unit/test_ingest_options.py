"""Undirected, dedup, relabel and reorder, alone and together; the report; replacing a volume."""

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import reverse_cuthill_mckee as scipy_rcm
from tests.reference.tiles import decode_tiles, expected_edges

from hyades.common.blocks import FileBlocks
from hyades.common.errors import DataError, UsageError
from hyades.common.volume import Volume
from hyades.deploy.ingest import IngestOptions, ingest
from hyades.deploy.ingest import reorder as reorder_module
from hyades.deploy.ingest.dedup import UniqueEdges
from hyades.deploy.ingest.progress import silent
from hyades.deploy.ingest.sources import ArrayEdges


def load(target):
    with Volume.open(FileBlocks(target, writable=False)) as volume:
        tables = {
            name: volume.read_rows(name)
            for name, info in volume.catalog.objects.items()
            if info.kind != "pages"
        }
        return sorted(decode_tiles(volume)[0]), tables, volume.catalog.graph


def random_edges(seed=2, vertices=50, edges=600):
    return np.random.default_rng(seed).integers(0, vertices, (2, edges))


def test_undirected_and_dedup_keep_the_first_with_its_weight(tmp_path):
    edges = random_edges()
    weight = np.arange(edges.shape[1], dtype=np.float32)
    target = tmp_path / "g.vol"
    report = ingest(target, edges=edges, weights=weight, undirected=True, dedup=True)
    kept = {}
    both = [*zip(*edges, weight, strict=True), *zip(*edges[::-1], weight, strict=True)]
    for s, d, w in both:
        kept.setdefault((int(s), int(d)), float(w))
    source, destination = ([pair[i] for pair in kept] for i in (0, 1))
    found, tables, graph = load(target)
    assert found == sorted(expected_edges(source, destination, list(kept.values())))
    assert graph.undirected
    assert tables["self_loops"].max() == 1
    assert any("duplicates left out" in note for note in report.notes)


@settings(max_examples=30, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=200),
    memory=st.sampled_from([1, 9 * 2**20]),
)
def test_dedup_keeps_first_occurrences_in_order(tmp_path_factory, pairs, memory):
    scratch = tmp_path_factory.mktemp("scratch")
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    weight = np.arange(len(edges), dtype=np.float32)
    inner = ArrayEdges(edges[:, 0], edges[:, 1], weight)
    unique = UniqueEdges(inner, 31, memory, scratch, silent)
    found = [
        (int(s), int(d), float(w))
        for block in unique.blocks(7)
        for s, d, w in zip(*block, strict=True)
    ]
    first = {}
    for at, pair in enumerate(pairs):
        first.setdefault(pair, (*pair, float(at)))
    assert unique.edges == len(first)
    for destination in range(31):
        want = [edge for edge in first.values() if edge[1] == destination]
        assert [edge for edge in found if edge[1] == destination] == want


@pytest.mark.parametrize("spread", [1, 10**6, 10**15])
def test_relabel_keeps_the_ids(tmp_path, spread):
    edges = random_edges()
    ids = np.sort(np.random.default_rng(1).integers(-spread, spread + 100, 50))
    ids = np.unique(ids)
    edges = edges % len(ids)
    used = np.unique(edges)
    target = tmp_path / "g.vol"
    ingest(target, edges=ids[edges], relabel=True, memory="64MiB")
    found, tables, graph = load(target)
    assert graph.vertices == len(used)
    assert np.array_equal(tables["original_ids"], ids[used])
    assert found == sorted(expected_edges(*np.searchsorted(used, edges).tolist()))


def test_many_sparse_ids_are_collected_in_runs(monkeypatch):
    from hyades.deploy.ingest import relabel

    monkeypatch.setattr(relabel, "_BLOCK", 64)
    edges = np.random.default_rng(0).integers(-(2**60), 2**60, (2, 3000))
    found = relabel.relabel(ArrayEdges(edges[0], edges[1]), 1 << 20, silent)
    assert np.array_equal(found.original_ids, np.unique(edges))
    (block,) = found.edges.blocks(10**6)
    assert np.array_equal(found.original_ids[block.source], edges[0])


@pytest.mark.parametrize("kind", ["array", "npy", "text"])
def test_ids_name_the_feature_rows(tmp_path, kind):
    ids = np.array([40, 10, 999, -3, 7])
    features = np.arange(10, dtype=np.float32).reshape(5, 2)
    given = ids
    if kind == "npy":
        given = tmp_path / "ids.npy"
        np.save(given, ids)
    elif kind == "text":
        given = tmp_path / "ids.txt"
        np.savetxt(given, ids, "%d")
    edges = np.array([[40, 999, 10], [10, -3, 40]])
    ingest(tmp_path / "g.vol", edges=edges, features=features, ids=given)
    found, tables, _ = load(tmp_path / "g.vol")
    assert [edge[:2] for edge in found] == [(0, 1), (1, 0), (2, 3)]
    assert np.array_equal(tables["features"], features)
    assert np.array_equal(tables["original_ids"], ids)


def test_wrong_ids_are_refused(tmp_path):
    target, edges = tmp_path / "g.vol", np.array([[1, 2], [2, 5]])
    with pytest.raises(DataError, match=r"edge 1: 2 -> 5 has an id that is not in ids"):
        ingest(target, edges=edges, ids=[1, 2])
    with pytest.raises(DataError, match="ids: id 2 occurs twice"):
        ingest(target, edges=edges, ids=[1, 2, 5, 2])
    with pytest.raises(UsageError, match=r"features has 4 rows, --ids has 3 ids"):
        ingest(target, edges=edges, ids=[1, 2, 5], features=np.zeros((4, 2)))
    with pytest.raises(UsageError, match=r"3 different ids, features has 4 rows: pass --ids"):
        ingest(target, edges=edges, relabel=True, features=np.zeros((4, 2)))
    assert list(tmp_path.iterdir()) == []


def grid(side, seed=0):
    """A square grid whose vertices are numbered at random: an order exists that is much better."""
    at = np.arange(side * side).reshape(side, side)
    pairs = np.concatenate(
        [
            np.stack((at[:, 1:].ravel(), at[:, :-1].ravel())),
            np.stack((at[1:].ravel(), at[:-1].ravel())),
        ],
        axis=1,
    )
    shuffled = np.random.default_rng(seed).permutation(side * side)[pairs]
    return np.concatenate([shuffled, shuffled[::-1]], axis=1)


@pytest.mark.parametrize("method", ["rcm", "hyades"])
def test_reorder_shortens_the_span_and_keeps_the_graph(tmp_path, method):
    edges = grid(40)
    features = np.random.default_rng(0).standard_normal((1600, 3)).astype(np.float32)
    target = tmp_path / "g.vol"
    report = ingest(target, edges=edges, features=features, reorder=method)
    found, tables, graph = load(target)
    assert graph.reorder == method
    assert graph.span_before == int(np.abs(edges[0] - edges[1]).sum())
    assert graph.span_after < graph.span_before / 10
    order = tables["order"]
    assert np.array_equal(np.sort(order), np.arange(1600))
    assert np.array_equal(tables["features"], features[order])
    back = sorted(e._replace(source=order[e[0]], destination=order[e[1]]) for e in found)
    assert back == sorted(expected_edges(*edges.tolist()))
    assert any("total span" in line and "before" in line for line in report.lines())


def test_cuthill_mckee_is_as_narrow_as_scipys():
    edges = grid(30, seed=4)
    graph = reorder_module._read(ArrayEdges(edges[0], edges[1]), 900, silent)
    own = reorder_module.reverse_cuthill_mckee(graph).astype(np.int64)
    matrix = sp.csr_array((np.ones(edges.shape[1]), edges), shape=(900, 900))
    theirs = np.empty(900, np.int64)
    theirs[scipy_rcm(matrix, symmetric_mode=True)] = np.arange(900)
    assert sorted(own) == list(range(900))

    def bandwidth(new):
        return np.abs(new[edges[0]] - new[edges[1]]).max()

    assert bandwidth(own) <= bandwidth(theirs) * 1.1


def test_hubs_come_first():
    rng = np.random.default_rng(0)
    destination = rng.integers(0, 2000, 20_000)
    destination[:4000] = 1234
    destination[4000:5000] = 77
    edges = ArrayEdges(rng.integers(0, 2000, 20_000), destination)
    graph = reorder_module._read(edges, 2000, silent)
    in_degree = graph.middle - graph.starts[:-1]
    new = reorder_module._hubs_first(np.arange(2000), in_degree)
    assert (new[1234], new[77]) == (0, 1)
    assert sorted(new) == list(range(2000))


def test_an_order_that_is_best_already_is_kept(tmp_path):
    chain = np.stack((np.arange(99), np.arange(1, 100)))
    report = ingest(tmp_path / "g.vol", edges=chain, reorder="hyades")
    assert report.graph.reorder == "none"
    assert any("no order beats that of the input" in note for note in report.notes)


def test_reorder_beyond_the_budget_names_the_bytes(tmp_path):
    edges = np.zeros((2, 3_000_000), np.int8)
    with pytest.raises(UsageError, match=r"--reorder rcm holds 3,000,000 edges .*needs 40,777,\d+"):
        ingest(tmp_path / "g.vol", edges=edges, reorder="rcm", memory="32MiB")


def test_reorder_and_dedup_report_bad_ids_too(tmp_path):
    for options in ({"reorder": "rcm"}, {"dedup": True}):
        with pytest.raises(DataError, match=r"1 of 2 edges .* edge 1: 1 -> 7"):
            ingest(tmp_path / "g.vol", edges=[[0, 1], [1, 7]], vertices=3, **options)


def test_relabel_undirected_dedup_and_reorder_together(tmp_path):
    edges = random_edges(seed=8)
    target = tmp_path / "g.vol"
    ingest(
        target, edges=edges * 10 + 5, relabel=True, undirected=True, dedup=True, reorder="rcm",
        range_rows=16, memory="64MiB",
    )  # fmt: skip
    found, tables, graph = load(target)
    user = tables["original_ids"][tables["order"]]
    got = {(int(user[e.source]), int(user[e.destination])) for e in found}
    pairs = {(s * 10 + 5, d * 10 + 5) for s, d in edges.T.tolist() if s != d}
    assert got == pairs | {(d, s) for s, d in pairs}
    assert len(found) == len(got) == graph.edges


def test_report_and_progress(tmp_path):
    calls = {}

    def progress(phase, done, total, unit):
        assert 0 <= done <= total
        calls[phase] = (done, total, unit)

    report = ingest(
        tmp_path / "g.vol", edges=random_edges(), features=np.ones((50, 4)), progress=progress
    )
    assert set(calls) == {
        "reading edges", "reading features", "sorting edges", "writing topology", "committing",
    }  # fmt: skip
    assert all(done == total for done, total, _ in calls.values())
    assert set(report.phases) == set(calls)
    assert report.lines()[0].startswith(str(tmp_path / "g.vol") + ": 50 vertices, ")
    assert "note: features: float64 features are stored as float32" in report.lines()


def test_existing_volume_needs_force(tmp_path):
    target = tmp_path / "g.vol"
    ingest(target, edges=[[0], [1]])
    before = target.read_bytes()
    with pytest.raises(UsageError, match=r"exists: .*--force"):
        ingest(target, edges=[[0, 1], [1, 2]])
    with pytest.raises(DataError, match="outside 0 to 1"):
        ingest(target, edges=[[0, 9], [1, 2]], vertices=2, force=True)
    assert target.read_bytes() == before
    ingest(target, edges=[[0, 1], [1, 2]], force=True)
    assert load(target)[2].vertices == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "is a directory"),
        ("no/g.vol", "there is no folder"),
        ("carrier-pigeon://h/x", "no transport carrier-pigeon://"),
    ],
)
def test_impossible_targets(tmp_path, name, message):
    with pytest.raises(UsageError, match=message):
        ingest(tmp_path / name if "://" not in name else name, edges=[[0], [1]])


def test_unknown_options_are_usage_errors(tmp_path):
    for options in ({"colour": 1}, {"reorder": "best"}, {"edge_layout": "x"}, {"page_size": 5}):
        with pytest.raises(UsageError):
            ingest(tmp_path / "g.vol", edges=[[0], [1]], **options)
    assert IngestOptions(edges=None).memory == "1GiB"
