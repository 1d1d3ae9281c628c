"""Every malformed input gets one clear line, and leaves nothing behind."""

import gzip
import pickle
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hyades.common.errors import DataError, HyadesError, UsageError
from hyades.deploy.ingest import ingest

GOOD = np.array([[0, 1, 2], [1, 2, 0]])


@pytest.fixture
def refuse(tmp_path):
    """Ingest must raise one line that matches, and leave the output folder empty."""
    folder = tmp_path / "out"
    folder.mkdir()

    def check(kind, match, **options):
        options.setdefault("edges", GOOD)
        with pytest.raises(kind, match=match) as caught:
            ingest(folder / "g.vol", **options)
        assert "\n" not in str(caught.value)
        assert list(folder.iterdir()) == []

    return check


def cut(path, bytes_left):
    path.write_bytes(path.read_bytes()[:bytes_left])
    return path


def save(path, array):
    np.save(path, array)
    return path


def test_missing_directory_and_empty(tmp_path, refuse):
    (tmp_path / "empty.csv").touch()
    (tmp_path / "d").mkdir()
    for option in ("edges", "features"):
        refuse(UsageError, "no.npy: no such file", **{option: tmp_path / "no.npy"})
        refuse(DataError, r"empty.csv is empty \(0 bytes\)", **{option: tmp_path / "empty.csv"})
        refuse(UsageError, "d is a directory, not a file", **{option: tmp_path / "d"})


def test_only_comments(tmp_path, refuse):
    (tmp_path / "e.txt").write_text("# a\n% b\n\n")
    refuse(DataError, "holds no lines but comments", edges=tmp_path / "e.txt")


def test_truncated_npy(tmp_path, refuse):
    path = save(tmp_path / "e.npy", np.zeros((2, 100), int))
    size = path.stat().st_size
    cut(path, size - 1)
    refuse(DataError, rf"truncated: \[2, 100\] int64 need {size:,} bytes, .* {size - 1:,}",
           edges=path)  # fmt: skip
    cut(path, 40)
    refuse(DataError, "e.npy: unreadable .npy header", edges=path)
    features = save(tmp_path / "x.npy", np.zeros((3, 5)))
    cut(features, features.stat().st_size - 8)
    refuse(DataError, r"x.npy: truncated", features=features)


@pytest.mark.parametrize("compressed", [False, True])
def test_truncated_npz(tmp_path, refuse, compressed):
    path = tmp_path / "data.npz"
    rng = np.random.default_rng(0)
    save_as = np.savez_compressed if compressed else np.savez
    save_as(path, edge_index=rng.integers(0, 9, (2, 5000)), num_nodes_list=[9])
    whole = path.read_bytes()
    cut(path, len(whole) // 2)
    refuse(DataError, "no .npz archive, or truncated", edges=path)
    # The directory is whole, the member is not.
    damaged = bytearray(whole)
    damaged[100:3000] = bytes(2900)
    path.write_bytes(damaged)
    with pytest.raises(HyadesError):
        ingest(tmp_path / "out/g.vol", edges=path)


def test_npz_without_edges(tmp_path, refuse):
    np.savez(tmp_path / "a.npz", x=GOOD)
    refuse(UsageError, r"a.npz: holds x: expected edge_index", edges=tmp_path / "a.npz")
    with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
        archive.writestr("x.npy", b"nothing")
    refuse(DataError, r"b.npz\[x\]: unreadable .npy header", features=tmp_path / "b.npz")


def test_npz_features_ask_for_the_key(tmp_path, refuse):
    np.savez(tmp_path / "x.npz", a=GOOD, b=GOOD)
    refuse(UsageError, "--feature-key with one of: a, b", features=tmp_path / "x.npz")
    refuse(UsageError, "no array 'c'; it has: a, b", features=tmp_path / "x.npz", feature_key="c")


def test_truncated_gzip(tmp_path, refuse):
    path = tmp_path / "e.txt.gz"
    rows = "".join(f"{i} {i + 1}\n" for i in range(5000))
    path.write_bytes(gzip.compress(rows.encode()))
    cut(path, path.stat().st_size // 2)
    refuse(DataError, "e.txt.gz: truncated or damaged gzip near byte", edges=path)


def test_truncated_parquet(tmp_path, refuse):
    path = tmp_path / "e.parquet"
    pq.write_table(pa.table({"src": [0], "dst": [1]}), path)
    cut(path, path.stat().st_size - 10)
    refuse(DataError, "no parquet file, or truncated", edges=path)


def test_objects_and_records(tmp_path, refuse):
    np.save(tmp_path / "o.npy", np.array([[1, None]], object), allow_pickle=True)
    for option in ("edges", "features"):
        refuse(DataError, "pickled Python objects", **{option: tmp_path / "o.npy"})
    save(tmp_path / "r.npy", np.zeros(3, [("a", "i4"), ("b", "f4")]))
    refuse(UsageError, "an array of records", edges=tmp_path / "r.npy")


def test_pickles(tmp_path, refuse):
    (tmp_path / "e.pkl").write_bytes(pickle.dumps({"a": 1}, protocol=4))
    (tmp_path / "e.pt").write_bytes(b"\x80\x02rubbish")
    for name in ("e.pkl", "e.pt"):
        for option in ("edges", "features"):
            if option == "edges" or name == "e.pt":
                refuse(DataError, "a pickle of Python objects, which is not read",
                       **{option: tmp_path / name})  # fmt: skip
    torch.save({"a": 1}, tmp_path / "e.pt")
    refuse(UsageError, "a dictionary without edge_index", edges=tmp_path / "e.pt")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("0 1\n1 x\n", "line 2: 'x' is not a number"),
        ("src,dst\n0,1\n\n1,2.5\n", "line 4: '2.5' is not a whole number"),
        ("0,1\n7\n", "line 2 has not as many columns"),
        ("0 1\n7 \n", "line 2 has not as many columns"),
        ("0 1\n1 99999999999999999999\n", "line 2: '99999999999999999999' has more than 18"),
        ("a,b\nc,d\n", "line 2: 'c' is not a number"),
        ("0\n1\n", "one column"),
        ("0,1\n,2\n", "line 2: '' is not a number"),
        ("0 1\n-5 1\n", "1 of 2 edges have an id outside 0 to 1; the first is edge 1: -5 -> 1"),
        ("%%MatrixMarket matrix coordinate\n1 1 1\n", "Matrix Market"),
    ],
)
def test_text(tmp_path, refuse, text, match):
    (tmp_path / "e.txt").write_text(text)
    refuse(HyadesError, match, edges=tmp_path / "e.txt")


