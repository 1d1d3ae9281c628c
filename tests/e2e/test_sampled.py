"""Sampled refreshes: which edges they use, and that the result is PyG's over exactly those."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chi2
from tests.reference.engine import error, make_volume, rows_of, same_bits
from tests.reference.gnn import messy_graph, randomised
from tests.reference.sampled import edge_ranks, kept_edges, sampled_batch
from tests.reference.zoo import make
from torch import nn

from hyades.common.errors import UsageError
from hyades.gpu_side.models import load_model

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")

BOUND = 2e-6
PLANS = (None, "resident", "passes:2", "passes:5", "log:1", "log:2")
VERTICES, _EDGES = messy_graph(77, 700)
EDGES = _EDGES.numpy()
WEIGHTS = np.random.default_rng(4).random(EDGES.shape[1], np.float32) + np.float32(0.05)
Volumes = Callable[..., Path]


def features(width: int) -> NDArray[np.float32]:
    return np.random.default_rng(width).standard_normal((VERTICES, width)).astype(np.float32)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Volumes:
    """Return a function that gives a volume of the messy graph, by its options."""
    folder = tmp_path_factory.mktemp("sampled")

    def get(x: Any = None, *, weighted: bool = False, **options: Any) -> Path:
        x = features(5) if x is None else x
        name = f"{np.asarray(x).shape[1]}-{weighted}-{sorted(options.items())}.vol"
        path = folder / name.replace("/", "")
        if not path.exists():
            make_volume(path, EDGES, x, WEIGHTS if weighted else None, **options)
        return path

    return get


def summing(width: int) -> nn.Module:
    """Return a layer whose output is the sum of the sampled in-neighbours' features."""
    module: nn.Module = pyg.SAGEConv(width, width, aggr="sum", root_weight=False, bias=False)
    with torch.no_grad():
        module.get_parameter("lin_l.weight").copy_(torch.eye(width))
    return module.eval()


ONE_HOT = np.eye(VERTICES, dtype=np.float32)


def sample(path: Path, fanout: int, seed: int = 7, **options: Any) -> NDArray[np.int64]:
    """Return how often each vertex takes each source: [V, V], as the engine sampled."""
    rows = rows_of(path, summing(VERTICES), fanout=[fanout], seed=seed, **options)
    counts = rows.astype(np.int64)
    assert np.array_equal(counts, rows)
    return counts


def adjacency(edges: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.zeros((VERTICES, VERTICES), np.int64)
    np.add.at(counts, (edges[1], edges[0]), 1)
    return counts


@pytest.mark.parametrize("fanout", [1, 3, 10, 1000])
def test_the_sample_is_the_rule(volume: Volumes, fanout: int) -> None:
    expected = adjacency(EDGES[:, kept_edges(EDGES, fanout, 7, 0)])
    assert np.array_equal(sample(volume(ONE_HOT), fanout), expected)


@pytest.mark.parametrize("fanout", [1, 3, 10])
def test_each_vertex_keeps_as_many_as_it_can(volume: Volumes, fanout: int) -> None:
    whole, kept = adjacency(EDGES), sample(volume(ONE_HOT), fanout)
    assert np.array_equal(kept.sum(axis=1), np.minimum(whole.sum(axis=1), fanout))
    assert np.all(kept <= whole), "an edge is taken at most once"


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("options", [{"threads": 1}, {"threads": 3}, {"memory": "40MiB"}], ids=str)
def test_the_sample_does_not_depend_on_how_it_runs(
    volume: Volumes, plan: str | None, options: dict[str, Any]
) -> None:
    expected = sample(volume(ONE_HOT), 3)
    assert np.array_equal(sample(volume(ONE_HOT), 3, plan=plan, **options), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"reorder": "rcm"}, {"reorder": "hyades"}, {"range_rows": 64}, {"range_rows": 2},
        {"range_rows": 8, "reorder": "rcm"},
    ],
    ids=str,
)  # fmt: skip
def test_the_sample_does_not_depend_on_the_volume(volume: Volumes, options: dict[str, Any]) -> None:
    expected = sample(volume(ONE_HOT), 3)
    for plan in ("resident", "log:1"):
        assert np.array_equal(sample(volume(ONE_HOT, **options), 3, plan=plan), expected)


