"""DGL's layers, refreshed from a volume, against outputs of DGL itself."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.reference.engine import error, make_volume, refresh
from torch import Tensor

from hyades.gpu_side.models import Model, load_model

GOLDEN = Path(__file__).parent.parent / "golden" / "dgl_models.safetensors"
# Layers that tests/golden/make_dgl_models.py wrote, and what their keys do not tell.
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "graph_both": ("GraphConv", {"norm": "both"}),
    "graph_right": ("GraphConv", {"norm": "right"}),
    "graph_left": ("GraphConv", {"norm": "left"}),
    "graph_none": ("GraphConv", {"norm": "none"}),
    "graph_wide": ("GraphConv", {"activation": "relu"}),
    "graph_no_weight": ("GraphConv", {"weight": False, "in_feats": 6}),
    "sage_mean_wide": ("SAGEConv", {"activation": "tanh"}),
    "sage_gcn": ("SAGEConv", {"aggregator_type": "gcn"}),
    "sage_gcn_wide": ("SAGEConv", {"aggregator_type": "gcn", "bias": False}),
    "sage_pool": ("SAGEConv", {"aggregator_type": "pool"}),
    "sage_norm": ("SAGEConv", {"norm": "layer_norm", "activation": "elu"}),
    "gin_sum": ("GINConv", {"aggregator_type": "sum", "activation": "relu"}),
    "gin_max": ("GINConv", {"aggregator_type": "max"}),
    "gat": ("GATConv", {"num_heads": 3, "concat": True}),
    "gat_residual": ("GATConv", {"residual": True, "negative_slope": 0.05, "concat": True}),
    "gat_identity": ("GATConv", {"residual": True, "activation": "elu", "concat": True}),
}


def golden(name: str) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
    """Return (state dict, x, edge_index, output of DGL)."""
    every = load_file(GOLDEN)
    tensors = {k.removeprefix(f"{name}/"): v for k, v in every.items() if k.startswith(f"{name}/")}
    return tensors, every["x"], every["edge_index"], tensors.pop("OUTPUT")


def layer(folder: Path, name: str, tensors: dict[str, Tensor]) -> Model:
    cls, kwargs = LAYERS[name]
    torch.save(tensors, folder / "w.pt")
    entry = {"class": cls, "framework": "dgl", "weights": "w.pt", "kwargs": kwargs, "layers": [""]}
    (folder / "model.json").write_text(json.dumps(entry))
    return load_model(folder / "model.json")


@pytest.mark.parametrize("name", LAYERS)
def test_same_as_dgl(tmp_path: Path, name: str) -> None:
    tensors, x, edges, expected = golden(name)
    model = layer(tmp_path, name, tensors)
    volume = make_volume(tmp_path / "g.vol", edges, x, range_rows=4)
    assert refresh(volume, model)[1].graph.vertices > 8, "several ranges"
    for plan in ("resident", "passes:3", "log:1"):
        rows, _ = refresh(volume, model, plan=plan)
        assert error(rows, expected.flatten(1).double().numpy()) <= 2e-6


@pytest.mark.parametrize("norm", ["graph_both", "graph_left", "graph_right"])
def test_norms_count_the_edges_of_the_whole_graph(tmp_path: Path, norm: str) -> None:
    """On a larger graph than the golden one, with loops and duplicates: A[v, u] counts u -> v."""
    tensors, _, _, _ = golden(norm)
    model = layer(tmp_path, norm, tensors)
    rng = np.random.default_rng(3)
    edges = np.concatenate([rng.integers(0, 60, (2, 300)), np.full((2, 2), 7)], axis=1)
    x = rng.standard_normal((70, 6)).astype(np.float32)
    matrix = np.zeros((70, 70))
    np.add.at(matrix, (edges[1], edges[0]), 1)
    received = np.maximum(matrix.sum(1), 1)[:, None]
    sent = np.maximum(matrix.sum(0), 1)[None, :]
    scaled = {
        "graph_both": matrix / np.sqrt(received) / np.sqrt(sent),
        "graph_left": matrix / sent,
        "graph_right": matrix / received,
    }[norm]
    weight = tensors["weight"].double().numpy()
    expected = scaled @ x.astype(np.float64) @ weight + tensors["bias"].double().numpy()
    volume = make_volume(tmp_path / "g.vol", edges, x, range_rows=16)
    for plan in ("resident", "passes:3", "log:1"):
        assert error(refresh(volume, model, plan=plan)[0], expected) <= 2e-6
