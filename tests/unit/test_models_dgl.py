"""DGL checkpoints: against outputs of DGL 1.1.3 itself, and against its documented equations.

DGL cannot be installed beside the present torch in one environment, so tests/golden holds layers of
it with their outputs (make_dgl_models.py wrote them).  The equations are those of
https://www.dgl.ai/dgl_docs/generated/dgl.nn.pytorch.conv.{GraphConv,SAGEConv,GINConv,GATConv}.html,
written here with dense matrices: A[v, u] counts the edges u -> v.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from tests.reference.gnn import Graph, difference, features, graphs, messy_graph
from tests.reference.interpreter import run
from torch import Tensor, nn

from hyades.common.errors import UsageError
from hyades.gpu_side.models import Model, describe, load_model

GOLDEN = Path(__file__).parent.parent / "golden" / "dgl_models.safetensors"


def load(
    folder: Path, tensors: dict[str, Tensor], cls: str, kwargs: dict[str, Any], **top: Any
) -> Model:
    torch.save(tensors, folder / "w.pt")
    path = folder / "model.json"
    path.write_text(
        json.dumps({"class": cls, "framework": "dgl", "weights": "w.pt", "kwargs": kwargs, **top})
    )
    return load_model(path)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "graph_both": ("GraphConv", {"norm": "both", "in_feats": 6, "out_feats": 4}),
    "graph_right": ("GraphConv", {"norm": "right"}),
    "graph_left": ("GraphConv", {"norm": "left", "allow_zero_in_degree": True}),
    "graph_none": ("GraphConv", {"norm": "none"}),
    "graph_wide": ("dgl.nn.GraphConv", {"activation": "relu"}),
    "graph_no_weight": ("GraphConv", {"weight": False, "in_feats": 6}),
    "graph_no_bias": ("GraphConv", {"bias": False}),
    "sage_mean": ("SAGEConv", {"aggregator_type": "mean", "feat_drop": 0.5}),
    "sage_mean_wide": ("dgl.nn.pytorch.SAGEConv", {"activation": "tanh"}),
    "sage_gcn": ("SAGEConv", {"aggregator_type": "gcn"}),
    "sage_gcn_wide": ("SAGEConv", {"aggregator_type": "gcn", "bias": False}),
    "sage_pool": ("SAGEConv", {"aggregator_type": "pool"}),
    "sage_norm": ("SAGEConv", {"norm": "layer_norm", "activation": "elu"}),
    "gin_sum": ("GINConv", {"aggregator_type": "sum", "activation": "relu"}),
    "gin_mean": (
        "GINConv",
        {
            "aggregator_type": "mean",
            "apply_func": ["linear", "batch_norm", "relu", "linear"],
            "learn_eps": True,
        },
    ),
    "gin_max": ("GINConv", {"aggregator_type": "max"}),
    "gat": ("GATConv", {"num_heads": 3, "concat": True}),
    "gat_residual": ("GATConv", {"residual": True, "negative_slope": 0.05, "concat": True}),
    "gat_identity": ("GATConv", {"residual": True, "activation": "elu", "concat": True}),
    "gat_no_bias": ("GATConv", {"bias": False, "concat": True}),
}


def golden(name: str) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Return (state dict, x, edge_index, output of DGL)."""
    every = load_file(GOLDEN)
    tensors = {k.removeprefix(f"{name}/"): v for k, v in every.items() if k.startswith(f"{name}/")}
    return tensors, every["x"], every["edge_index"], tensors.pop("OUTPUT")


@pytest.mark.parametrize("name", CASES)
def test_same_as_dgl(tmp_path: Path, name: str) -> None:
    tensors, x, edges, expected = golden(name)
    cls, kwargs = CASES[name]
    model = load(tmp_path, tensors, cls, kwargs, layers=[""])
    assert difference(run(model, x, edges), expected.flatten(1).double()) <= 1e-6


