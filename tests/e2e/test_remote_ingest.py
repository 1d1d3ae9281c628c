"""Ingest to URLs and stripes, the command line, and the trained checkpoints over them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.reference.runs import same_bits
from torch import nn

import hyades
from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK
from hyades.deploy.cli import cli
from hyades.deploy.ingest import ingest
from hyades.proxy.registry import open_transport
from hyades.proxy.transports.mem import forget

pytestmark = pytest.mark.timeout(280)

Volumes = Callable[[str], Path]
Models = Callable[[str], tuple[nn.Module, Any]]


@pytest.fixture
def memory_url(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"remote-{abs(hash(request.node.name))}"
    yield f"mem://{name}"
    forget(name)


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch, memory_url: str) -> str:
    """Return the URL of a blank device of 1 MiB that cannot grow."""
    from hyades.proxy.transports import mem

    open_transport(f"{memory_url}?size=1MiB", create=True)

    def grow(self: Any, nblocks: int) -> None:
        if nblocks > self.nblocks:
            raise UsageError(f"a namespace of {self.nblocks} blocks: use a larger one")

    monkeypatch.setattr(mem.MemTransport, "grow", grow)
    return memory_url


def test_a_device_that_is_too_small(fixed: str) -> None:
    """Known before the edges are read; and in the middle, it is blank afterwards."""
    edges = np.random.default_rng(0).integers(0, 3000, (2, 9000))
    wide = np.zeros((3000, 200), np.float32)
    seen: list[str] = []
    needed = wide.nbytes + 12 * 3000
    missing = -(-needed // BLOCK) * BLOCK - (1 << 20)
    with pytest.raises(UsageError, match=rf"holds 1\.0 MiB, this graph .*: {missing} bytes are mi"):
        ingest(fixed, edges=edges, features=wide, progress=lambda phase, *_: seen.append(phase))
    assert "reading edges" not in seen
    with pytest.raises(UsageError, match=r"use a larger one \(\d+ bytes are missing\)"):
        ingest(fixed, edges=edges, features=wide[:, :80])
    ingest(fixed, edges=edges[:, :10], features=wide[:, :8], vertices=3000)
    with pytest.raises(UsageError, match="already holds data: pass --force"):
        ingest(fixed, edges=edges[:, :10], features=wide[:, :8], vertices=3000)
    ingest(fixed, edges=edges[:, :10], features=wide[:, :4], vertices=3000, force=True)
    with hyades.open(fixed) as volume:
        assert volume.read("features").shape == (3000, 4)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    edges, features = tmp_path / "e.npy", tmp_path / "x.npy"
    random = np.random.default_rng(3)
    np.save(edges, random.integers(0, 800, (2, 4000)))
    np.save(features, random.standard_normal((800, 24), np.float32))

    def hyades_(*arguments: Any, code: int = 0) -> str:
        result = CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="hyades")
        assert result.exit_code == code, result.output
        return result.output

    members = f"{tmp_path}/a,{tmp_path}/b"
    given = ("ingest", "--edges", edges, "--features", features)
    assert f"stripe:{members}: 800 vertices" in hyades_(*given, "--stripe", members)
    assert "already holds data: pass --force" in hyades_(*given, "--stripe", members, code=2)
    hyades_(*given, "--stripe", members, "--force")
    assert "not both" in hyades_(*given, "g.vol", "--stripe", members, code=2)
    assert "not both" in hyades_(*given, code=2)
    model = _model_file(tmp_path)
    url, out = f"stripe:{tmp_path}/b,{tmp_path}/a", tmp_path / "out.vol"
    text = hyades_("refresh", url, "--model", model, "--out", "x", "--output-volume", out)
    assert f"{out}: " in text
    assert f"{url}: " in text
    assert f"outputs of {url}, uuid " in hyades_("inspect", out)
    assert '"source_uuid"' in hyades_("inspect", out, "--json")
    hyades_("inspect", url, "--verify")
    hyades_("export", out, "x", "x_out.npy")
    hyades_("refresh", url, "--model", model, "--out", "x")
    hyades_("export", url, "x", "x_in.npy")
    assert (tmp_path / "x_out.npy").read_bytes() == (tmp_path / "x_in.npy").read_bytes()


def _model_file(folder: Path) -> Path:
    from hyades.deploy.bench.weights import ModelSpec, write_weights

    return write_weights(ModelSpec("sage", (24, 16, 8)), folder / "model").model


# -- trained checkpoints


@pytest.mark.parametrize("name", ["gcn", "graphsage", "gin", "gat"])
def test_checkpoints(
    facebook: Path, facebook_volume: Volumes, facebook_model: Models, tmp_path: Path, name: str
) -> None:
    """Local, on a stripe of two, and with the outputs elsewhere."""
    module, _ = facebook_model(name)
    source, out = facebook_volume("none"), tmp_path / "out.vol"
    hyades.refresh(source, module, out="x", threads=2, force=True)
    with hyades.open(source) as volume:
        expected = volume.read("x")
    url = f"stripe:{tmp_path}/a,{tmp_path}/b"
    ingest(url, edges=facebook / "edge_index.npy", features=facebook / "features.npy",
           range_rows=1024)  # fmt: skip
    hyades.refresh(url, module, out="x", threads=2)
    hyades.refresh(url, module, out="x", threads=2, output_volume=out)
    for place in (url, out):
        with hyades.open(place) as volume:
            assert same_bits(volume.read("x"), expected)
