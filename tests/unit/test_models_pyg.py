"""Live PyG modules against the IR's meaning in plain torch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference.gnn import Graph, difference, features, graphs, messy_graph, randomised
from tests.reference.interpreter import run
from torch import Tensor, nn

from hyades.gpu_side.models import load_model

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")

FOLDED = 1e-6  # BatchNorm is folded into float32 scales and shifts


def check(
    module: nn.Module, graph: Graph, weight: Tensor | None = None, exact: float = 1e-10
) -> None:
    """Compare in float32 and in float64."""
    vertices, edges = graph
    model = load_model(module)
    x = features(vertices, model.in_channels)
    extra = () if weight is None else (weight,)
    with torch.no_grad():
        expected = module(x, edges, *extra)
        assert expected.shape == (vertices, model.out_channels)
        assert difference(run(model, x, edges, weight, torch.float32), expected) <= 1e-5
        module.double()
        expected = module(x.double(), edges, *(w.double() for w in extra))
        assert difference(run(model, x, edges, weight), expected) <= exact
    module.float()


COMMON: list[dict[str, Any]] = [
    {},
    {"out_channels": None},
    {"num_layers": 1},
    {"num_layers": 1, "jk": "cat"},
    {"jk": "cat"},
    {"jk": "max", "num_layers": 3},
    {"jk": "last"},
    {"norm": "batch_norm"},
    {"norm": "batch_norm", "act_first": True, "norm_kwargs": {"eps": 0.1}},
    {"norm": "batch_norm", "norm_kwargs": {"affine": False}, "jk": "cat"},
    {"norm": "layer_norm"},
    {"norm": "layer_norm", "norm_kwargs": {"mode": "node", "eps": 1e-2}, "jk": "max"},
    {"norm": "layer_norm", "norm_kwargs": {"affine": False}},
    {"norm": nn.BatchNorm1d(16)},
    {"norm": nn.LayerNorm(16, eps=0.1), "act_first": True},
    {"act": None},
    {"act": "tanh", "dropout": 0.5},
    {"act": nn.PReLU(), "jk": "cat"},
    {"act": nn.PReLU(16), "num_layers": 3},
]
OWN: dict[str, list[dict[str, Any]]] = {
    "GCN": [
        {"improved": True},
        {"normalize": False},
        {"add_self_loops": False},
        {"bias": False},
        {"cached": True},
        {"improved": True, "add_self_loops": False},
    ],
    "GraphSAGE": [
        {"aggr": "max"},
        {"aggr": "sum"},
        {"aggr": "add", "bias": False},
        {"normalize": True, "norm": "layer_norm"},
        {"project": True},
        {"project": True, "aggr": "max", "root_weight": False},
        {"root_weight": False, "bias": False, "normalize": True},
        {"aggr": "max", "normalize": True, "jk": "cat"},
    ],
    "GIN": [
        {"train_eps": True, "eps": 0.5},
        {"aggr": "mean"},
        {"aggr": "max", "norm": "batch_norm", "jk": "max"},
        {"eps": -1.0},
        {"norm": "layer_norm", "act_first": True, "act": "elu", "act_kwargs": {"alpha": 0.3}},
    ],
    "GAT": [
        {"heads": 4},
        {"heads": 4, "out_channels": None},
        {"heads": 4, "jk": "cat"},
        {"heads": 2, "concat": False},
        {"heads": 2, "concat": False, "out_channels": None},
        {"heads": 2, "concat": False, "jk": "max"},
        {"heads": 4, "residual": True},
        {"heads": 4, "residual": True, "bias": False, "add_self_loops": False},
        {"negative_slope": 0.01, "heads": 2},
        {"add_self_loops": False},
        {"bias": False, "heads": 8, "num_layers": 3},
    ],
}
# GIN's last MLP has 3 channels, for which no PReLU of 16 slopes works, in PyG either.
CASES = [
    (cls, kwargs)
    for cls in OWN
    for kwargs in [*COMMON, *OWN[cls]]
    if not (cls == "GIN" and getattr(kwargs.get("act"), "num_parameters", 1) > 1)
]


def zoo(cls: str, kwargs: dict[str, Any], width: int = 5) -> nn.Module:
    arguments = {"in_channels": width, "hidden_channels": 16, "num_layers": 2, "out_channels": 3}
    module: nn.Module = getattr(pyg.models, cls)(**{**arguments, **kwargs})
    return module


def uses_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(m, nn.BatchNorm1d) for m in module.modules())


@pytest.mark.parametrize(("cls", "kwargs"), CASES, ids=str)
def test_zoo_matches(cls: str, kwargs: dict[str, Any]) -> None:
    module = randomised(zoo(cls, kwargs))
    if kwargs.get("cached"):
        module = randomised(zoo(cls, {**kwargs, "cached": False}))
    check(module, messy_graph(), exact=FOLDED if uses_batch_norm(module) else 1e-10)


@pytest.mark.parametrize("kwargs", [*OWN["GCN"][:4], {}, {"jk": "cat"}], ids=str)
def test_gcn_with_edge_weights(kwargs: dict[str, Any]) -> None:
    graph = messy_graph()
    weight = torch.rand(graph[1].shape[1], generator=torch.Generator().manual_seed(4))
    check(randomised(zoo("GCN", kwargs)), graph, weight)


def test_improved_without_edge_weights_adds_loops_of_one() -> None:
    """PyG 2.8 adds loops of 2 only where there are edge weights; so do we."""
    graph = messy_graph()
    improved, plain = (zoo("GCN", {"improved": flag}) for flag in (True, False))
    improved.load_state_dict(plain.state_dict())
    x = features(graph[0], 5)
    a, b = (run(load_model(m), x, graph[1]) for m in (improved, plain))
    assert torch.equal(a, b)
    ones = torch.ones(graph[1].shape[1])
    assert difference(run(load_model(improved), x, graph[1], ones), b) > 1e-3


WIDTHS = [(1, 1), (1, 3), (3, 17), (17, 3), (602, 2)]


@pytest.mark.parametrize("cls", list(OWN))
@pytest.mark.parametrize(("width", "out"), WIDTHS)
def test_widths(cls: str, width: int, out: int) -> None:
    kwargs = {"hidden_channels": out, "out_channels": out, "num_layers": 2}
    check(randomised(zoo(cls, kwargs, width)), messy_graph())


@settings(max_examples=60, deadline=None)
@given(
    graph=graphs(), cls=st.sampled_from(list(OWN)), pick=st.integers(0, 30), seed=st.integers(0, 9)
)
def test_any_graph(graph: Graph, cls: str, pick: int, seed: int) -> None:
    own = [kwargs for kwargs in OWN[cls] if not kwargs.get("cached")]
    cases = [*own, {"norm": "layer_norm"}, {"jk": "cat"}]
    check(
        randomised(zoo(cls, cases[pick % len(cases)]), seed),
        graph,
        exact=FOLDED if "norm" in cases[pick % len(cases)] else 1e-10,
    )


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), improved=st.booleans(), normalize=st.booleans(), seed=st.integers(0, 99))
def test_any_weighted_graph(graph: Graph, improved: bool, normalize: bool, seed: int) -> None:
    weight = torch.rand(graph[1].shape[1], generator=torch.Generator().manual_seed(seed))
    module = zoo("GCN", {"improved": improved, "normalize": normalize})
    check(randomised(module, seed), graph, weight)


ACTS: list[Any] = [
    nn.Threshold(0.1, -2.0), nn.ReLU(), nn.RReLU(0.1, 0.5), nn.Hardtanh(-0.3, 0.7), nn.ReLU6(),
    nn.Sigmoid(), nn.Hardsigmoid(), nn.Tanh(), nn.SiLU(), nn.Mish(), nn.Hardswish(), nn.ELU(0.4),
    nn.CELU(0.4), nn.SELU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.Hardshrink(0.2),
    nn.LeakyReLU(0.3), nn.LogSigmoid(), nn.Softplus(2.0, 1.5), nn.Softshrink(0.2), nn.PReLU(),
    nn.PReLU(7), nn.Softsign(), nn.Tanhshrink(), nn.ReLU(inplace=True), nn.Identity(),
    torch.relu, torch.tanh, nn.functional.gelu, nn.functional.elu, torch.sigmoid, "swish",
]  # fmt: skip


@pytest.mark.parametrize("act", ACTS, ids=str)
def test_activations(act: Any) -> None:
    module = pyg.models.GCN(4, 7, 2, 3, act=act)
    check(randomised(module), messy_graph())


MLPS = {
    "linear": lambda: nn.Linear(5, 4),
    "no bias": lambda: nn.Linear(5, 4, bias=False),
    "sequential": lambda: nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4)),
    "norms": lambda: nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(8),
        nn.Linear(8, 4, bias=False), nn.PReLU(4),
    ),
    "norm first": lambda: nn.Sequential(nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)),
    "act first": lambda: nn.Sequential(nn.ReLU(), nn.Linear(5, 4)),
    "nested": lambda: nn.Sequential(nn.Sequential(nn.Linear(5, 6), nn.Tanh()), nn.Linear(6, 4)),
    "pyg": lambda: pyg.MLP([5, 9, 8, 4]),
    "pyg act first": lambda: pyg.MLP([5, 9, 4], act_first=True, act="elu", norm="layer_norm"),
    "pyg not plain": lambda: pyg.MLP([5, 9, 4], plain_last=False, bias=[False, True]),
    "pyg no norm": lambda: pyg.MLP([5, 9, 4], norm=None, dropout=0.5),
    "pyg norm kwargs": lambda: pyg.MLP([5, 9, 4], norm="LayerNorm", norm_kwargs={"mode": "node"}),
    "one layer": lambda: pyg.MLP([5, 4]),
}  # fmt: skip


@pytest.mark.parametrize("mlp", MLPS)
@pytest.mark.parametrize("aggr", ["add", "mean", "max"])
def test_gin_with_any_mlp(mlp: str, aggr: str) -> None:
    module = randomised(pyg.GINConv(MLPS[mlp](), eps=0.3, train_eps=True, aggr=aggr))
    check(module, messy_graph(), exact=FOLDED if uses_batch_norm(module) else 1e-10)


@pytest.mark.parametrize(
    "layer",
    [
        pyg.GCNConv(5, 4), pyg.SAGEConv(5, 4, aggr="max"), pyg.GATConv(5, 4, heads=3),
        pyg.GATConv(5, 4, heads=3, concat=False, residual=True),
        pyg.SAGEConv(5, 4, normalize=True, project=True),
    ],
    ids=str,
)  # fmt: skip
def test_single_layers(layer: nn.Module) -> None:
    check(randomised(layer), messy_graph())


def test_sequential() -> None:
    module = pyg.Sequential(
        "x, edge_index",
        [
            (nn.Dropout(0.5), "x -> x"),
            (pyg.GCNConv(5, 8), "x, edge_index -> x"),
            nn.ReLU(inplace=True),
            (pyg.BatchNorm(8), "x -> h"),
            (pyg.GATConv(8, 4, heads=2), "h, edge_index -> h"),
            nn.Linear(8, 6),
            nn.Tanh(),
            (pyg.SAGEConv(6, 6), "h, edge_index -> z"),
            nn.Sequential(nn.Linear(6, 3), nn.Sigmoid()),
        ],
    )
    check(randomised(module), messy_graph(), exact=FOLDED)


def test_sequential_with_edge_weights() -> None:
    module = pyg.Sequential(
        "x, edge_index, edge_weight", [(pyg.GCNConv(5, 3), "x, edge_index, edge_weight -> x")]
    )
    graph = messy_graph()
    check(randomised(module), graph, torch.rand(graph[1].shape[1]))


def test_sequential_without_edge_weights_ignores_those_of_the_volume() -> None:
    module = pyg.Sequential("x, edge_index", [(pyg.GCNConv(5, 3), "x, edge_index -> x")])
    assert not load_model(module).layers[0].edge_weight
    assert load_model(pyg.GCNConv(5, 3)).layers[0].edge_weight


def test_wrapped_modules_and_training_mode() -> None:
    module = randomised(zoo("GCN", {"dropout": 0.5, "norm": "batch_norm"}))
    graph = messy_graph()
    x = features(graph[0], 5)
    expected = run(load_model(module), x, graph[1])
    assert torch.equal(run(load_model(nn.DataParallel(module)), x, graph[1]), expected)
    assert "eval" not in load_model(module).description
    trained = load_model(module.train())
    assert torch.equal(run(trained, x, graph[1]), expected)
    assert "eval" in trained.description


def test_the_model_is_a_snapshot() -> None:
    module = randomised(zoo("GraphSAGE", {}))
    model = load_model(module)
    graph = messy_graph()
    x = features(graph[0], 5)
    before = run(model, x, graph[1])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(run(model, x, graph[1]), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_of_other_types(dtype: torch.dtype) -> None:
    module = randomised(zoo("GCN", {})).to(dtype)
    model = load_model(module)
    maps = [layer.neighbour for layer in model.layers]
    assert all(linear is not None and linear.weight.dtype == torch.float32 for linear in maps)
    assert ("rounded to float32" in model.description) == (dtype == torch.float64)
    graph = messy_graph()
    x = features(graph[0], 5)
    with torch.no_grad():
        assert difference(run(model, x, graph[1]), module.double()(x.double(), graph[1])) <= 1e-6


def test_lazy_module_after_its_first_run() -> None:
    module = pyg.models.GCN(-1, 8, 2, 3)
    graph = messy_graph()
    module(features(graph[0], 5), graph[1])
    check(randomised(module), graph)