@pytest.mark.parametrize("name", ["gat", "gat_residual", "gat_identity"])
def test_mean_of_heads(tmp_path: Path, name: str) -> None:
    tensors, x, edges, expected = golden(name)
    model = load(tmp_path, tensors, "GAT", {**CASES[name][1], "concat": False})
    assert difference(run(model, x, edges), expected.mean(1).double()) <= 1e-6


def test_every_layer_in_the_golden_file_is_tested() -> None:
    assert {key.split("/")[0] for key in load_file(GOLDEN) if "/" in key} == set(CASES)


def dense(graph: Graph) -> Tensor:
    vertices, edges = graph
    matrix = torch.zeros(vertices, vertices, dtype=torch.float64)
    return matrix.index_put((edges[1], edges[0]), torch.ones(edges.shape[1]).double(), True)


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randn(shape, generator=generator) for shape in shapes]


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), norm=st.sampled_from(["both", "right", "left", "none"]))
def test_graph_conv_equation(tmp_path_factory: Any, graph: Graph, norm: str) -> None:
    """h_i = b + sum_j c_ji^-1 h_j W; c = sqrt(d_out(j)) sqrt(d_in(i)), d_in(i), d_out(j) or 1."""
    weight, bias = weights((5, 3), (3,))
    model = load(
        tmp_path_factory.mktemp("w"), {"weight": weight, "bias": bias}, "GraphConv", {"norm": norm}
    )
    matrix = dense(graph)
    d_in, d_out = matrix.sum(1).clamp(min=1)[:, None], matrix.sum(0).clamp(min=1)[None, :]
    scaled = {
        "both": matrix / d_in.sqrt() / d_out.sqrt(),
        "right": matrix / d_in,
        "left": matrix / d_out,
        "none": matrix,
    }[norm]
    x = features(graph[0], 5)
    expected = scaled @ x.double() @ weight.double() + bias.double()
    assert difference(run(model, x, graph[1]), expected) <= 1e-10


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), aggregator=st.sampled_from(["mean", "gcn", "pool"]))
def test_sage_conv_equation(tmp_path_factory: Any, graph: Graph, aggregator: str) -> None:
    """W_self h_i + b + W_neigh agg(h_j); gcn: W_neigh (sum_j h_j + h_i) / (d_in(i) + 1) + b."""
    neigh, own, bias, pool, pool_bias = weights((3, 5), (3, 5), (3,), (5, 5), (5,))
    tensors = {"fc_neigh.weight": neigh}
    tensors |= {
        "mean": {"fc_self.weight": own, "fc_self.bias": bias},
        "gcn": {"bias": bias},
        "pool": {
            "fc_self.weight": own,
            "fc_self.bias": bias,
            "fc_pool.weight": pool,
            "fc_pool.bias": pool_bias,
        },
    }[aggregator]
    kwargs = {"aggregator_type": aggregator}
    model = load(tmp_path_factory.mktemp("w"), tensors, "SAGEConv", kwargs)
    matrix, x = dense(graph), features(graph[0], 5)
    h = x.double()
    if aggregator == "gcn":
        total = (matrix @ h + h) / (matrix.sum(1)[:, None] + 1)
        expected = total @ neigh.double().T + bias.double()
    else:
        if aggregator == "mean":
            total = matrix @ h / matrix.sum(1).clamp(min=1)[:, None]
        else:
            pooled = (h @ pool.double().T + pool_bias.double()).relu()
            total = ((matrix > 0)[:, :, None] * pooled).amax(1)  # pooled >= 0, so none is 0
        expected = h @ own.double().T + bias.double() + total @ neigh.double().T
    assert difference(run(model, x, graph[1]), expected) <= 1e-10


