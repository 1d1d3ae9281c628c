import errno
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyades.common.errors import UsageError
from hyades.deploy.bench import graphs
from hyades.deploy.bench.graphs import (
    GraphSpec,
    make_csc,
    make_features,
    named_graph,
    write_graph,
)

SMALL = GraphSpec(5000, 12, 6)


def edge_keys(indptr: np.ndarray, indices: np.ndarray, vertices: int) -> np.ndarray:
    destinations = np.repeat(np.arange(vertices, dtype=np.int64), np.diff(indptr))
    return np.sort(destinations * vertices + indices)


@given(
    vertices=st.integers(1, 300),
    degree=st.integers(0, 9),
    seed=st.integers(0, 2**32),
    shuffled=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_spec_gives_a_valid_csc(
    vertices: int, degree: int, seed: int, shuffled: bool
) -> None:
    indptr, indices = make_csc(GraphSpec(vertices, degree, 1, seed, shuffled))
    assert indptr.dtype == np.int64
    assert indices.dtype == np.int32
    assert indptr[0] == 0
    assert indptr[-1] == indices.size == vertices * degree
    assert (np.diff(indptr) >= 0).all()
    if indices.size:
        assert indices.min() >= 0
        assert indices.max() < vertices
    for v in range(vertices):
        assert (np.diff(indices[indptr[v] : indptr[v + 1]]) >= 0).all()


def test_degrees_are_skewed_and_some_vertices_have_no_in_edges() -> None:
    indptr, indices = make_csc(SMALL)
    degrees = np.diff(indptr)
    assert degrees.max() > 20 * SMALL.degree
    assert 0 < (degrees == 0).mean() < 0.03
    assert np.bincount(indices).max() > 20 * SMALL.degree


def test_locality_is_there_until_the_ids_are_shuffled() -> None:
    def local(spec: GraphSpec) -> float:
        indptr, indices = make_csc(spec)
        gap = np.abs(np.repeat(np.arange(spec.vertices), np.diff(indptr)) - indices)
        gap = np.minimum(gap, spec.vertices - gap)
        return float((gap <= spec.vertices / 32).mean())

    assert 0.55 < local(SMALL) < 0.7
    assert local(GraphSpec(5000, 12, 6, shuffled=True)) < 0.15


def test_shuffling_renames_vertices_and_changes_nothing_else() -> None:
    spec = GraphSpec(700, 5, 3, seed=3)
    shuffled = GraphSpec(700, 5, 3, seed=3, shuffled=True)
    plain_rows, rows = make_features(spec), make_features(shuffled)
    # Feature rows are unique, so they tell which vertex became which.
    place = {row.tobytes(): new for new, row in enumerate(rows)}
    renamed = np.array([place[row.tobytes()] for row in plain_rows])
    assert not np.array_equal(renamed, np.arange(700))
    indptr, indices = make_csc(spec)
    destinations = renamed[np.repeat(np.arange(700), np.diff(indptr))]
    expected = np.sort(destinations * np.int64(700) + renamed[indices])
    assert np.array_equal(edge_keys(*make_csc(shuffled), 700), expected)


def test_features_have_zero_mean_and_unit_variance() -> None:
    rows = make_features(GraphSpec(4000, 1, 16))
    assert rows.dtype == np.float32
    assert np.isfinite(rows).all()
    assert np.abs(rows.mean(axis=0)).max() < 0.1
    assert np.abs(rows.std(axis=0) - 1).max() < 0.05
    assert np.abs(np.corrcoef(rows.T) - np.eye(16)).max() < 0.1


def test_the_seed_decides() -> None:
    one, two = GraphSpec(900, 4, 2, seed=1), GraphSpec(900, 4, 2, seed=2)
    assert np.array_equal(make_csc(one)[1], make_csc(one)[1])
    assert not np.array_equal(make_csc(one)[1], make_csc(two)[1])
    assert not np.array_equal(make_features(one), make_features(two))


@pytest.mark.parametrize("shuffled", [False, True])
def test_files_hold_what_the_arrays_say_whatever_the_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shuffled: bool
) -> None:
    spec = GraphSpec(2000, 6, 5, shuffled=shuffled)
    indptr, indices = make_csc(spec)
    features = make_features(spec)
    monkeypatch.setattr(graphs, "_BLOCK_EDGES", 97)
    monkeypatch.setattr(graphs, "_BLOCK_FEATURE_BYTES", 777)
    files = write_graph(spec, tmp_path / "g")
    assert np.array_equal(np.load(files.indptr), indptr)
    assert np.array_equal(np.load(files.indices), indices)
    assert np.array_equal(np.load(files.features), features)
    assert np.load(files.features, mmap_mode="r").flags.c_contiguous


def test_a_stored_graph_is_kept_for_its_spec_only(tmp_path: Path) -> None:
    files = write_graph(GraphSpec(100, 3, 2), tmp_path)
    stamp = files.features.stat().st_mtime_ns
    write_graph(GraphSpec(100, 3, 2), tmp_path)
    assert files.features.stat().st_mtime_ns == stamp
    write_graph(GraphSpec(100, 3, 4), tmp_path)
    assert np.load(files.features).shape == (100, 4)


def test_memory_stays_at_blocks_and_vertex_arrays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = GraphSpec(20_000, 40, 64, shuffled=True)
    monkeypatch.setattr(graphs, "_BLOCK_EDGES", 1 << 14)
    monkeypatch.setattr(graphs, "_BLOCK_FEATURE_BYTES", 1 << 17)
    make_csc(GraphSpec(10, 2, 1))  # compile first: the compiler's memory is not the generator's
    make_features(GraphSpec(10, 2, 1))
    tracemalloc.start()
    write_graph(spec, tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 60 * spec.vertices + (1 << 20)
    assert spec.feature_bytes + 4 * spec.edges > 3 * peak


def test_a_full_disk_is_reported_and_leaves_no_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_1_0", full)
    with pytest.raises(UsageError, match="No space left on device"):
        write_graph(GraphSpec(10, 2, 1), tmp_path)
    assert not (tmp_path / "graph.json").exists()


def test_names() -> None:
    assert named_graph("1M16M").edges == 16_000_000
    assert named_graph("4M64M-shuffled").shuffled
    assert named_graph("wide").feature_bytes > 1 << 30
    with pytest.raises(UsageError, match="no graph '2M'"):
        named_graph("2M")


@pytest.mark.parametrize("spec", [(0, 1, 1), (1, -1, 1), (1, 1, 0), (1 << 31, 1, 1)])
def test_impossible_specs_are_refused(spec: tuple[int, int, int]) -> None:
    with pytest.raises(UsageError, match="cannot generate"):
        GraphSpec(*spec)
