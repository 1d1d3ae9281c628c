"""Whole refreshes whose pages pass through the kernel of the guest: the bits of a local run."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.reference.runs import least_memory, same_bits, three_layers, write_volume
from tests.vm.linux import Linux
from tests.vm.machine import Machine
from tests.vm.serving import Serve

import hyades
from hyades.common.jit import cache_directory
from hyades.deploy.api import VolumeHandle

pytestmark = pytest.mark.slow
NQN = "nqn.2024-01.org.example:graph"
SPACE = "24M"
# Hidden rows and the log lie on the volume, so that it is written as well as read.
RUNS: dict[str, dict[str, Any]] = {
    "sage": {"plan": "passes:3"}, "gcn": {"plan": "log:12", "fanout": (3, 3, 3)},
}  # fmt: skip
# The guest's processor is not the host's.  Code for the least x86-64 runs on both, so what the host
# compiled is loaded there instead of being compiled for minutes; so do products of matrices give
# the same bits.
ANY_CPU = {
    "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
}  # fmt: skip


@dataclass(frozen=True)
class Local:
    """Budgets of memory and what runs on a local volume made with them."""

    memory: dict[str, int]
    rows: dict[str, NDArray[Any]]

    def check(self, volume: VolumeHandle) -> None:
        """Compare the bits of every output in a volume."""
        for kind, rows in self.rows.items():
            assert same_bits(volume.read(kind), rows), kind


def refresh_all(volume: VolumeHandle, memory: dict[str, int]) -> None:
    """Run everything in RUNS."""
    for kind, options in RUNS.items():
        budget = {"threads": 2, "memory": memory[kind]}
        report = hyades.refresh(volume, three_layers(kind), out=kind, **budget, **options).report
        assert report.stages[0].bytes_written > 0, "hidden rows are in memory"


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Local:
    """Refresh a local volume with the least memory that the plans need."""
    path = write_volume(tmp_path_factory.mktemp("local") / "g.vol")
    with hyades.open(path, writable=True) as volume:
        memory = {k: least_memory(volume, three_layers(k), **RUNS[k]) for k in RUNS}
        refresh_all(volume, memory)
        return Local(memory, {kind: volume.read(kind) for kind in RUNS})


def test_a_volume_on_kernel_nvmet(linux: Linux, local: Local) -> None:
    linux.machine.run(f"truncate --size={SPACE} /dev/shm/disk")
    linux.export(NQN, {1: "/dev/shm/disk"}, port=4420)
    port = linux.machine.forward(4420)
    url = f"nvme+tcp://127.0.0.1:{port}/{NQN}?queues=2&digest=header,data"
    write_volume(url)
    with hyades.open(url, writable=True) as volume:
        refresh_all(volume, local.memory)
        local.check(volume)


def test_a_volume_behind_a_device_of_the_guest(linux: Linux, tmp_path: Path, local: Local) -> None:
    """The device /dev/nvme1n1 of the guest is our target, and nvmet gives it back to the host.

    So every page passes through both kernel drivers: initiator, nvmet, nvme-tcp, `hyades serve`.
    """
    path = tmp_path / "g.vol"
    options = ("--create", f"{SPACE}iB")
    with Serve(tmp_path, f"{path},block=512", nqn=NQN, options=options) as serve:
        linux.connect(serve.address, NQN, "--data-digest")
        linux.export(f"{NQN}-again", {1: linux.device(NQN)}, port=4420)
        port = linux.machine.forward(4420)
        url = f"nvme+tcp://127.0.0.1:{port}/{NQN}-again"
        write_volume(url)
        with hyades.open(url, writable=True) as volume:
            refresh_all(volume, local.memory)
        linux.clean()
        assert serve.stop() == 0
    with hyades.open(path) as volume:
        local.check(volume)


@pytest.fixture
def kernels(machine: Machine) -> Iterator[Path]:
    """Return where the guest finds compiled kernels; `copy_kernels` puts them there."""
    folder = machine.folder / "kernels"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def copy_kernels(folder: Path) -> None:
    """Copy what was compiled from the sources as they are now."""
    cache = cache_directory()
    assert cache is not None
    shutil.copytree(cache, folder / cache.name)


@pytest.mark.timeout(560)
def test_a_refresh_in_the_guest(linux: Linux, kernels: Path, tmp_path: Path) -> None:
    """`hyades refresh blk:/dev/nvme1n1` in the guest, where that device is our target."""
    path, model = tmp_path / "g.vol", linux.machine.folder / "model.pt"
    write_volume(path, vertices=1000, edges=8000)
    torch.save(three_layers("sage").state_dict(), model)
    command = [
        sys.executable, "-m", "hyades.deploy.cli", "refresh", "VOLUME", "--model", str(model),
        "--threads", "1", "--no-progress", "--no-report", "--out",
    ]  # fmt: skip
    local = [str(path) if word == "VOLUME" else word for word in command]
    subprocess.run([*local, "local"], env=os.environ | ANY_CPU, check=True, timeout=200)
    copy_kernels(kernels)
    os.truncate(path, 8 << 20)  # a device does not grow; the local run has cut off what it freed

    with Serve(tmp_path, f"{path},block=512", nqn=NQN) as serve:
        linux.connect(serve.address, NQN)
        device = linux.device(NQN)
        words = [f"blk:{device}" if word == "VOLUME" else word for word in command]
        output = linux.machine.run(
            " ".join([*words, "guest"]), timeout=450, NUMBA_CACHE_DIR=str(kernels), **ANY_CPU
        )
        assert "guest: 1,000 rows" in output.out
        linux.disconnect(NQN)
        assert serve.stop() == 0
    with hyades.open(path) as volume:
        rows = volume.read("guest")
        assert rows.shape == (1000, 16)
        assert np.isfinite(rows).all()
        assert same_bits(rows, volume.read("local"))