@settings(max_examples=40, deadline=None)
@given(graph=graphs(), concat=st.booleans())
def test_gat_conv_equation(tmp_path_factory: Any, graph: Graph, concat: bool) -> None:
    """alpha = softmax of LeakyReLU(a_l . W h_j + a_r . W h_i); a vertex without in-edges gets 0."""
    heads, channels = 2, 3
    fc, left, right, bias = weights((6, 5), (1, 2, 3), (1, 2, 3), (6,))
    tensors = {"fc.weight": fc, "attn_l": left, "attn_r": right, "bias": bias}
    model = load(tmp_path_factory.mktemp("w"), tensors, "GATConv", {"concat": concat})
    matrix, x = dense(graph), features(graph[0], 5)
    h = (x.double() @ fc.double().T).view(-1, heads, channels)
    score = (h * left.double()).sum(-1)[None, :, :] + (h * right.double()).sum(-1)[:, None, :]
    weight = nn.functional.leaky_relu(score, 0.2).exp() * matrix[:, :, None]
    alpha = weight / weight.sum(1, keepdim=True).clamp(min=1e-300)
    out = torch.einsum("ijh,jhc->ihc", alpha, h) + bias.double().view(heads, channels)
    expected = out.flatten(1) if concat else out.mean(1)
    assert difference(run(model, x, graph[1]), expected) <= 1e-10


@pytest.mark.parametrize("aggregator", ["sum", "mean", "max"])
def test_gin_conv_equation(tmp_path: Path, aggregator: str) -> None:
    """f((1 + eps) h_i + agg(h_j))."""
    weight, bias = weights((3, 5), (3,))
    tensors = {"eps": torch.tensor([0.25]), "apply_func.weight": weight, "apply_func.bias": bias}
    model = load(tmp_path, tensors, "GINConv", {"aggregator_type": aggregator})
    graph = messy_graph()
    matrix, h = dense(graph), features(graph[0], 5).double()
    total = matrix @ h
    if aggregator == "mean":
        total = total / matrix.sum(1).clamp(min=1)[:, None]
    if aggregator == "max":
        masked = h[None].expand(len(h), -1, -1).masked_fill((matrix == 0)[:, :, None], -torch.inf)
        total = masked.amax(1)
        total[matrix.sum(1) == 0] = 0
    expected = (1.25 * h + total) @ weight.double().T + bias.double()
    assert difference(run(model, h, graph[1]), expected) <= 1e-10


def two_layers(cls: str) -> dict[str, Tensor]:
    """Return a state dict as a user's own module has it: layers.0, layers.1."""
    shapes: dict[str, list[dict[str, tuple[int, ...]]]] = {
        "GraphConv": [{"weight": (5, 8), "bias": (8,)}, {"weight": (8, 3), "bias": (3,)}],
        "SAGEConv": [
            {"fc_neigh.weight": (8, 5), "fc_self.weight": (8, 5), "fc_self.bias": (8,)},
            {"fc_neigh.weight": (3, 8), "fc_self.weight": (3, 8), "fc_self.bias": (3,)},
        ],
        "GINConv": [
            {"eps": (1,), "apply_func.0.weight": (8, 5), "apply_func.2.weight": (8, 8)},
            {"eps": (1,), "apply_func.0.weight": (8, 8), "apply_func.2.weight": (3, 8)},
        ],
        "GATConv": [
            {"fc.weight": (8, 5), "attn_l": (1, 2, 4), "attn_r": (1, 2, 4), "bias": (8,)},
            {"fc.weight": (9, 8), "attn_l": (1, 3, 3), "attn_r": (1, 3, 3), "bias": (9,)},
        ],
    }
    return {
        f"layers.{i}.{key}": tensor
        for i, layer in enumerate(shapes[cls])
        for key, tensor in zip(layer, weights(*layer.values()), strict=True)
    }


