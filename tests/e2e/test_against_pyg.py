"""Every variant of the four models, refreshed from a volume, against PyG over the whole graph."""

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.reference.engine import error, full_batch, make_volume, refresh, rows_of, same_bits
from tests.reference.gnn import messy_graph, randomised
from tests.reference.zoo import CASES, MLPS, make
from torch import nn

import hyades
from hyades.common.errors import UsageError
from hyades.gpu_side import price as planner
from hyades.gpu_side.program import Stage
from hyades.gpu_side.shapes import product_orders

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")

VERTICES, EDGES = messy_graph(77, 500)  # five lanes of 16, the last one short; some isolated
BOUND = 2e-6  # relative Frobenius error of float32 sums against float64
PLANS = (None, "resident", "passes:2", "passes:5", "log:1", "log:2", "log:5")
Features = NDArray[np.float32]
Volumes = Callable[..., tuple[Path, Features]]


def features(width: int, vertices: int = VERTICES) -> Features:
    return np.random.default_rng(width).standard_normal((vertices, width)).astype(np.float32)


def signs(kind: str) -> NDArray[np.float32]:
    """Return a weight for each edge."""
    rng = np.random.default_rng(9)
    drawn = rng.standard_normal(EDGES.shape[1]).astype(np.float32)
    if kind == "positive":
        return np.abs(drawn)
    drawn[::7] = 0.0
    return drawn * (0.1 if kind == "slightly negative" else 1.0)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Volumes:
    """Return a function that gives the volume of the messy graph and its features."""
    folder = tmp_path_factory.mktemp("messy")

    def get(width: int = 5, dtype: str = "float32", weights: str = "") -> tuple[Path, Features]:
        path = folder / f"{width}-{dtype}-{weights}.vol"
        x = features(width).astype(dtype)
        if not path.exists():
            make_volume(path, EDGES, x, signs(weights) if weights else None)
        return path, x

    return get


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Return a function that forces an order of the products where a stage has both."""

    def force(project_first: bool) -> None:
        def only(stage: Stage) -> tuple[bool, ...]:
            found = product_orders(stage)
            return (project_first,) if len(found) > 1 else found

        monkeypatch.setattr(planner, "product_orders", only)

    return force


def check(
    volume: tuple[Path, Features], module: nn.Module, weights: Any = None, **options: Any
) -> None:
    path, x = volume
    assert error(rows_of(path, module, **options), full_batch(module, x, EDGES, weights)) <= BOUND


@pytest.mark.parametrize(("cls", "kwargs"), CASES, ids=str)
def test_variants(volume: Volumes, cls: str, kwargs: dict[str, Any]) -> None:
    module = randomised(make(cls, kwargs))
    first = CASES.index((cls, kwargs))
    for step in (0, 3):
        check(volume(), module, plan=PLANS[(first + step) % len(PLANS)], threads=1 + first % 3)


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("aggr", ["add", "mean", "max"])
def test_gin_with_any_mlp(volume: Volumes, mlp: str, aggr: str) -> None:
    module = randomised(pyg.GINConv(MLPS[mlp](), eps=0.3, train_eps=True, aggr=aggr))
    for plan in ("resident", "passes:3", "log:1"):
        check(volume(), module, plan=plan)


@pytest.mark.parametrize("project_first", [True, False])
@pytest.mark.parametrize(("inner", "outer"), [(5, 40), (40, 5)])
@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        ("GCN", {}), ("GCN", {"norm": "layer_norm"}), ("GraphSAGE", {}),
        ("GraphSAGE", {"project": True, "aggr": "sum"}), ("GraphSAGE", {"root_weight": False}),
        ("GIN", {}), ("GIN", {"aggr": "mean"}),
    ],
    ids=str,
)  # fmt: skip
def test_both_orders_of_the_products(
    volume: Volumes, order: Callable[[bool], None], cls: str, kwargs: dict[str, Any], inner: int,
    outer: int, project_first: bool,
) -> None:  # fmt: skip
    order(project_first)
    sizes = {"hidden_channels": inner, "out_channels": outer}
    module = randomised(make(cls, {**sizes, **kwargs}, width=17))
    path, x = volume(17)
    expected = full_batch(module, x, EDGES)
    for plan in ("resident", "passes:3", "log:1"):
        rows, report = refresh(path, module, plan=plan)
        wanted = "project first" if project_first else "aggregate first"
        assert {stage.order for stage in report.stages} <= {wanted, ""}
        assert error(rows, expected) <= BOUND


WIDTHS = [(1, 1), (1, 3), (3, 17), (17, 3), (602, 2), (2, 602), (1024, 1), (3, 1024)]


@pytest.mark.parametrize("cls", ["GCN", "GraphSAGE", "GIN", "GAT"])
@pytest.mark.parametrize(("width", "out"), WIDTHS)
def test_widths(volume: Volumes, cls: str, width: int, out: int) -> None:
    kwargs = {"hidden_channels": out, "out_channels": out}
    module = randomised(make(cls, kwargs, width))
    for plan in ("resident", "log:1"):
        check(volume(width), module, plan=plan)


@pytest.mark.parametrize(("heads", "channels"), [(1, 17), (3, 5), (7, 1), (16, 3), (5, 32)])
@pytest.mark.parametrize("concat", [True, False])
def test_heads(volume: Volumes, heads: int, channels: int, concat: bool) -> None:
    module = randomised(pyg.GATConv(3, channels, heads, concat=concat, residual=True))
    for plan in ("resident", "passes:5", "log:2"):
        check(volume(3), module, plan=plan)


@pytest.mark.parametrize("cls", ["GCN", "GraphSAGE", "GIN", "GAT"])
@pytest.mark.parametrize("width", [1, 3, 17, 602])
def test_half_precision_features(volume: Volumes, cls: str, width: int) -> None:
    module = randomised(make(cls, {}, width))
    for plan in ("passes:2", "log:1"):
        check(volume(width, "float16"), module, plan=plan)


@pytest.mark.parametrize(
    ("kwargs", "kind"),
    [
        ({}, "positive"), ({"improved": True}, "positive"), ({"add_self_loops": False}, "positive"),
        ({"normalize": False}, "negative"), ({"normalize": False, "num_layers": 4}, "negative"),
        ({}, "slightly negative"), ({"improved": True, "jk": "cat"}, "slightly negative"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("project_first", [True, False])
def test_edge_weights(
    volume: Volumes, order: Callable[[bool], None], kwargs: dict[str, Any], kind: str,
    project_first: bool,
) -> None:  # fmt: skip
    order(project_first)
    module = randomised(make("GCN", kwargs, 17))
    for plan in ("resident", "passes:3", "log:1"):
        check(volume(17, weights=kind), module, signs(kind), plan=plan)


def test_a_negative_degree_gives_nan_where_pyg_does(volume: Volumes) -> None:
    path, x = volume(17, weights="negative")
    module = randomised(make("GCN", {"num_layers": 1, "add_self_loops": False}, 17))
    expected = full_batch(module, x, EDGES, signs("negative"))
    assert np.isnan(expected).any()
    for plan in ("resident", "log:1"):
        assert error(rows_of(path, module, plan=plan), expected) <= BOUND


@pytest.mark.parametrize("cls", ["GraphSAGE", "GIN", "GAT"])
def test_only_gcn_uses_edge_weights(volume: Volumes, cls: str) -> None:
    module = randomised(make(cls, {}))
    check(volume(weights="positive"), module)


@pytest.mark.parametrize(("cls", "kwargs"), CASES[:: len(CASES) // 12], ids=str)
def test_output_in_half_precision(volume: Volumes, cls: str, kwargs: dict[str, Any]) -> None:
    """Stored outputs are the float32 ones, rounded once; nothing before them is rounded."""
    module = randomised(make(cls, kwargs))
    path, _ = volume()
    for plan in ("passes:2", "log:1"):
        whole = rows_of(path, module, plan=plan)
        half = rows_of(path, module, plan=plan, dtype="float16")
        assert same_bits(half, whole.astype(np.float16))


@pytest.mark.parametrize(("cls", "kwargs"), CASES[:: len(CASES) // 12], ids=str)
@pytest.mark.parametrize("plan", PLANS)
def test_same_bits_for_any_number_of_threads(
    volume: Volumes, cls: str, kwargs: dict[str, Any], plan: str | None
) -> None:
    module = randomised(make(cls, kwargs))
    path, _ = volume()
    one, *others = (rows_of(path, module, plan=plan, threads=n) for n in (1, 2, 7))
    assert all(same_bits(one, other) for other in others)


def test_a_sequential_of_everything(volume: Volumes) -> None:
    module = pyg.Sequential(
        "x, edge_index, edge_weight",
        [
            (pyg.GCNConv(17, 8), "x, edge_index, edge_weight -> x"),
            (pyg.LayerNorm(8), "x -> x"),
            (pyg.LayerNorm(8), "x -> x"),
            nn.ReLU(),
            (pyg.GATConv(8, 4, heads=2), "x, edge_index -> x"),
            nn.Linear(8, 6),
            (pyg.SAGEConv(6, 6, aggr="max"), "x, edge_index -> x"),
            nn.Sequential(nn.Linear(6, 3), nn.Sigmoid()),
            (pyg.LayerNorm(3), "x -> x"),
        ],
    )  # fmt: skip
    path, x = volume(17, weights="positive")
    expected = full_batch(randomised(module), x, EDGES, signs("positive"))
    for plan, memory in zip(PLANS, cycle(("512MiB", "40MiB")), strict=False):
        rows = rows_of(path, module, plan=plan, memory=memory)
        assert error(rows, expected) <= BOUND


def test_what_is_refused_leaves_the_volume_alone(volume: Volumes) -> None:
    path, _ = volume()
    before = path.read_bytes()
    for module in (make("GCN", {"jk": "lstm"}), make("GraphSAGE", {"aggr": "lstm"})):
        with pytest.raises(UsageError, match="lstm"):
            hyades.refresh(path, module, out="refused")
    with pytest.raises(UsageError, match="7 channels"):
        hyades.refresh(path, make("GCN", {}, 7), out="refused")
    assert path.read_bytes() == before


def test_the_module_is_not_changed(volume: Volumes) -> None:
    module = randomised(make("GCN", {"norm": "batch_norm"})).train()
    state = {key: value.clone() for key, value in module.state_dict().items()}
    rows_of(volume()[0], module)
    assert module.training
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
