"""describe: what keys tell, what they do not, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.test_models_state_dict import build

from hyades.gpu_side.models import describe

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")


def described(tmp_path: Path, cls: str, kwargs: dict[str, Any]) -> Any:
    torch.save(build(cls, kwargs).state_dict(), tmp_path / "w.pt")
    return describe(tmp_path / "w.pt")


@pytest.mark.parametrize(
    ("cls", "kwargs", "known", "unknown"),
    [
        ("GCN", {}, {"bias": True, "jk": None}, {"improved", "normalize", "act", "norm"}),
        ("GCN", {"jk": "cat"}, {"jk": "cat"}, {"act"}),
        ("GCN", {"jk": "max"}, {"out_channels": 3}, {"jk"}),
        ("GCN", {"norm": "batch_norm"}, {"norm": "BatchNorm"}, {"norm_kwargs.eps", "act_first"}),
        ("GCN", {"norm": "layer_norm"}, {}, {"norm", "norm_kwargs.mode"}),
        ("GCN", {"act": "prelu"}, {"act": "PReLU"}, {"improved"}),
        ("GraphSAGE", {"project": True}, {"project": True, "root_weight": True}, {"aggr"}),
        ("GraphSAGE", {"root_weight": False}, {"root_weight": False}, {"normalize"}),
        ("GIN", {"norm": "batch_norm"}, {"norm": "BatchNorm"}, {"aggr"}),
        ("GAT", {"heads": 4}, {"heads": 4, "residual": False}, {"negative_slope"}),
        ("GAT", {"heads": 4, "residual": True}, {"residual": True}, {"add_self_loops"}),
        ("GAT", {"heads": 4, "bias": False}, {"heads": 4}, {"out_channels"}),
    ],
)
def test_zoo(
    tmp_path: Path, cls: str, kwargs: dict[str, Any], known: dict[str, Any], unknown: set[str]
) -> None:
    found = described(tmp_path, cls, kwargs)
    assert (found.cls, found.framework, found.problems) == (cls, "pyg", [])
    expected = {"in_channels": 5, "hidden_channels": 16, "num_layers": 2, **known}
    assert expected.items() <= found.known.items()
    assert unknown <= {entry.name for entry in found.unknown}
    assert not {entry.name for entry in found.unknown} & set(found.known)
    text = found.text()
    assert f"w.pt: {cls} (PyG)" in text
    assert "the keys do not tell" in text
    assert 'weights = "w.pt"' in text
    if "jk" in unknown or "out_channels" in unknown:
        assert "must be given" in text


def test_layers_and_counts(tmp_path: Path) -> None:
    found = described(tmp_path, "GAT", {"heads": 4})
    assert [layer[1:] for layer in found.layers] == [("GATConv", 5, 16), ("GATConv", 16, 3)]
    assert found.tensors == 8
    assert found.parameters == sum(p.numel() for p in build("GAT", {"heads": 4}).parameters())


@pytest.mark.parametrize(
    ("cls", "kwargs", "problem"),
    [
        ("GAT", {"v2": True}, "convs.0 is a GATv2Conv, which is not supported"),
        ("GCN", {"norm": "graph_norm"}, "norm 'GraphNorm' is not supported"),
        ("GCN", {"jk": "lstm"}, "jk='lstm' is not supported"),
        ("GCN", {"norm": pyg.MessageNorm(learn_scale=True)}, "keys norms.0.scale is not supported"),
    ],
)
def test_unsupported(tmp_path: Path, cls: str, kwargs: dict[str, Any], problem: str) -> None:
    found = described(tmp_path, cls, kwargs)
    assert len(found.problems) == 1
    assert problem in found.problems[0]
    assert f"problem: {found.problems[0]}" in found.text()


def test_not_recognised(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3, 4, 5)}, tmp_path / "w.pt")
    found = describe(tmp_path / "w.pt")
    assert found.problems == ["no graph convolution is recognised in weight"]
    assert "not recognised (unknown framework)" in found.text()


def test_own_module(tmp_path: Path) -> None:
    module = torch.nn.ModuleDict(
        {"conv10": pyg.GCNConv(8, 3), "conv9": pyg.GCNConv(5, 8), "bn": torch.nn.BatchNorm1d(8)}
    )
    torch.save(module.state_dict(), tmp_path / "w.pt")
    found = describe(tmp_path / "w.pt")
    assert [layer[0] for layer in found.layers] == ["conv9", "conv10"]
    assert "bn.weight" in found.problems[0]
    assert 'layers = ["conv9", "conv10"]' in found.toml