@pytest.mark.parametrize("cls", ["GraphConv", "SAGEConv", "GINConv", "GATConv"])
def test_two_layers_and_what_lies_between(tmp_path: Path, cls: str) -> None:
    tensors = two_layers(cls)
    graph = messy_graph()
    x = features(graph[0], 5)
    kwargs = {"apply_func": ["linear", "relu", "linear"]} if cls == "GINConv" else {}
    tables = {"layer": [{}, {"concat": False}]} if cls == "GATConv" else {}
    model = load(tmp_path, tensors, cls, kwargs, between=["tanh"], **tables)
    first, second = (
        load(
            tmp_path,
            {k.removeprefix(f"layers.{i}."): v for k, v in tensors.items() if f".{i}." in k[:9]},
            cls,
            {**kwargs, **({"concat": i == 0} if cls == "GATConv" else {})},
        )
        for i in range(2)
    )
    expected = run(second, run(first, x, graph[1]).tanh(), graph[1])
    assert difference(run(model, x, graph[1]), expected) <= 1e-12
    torch.save(tensors, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="what lies between the 2 layers"):
        load_model(tmp_path / "w.pt")


@pytest.mark.parametrize("cls", ["GraphConv", "SAGEConv", "GINConv", "GATConv"])
def test_describe_gives_a_model_file_that_loads(tmp_path: Path, cls: str) -> None:
    torch.save(two_layers(cls), tmp_path / "w.pt")
    found = describe(tmp_path / "w.pt")
    assert (found.framework, found.cls, found.problems) == ("dgl", cls, [])
    assert {u.name for u in found.unknown} >= {"between", "activation"}
    (tmp_path / "model.toml").write_text(found.toml)
    model = load_model(tmp_path / "model.toml")
    assert model.in_channels == 5
    assert [layer.name for layer in model.layers] == [f"layers.{i} ({cls})" for i in range(2)]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("SAGEConv", {"aggregator_type": "lstm"}, "aggregator 'lstm' is not supported"),
    ("SAGEConv", {"aggregator_type": "pool"}, "the keys say 'mean'"),
    ("SAGEConv", {"num_heads": 2}, "DGL's SAGEConv takes no num_heads"),
    ("SAGEConv", {"in_feats": [5, 5]}, "bipartite layers are not supported"),
    ("SAGEConv", {"in_feats": 6}, r"layers.0.fc_neigh.weight is \[8, 5\], not \[any, 6\]"),
    ("SAGEConv", {"activation": "softmax"}, "activation 'softmax' is not supported"),
    ("GraphConv", {"norm": "sym"}, "norm = 'sym' is not one of both, right, left, none"),
    ("GraphConv", {"weight": False}, "leaves no key that tells in_feats"),
    ("GINConv", {}, "keys do not tell what its apply_func is"),
    ("GATConv", {"concat": 3}, "Expected `bool"),
    ("GATConv", {}, "puts its heads side by side or averages them"),
    ("GATv2Conv", {}, "'GATv2Conv' is not supported"),
    ("EdgeConv", {}, "'EdgeConv' is not supported"),
]


@pytest.mark.parametrize(("cls", "kwargs", "text"), REFUSED, ids=str)
def test_refused(tmp_path: Path, cls: str, kwargs: dict[str, Any], text: str) -> None:
    tensors = two_layers(cls if cls in ("SAGEConv", "GraphConv", "GINConv") else "GATConv")
    with pytest.raises(UsageError, match=text):
        load(tmp_path, tensors, cls, kwargs, between=[])


def test_refused_by_keys(tmp_path: Path) -> None:
    torch.save({"fc_src.weight": torch.ones(2, 2), "attn": torch.ones(1, 1, 2)}, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="GATv2Conv, which is not supported"):
        load_model(tmp_path / "w.pt")
    (weight,) = weights((3, 5))
    lstm = {"fc_neigh.weight": weight, "lstm.weight_ih_l0": torch.ones(20, 5)}
    with pytest.raises(UsageError, match="aggregator 'lstm' is not supported"):
        load(tmp_path, lstm, "SAGEConv", {})
    old = {"fc_neigh.weight": weight, "fc_self.weight": weight, "fc_neigh.bias": torch.ones(3)}
    with pytest.raises(UsageError, match=r"before 0\.7"):
        load(tmp_path, old, "SAGEConv", {})
    with pytest.raises(UsageError, match="edge_weight = true"):
        load(tmp_path, two_layers("GraphConv"), "GraphConv", {}, between=[], edge_weight=True)
