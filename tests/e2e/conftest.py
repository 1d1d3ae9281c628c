"""Volumes that several end-to-end tests share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hyades.deploy.ingest import ingest

FACEBOOK = Path(__file__).parents[3] / "shared" / "data" / "facebook_pages"


@pytest.fixture(scope="session")
def facebook() -> Path:
    """Return the folder of the facebook_pages data; skip where it is absent."""
    if not FACEBOOK.is_dir():
        pytest.skip(f"{FACEBOOK} is absent; it comes with the shared data, not the project")
    return FACEBOOK


@pytest.fixture(scope="session")
def facebook_volume(
    facebook: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function from a reorder mode to the volume of facebook_pages in that order."""
    folder = tmp_path_factory.mktemp("facebook")

    def volume(reorder: str) -> Path:
        path = folder / f"{reorder}.vol"
        if not path.exists():
            ingest(
                path, edges=facebook / "edge_index.npy", features=facebook / "features.npy",
                range_rows=1024, reorder=reorder,
            )  # fmt: skip
        return path

    return volume


@pytest.fixture(scope="session")
def facebook_model(facebook: Path) -> Callable[[str], tuple[nn.Module, Any]]:
    """Return a function from a checkpoint's name to its live module and PyG's output."""
    models = pytest.importorskip("torch_geometric.nn.models", reason="no torch_geometric")
    entries = json.loads((facebook / "info.json").read_text())["models"]

    def model(name: str) -> tuple[nn.Module, Any]:
        entry = entries[name]
        module = getattr(models, entry["class"].rsplit(".", 1)[-1])(**entry["kwargs"])
        module.load_state_dict(torch.load(facebook / f"{name}.pt", weights_only=True))
        return module.eval(), np.load(facebook / f"{name}_reference.npy")

    return model
