"""Whatever is not computed exactly is refused by name, before any work."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.test_models_state_dict import DIMS, build, kwargs_text, model_file
from torch import Tensor, nn

from hyades.common.errors import DataError, UsageError
from hyades.gpu_side.models import load_model

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")


def zoo(cls: str = "GCN", **kwargs: Any) -> nn.Module:
    module: nn.Module = getattr(pyg.models, cls)(**{**DIMS, **kwargs})
    return module


def hooked() -> nn.Module:
    module = zoo()
    module.convs[0].lin.register_forward_hook(lambda *_: None)
    return module


def replaced_forward() -> nn.Module:
    module = zoo()
    module.convs[1].forward = lambda x, edges: x
    return module


def patched(change: Callable[[Any], None]) -> nn.Module:
    module = zoo()
    change(module)
    return module


def complex_weights() -> nn.Module:
    module = zoo()
    weight = module.convs[0].lin.weight  # type: ignore[union-attr,index]
    weight.data = weight.data.to(torch.complex64)  # type: ignore[union-attr]
    return module


class MyGCN(pyg.models.GCN):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros(1)


class MyReLU(nn.ReLU):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def gin(mlp: Any) -> Callable[[], nn.Module]:
    return lambda: pyg.GINConv(mlp)


def sequential(*modules: Any) -> nn.Module:
    module: nn.Module = pyg.Sequential("x, edge_index", list(modules))
    return module


def patched_sequential() -> nn.Module:
    step = (pyg.SAGEConv(5, 5), "x, edge_index, size -> x")
    module: nn.Module = pyg.Sequential("x, edge_index, size", [step])
    return module


GCN_STEP = "x, edge_index -> x"
LIVE: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "GATv2 in the zoo": (lambda: zoo("GAT", v2=True), r"convs\.0: the layer GATv2Conv"),
    "GATv2Conv": (lambda: pyg.GATv2Conv(5, 4), "GATv2Conv is not supported"),
    "edge_dim": (lambda: zoo("GAT", edge_dim=3), r"edge_dim=3 \(edge features\)"),
    "PNA": (
        lambda: zoo("PNA", aggregators=["mean"], scalers=["identity"], deg=torch.ones(3).long()),
        "PNA is not supported",
    ),
    "EdgeCNN": (lambda: zoo("EdgeCNN"), "EdgeCNN is not supported"),
    "GraphConv of PyG": (lambda: pyg.GraphConv(5, 4), "GraphConv is not supported"),
    "GINEConv": (lambda: pyg.GINEConv(nn.Linear(5, 5)), "GINEConv is not supported"),
    "lstm": (lambda: zoo("GraphSAGE", aggr="lstm"), "aggregation 'lstm'"),
    "softmax aggregation": (lambda: zoo("GraphSAGE", aggr="softmax"), "aggregation 'softmax'"),
    "powermean": (lambda: zoo("GraphSAGE", aggr="powermean"), "aggregation 'powermean'"),
    "min": (lambda: zoo("GraphSAGE", aggr="min"), "aggregation 'min'.*supported here: sum, mean"),
    "aggregation module": (
        lambda: pyg.SAGEConv(5, 4, aggr=pyg.aggr.MedianAggregation()),
        "MedianAggregation",
    ),
    "several aggregations": (
        lambda: pyg.SAGEConv(5, 4, aggr=["mean", "max"]),
        r"aggregation \['mean', 'max'\]",
    ),
    "GCN with mean": (lambda: zoo("GCN", aggr="mean"), r"convs\.0 \(GCNConv\): aggregation 'mean'"),
    "GAT with max": (lambda: zoo("GAT", aggr="max"), r"convs\.0 \(GATConv\): aggregation 'max'"),
    "GraphNorm": (lambda: zoo(norm="graph_norm"), r"norms\.0: GraphNorm"),
    "InstanceNorm": (lambda: zoo(norm="instance_norm"), "InstanceNorm"),
    "PairNorm": (lambda: zoo(norm="pair_norm"), "PairNorm"),
    "GraphSizeNorm": (lambda: patched(lambda m: m.norms.__setitem__(0, pyg.GraphSizeNorm())),
                      "GraphSizeNorm"),
    "DiffGroupNorm": (lambda: zoo(norm=pyg.DiffGroupNorm(16, 2)), "DiffGroupNorm"),
    "MessageNorm": (lambda: zoo(norm=pyg.MessageNorm()), "MessageNorm"),
    "InstanceNorm1d": (lambda: zoo(norm=nn.InstanceNorm1d(16)), "InstanceNorm1d"),
    "RMSNorm": (lambda: zoo(norm=nn.RMSNorm(16)), "RMSNorm"),
    "norm in a GIN": (lambda: zoo("GIN", norm="instance_norm"), r"nn\.norms\.0: InstanceNorm"),
    "track_running_stats": (
        lambda: zoo(norm="batch_norm", norm_kwargs={"track_running_stats": False}),
        "track_running_stats=False",
    ),
    "LayerNorm over two axes": (lambda: zoo(norm=nn.LayerNorm((2, 8))), r"LayerNorm over \[2, 8\]"),
    "jk lstm": (lambda: zoo(jk="lstm"), "jk='lstm'"),
    "lambda": (lambda: zoo(act=lambda x: x.relu()), "act: activation <lambda>"),
    "partial": (lambda: zoo(act=functools.partial(nn.functional.elu)), r"functools\.partial"),
    "Softmax": (lambda: zoo(act="softmax"), "Softmax"),
    "GLU": (lambda: zoo(act=nn.GLU()), "GLU"),
    "subclass of an activation": (lambda: zoo(act=MyReLU()), "MyReLU"),
    "subclass of a model": (lambda: MyGCN(5, 4, 2), "MyGCN is not a model of PyG's zoo"),
    "own module": (lambda: nn.Linear(3, 3), "Linear is not a model of PyG's zoo"),
    "bipartite": (lambda: zoo("GraphSAGE", in_channels=(5, 5)), r"in_channels=\(5, 5\); bipartite"),
    "bipartite GAT": (lambda: pyg.GATConv((5, 5), 4, add_self_loops=False), "bipartite"),
    "lazy": (lambda: zoo(in_channels=-1), r"lin\.weight is not initialised"),
    "flow": (lambda: zoo(flow="target_to_source"), "flow='target_to_source'"),
    "hook": (hooked, "forward hooks"),
    "replaced forward": (replaced_forward, "its forward was replaced"),
    "weight_norm": (
        lambda: patched(lambda m: nn.utils.parametrizations.weight_norm(m.convs[0].lin)),
        "ParametrizedLinear",
    ),
    "GIN with attention": (gin(nn.MultiheadAttention(5, 1)), "MultiheadAttention"),
    "GIN with GRU": (gin(nn.Sequential(nn.Linear(5, 4), nn.GRU(4, 4))), r"nn\.1: .*GRU is not"),
    "GIN of no width": (gin(nn.ReLU()), "how many channels"),
    "GIN of wrong widths": (gin(nn.Sequential(nn.Linear(5, 4), nn.Linear(3, 4))), "gets 4"),
    "GIN with a lambda": (gin(lambda x: x), "<lambda>"),
    "complex": (complex_weights, r"convs\.0\.lin\.weight is complex"),
    "meta": (lambda: zoo().to("meta"), "meta device"),
    "Sequential, skip": (
        lambda: sequential((pyg.GCNConv(5, 5), "x, edge_index -> y"),
                           (pyg.GCNConv(5, 5), "x, edge_index -> z")),
        "not the next step of one chain",
    ),
    "Sequential, function": (
        lambda: sequential((pyg.GCNConv(5, 5), GCN_STEP), (lambda x: x + 1, "x -> x")),
        "<lambda>",
    ),
    "Sequential, Linear first": (
        lambda: sequential((nn.Linear(5, 5), "x -> x"), (pyg.GCNConv(5, 5), GCN_STEP)),
        "before the first convolution",
    ),
    "Sequential, no layer": (lambda: sequential((nn.Dropout(), "x -> x")), "no convolution"),
    "Sequential, widths": (
        lambda: sequential((pyg.GCNConv(5, 5), GCN_STEP), (pyg.GCNConv(4, 5), GCN_STEP)),
        r"module_1 \(GCNConv\) takes 4 channels, but module_0 \(GCNConv\) gives 5",
    ),
    "Sequential, size": (
        patched_sequential,
        r"module_0 \(SAGEConv\): the arguments size are not supported",
    ),
    "removed layer": (
        lambda: patched(lambda m: m.convs.pop(1)), "1 layers and 2 norms, but num_layers = 2"
    ),
    "Sequential, pooling": (
        lambda: sequential((pyg.GCNConv(5, 5), GCN_STEP), (pyg.JumpingKnowledge("cat"), "x -> x")),
        "JumpingKnowledge",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LIVE)
def test_live_module(name: str) -> None:
    make, text = LIVE[name]
    with pytest.raises(UsageError, match=text):
        load_model(make())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(value: float, tmp_path: Path) -> None:
    module = build("GIN", {"norm": "batch_norm"})
    with torch.no_grad():
        module.convs[1].nn.lins[0].weight[0, 1] = value  # type: ignore[union-attr,index]
    text = r"convs\.1\.nn\.lins\.0\.weight: 1 of 48 values are NaN or infinite"
    with pytest.raises(DataError, match=text):
        load_model(module)
    torch.save(module.state_dict(), tmp_path / "w.pt")
    with pytest.raises(DataError, match=rf"w\.pt: {text}"):
        load_model(tmp_path / "w.pt")


def test_negative_running_variance() -> None:
    module = build("GCN", {"norm": "batch_norm"})
    module.norms[0].module.running_var.fill_(-1.0)  # type: ignore[union-attr,operator]
    with pytest.raises(DataError, match=r"norms\.0\.module\.running_var"):
        load_model(module)


WITH_ARGUMENTS: list[tuple[str, dict[str, Any], str]] = [
    ("GAT", {"v2": True}, r"v2 = true \(GATv2Conv\)"),
    ("GAT", {"edge_dim": 4}, "edge_dim = 4"),
    ("GCN", {"jk": "lstm"}, "jk = 'lstm'"),
    ("GCN", {"in_channels": [5, 5]}, "bipartite"),
    ("GCN", {"flow": "target_to_source"}, "flow = 'target_to_source'"),
    ("GCN", {"heads": 2}, "GCN takes no heads"),
    ("GCN", {"head": 2}, "unknown field `head`"),
    ("GCN", {"hidden_channels": "16"}, "Expected `int`, got `str`"),
    ("GCN", {"hidden_channels": 32}, "hidden_channels = 32, but the keys .* say 16"),
    ("GCN", {"num_layers": 3}, "num_layers = 3, but the keys .* say 2"),
    ("GCN", {"bias": False}, "bias = False, but the keys"),
    ("GCN", {"norm": "batch_norm"}, r"missing norms\.0\.module\.running_mean"),
    ("GCN", {"norm": "GraphNorm"}, "norm 'GraphNorm' is not supported"),
    ("GCN", {"norm": "pair_norm"}, "norm 'pair_norm' is not supported"),
    ("GCN", {"norm": "layer_norm", "norm_kwargs": {"mode": "batch"}}, "mode 'batch'"),
    ("GCN", {"norm": "layer_norm", "norm_kwargs": {"epsilon": 1}}, "takes no epsilon"),
    ("GCN", {"norm": "batch_norm", "norm_kwargs": {"track_running_stats": False}}, "track_running"),
    ("GCN", {"act": "softmax"}, "activation 'softmax' is not supported"),
    ("GCN", {"act": "elu", "act_kwargs": {"slope": 1}}, "ELU does not take"),
    ("GCN", {"aggr": "mean"}, "aggregation 'mean'"),
    ("GCN", {"normalize": False, "add_self_loops": True}, "needs normalize=True"),
    ("GraphSAGE", {"aggr": ["mean", "max"]}, r"aggregation \['mean', 'max'\]"),
    ("GraphSAGE", {"aggr": "lstm"}, "aggregation 'lstm'"),
    ("GraphSAGE", {"project": True}, "project = True, but the keys"),
    ("GraphSAGE", {"jk": "cat"}, "jk = cat, but the keys .* say None"),
    ("GAT", {"heads": 2}, "heads = 2, but the keys .* say 4"),
    ("GAT", {"concat": False}, r"concat = false, but the keys of convs\.0 say true"),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "kwargs", "text"), WITH_ARGUMENTS, ids=str)
def test_arguments(tmp_path: Path, cls: str, kwargs: dict[str, Any], text: str) -> None:
    module = build(cls, {"heads": 4} if cls == "GAT" else {})
    with pytest.raises(UsageError, match=text):
        load_model(model_file(tmp_path, kwargs_text(cls, kwargs), module.state_dict()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('class = "PNA"\n', "class = 'PNA' is not supported"),
        ('class = "EdgeCNN"\n', "class = 'EdgeCNN' is not supported"),
        ('class = "GATv2Conv"\n', "class = 'GATv2Conv' is not supported"),
        ('class = "my.package.GCN"\n', "not one of PyG or DGL's"),
        ('class = "dgl.nn.GraphConv"\nframework = "pyg"\n', "not one of pyg's"),
        ('class = "GCN"\nframework = "jax"\n', "Invalid enum value 'jax'"),
        ('class = "GCN"\nbetween = ["relu"]\n', "between belongs to a stack"),
        ('class = "GCN"\nclasses = 1\n', "unknown field `classes`"),
        ("", "missing required field `class`"),
        ('class = "GAT"\n', r"missing convs\.0\.att_src"),
        ('class = "SAGEConv"\n', r"but .* has convs\.0 \(GCNConv\), convs\.1 \(GCNConv\)"),
        ('class = "GCNConv"\n', "what lies between the 2 layers"),
        ('class = "GCNConv"\nbetween = []\n[[layer]]\n', r"1 \[\[layer\]\] tables for 2"),
        ('class = "GCNConv"\nbetween = ["softmax"]\n', "activation 'softmax'"),
        ('class = "GCNConv"\nbetween = [{op = "linear", key = "l"}]\n', r"missing l\.weight"),
        ('class = "GCNConv"\nbetween = [{key = "l"}]\n', "needs op = NAME"),
        ('class = "GCNConv"\nbetween = ["linear"]\n', "missing .no key given for linear"),
        ('class = "GCNConv"\nlayers = ["a", "b"]\nbetween = []\n', r"missing a\.lin\.weight"),
        ('prefix = "net."\nclass = "GCN"\n', "no key starts with 'net.'"),
        ('class = "GCN"\nedge_weight = 1\n', "Expected `bool"),
    ],
)
def test_model_files(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_model(model_file(tmp_path, text, build("GCN", {}).state_dict()))


def without(tensors: dict[str, Tensor]) -> None:
    del tensors["convs.1.lin.weight"], tensors["convs.1.bias"]


KEYS: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (without, r"num_layers = 2, but the keys of .* say 1"),
    (lambda t: t.pop("convs.1.lin.weight"), r"missing convs\.1\.lin\.weight"),
    (lambda t: t.pop("convs.0.bias"), r"missing convs\.0\.bias|unexpected convs\.1\.bias"),
    (lambda t: t.update({"extra.weight": torch.ones(1)}), r"unexpected extra\.weight"),
    (lambda t: t.update({"convs.0.bias": torch.ones(7)}), r"convs\.0\.bias is \[7\], not \[16\]"),
    (lambda t: t.update({"convs.1.lin.weight": torch.ones(3, 8)}),
     r"convs\.1\.lin\.weight is \[3, 8\], not \[3, 16\]"),
    (lambda t: t.update({"convs.0.lin.weight": torch.ones(16)}), "not 2-dimensional"),
    (lambda t: t.update({"convs.0.bias": torch.ones(16).long()}), r"bias is of type torch\.int64"),
    (lambda t: t.update({"convs.0.bias": torch.ones(16, dtype=torch.complex64)}), "complex"),
    (lambda t: t.update({"convs.0.bias": torch.ones(16).to_sparse()}), "stored as torch.sparse"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "text"), KEYS)
def test_keys(tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], text: str) -> None:
    tensors = dict(build("GCN", {}).state_dict())
    change(tensors)
    torch.save(tensors, tmp_path / "w.pt")
    with pytest.raises(UsageError, match=text):
        load_model(model_file(tmp_path, 'class = "GCN"\n[kwargs]\nnum_layers = 2\n', tensors))


def test_every_wrong_key_is_named_at_once(tmp_path: Path) -> None:
    tensors = dict(build("GraphSAGE", {"norm": "batch_norm"}).state_dict())
    del tensors["norms.0.module.running_var"]
    tensors["odd"] = torch.ones(1)
    tensors["convs.0.lin_r.weight"] = torch.ones(2, 2)
    with pytest.raises(UsageError) as caught:
        load_model(model_file(tmp_path, 'class = "GraphSAGE"\n', tensors))
    for part in ("lin_r.weight is [2, 2], not [16, 5]", "missing norms.0.module.running_var",
                 "unexpected odd", "hyades model describe"):  # fmt: skip
        assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_quantised_weights(tmp_path: Path) -> None:
    tensors = dict(build("GCN", {}).state_dict())
    tensors["convs.0.lin.weight"] = torch.zeros(16, 5, dtype=torch.int8)
    torch.save(tensors, tmp_path / "w.pt")
    with pytest.raises(UsageError, match=r"convs\.0\.lin\.weight is of type torch\.int8"):
        load_model(tmp_path / "w.pt")


def test_what_is_no_model() -> None:
    with pytest.raises(UsageError, match="not a dict"):
        load_model({})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="needs no model file"):
        load_model(build("GCN", {}), "model.toml")