def test_seeds(volume: Volumes) -> None:
    path = volume(ONE_HOT)
    samples = [sample(path, 3, seed) for seed in (0, 1, 2**63 - 1, 0)]
    assert np.array_equal(samples[0], samples[3])
    assert not np.array_equal(samples[0], samples[1])
    assert not np.array_equal(samples[1], samples[2])


def test_layers_choose_apart() -> None:
    first, second = (kept_edges(EDGES, 3, 7, layer) for layer in (0, 1))
    assert not np.array_equal(first, second)


def test_undirected_graphs_rank_the_reversed_edges_last(volume: Volumes) -> None:
    body = EDGES[:, EDGES[0] != EDGES[1]]
    loops = EDGES[:, EDGES[0] == EDGES[1]]
    both = np.concatenate([body, body[::-1], loops], axis=1)
    expected = adjacency(both[:, kept_edges(both, 3, 7, 0)])
    assert np.array_equal(sample(volume(ONE_HOT, undirected=True), 3), expected)


MODELS: list[tuple[str, dict[str, Any]]] = [
    ("GCN", {}), ("GCN", {"normalize": False}), ("GCN", {"add_self_loops": False}),
    ("GCN", {"improved": True}), ("GraphSAGE", {}), ("GraphSAGE", {"aggr": "sum"}),
    ("GraphSAGE", {"aggr": "max", "project": True}), ("GraphSAGE", {"root_weight": False}),
    ("GIN", {}), ("GIN", {"aggr": "mean"}), ("GIN", {"aggr": "max"}),
    ("GAT", {"heads": 4}), ("GAT", {"add_self_loops": False, "residual": True}),
    ("GraphSAGE", {"norm": "layer_norm", "jk": "cat"}),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "kwargs"), MODELS, ids=str)
@pytest.mark.parametrize("fanout", [(3, 5), (1, -1), (-1, 4)])
def test_equal_to_pyg_on_the_sampled_graph(
    volume: Volumes, cls: str, kwargs: dict[str, Any], fanout: tuple[int, ...]
) -> None:
    module = randomised(make(cls, kwargs))
    expected = sampled_batch(module, features(5), EDGES, None, fanout, 11)
    number = MODELS.index((cls, kwargs)) + fanout[0]
    for step in (0, 2):
        plan = PLANS[(number + step) % len(PLANS)]
        rows = rows_of(volume(), module, fanout=fanout, seed=11, plan=plan)
        assert error(rows, expected) <= BOUND, plan


@pytest.mark.parametrize("kwargs", [kwargs for cls, kwargs in MODELS if cls == "GCN"], ids=str)
@pytest.mark.parametrize("reorder", ["none", "rcm"])
def test_gcn_with_edge_weights(volume: Volumes, kwargs: dict[str, Any], reorder: str) -> None:
    module = randomised(make("GCN", kwargs))
    for fanout in ((2, 3), (4, -1)):
        expected = sampled_batch(module, features(5), EDGES, WEIGHTS, fanout, 5)
        for plan in ("resident", "passes:3", "log:1"):
            path = volume(weighted=True, reorder=reorder)
            rows = rows_of(path, module, fanout=fanout, seed=5, plan=plan)
            assert error(rows, expected) <= BOUND


@pytest.mark.parametrize(("cls", "kwargs"), MODELS[::2], ids=str)
def test_a_fanout_beyond_every_degree_changes_nothing(
    volume: Volumes, cls: str, kwargs: dict[str, Any]
) -> None:
    module = randomised(make(cls, kwargs))
    for plan in ("resident", "log:1"):
        whole = rows_of(volume(), module, plan=plan)
        for fanout in ((-1, -1), (500, -1), (500, 500)):
            assert same_bits(rows_of(volume(), module, plan=plan, fanout=fanout), whole)


@pytest.mark.parametrize(("cls", "kwargs"), MODELS[1::3], ids=str)
@pytest.mark.parametrize("plan", ["resident", "passes:3", "log:1"])
def test_same_bits_for_any_number_of_threads(
    volume: Volumes, cls: str, kwargs: dict[str, Any], plan: str
) -> None:
    module = randomised(make(cls, kwargs))
    one, *others = (
        rows_of(volume(), module, plan=plan, fanout=[3, 4], threads=n) for n in (1, 2, 5)
    )
    assert all(same_bits(one, other) for other in others)


