"""Trained checkpoints of a public graph against PyG's outputs that came with them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.reference.interpreter import run

from hyades.gpu_side.models import describe, load_model

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "facebook_pages"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(),
    reason=f"{FOLDER} is absent; it comes with the shared data, not the project",
)
NAMES = ("gcn", "graphsage", "gin", "gat")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bare", [True, False])
def test_reference(tmp_path: Path, name: str, bare: bool) -> None:
    source = FOLDER / f"{name}.pt"
    if not bare:
        entry = json.loads((FOLDER / "info.json").read_text())["models"][name]
        source = tmp_path / "model.json"
        source.write_text(
            json.dumps(
                {
                    "class": entry["class"],
                    "weights": str(FOLDER / f"{name}.pt"),
                    "kwargs": entry["kwargs"],
                }
            )
        )
    x = torch.from_numpy(np.load(FOLDER / "features.npy")).float()
    edges = torch.from_numpy(np.load(FOLDER / "edge_index.npy")).long()
    got = run(load_model(source), x, edges).numpy()
    expected = np.load(FOLDER / f"{name}_reference.npy").astype(np.float64)
    assert np.abs(got - expected).max() <= 1e-4
    assert np.linalg.norm(got - expected) / np.linalg.norm(expected) <= 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_describe(name: str) -> None:
    entry = json.loads((FOLDER / "info.json").read_text())["models"][name]
    found = describe(FOLDER / f"{name}.pt")
    assert found.cls == entry["class"].rsplit(".", 1)[-1]
    assert found.problems == []
    kwargs = dict(entry["kwargs"])
    if kwargs.pop("norm", None):
        assert found.known["norm"] == "BatchNorm"
    assert kwargs.items() <= found.known.items()
