"""A refresh over dma://: the same bits as here, also where the target is killed in the middle."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.reference import dma, doca
from tests.reference.killed import LEAN, local_run, refresh_while_killed
from tests.reference.nvme import stopped_at_end
from tests.reference.runs import refresh_rows, same_bits, three_layers

import hyades
from hyades.target_side.namespaces import FileNamespace

Rows = NDArray[np.float32]
WAYS = {
    "buffers": {"buffer": "1MiB"},
    "small buffers": {"buffer": "64KiB", "buffers": 2},
    "zero copy": {"zerocopy": 1},
}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Rows]]:
    """Give a volume with room behind it, and the rows of a local run."""
    yield local_run(tmp_path_factory.mktemp("local"))
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
        refresh_while_killed(target, url, local[1], 1)
