"""PyG's models in the variants that the engine must compute, for end-to-end tests."""

from typing import Any

import pytest
from torch import nn

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")

# By class: arguments beyond those of `make`.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "GCN": [
        {},
        {"improved": True},
        {"normalize": False},
        {"add_self_loops": False},
        {"bias": False},
        {"num_layers": 1},
        {"num_layers": 1, "jk": "cat", "norm": "layer_norm"},
        {"num_layers": 4},
        {"norm": "batch_norm", "act_first": True},
        {"norm": "layer_norm", "num_layers": 3},
        {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}},
        {"norm": "layer_norm", "jk": "cat"},
        {"jk": "cat", "num_layers": 3},
        {"jk": "max", "num_layers": 3},
        {"act": nn.PReLU(16)},
        {"act": "elu", "act_kwargs": {"alpha": 0.3}},
    ],
    "GraphSAGE": [
        {},
        {"aggr": "sum"},
        {"aggr": "max"},
        {"aggr": "max", "num_layers": 3, "jk": "max"},
        {"normalize": True},
        {"project": True},
        {"project": True, "aggr": "max"},
        {"root_weight": False},
        {"root_weight": False, "aggr": "max", "normalize": True, "bias": False},
        {"num_layers": 1, "aggr": "sum"},
        {"num_layers": 4, "norm": "batch_norm"},
        {"norm": "layer_norm", "act_first": True, "act": "gelu"},
        {"norm": "layer_norm", "aggr": "max", "jk": "cat"},
        {"jk": "cat", "aggr": "max", "act": "leaky_relu"},
    ],
    "GIN": [
        {},
        {"eps": -1.0},
        {"train_eps": True, "eps": 0.5},
        {"aggr": "mean"},
        {"aggr": "max"},
        {"aggr": "max", "norm": "batch_norm", "jk": "max"},
        {"num_layers": 1},
        {"num_layers": 4, "act": "tanh"},
        {"norm": "layer_norm", "jk": "cat"},
        {"norm": "batch_norm", "act_first": True, "act": nn.PReLU()},
    ],
    "GAT": [
        {},
        {"heads": 4},
        {"heads": 4, "jk": "cat"},
        {"heads": 2, "concat": False},
        {"heads": 2, "concat": False, "jk": "max"},
        {"heads": 4, "residual": True},
        {"heads": 4, "residual": True, "bias": False, "add_self_loops": False},
        {"add_self_loops": False},
        {"negative_slope": 0.01, "heads": 8, "num_layers": 3},
        {"num_layers": 1, "heads": 3, "out_channels": 21},
        {"num_layers": 4, "heads": 2, "norm": "layer_norm"},
        {"norm": "batch_norm", "heads": 2, "act": "silu"},
    ],
}
CASES = [(cls, kwargs) for cls, variants in VARIANTS.items() for kwargs in variants]


def make(cls: str, kwargs: dict[str, Any], width: int = 5) -> nn.Module:
    """Return a model of *width* -> 16 -> 3 channels unless *kwargs* say otherwise."""
    arguments = {"in_channels": width, "hidden_channels": 16, "num_layers": 2, "out_channels": 3}
    module: nn.Module = getattr(pyg.models, cls)(**{**arguments, **kwargs})
    return module


# What GINConv takes as its MLP, of 5 channels.
MLPS = {
    "linear": lambda: nn.Linear(5, 4),
    "no linear first": lambda: nn.Sequential(nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)),
    "no linear": lambda: nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.LayerNorm(5)),
    "wide": lambda: nn.Sequential(nn.Linear(5, 40, bias=False), nn.GELU(), nn.Linear(40, 4)),
    "batch norm": lambda: pyg.MLP([5, 9, 8, 4]),
    "layer norms over the graph": lambda: pyg.MLP([5, 9, 7, 4], norm="layer_norm"),
    "layer norm over the graph last": lambda: nn.Sequential(nn.Linear(5, 4), pyg.LayerNorm(4)),
    "layer norm over the graph first": lambda: nn.Sequential(pyg.LayerNorm(5), nn.Linear(5, 4)),
    "two in a row": lambda: nn.Sequential(
        nn.Linear(5, 4), pyg.LayerNorm(4), pyg.LayerNorm(4, affine=False), nn.ReLU()
    ),
    "only one": lambda: pyg.LayerNorm(5),
}  # fmt: skip
