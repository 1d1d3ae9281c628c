import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyades.common.errors import BackendMissing, UsageError
from hyades.deploy.bench import peers_venv, systems
from hyades.deploy.bench.graphs import GraphSpec, make_csc
from hyades.deploy.bench.peer_worker import gcn_edges, without_loops
from hyades.deploy.bench.runner import run_case
from hyades.deploy.bench.systems import Case, Peer, Workplace
from hyades.deploy.bench.weights import ModelSpec, make_weights, pyg_state, write_weights

CASES = [Case("toy", ModelSpec(kind, (24, 16, 16)), batch=512) for kind in ("sage", "gcn")]
PEERS_VENV = Path(__file__).resolve().parents[2] / ".venv-peers"


def dense(indptr: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Edge counts [destination, source]."""
    vertices = indptr.size - 1
    counts = np.zeros((vertices, vertices))
    np.add.at(counts, (np.repeat(np.arange(vertices), np.diff(indptr)), indices), 1)
    return counts


def expected(case: Case, work: Workplace) -> np.ndarray:
    """The model's definition with dense matrices in float64, at the compared rows."""
    files = work.graph(case.graph)
    adjacency = dense(np.load(files.indptr), np.load(files.indices))
    if case.model.kind == "gcn":
        np.fill_diagonal(adjacency, 1)
        factor = 1 / np.sqrt(adjacency.sum(axis=1))
        adjacency = factor[:, None] * adjacency * factor
    else:
        adjacency /= np.maximum(adjacency.sum(axis=1, keepdims=True), 1)
    weights, x = make_weights(case.model), np.load(files.features).astype(np.float64)
    for layer in range(case.model.layers):
        y = adjacency @ x @ weights[f"{layer}.neighbour"].T + weights[f"{layer}.bias"]
        if case.model.kind == "sage":
            y += x @ weights[f"{layer}.root"].T
        x = y if layer + 1 == case.model.layers else np.maximum(y, 0)
    return x[work.rows(case.graph)]


@given(st.integers(1, 40), st.integers(0, 6), st.integers(0, 50))
@settings(max_examples=80, deadline=None)
def test_gcn_edges_have_one_loop_each_and_symmetric_weights(
    vertices: int, degree: int, seed: int
) -> None:
    indptr, indices = make_csc(GraphSpec(vertices, degree, 1, seed))
    indices = indices.astype(np.int64)
    adjacency = dense(indptr, indices)
    bare = dense(*without_loops(indptr, indices))
    np.fill_diagonal(adjacency, 0)
    assert np.array_equal(bare, adjacency)
    np.fill_diagonal(adjacency, 1)
    before = indptr.copy()
    with_loops, sources, weights = gcn_edges(indptr, indices)
    assert np.array_equal(indptr, before)
    assert np.array_equal(dense(with_loops, sources), adjacency)
    degrees = adjacency.sum(axis=1)
    destinations = np.repeat(np.arange(vertices), np.diff(with_loops))
    want = 1 / np.sqrt(degrees[destinations] * degrees[sources])
    np.testing.assert_allclose(weights, want, rtol=1e-6)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model.kind)
def test_pyg_full_computes_the_model(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systems, "peers_ready", lambda _: None)
    work = Workplace(tmp_path)
    # The tests' own environment has PyG and can stand in for that of the peers.
    (row,) = run_case(case, [Peer("pyg-full-csr", Path(sys.prefix))], work, repeat=1, cold=False)
    assert row.ok, row.median.measured.detail
    assert row.sample is not None
    np.testing.assert_allclose(row.sample, expected(case, work), rtol=0, atol=2e-5)
    detail = row.median.detail
    assert detail is not None
    assert 0 < detail.seconds <= row.median.measured.wall_s
    assert list(detail.notes) == ["torch.sparse CSR"]
    assert set(detail.phases) == {"topology", "features", "forward"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.model.kind)