def test_binary_as_text(tmp_path, refuse):
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe1\x00\n")
    refuse(DataError, r"line 1 is no text", edges=tmp_path / "e.txt")


def test_float_ids(tmp_path, refuse):
    refuse(DataError, "edge 2 has id 1.5, not a whole number",
           edges=save(tmp_path / "e.npy", np.array([[0, 1, 1.5], [1, 2, 0]])))  # fmt: skip
    refuse(DataError, "edge 1 has id nan", edges=save(tmp_path / "n.npy",
           np.array([[0, np.nan, 1], [1, 2, 0]])))  # fmt: skip


@pytest.mark.parametrize("shape", [(3,), (3, 4), (2, 3, 4), ()])
def test_shapes_that_are_no_edges(tmp_path, refuse, shape):
    refuse(UsageError, r"is no edge list: it must be \[2, E\] or \[E, 2\]",
           edges=save(tmp_path / "e.npy", np.zeros(shape, int)))  # fmt: skip


def test_ids_that_are_no_integers(tmp_path, refuse):
    refuse(UsageError, "ids of dtype <U1 are not integers",
           edges=save(tmp_path / "e.npy", np.array([["a"], ["b"]])))  # fmt: skip
    refuse(UsageError, "ids of dtype bool are not integers",
           edges=save(tmp_path / "e.npy", np.zeros((2, 3), bool)))  # fmt: skip


def test_row_count_mismatch(tmp_path, refuse):
    x = save(tmp_path / "x.npy", np.zeros((3, 2), "f4"))
    refuse(UsageError, r"--vertices has 4 vertices, .*x.npy has 3", features=x, vertices=4)
    refuse(DataError, "outside 0 to 2", features=x, edges=np.array([[0, 3], [1, 1]]))


def test_features_that_are_no_matrix(tmp_path, refuse):
    refuse(UsageError, r"\[2, 2, 2\] float32 is no matrix",
           features=save(tmp_path / "x.npy", np.zeros((2, 2, 2), "f4")))  # fmt: skip
    refuse(UsageError, "dtype complex128 are no real numbers",
           features=save(tmp_path / "c.npy", np.zeros((3, 2), complex)))  # fmt: skip
    refuse(UsageError, "3 rows of 0 columns: empty",
           features=save(tmp_path / "w.npy", np.zeros((3, 0), "f4")))  # fmt: skip


def test_nonfinite_features_of_a_file(tmp_path, refuse):
    x = np.zeros((3, 2), "f2")
    x[1, 1] = np.nan
    refuse(DataError, r"x.npy: 1 of 3 rows hold NaN or inf .*row 1 column 1 = nan.*--allow-non",
           features=save(tmp_path / "x.npy", x))  # fmt: skip


