"""A refresh of a volume behind SPDK (the stand-in) gives the bits of a local one."""

import shutil

import numpy as np
import pytest
from tests.reference.runs import EDGES, three_layers, write_volume
from tests.reference.spdk import ADDRESS, NQN, StandIn, needs_compiler, remove_builds

import hyades
from hyades.common.errors import HyadesError
from hyades.common.layout import BLOCK

pytestmark = needs_compiler
VERTICES = 3000
ROOM = 4096  # blocks that outputs may take


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    yield
    remove_builds()


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return write_volume(
        tmp_path_factory.mktemp("spdk") / "graph.vol", vertices=VERTICES, edges=EDGES // 2
    )


@pytest.fixture
def stand_in(monkeypatch, tmp_path, local):
    """A namespace that holds a copy of the volume, and room behind it."""
    stand_in = StandIn(monkeypatch, tmp_path)
    path = stand_in.folder / NQN
    shutil.copyfile(local, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // BLOCK * BLOCK + ROOM * BLOCK)
    return stand_in


def rows(volume, kind, **options):
    """Refresh *volume* (a path or a URL) and return the output in original order."""
    with hyades.open(volume, writable=True) as handle:
        hyades.refresh(handle, three_layers(kind), out="x", threads=2, **options)
    with hyades.open(volume) as handle:
        assert list(handle.volume.verify()) == []
        return np.asarray(handle.read("x"))


@pytest.mark.parametrize(
    ("kind", "options", "faults"),
    [
        ("sage", {"plan": "resident"}, {}),
        ("gat", {"plan": "log:2"}, {"sector": 512, "maxio": 65536, "hold": 1, "enomem": 5}),
        ("sage", {"plan": "passes:2"}, {"break": 40, "breaks": 8, "fail": 1, "epoch": 1}),
    ],
    ids=["plain", "unwilling", "lost and found"],
)
def test_the_same_bits(local, stand_in, tmp_path, kind, options, faults):
    copy = tmp_path / "copy.vol"
    shutil.copyfile(local, copy)
    expected = rows(copy, kind, **options)
    stand_in.faults(**faults)
    found = rows(f"spdk+tcp://{ADDRESS}?ns=1&queues=2&depth=32", kind, **options)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_a_run_whose_device_is_lost_says_so_and_resumes(local, stand_in, tmp_path):
    copy = tmp_path / "copy.vol"
    shutil.copyfile(local, copy)
    expected = rows(copy, "sage", plan="passes:2")
    url = f"spdk+tcp://{ADDRESS}?ns=1&ctrl_loss_timeout=0.2&depth=16"
    stand_in.faults(maxio=16384, **{"break": 40, "fail": 1, "refuse": -1})
    with (
        pytest.raises(HyadesError, match=r"LBA \d+.*LOST"),
        hyades.open(url, writable=True) as handle,
    ):
        hyades.refresh(handle, three_layers("sage"), out="x", threads=2, plan="passes:2")
    stand_in.faults()
    found = rows(url, "sage", plan="passes:2", resume=True)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))
