"""The forms of the Python API that the documentation promises, as they stand there."""

from pathlib import Path

import numpy as np
import pytest
import torch

import hyades
from hyades.common.errors import UsageError
from hyades.deploy.export import export
from hyades.deploy.ingest import ingest

models = pytest.importorskip("torch_geometric.nn.models", reason="no torch_geometric")


@pytest.fixture
def url(tmp_path: Path) -> str:
    rng = np.random.default_rng(5)
    features = rng.standard_normal((300, 6), dtype=np.float32)
    ingest(tmp_path / "g.vol", edges=rng.integers(0, 300, (2, 900)), features=features)
    return str(tmp_path / "g.vol")


@pytest.fixture
def module() -> torch.nn.Module:
    torch.manual_seed(3)
    return models.GraphSAGE(6, 5, 2, 4).eval()


def test_open_refresh_read(url: str, module: torch.nn.Module, tmp_path: Path) -> None:
    volume = hyades.open(url)
    hyades.refresh(volume, module, out="NAME", memory="2GiB", fanout=None, seed=0)
    rows = volume.read("NAME")
    assert rows.shape == (300, 4)
    assert rows.dtype == np.float32
    assert not volume.volume.writable
    export(volume, "NAME", str(tmp_path / "out.npy"))
    volume.close()
    assert np.array_equal(np.load(tmp_path / "out.npy"), rows)


def test_a_refused_refresh_leaves_the_handle_readable(url: str, module: torch.nn.Module) -> None:
    with hyades.open(url) as volume:
        with pytest.raises(UsageError, match="layers"):
            hyades.refresh(volume, module, out="NAME", fanout=[3])
        with pytest.raises(UsageError, match="one number for each layer"):
            hyades.refresh(volume, module, out="NAME", fanout=10)  # type: ignore[arg-type]
        assert volume.read("features").shape == (300, 6)


def test_passes_read_more_than_one_scan(url: str, module: torch.nn.Module, tmp_path: Path) -> None:
    small = tmp_path / "small.vol"
    rng = np.random.default_rng(6)
    features = rng.standard_normal((60_000, 64), dtype=np.float32)
    ingest(small, edges=rng.integers(0, 60_000, (2, 90_000)), features=features)
    torch.manual_seed(3)
    wide = models.GraphSAGE(64, 64, 1, 64).eval()
    once = hyades.refresh(small, wide, out="a", plan="resident")
    assert once.report.traffic.amplification == 1.0
    tight = hyades.refresh(small, wide, out="b", plan="passes:8", memory="24MiB")
    assert tight.report.traffic.amplification > 1.5