def test_all_peers_agree_and_the_one_that_is_wrong_shows(case: Case, tmp_path: Path) -> None:
    reason = peers_venv.peers_ready(PEERS_VENV)
    if reason is not None:
        pytest.skip(reason)
    names = ["pyg-full", "dgl-full", "dgl-layerwise", "pyg-inference"]
    work = Workplace(tmp_path)
    found = [Peer(name, PEERS_VENV) for name in names]
    rows = {row.system: row for row in run_case(case, found, work, repeat=1, cold=False)}
    for name in names[:3]:
        assert rows[name].ok, rows[name].median.measured.detail
        np.testing.assert_allclose(rows[name].sample, expected(case, work), rtol=0, atol=2e-5)
        assert (rows[name].difference or 0) < 1e-5
    last = rows["pyg-inference"]
    if "torch_sparse" in peers_venv.missing_parts(PEERS_VENV):
        assert not last.ok
    elif case.model.kind == "gcn":
        assert (last.difference or 0) > 0.1
        assert "wrong for GCN" in " ".join(last.median.detail.notes if last.median.detail else [])
    else:
        assert (last.difference or 0) < 1e-5


def test_without_an_environment_the_row_says_how_to_make_it(tmp_path: Path) -> None:
    (row,) = run_case(CASES[0], [Peer("dgl-full", tmp_path / "no")], Workplace(tmp_path), repeat=3)
    assert len(row.runs) == 1
    assert row.median.measured.outcome == "skipped"
    assert "run `make bench`" in row.median.measured.detail


def test_pyg_inference_is_not_run_where_it_would_exhaust_the_machine(tmp_path: Path) -> None:
    case = Case("4M64M", ModelSpec("sage", (128, 128, 128)))
    assert "would not fit" in (Peer("pyg-inference", tmp_path).obstacle(case) or "")


def test_weights_are_those_of_pyg_and_the_same_for_a_seed(tmp_path: Path) -> None:
    pyg = pytest.importorskip("torch_geometric.nn.models", reason="torch_geometric is absent")
    for kind, zoo in (("sage", pyg.GraphSAGE), ("gcn", pyg.GCN)):
        spec = ModelSpec(kind, (5, 7, 7, 3))
        state = pyg_state(spec)
        wanted = {name: tuple(value.shape) for name, value in zoo(5, 7, 3, 3).state_dict().items()}
        assert {name: value.shape for name, value in state.items()} == wanted
        files = write_weights(spec, tmp_path / kind)
        stored = np.load(files.npz)
        again = make_weights(spec)
        assert set(stored) == set(again)
        assert all(np.array_equal(stored[name], again[name]) for name in again)
        assert files.model.exists()
    with pytest.raises(UsageError, match="equal hidden widths"):
        ModelSpec("gcn", (5, 7, 6, 3))


class Installs:
    """Stands in for pip: records commands and fails on those that contain `broken`."""

    def __init__(self, broken: str = "nothing") -> None:
        self.commands: list[list[str]] = []
        self.broken = broken

    def __call__(self, command: list[str]) -> None:
        self.commands.append(command)
        if "venv" in command:
            Path(command[-1]).mkdir()
        if any(word.startswith(self.broken) for word in command):
            raise BackendMissing(f"no {self.broken}")


def test_the_environment_is_made_once_for_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv, installs = tmp_path / "peers", Installs()
    monkeypatch.setattr(peers_venv, "_run", installs)
    assert "no peers' environment" in (peers_venv.peers_ready(venv) or "")
    peers_venv.make_peers_venv(venv, lambda _: None)
    assert len(installs.commands) == 4
    assert installs.commands[2][-2:] == ["--no-deps", "dgl==1.1.3"]
    assert peers_venv.peers_ready(venv) is None
    assert peers_venv.missing_parts(venv) == {}
    peers_venv.make_peers_venv(venv, lambda _: None)
    assert len(installs.commands) == 4
    monkeypatch.setattr(peers_venv, "_BASE", ("torch==99",))
    assert "other versions" in (peers_venv.peers_ready(venv) or "")


def test_torch_sparse_may_be_missing_and_torch_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(peers_venv, "_run", Installs("torch_sparse"))
    peers_venv.make_peers_venv(tmp_path / "one", said.append)
    assert peers_venv.missing_parts(tmp_path / "one") == {"torch_sparse": "no torch_sparse"}
    assert said[-1] == "without torch_sparse: no torch_sparse"
    monkeypatch.setattr(peers_venv, "_run", Installs("torch=="))
    with pytest.raises(BackendMissing, match="no torch=="):
        peers_venv.make_peers_venv(tmp_path / "two", said.append)
    assert peers_venv.peers_ready(tmp_path / "two") is not None


def test_a_failed_command_is_reported_with_its_last_line() -> None:
    with pytest.raises(BackendMissing, match="failed: because"):
        peers_venv._run([sys.executable, "-c", "import sys; sys.exit('because')"])
