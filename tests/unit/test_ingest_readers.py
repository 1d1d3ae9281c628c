"""Every format gives the graph that was put into it."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse as sp
import torch
from tests.reference.tiles import decode_tiles, expected_edges

from hyades.common.blocks import FileBlocks
from hyades.common.errors import DataError, UsageError
from hyades.common.volume import Volume
from hyades.deploy.ingest import ingest

V, E, F = 60, 400, 5
RNG = np.random.default_rng(11)
SOURCE, DESTINATION = RNG.integers(0, V, (2, E))
WEIGHT = RNG.standard_normal(E).astype(np.float32)
FEATURES = RNG.standard_normal((V, F)).astype(np.float32)


@pytest.fixture
def target(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    yield folder / "g.vol"
    left = {path.name for path in folder.iterdir()} - {"g.vol"}
    assert not left, "temporary files stay"


def load(target, **options):
    options.setdefault("range_rows", 16)
    report = ingest(target, memory="64MiB", **options)
    with Volume.open(FileBlocks(target, writable=False)) as volume:
        edges, _ = decode_tiles(volume)
        features = None
        if "features" in volume.catalog.objects:
            features = volume.read_rows("features")
        return SimpleNamespace(report=report, edges=edges, features=features, graph=report.graph)


def expect(source=SOURCE, destination=DESTINATION, weight=None):
    edges = expected_edges(source.tolist(), destination.tolist(), weight)
    return sorted(edges, key=lambda e: (e.source // 16, e.destination, e.source, e.rank))


@pytest.mark.parametrize("dtype", ["i4", "i8", "u4", ">i8", "f8"])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_edge_index_npy(tmp_path, target, dtype, pairs, order):
    array = np.stack((SOURCE, DESTINATION), axis=1 if pairs else 0).astype(dtype)
    np.save(tmp_path / "e.npy", np.asarray(array, order=order))
    found = load(target, edges=tmp_path / "e.npy", vertices=V)
    assert found.edges == expect()


def test_two_by_two_asks_for_the_layout(tmp_path, target):
    np.save(tmp_path / "e.npy", np.array([[0, 1], [2, 3]]))
    with pytest.raises(UsageError, match=r"could be either \[2, E\] or \[E, 2\].*--edge-layout"):
        load(target, edges=tmp_path / "e.npy")
    found = load(target, edges=tmp_path / "e.npy", edge_layout="pairs")
    assert {edge[:2] for edge in found.edges} == {(0, 1), (2, 3)}
    found = load(target, edges=tmp_path / "e.npy", edge_layout="source-target", force=True)
    assert {edge[:2] for edge in found.edges} == {(0, 2), (1, 3)}


def test_layout_that_does_not_fit_is_refused(tmp_path, target):
    np.save(tmp_path / "e.npy", np.zeros((2, 5), int))
    with pytest.raises(UsageError, match=r"\[2, 5\] int64 cannot have --edge-layout pairs"):
        load(target, edges=tmp_path / "e.npy", edge_layout="pairs")


@pytest.mark.parametrize(
    ("name", "separator", "header", "comments"),
    [
        ("e.csv", ",", "src,dst\n", ""),
        ("e.csv", ", ", "", ""),
        ("e.txt", "\t", "", "# Nodes: 60\n# FromNodeId\tToNodeId\n"),
        ("e.txt", "   ", "", "% konect\n\n"),
        ("e.tsv", "\t", "source\ttarget\n", ""),
        ("e.edges", ";", "", ""),
        ("e.any", "::", "", ""),
        ("e.csv", ",", '"from","to"\n', "\ufeff"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_text_edges(tmp_path, target, name, separator, header, comments, packed):
    if separator == "::":
        separator = ":"
    rows = "\n".join(f"{s}{separator}{d}" for s, d in zip(SOURCE, DESTINATION, strict=True))
    text = (comments + header + rows).encode()
    path = tmp_path / (name + ".gz" if packed else name)
    path.write_bytes(gzip.compress(text) if packed else text)
    assert load(target, edges=path, vertices=V).edges == expect()


def test_text_without_last_newline_crlf_comments_inside_and_small_blocks(
    tmp_path, target, monkeypatch
):
    monkeypatch.setattr("hyades.deploy.ingest.readers.text._BLOCK", 100)
    rows = [f"{s} {d} " for s, d in zip(SOURCE, DESTINATION, strict=True)]
    rows.insert(200, "# half of it")
    rows.insert(100, "")
    path = tmp_path / "e.txt"
    path.write_bytes("\r\n".join(rows).encode())
    assert load(target, edges=path, vertices=V).edges == expect()


def test_text_weights_by_name_and_number(tmp_path, target):
    rows = [f"{s},{w!r},{d}" for s, d, w in zip(SOURCE, DESTINATION, WEIGHT.tolist(), strict=True)]
    path = tmp_path / "e.csv"
    path.write_text("src,w,dst\n" + "\n".join(rows))
    assert load(target, edges=path, vertices=V, weights="w").edges == expect(weight=WEIGHT)
    found = load(target, edges=path, vertices=V, weights="1", edge_columns=("0", "2"), force=True)
    assert found.edges == expect(weight=WEIGHT)
    found = load(target, edges=path, vertices=V, force=True)
    assert found.edges == expect()
    assert any("1 are ignored" in note for note in found.report.notes)


@pytest.mark.parametrize("text", ["1", "-2.5", "+.5", "1e3", "2.5E-3", "1e-320", "7e400", "-inf"])
def test_text_floats_are_what_python_reads(tmp_path, target, text):
    path = tmp_path / "e.csv"
    path.write_text(f"0,1,{text}\n")
    found = load(target, edges=path, weights="2", allow_nonfinite=True)
    with np.errstate(over="ignore"):
        assert found.edges[0].weight == float(np.float32(float(text)))


def test_header_with_unknown_names_asks_for_columns(tmp_path, target):
    path = tmp_path / "e.csv"
    path.write_text("a,b,c\n1,2,3\n")
    with pytest.raises(UsageError, match=r"which of the columns a, b, c .*--edge-columns"):
        load(target, edges=path)
    assert load(target, edges=path, edge_columns=("c", "a")).edges[0][:2] == (3, 1)


@pytest.mark.parametrize("names", [("src", "dst"), ("target", "source")])
def test_parquet_edges(tmp_path, target, names):
    columns = dict(zip(names, (SOURCE, DESTINATION), strict=True))
    path = tmp_path / "e.parquet"
    pq.write_table(pa.table({"w": WEIGHT, **columns}), path, row_group_size=64)
    forward = names == ("src", "dst")
    pair = (SOURCE, DESTINATION) if forward else (DESTINATION, SOURCE)
    found = load(target, edges=path, vertices=V, weights="w")
    assert found.edges == expect(*pair, weight=WEIGHT)


def test_parquet_strings_and_nulls_are_refused(tmp_path, target):
    path = tmp_path / "e.parquet"
    pq.write_table(pa.table({"src": ["a"], "dst": ["b"]}), path)
    with pytest.raises(UsageError, match="column 'src' holds string: ids must be integers"):
        load(target, edges=path)
    pq.write_table(pa.table({"src": [0, None], "dst": [1, 2]}), path)
    with pytest.raises(DataError, match="column 'src' is null in row 1"):
        load(target, edges=path)


@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_scipy_npz(tmp_path, target, form, compressed, weighted):
    pairs = np.unique(np.stack((SOURCE, DESTINATION)), axis=1)  # scipy would add duplicates
    values = WEIGHT[: pairs.shape[1]] if weighted else np.ones(pairs.shape[1], np.float32)
    matrix = sp.coo_array((values, (pairs[0], pairs[1])), shape=(V, V)).asformat(form)
    sp.save_npz(tmp_path / "a.npz", matrix, compressed=compressed)
    found = load(target, edges=tmp_path / "a.npz")
    whole = matrix.tocoo()
    by_source = np.lexsort((whole.col, whole.row))
    want = expect(
        whole.row[by_source], whole.col[by_source], whole.data[by_source] if weighted else None
    )
    assert [e[:2] + e[3:] for e in found.edges] == [e[:2] + e[3:] for e in want]
    assert found.graph.weighted == weighted
    assert found.graph.vertices == V


def csc():
    order = np.argsort(DESTINATION, kind="stable")
    indptr = np.zeros(V + 1, np.int64)
    np.cumsum(np.bincount(DESTINATION, minlength=V), out=indptr[1:])
    return indptr, SOURCE[order].astype(np.int32), order


@pytest.mark.parametrize("block", [3, 50, 1000])
def test_csc_pair_of_npy(tmp_path, target, block, monkeypatch):
    from hyades.deploy.ingest import build
    from hyades.deploy.ingest.budget import Budget

    monkeypatch.setattr(build, "plan_memory", lambda *_, **__: Budget(block, 10**6, True))
    indptr, indices, _ = csc()
    np.save(tmp_path / "indptr.npy", indptr)
    np.save(tmp_path / "indices.npy", indices)
    found = load(target, edges=(tmp_path / "indptr.npy", tmp_path / "indices.npy"))
    assert found.edges == expect()  # a stable order by destination has the same ranks
    assert found.graph.vertices == V


def test_ginex_folder_of_raw_files(tmp_path, target):
    indptr, indices, _ = csc()
    conf = {}
    for name, array in (("indptr", indptr), ("indices", indices), ("features", FEATURES)):
        array.tofile(tmp_path / f"{name}.dat")
        conf |= {f"{name}_shape": list(array.shape), f"{name}_dtype": array.dtype.name}
    (tmp_path / "conf.json").write_text(json.dumps(conf))
    found = load(target, edges=tmp_path)
    assert found.edges == expect()
    assert np.array_equal(found.features, FEATURES)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("folder", [False, True])
def test_ogb_binary(tmp_path, target, compressed, folder):
    (tmp_path / "raw").mkdir()
    (np.savez_compressed if compressed else np.savez)(
        tmp_path / "raw" / "data.npz",
        edge_index=np.stack((SOURCE, DESTINATION)),
        num_nodes_list=np.array([V]),
        num_edges_list=np.array([E]),
        node_feat=FEATURES,
        edge_feat=WEIGHT[:, None],
    )
    found = load(target, edges=tmp_path if folder else tmp_path / "raw" / "data.npz")
    assert found.edges == expect()
    assert np.array_equal(found.features, FEATURES)
    assert any("edge_feat is ignored" in note for note in found.report.notes)


def test_ogb_csv(tmp_path, target):
    (tmp_path / "raw").mkdir()

    def write(name, array):
        rows = "\n".join(",".join(repr(x) for x in row) for row in array.tolist())
        (tmp_path / "raw" / f"{name}.csv.gz").write_bytes(gzip.compress(rows.encode()))

    write("edge", np.stack((SOURCE, DESTINATION), 1))
    write("node-feat", FEATURES)
    write("num-node-list", np.array([[V]]))
    found = load(target, edges=tmp_path)
    assert found.edges == expect()
    assert np.array_equal(found.features, FEATURES)


@pytest.mark.parametrize("edges", ["csv", "numpy"])
@pytest.mark.parametrize("features", ["numpy", "torch", None])
def test_graphbolt(tmp_path, target, edges, features):
    (tmp_path / "d").mkdir()
    if edges == "csv":
        np.savetxt(tmp_path / "d/e.csv", np.stack((SOURCE, DESTINATION), 1), "%d", delimiter=",")
    else:
        np.save(tmp_path / "d/e.npy", np.stack((SOURCE, DESTINATION)))
    np.save(tmp_path / "d/x.npy", FEATURES)
    torch.save(torch.from_numpy(FEATURES), tmp_path / "d/x.pt")
    path = {"csv": "d/e.csv", "numpy": "d/e.npy"}[edges]
    text = f"graph:\n  nodes: [{{num: {V}}}]\n  edges: [{{format: {edges}, path: {path}}}]\n"
    if features:
        file = {"numpy": "d/x.npy", "torch": "d/x.pt"}[features]
        text += (
            f"feature_data:\n  - {{domain: node, name: feat, format: {features}, path: {file}}}\n"
            "  - {domain: node, name: year, format: numpy, path: d/none.npy}\n"
        )
    (tmp_path / "metadata.yaml").write_text(text)
    found = load(target, edges=tmp_path)
    assert found.edges == expect()
    assert found.graph.vertices == V
    assert (found.features is None) == (features is None)
    if features:
        assert np.array_equal(found.features, FEATURES)


def test_heterogeneous_graphbolt_is_refused(tmp_path, target):
    (tmp_path / "metadata.yaml").write_text(
        "graph:\n  nodes: [{type: a, num: 1}, {type: b, num: 2}]\n"
        "  edges: [{format: csv, path: e.csv}]\n"
    )
    with pytest.raises(UsageError, match="2 types of vertices"):
        load(target, edges=tmp_path)


def pyg_data():
    module = pytest.importorskip("torch_geometric.data", reason="torch_geometric is not installed")
    return module.Data


def test_pyg_data_object(target):
    data = pyg_data()(
        x=torch.from_numpy(FEATURES),
        edge_index=torch.from_numpy(np.stack((SOURCE, DESTINATION))),
        edge_weight=torch.from_numpy(WEIGHT),
    )
    found = load(target, edges=data)
    assert found.edges == expect(weight=WEIGHT)
    assert np.array_equal(found.features, FEATURES)


def test_saved_dictionary_of_tensors(tmp_path, target):
    both = torch.from_numpy(np.stack((SOURCE, DESTINATION)))
    torch.save({"edge_index": both, "x": torch.from_numpy(FEATURES)}, tmp_path / "g.pt")
    found = load(target, edges=tmp_path / "g.pt")
    assert found.edges == expect()
    assert np.array_equal(found.features, FEATURES)


def test_pickled_data_object_is_refused_with_advice(tmp_path, target):
    torch.save(pyg_data()(edge_index=torch.zeros(2, 3, dtype=torch.long)), tmp_path / "data.pt")
    with pytest.raises(DataError, match=r"could run code: .* pass the Data object"):
        load(target, edges=tmp_path / "data.pt")


def test_arrays_from_python(target):
    found = load(target, edges=np.stack((SOURCE, DESTINATION)), features=FEATURES, weights=WEIGHT)
    assert found.edges == expect(weight=WEIGHT)
    assert np.array_equal(found.features, FEATURES)


def test_weights_in_a_file_of_their_own(tmp_path, target):
    np.save(tmp_path / "e.npy", np.stack((SOURCE, DESTINATION)))
    np.savetxt(tmp_path / "e.csv", np.stack((SOURCE, DESTINATION), 1), "%d")
    np.save(tmp_path / "w.npy", WEIGHT.astype(np.float64))
    (tmp_path / "w.txt").write_text("\n".join(repr(w) for w in WEIGHT.tolist()))
    for at, (edges, weights) in enumerate(
        [("e.npy", "w.npy"), ("e.csv", "w.npy"), ("e.npy", "w.txt")]
    ):
        found = load(
            target, edges=tmp_path / edges, weights=tmp_path / weights, vertices=V, force=at > 0
        )
        assert found.edges == expect(weight=WEIGHT)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "i8"])
def test_feature_npy(tmp_path, target, order, dtype):
    rows = np.asarray((FEATURES * 10).astype(dtype), order=order)
    np.save(tmp_path / "x.npy", rows)
    found = load(target, edges=np.stack((SOURCE, DESTINATION)), features=tmp_path / "x.npy")
    assert np.array_equal(found.features, rows.astype("f2" if dtype == "f2" else "f4"))


def test_feature_files_of_every_kind(tmp_path, target):
    np.savez(tmp_path / "x.npz", other=WEIGHT, emb=FEATURES)
    pq.write_table(
        pa.table({"id": np.arange(V), "x": pa.FixedSizeListArray.from_arrays(FEATURES.ravel(), F)}),
        tmp_path / "fixed.parquet",
    )
    pq.write_table(pa.table({"x": FEATURES.tolist()}), tmp_path / "list.parquet")
    pq.write_table(
        pa.table({"id": np.arange(V), **{f"x{i}": FEATURES[:, i] for i in range(F)}}),
        tmp_path / "wide.parquet", row_group_size=7,
    )  # fmt: skip
    np.savetxt(tmp_path / "x.csv", FEATURES, "%.9g", delimiter=",")
    FEATURES.tofile(tmp_path / "x.bin")
    FEATURES.tofile(tmp_path / "raw.npy")
    torch.save(torch.from_numpy(FEATURES), tmp_path / "x.pt")
    raw = {"feature_shape": f"{V},{F}", "feature_dtype": "float32"}
    cases = [
        ("x.npz", {"feature_key": "emb"}), ("fixed.parquet", {}), ("list.parquet", {}),
        ("wide.parquet", {}), ("x.csv", {}), ("x.bin", raw), ("raw.npy", raw), ("x.pt", {}),
    ]  # fmt: skip
    for at, (name, options) in enumerate(cases):
        found = load(
            target, edges=np.stack((SOURCE, DESTINATION)), features=tmp_path / name,
            force=at > 0, **options,
        )  # fmt: skip
        assert np.array_equal(found.features, FEATURES), name


def test_raw_features_say_what_to_pass(tmp_path, target):
    FEATURES.tofile(tmp_path / "x.npy")
    with pytest.raises(
        UsageError,
        match=r"does not begin with \\x93NUMPY.* would fit for 60 vertices: "
        r"--feature-shape 60,5 --feature-dtype float32 or --feature-shape 60,10",
    ):
        load(target, edges=np.stack((SOURCE, DESTINATION)), features=tmp_path / "x.npy", vertices=V)


def test_facebook_pages_from_both_files_give_the_same_tiles(tmp_path, target):
    folder = Path(__file__).parents[2].parent / "shared/data/facebook_pages"
    if not folder.is_dir():
        pytest.skip(f"no {folder}: the data set is not part of the repository")
    ingest(target, edges=folder / "edge_index.npy", features=folder / "features.npy")
    other = tmp_path / "csv.vol"
    ingest(other, edges=folder / "edges.csv", features=folder / "features.npy", undirected=True)
    with (
        Volume.open(FileBlocks(target, writable=False)) as a,
        Volume.open(FileBlocks(other, writable=False)) as b,
    ):
        for name in a.catalog.objects:
            if name != "ranks":  # those follow the order of the input
                assert a.page_table(name).tolist() == b.page_table(name).tolist(), name
        assert a.catalog.graph.edges == 341_646
