"""State dicts with a model file, and bare ones, against the live module they came from."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.reference.gnn import features, messy_graph, randomised
from tests.reference.interpreter import run
from torch import Tensor, nn

from hyades.common.errors import UsageError
from hyades.gpu_side.models import Model, describe, load_model

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")

DIMS = {"in_channels": 5, "hidden_channels": 16, "num_layers": 2, "out_channels": 3}


def output(model: Model) -> Tensor:
    vertices, edges = messy_graph()
    return run(model, features(vertices, model.in_channels), edges)


def toml(value: Any) -> str:
    """Return a value as TOML; tables inline."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(v)}" for key, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(toml(v) for v in value) + "]"
    return json.dumps("none" if value is None else value)


def model_file(folder: Path, text: str, tensors: dict[str, Tensor], weights: str = "w.pt") -> Path:
    torch.save(tensors, folder / weights)
    path = folder / "model.toml"
    path.write_text(f'weights = "{weights}"\n{text}')
    return path


def kwargs_text(cls: str, kwargs: dict[str, Any]) -> str:
    lines = "\n".join(f"{key} = {toml(value)}" for key, value in kwargs.items())
    return f'class = "{cls}"\n[kwargs]\n{lines}\n'


# Constructor arguments, and for the model file what replaces those that are modules.
COMMON: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"num_layers": 1}, {}),
    ({"num_layers": 1, "jk": "cat"}, {}),
    ({"num_layers": 3, "jk": "cat"}, {}),
    ({"jk": "max", "act": "tanh"}, {}),
    ({"jk": "last", "norm": "batch_norm"}, {}),
    ({"norm": "BatchNorm", "act_first": True, "norm_kwargs": {"eps": 0.1}}, {}),
    ({"norm": "batch_norm", "norm_kwargs": {"affine": False}}, {}),
    ({"norm": "layer_norm"}, {}),
    ({"norm": "layer", "norm_kwargs": {"mode": "node"}, "jk": "cat"}, {}),
    ({"norm": "layer_norm", "norm_kwargs": {"affine": False}}, {}),
    ({"norm": nn.BatchNorm1d(16)}, {"norm": "torch.nn.BatchNorm1d"}),
    ({"norm": nn.LayerNorm(16)}, {"norm": "torch.nn.LayerNorm"}),
    ({"act": None}, {}),
    ({"act": "leaky-relu", "act_kwargs": {"negative_slope": 0.3}}, {}),
    ({"act": "PReLU", "jk": "cat"}, {}),
    ({"act": "elu", "dropout": 0.5, "act_first": True, "norm": "batch_norm"}, {}),
]
OWN: dict[str, list[dict[str, Any]]] = {
    "GCN": [
        {"improved": True},
        {"normalize": False},
        {"add_self_loops": False, "bias": False},
        {"act": nn.PReLU(16)},
    ],
    "GraphSAGE": [
        {"aggr": "max", "bias": False},
        {"project": True, "normalize": True},
        {"root_weight": False, "aggr": "sum"},
    ],
    "GIN": [{"train_eps": True, "eps": 0.5}, {"aggr": "max", "norm": "batch_norm", "jk": "max"}],
    "GAT": [
        {"heads": 4},
        {"heads": 4, "residual": True},
        {"heads": 4, "jk": "cat"},
        {"heads": 2, "concat": False},
        {"heads": 2, "concat": False, "jk": "max", "num_layers": 3},
        {"heads": 2, "bias": False, "negative_slope": 0.05},
        {"heads": 2, "bias": False, "residual": True, "add_self_loops": False},
        {"heads": 2, "concat": False, "bias": False, "jk": "cat"},
        {"heads": 2, "jk": "last", "num_layers": 1, "bias": False},
    ],
}
CASES = [
    (cls, made, {**made, **written})
    for cls in OWN
    for made, written in [*COMMON, *((own, {}) for own in OWN[cls])]
]


def build(cls: str, kwargs: dict[str, Any]) -> nn.Module:
    module: nn.Module = getattr(pyg.models, cls)(**{**DIMS, **kwargs})
    return randomised(module)