def test_every_edge_is_equally_likely(tmp_path: Path) -> None:
    """20 in-edges in mixed order at each of 4,000 vertices, 5 kept: chi-square for a fixed seed."""
    sources, vertices, fanout = 20, 4020, 5
    rng = np.random.default_rng(1)
    in_lists = rng.permuted(np.tile(np.arange(sources), (vertices - sources, 1)), axis=1)
    edges = np.stack([in_lists.ravel(), np.repeat(np.arange(sources, vertices), sources)])
    x = np.zeros((vertices, sources), np.float32)
    x[:sources] = np.eye(sources)
    path = make_volume(tmp_path / "g.vol", edges, x, range_rows=512)
    taken = rows_of(path, summing(sources), fanout=[fanout], seed=3)[sources:]
    assert np.all(taken.sum(axis=1) == fanout)
    ranks = edge_ranks(edges)[0].reshape(-1, sources)
    by_rank = np.take_along_axis(taken, in_lists, axis=1)
    assert np.array_equal(ranks, np.tile(np.arange(sources), (len(taken), 1)))
    for counts in (taken.sum(axis=0), by_rank.sum(axis=0)):
        assert 0.001 < chi2.sf(spread(counts, len(taken), fanout), sources - 1) < 0.999
    pairs = (taken.T @ taken)[np.triu_indices(sources, 1)]
    share = fanout * (fanout - 1) / (sources * (sources - 1))
    deviation = (pairs - len(taken) * share) / np.sqrt(len(taken) * share * (1 - share))
    assert np.abs(deviation).max() < 4.5, "190 pairs of edges are equally likely, too"


def spread(counts: NDArray[Any], trials: int, fanout: int) -> float:
    """Return a statistic that is chi-square distributed where each of n edges is equally likely."""
    edges = len(counts)
    share = fanout / edges
    variance = trials * share * (1 - share) * edges / (edges - 1)  # they add up to a constant
    return float(((counts - trials * share) ** 2).sum() / variance)


def test_a_hub_keeps_its_share(tmp_path: Path) -> None:
    """Ranks beyond 16 bits, in several pieces of one tile."""
    rng = np.random.default_rng(2)
    hub = np.stack([rng.integers(1, 4000, 90_000), np.zeros(90_000, np.int64)])
    edges = np.concatenate([hub, rng.integers(0, 5000, (2, 9000))], axis=1)
    path = make_volume(tmp_path / "g.vol", edges, np.ones((5000, 1), np.float32), range_rows=4096)
    whole = np.bincount(edges[1], minlength=5000)
    for fanout in (7, 70_000):
        for plan in ("resident", "log:1"):
            rows = rows_of(path, summing(1), fanout=[fanout], plan=plan)
            assert np.array_equal(rows[:, 0], np.minimum(whole, fanout))


def test_dgl_norms_that_need_the_whole_sampled_graph_are_refused(
    volume: Volumes, tmp_path: Path
) -> None:
    tensors = {"weight": torch.randn(5, 4), "bias": torch.randn(4)}
    torch.save(tensors, tmp_path / "w.pt")
    x = features(5).astype(np.float64)
    for norm in ("both", "left", "right", "none"):
        entry: dict[str, Any] = {"class": "GraphConv", "framework": "dgl", "weights": "w.pt"}
        entry |= {"kwargs": {"norm": norm}, "layers": [""]}
        (tmp_path / "m.json").write_text(json.dumps(entry))
        model = load_model(tmp_path / "m.json")
        if norm in ("both", "left"):
            before = volume().read_bytes()
            with pytest.raises(UsageError, match=f"norm '{norm}'"):
                rows_of(volume(), model, fanout=[3])
            assert volume().read_bytes() == before
            continue
        matrix = adjacency(EDGES[:, kept_edges(EDGES, 3, 0, 0)]).astype(np.float64)
        if norm == "right":
            matrix /= np.maximum(matrix.sum(axis=1), 1)[:, None]
        expected = matrix @ x @ tensors["weight"].double().numpy()
        expected += tensors["bias"].double().numpy()
        assert error(rows_of(volume(), model, fanout=[3]), expected) <= BOUND


def test_wrong_fanouts_are_refused(volume: Volumes) -> None:
    module = make("GCN", {})
    for fanout, text in (([3], "1 numbers"), ([3, 0], "positive"), ([3, -2], "positive")):
        with pytest.raises(UsageError, match=text):
            rows_of(volume(), module, fanout=fanout)
    with pytest.raises(UsageError, match="--seed"):
        rows_of(volume(), module, fanout=[3, 3], seed=-1)