def test_raw_features(tmp_path, refuse):
    raw = tmp_path / "x.bin"
    np.zeros(30, "f4").tofile(raw)
    refuse(UsageError, r"no .npy header .*pass --feature-shape", features=raw)
    refuse(UsageError, "fit no whole number of columns for 7 vertices: truncated", features=raw,
           vertices=7)  # fmt: skip
    refuse(DataError, r"truncated: \[3, 11\] float32 need 132 bytes, the file has 120",
           features=raw, feature_shape="3,11", feature_dtype="f4")  # fmt: skip
    refuse(DataError, r"\[3, 9\] float32 take 108 bytes, the file has 120", features=raw,
           feature_shape=(3, 9), feature_dtype="f4")  # fmt: skip
    refuse(UsageError, "write ROWS,WIDTH", features=raw, feature_shape="3", feature_dtype="f4")
    refuse(UsageError, "unknown dtype", features=raw, feature_shape="3,10", feature_dtype="f5x")


def test_ragged_text_features(tmp_path, refuse):
    (tmp_path / "x.csv").write_text("1,2\n3\n")
    refuse(DataError, "line 2 has not as many columns", features=tmp_path / "x.csv")
    (tmp_path / "x.csv").write_text("1,2\n3,4,5\n")
    refuse(DataError, "line 2 has not as many columns", features=tmp_path / "x.csv")


def test_ragged_parquet_features(tmp_path, refuse):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"x": [[1.0, 2.0], [1.0], [0.0, 1.0]]}), path)
    refuse(DataError, "row 1 .* not 2 numbers", features=path)
    pq.write_table(pa.table({"a": [[1.0]] * 3, "b": [[1.0]] * 3}), path)
    refuse(UsageError, "--feature-key NAME.*it has a, b", features=path)
    refuse(UsageError, "no column 'c'", features=path, feature_key="c")


def test_weights(tmp_path, refuse):
    refuse(UsageError, r"weights: \[2\] float64: weights do not match the 3 edges",
           weights=np.ones(2))  # fmt: skip
    refuse(DataError, "edge 1 has weight inf", weights=np.array([0, np.inf, 1]))
    refuse(UsageError, "w.npy: no such file", weights=tmp_path / "w.npy")
    (tmp_path / "e.csv").write_text("0,1,5\n")
    refuse(UsageError, "no column 'w': it has 3 columns", edges=tmp_path / "e.csv", weights="w")


def csc_files(folder, indptr, indices):
    return save(folder / "indptr.npy", np.array(indptr)), save(folder / "i.npy", np.array(indices))


@pytest.mark.parametrize(
    ("indptr", "match"),
    [
        ([0, 1, 2], "goes from 0 to 2, but .* has 3 values"),
        ([1, 2, 3], "goes from 1 to 3"),
        ([0, 3, 1, 3], "decreases after position 1"),
        ([0], "indptr has V"),
        ([0.0, 3.0], "must be integers"),
    ],
)
def test_bad_indptr(tmp_path, refuse, indptr, match):
    refuse(HyadesError, match, edges=csc_files(tmp_path, indptr, [0, 0, 0]))


def test_raw_csc_without_conf(tmp_path, refuse):
    np.arange(4).tofile(tmp_path / "indptr.dat")
    np.arange(3).tofile(tmp_path / "indices.dat")
    refuse(UsageError, "no conf.json beside it that gives indptr_shape", edges=tmp_path)
    (tmp_path / "conf.json").write_text("{")
    refuse(DataError, "conf.json: unreadable", edges=tmp_path)
    (tmp_path / "conf.json").write_text(
        '{"indptr_shape": [4], "indptr_dtype": "int64", "indices_shape": [9],'
        '"indices_dtype": "int64"}'
    )
    refuse(DataError, r"indices.dat: truncated: \[9\] int64", edges=tmp_path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: [", "no YAML"),
        ("a: 1", "it has no graph"),
        ("graph: {edges: 5}", "edges is no list"),
        ("graph: {edges: [{format: parquet, path: x}]}", "format 'parquet'"),
        ("graph: {edges: [{format: csv, path: no.csv}]}", "no.csv: no such file"),
    ],
)
def test_bad_graphbolt(tmp_path, refuse, text, match):
    (tmp_path / "metadata.yaml").write_text(text)
    refuse(HyadesError, match, edges=tmp_path)


def test_matrix_that_is_not_square(tmp_path, refuse):
    import scipy.sparse as sp

    sp.save_npz(tmp_path / "a.npz", sp.csr_array((3, 4)))
    refuse(UsageError, "3 x 4 matrix is no graph", edges=tmp_path / "a.npz")
    sp.save_npz(tmp_path / "a.npz", sp.dia_array((3, 3)))
    refuse(UsageError, "a dia matrix: convert it", edges=tmp_path / "a.npz")