def written(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a file, with modules by name."""
    result = {**DIMS, **kwargs}
    if isinstance(result.get("act"), nn.PReLU):
        result |= {"act": "prelu", "act_kwargs": {"num_parameters": result["act"].num_parameters}}
    return result


@pytest.mark.parametrize(("cls", "made", "text"), CASES, ids=str)
def test_model_file(tmp_path: Path, cls: str, made: dict[str, Any], text: dict[str, Any]) -> None:
    module = build(cls, made)
    path = model_file(tmp_path, kwargs_text(cls, written(text)), module.state_dict())
    loaded = load_model(path)
    assert torch.equal(output(loaded), output(load_model(module)))
    if "act" in text and "norm" in text:
        assert "norm =" not in loaded.description
    as_json = tmp_path / "model.json"
    as_json.write_text(json.dumps(tomllib.loads(path.read_text())))
    assert torch.equal(output(load_model(as_json)), output(loaded))


@pytest.mark.parametrize("cls", list(OWN))
def test_safetensors_and_dotted_class(tmp_path: Path, cls: str) -> None:
    module = build(cls, {"norm": "batch_norm"})
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    path = tmp_path / "model.toml"
    path.write_text(
        f'class = "torch_geometric.nn.models.{cls}"\nweights = "w.safetensors"\nframework = "pyg"\n'
        '[kwargs]\nnorm = "batch_norm"\n'
    )
    assert torch.equal(output(load_model(path)), output(load_model(module)))
    alone = load_model(tmp_path / "w.safetensors")
    assert torch.equal(output(alone), output(load_model(module)))


def test_prelu_of_gin_in_safetensors_without_shared_tensors(tmp_path: Path) -> None:
    """The safetensors format keeps one name of shared tensors: the slope is under one only."""
    module = build("GIN", {"act": "prelu", "norm": "batch_norm"})
    tensors = {k: v for k, v in module.state_dict().items() if not k.endswith("nn.act.weight")}
    save_file(tensors, tmp_path / "w.safetensors")
    alone = load_model(tmp_path / "w.safetensors")
    assert torch.equal(output(alone), output(load_model(module)))


DEFAULTS = [
    (cls, made)
    for cls, made, _ in CASES
    if not set(made)
    & {
        "act_first",
        "act_kwargs",
        "improved",
        "normalize",
        "add_self_loops",
        "aggr",
        "negative_slope",
    }
    and made.get("jk") not in ("max", "last")
    and made.get("act", "relu") in ("relu", "PReLU")
    and not (made.get("norm_kwargs") or isinstance(made.get("norm"), nn.LayerNorm))
]


@pytest.mark.parametrize(("cls", "made"), DEFAULTS, ids=str)
def test_bare_checkpoint_and_described_file(tmp_path: Path, cls: str, made: dict[str, Any]) -> None:
    """Where PyG's defaults hold, the file alone is enough, and so is its described model file."""
    module = build(cls, made)
    torch.save(module.state_dict(), tmp_path / "w.pt")
    expected = output(load_model(module))
    alone = load_model(tmp_path / "w.pt")
    assert torch.equal(output(alone), expected)
    assert "assumed, as no key tells" in alone.description
    text = describe(tmp_path / "w.pt").toml
    (tmp_path / "model.toml").write_text(text)
    loaded = load_model(tmp_path / "model.toml")
    assert torch.equal(output(loaded), expected)


def test_description_lists_what_is_assumed(tmp_path: Path) -> None:
    module = build("GraphSAGE", {})
    torch.save(module.state_dict(), tmp_path / "w.pt")
    text = load_model(tmp_path / "w.pt").description
    assert text.splitlines()[0].endswith("5 -> 16 -> 3")
    for assumption in (
        "GraphSAGE",
        "aggr = mean",
        "normalize = false",
        "norm = none",
        "act = relu",
    ):
        assert assumption in text
    path = model_file(
        tmp_path,
        kwargs_text("GraphSAGE", {"aggr": "mean", "normalize": False, "norm": None, "act": "relu"}),
        module.state_dict(),
    )
    assert "assumed" not in load_model(path).description


def test_what_keys_cannot_tell_must_be_given(tmp_path: Path) -> None:
    torch.save(build("GCN", {"jk": "max"}).state_dict(), tmp_path / "w.pt")
    with pytest.raises(UsageError, match=r"do not tell jk .*'last' or 'max'"):
        load_model(tmp_path / "w.pt")
    torch.save(build("GAT", {"heads": 2, "bias": False}).state_dict(), tmp_path / "w.pt")
    with pytest.raises(UsageError, match="do not tell out_channels"):
        load_model(tmp_path / "w.pt")


@pytest.mark.parametrize("given", [True, False])
def test_gat_without_bias_needs_out_channels(tmp_path: Path, given: bool) -> None:
    made = {"heads": 2, "bias": False, "out_channels": 6 if given else None}
    module = build("GAT", made)
    path = model_file(tmp_path, kwargs_text("GAT", {**DIMS, **made}), module.state_dict())
    assert torch.equal(output(load_model(path)), output(load_model(module)))


def test_config_beside_the_checkpoint(tmp_path: Path) -> None:
    module = build("GCN", {"act": "tanh"})
    torch.save(module.state_dict(), tmp_path / "w.pt")
    config = tmp_path / "model.json"
    config.write_text('{"class": "GCN", "kwargs": {"act": "tanh"}}')
    assert torch.equal(output(load_model(tmp_path / "w.pt", config)), output(load_model(module)))
    with pytest.raises(UsageError, match="needs weights"):
        load_model(config)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda sd: {"state_dict": sd, "epoch": 3},
        lambda sd: {"model_state_dict": sd, "optimizer": {"lr": 1e-3}},
        lambda sd: {f"module.{key}": value for key, value in sd.items()},
        lambda sd: {f"_orig_mod.{key}": value for key, value in sd.items()},
    ],
)
def test_wrapped_state_dicts(tmp_path: Path, wrap: Callable[[Any], Any]) -> None:
    module = build("GCN", {})
    torch.save(wrap(module.state_dict()), tmp_path / "w.pt")
    model = load_model(tmp_path / "w.pt")
    assert torch.equal(output(model), output(load_model(module)))
    assert "took the entry" in model.description or "removed the prefix" in model.description


