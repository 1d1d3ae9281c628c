"""A refresh over dma://: the same bits as here, also where the target is killed in the middle."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.faults.test_nvme_refresh import Killer
from tests.reference import dma, doca
from tests.reference.nvme import stopped_at_end
from tests.reference.runs import refresh_rows, same_bits, three_layers, write_volume

import hyades
from hyades.common.units import MIB
from hyades.target_side.namespaces import FileNamespace

Rows = NDArray[np.float32]
LEAN = {"memory": "64MiB", "plan": "log:12", "force": True, "checkpoint_seconds": 0.05}
WAYS = {
    "buffers": {"buffer": "1MiB"},
    "small buffers": {"buffer": "64KiB", "buffers": 2},
    "zero copy": {"zerocopy": 1},
}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Rows]]:
    """Give a volume with room behind it, and the rows of a local run."""
    path = write_volume(tmp_path_factory.mktemp("local") / "pages.vol")
    with hyades.open(path, writable=True) as volume:
        rows, _ = refresh_rows(volume, three_layers("gcn"), "here", **LEAN)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 64 * MIB)
    yield path, rows
    doca.remove_builds()


@pytest.mark.parametrize("engine", ["memcpy", "doca"])
@pytest.mark.parametrize("way", WAYS)
def test_a_refresh(tmp_path, local, way, engine, monkeypatch):
    if engine == "doca":
        doca.use(monkeypatch, "late=2,tasks=9,max=300000")
    path = tmp_path / "pages.vol"
    path.write_bytes(local[0].read_bytes())
    with stopped_at_end() as servers:
        servers.append(dma.start({1: FileNamespace(path)}, engine=engine))
        url = dma.url(servers[0], **WAYS[way])
        with hyades.open(url, writable=True) as volume:
            rows, _ = refresh_rows(volume, three_layers("gcn"), "there", **LEAN)
        assert same_bits(rows, local[1])
    with hyades.open(path) as volume:
        assert same_bits(volume.read("there"), local[1])
        assert list(volume.volume.verify(["output/there"])) == []


@pytest.mark.parametrize("way", ["small buffers", "zero copy"])
def test_the_target_is_killed(tmp_path, local, way):
    path = tmp_path / "pages.vol"
    path.write_bytes(local[0].read_bytes())
    with dma.TargetProcess(path) as target:
        options = {"reconnect_delay": 0.02, "kato": 2, "depth": 8, **WAYS[way]}
        url = dma.path_url(target.socket, **options)
        with hyades.open(url, writable=True) as volume:
            killer = Killer(target, 1)
            killer.start()
            try:
                rows, _ = refresh_rows(volume, three_layers("gcn"), "there", **LEAN)
                while not killer.kills:  # it was faster
                    rows, _ = refresh_rows(volume, three_layers("gcn"), "there", **LEAN)
            finally:
                killer.stop()
        assert same_bits(rows, local[1])
        with hyades.open(url) as volume:  # what lies there, through a new connection
            assert same_bits(volume.read("there"), local[1])
            assert list(volume.volume.verify(["output/there"])) == []