def test_prefix(tmp_path: Path) -> None:
    module = build("GCN", {})
    tensors = {f"encoder.{key}": value for key, value in module.state_dict().items()}
    tensors["decoder.weight"] = torch.ones(2, 2)
    path = model_file(tmp_path, 'prefix = "encoder."\nclass = "GCN"\n', tensors)
    assert torch.equal(output(load_model(path)), output(load_model(module)))


def test_gat_of_older_pyg(tmp_path: Path) -> None:
    """PyG before 2.6 kept the projection as lin_src, and the same tensor as lin_dst."""
    module = build("GAT", {"heads": 2})
    tensors = {}
    for key, value in module.state_dict().items():
        tensors[key.replace("lin.weight", "lin_src.weight")] = value
        if key.endswith("lin.weight"):
            tensors[key.replace("lin.weight", "lin_dst.weight")] = value.clone()
    torch.save(tensors, tmp_path / "w.pt")
    assert torch.equal(output(load_model(tmp_path / "w.pt")), output(load_model(module)))
    tensors["convs.0.lin_dst.weight"] += 1
    torch.save(tensors, tmp_path / "w.pt")
    with pytest.raises(UsageError, match="lin_dst differ; bipartite"):
        load_model(tmp_path / "w.pt")


def test_edge_weight_false(tmp_path: Path) -> None:
    module = build("GCN", {"improved": True})
    text = 'edge_weight = false\nclass = "GCN"\n[kwargs]\nimproved = true\n'
    model = load_model(model_file(tmp_path, text, module.state_dict()))
    vertices, edges = messy_graph()
    x = features(vertices, 5)
    weighted = run(model, x, edges, torch.rand(edges.shape[1]))
    assert torch.equal(weighted, run(load_model(module), x, edges))
    sage = 'edge_weight = true\nclass = "GraphSAGE"\n'
    with pytest.raises(UsageError, match=r"convs.0 \(SAGEConv\) takes no edge weights"):
        load_model(model_file(tmp_path, sage, build("GraphSAGE", {}).state_dict()))


class Own(nn.Module):
    """A user's module with names of its own."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.conv1, self.conv2, self.bn = first, second, nn.BatchNorm1d(8)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        x = self.bn(self.conv1(x, edges)).relu()
        out: Tensor = self.head(self.conv2(x, edges))
        return out


MLP = '[{op = "linear", key = "0"}, "relu", "linear"]'
STACKS = {
    "GCNConv": (lambda: Own(pyg.GCNConv(5, 8, improved=True), pyg.GCNConv(8, 4)),
                "[[layer]]\nimproved = true\n[[layer]]\n"),
    "SAGEConv": (lambda: Own(pyg.SAGEConv(5, 8, project=True), pyg.SAGEConv(8, 4, project=True)),
                 '[kwargs]\naggr = "mean"\n'),
    "GATConv": (lambda: Own(pyg.GATConv(5, 4, heads=2), pyg.GATConv(8, 4, heads=3, concat=False)),
                ""),
    "GINConv": (
        lambda: Own(*(pyg.GINConv(nn.Sequential(nn.Linear(a, 6), nn.ReLU(), nn.Linear(6, b)))
                      for a, b in ((5, 8), (8, 4)))),
        f"[kwargs]\nnn = {MLP}\n"),
}  # fmt: skip


@pytest.mark.parametrize("cls", list(STACKS))
def test_stack_of_pyg_layers(tmp_path: Path, cls: str) -> None:
    make, extra = STACKS[cls]
    module = randomised(make())
    text = (
        f'class = "{cls}"\nlayers = ["conv1", "conv2"]\n'
        'between = [{op = "batch_norm", key = "bn"}, "relu"]\n'
        f'last = [{{op = "linear", key = "head"}}]\n{extra}'
    )
    model = load_model(model_file(tmp_path, text, module.state_dict()))
    vertices, edges = messy_graph()
    x = features(vertices, 5)
    with torch.no_grad():
        expected = module.double()(x.double(), edges)
    assert float((run(model, x, edges) - expected).norm() / expected.norm()) < 1e-6


def test_single_layer_alone(tmp_path: Path) -> None:
    module = randomised(pyg.SAGEConv(5, 4))
    torch.save(module.state_dict(), tmp_path / "w.pt")
    assert torch.equal(output(load_model(tmp_path / "w.pt")), output(load_model(module)))


def test_two_layers_alone_need_what_lies_between(tmp_path: Path) -> None:
    module = nn.ModuleDict({"conv1": pyg.GCNConv(5, 8), "conv2": pyg.GCNConv(8, 4)})
    torch.save(module.state_dict(), tmp_path / "w.pt")
    with pytest.raises(UsageError, match="what lies between the 2 layers"):
        load_model(tmp_path / "w.pt")
