"""A refresh over nvme+tcp while a path is cut, bytes change, or the target's medium fails.

It ends with the bits of a local run; or it names target, namespace, block and status, and resumes.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.reference import nvme
from tests.reference.relay import Relay
from tests.reference.runs import refresh_rows, same_bits, three_layers, write_volume

import hyades
from hyades.common.errors import DeviceLost, UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import MIB
from hyades.deploy import assemble
from hyades.proxy.transport import Transport

LEAN = {"memory": "64MiB", "plan": "log:12", "checkpoint_seconds": 0.05, "threads": 2}
QUICK = {"reconnect_delay": 0.02, "kato": 1, "depth": 8}


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.float32]]:
    """Return a volume without outputs, and the rows of a local run."""
    folder = tmp_path_factory.mktemp("local")
    path = write_volume(folder / "pages.vol")
    with hyades.open(path) as volume:
        hyades.refresh(volume, three_layers("gcn"), out="x", output_volume=folder / "out", **LEAN)
    with hyades.open(folder / "out") as outputs:
        return path, outputs.read("x")


@pytest.fixture
def served(tmp_path: Path, local: tuple[Path, NDArray[np.float32]]) -> Path:
    """Return a copy of the volume with room behind it."""
    path = tmp_path / "pages.vol"
    shutil.copyfile(local[0], path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 64 * MIB)
    return path


@contextmanager
def opened_devices() -> Iterator[list[Transport]]:
    """Give the list of the devices that refreshes inside the block open."""
    devices: list[Transport] = []
    inner = assemble.open_devices

    def opened(*urls: str) -> list[Transport]:
        found = inner(*urls)
        devices.extend(found)
        return found

    assemble.open_devices = opened
    try:
        yield devices
    finally:
        assemble.open_devices = inner


def run(url: str, expected: NDArray[np.float32], **options: Any) -> dict[str, Any]:
    """Refresh; the rows must be those expected.  Return the statistics of the device."""
    with opened_devices() as devices, hyades.open(url, writable=True) as volume:
        rows, _ = refresh_rows(volume, three_layers("gcn"), "x", **LEAN, **options)
        assert list(volume.volume.verify(["output/x"])) == []
    assert same_bits(rows, expected)
    return devices[0].stats()


# -- paths and bytes


@pytest.mark.parametrize("digest", ["none", "header,data"])
def test_one_of_two_paths_is_cut_and_comes_back(
    served: Path, local: tuple[Path, NDArray[np.float32]], digest: str
) -> None:
    with nvme.TargetProcess(served) as target, nvme_relays(target) as (one, two):
        passed = []

        def step(phase: str, *_: object) -> None:
            if phase.startswith("1/3") and not passed:
                passed.append((one.passed, two.passed))
                one.cut()
            elif phase.startswith("3/3") and len(passed) == 1:
                passed.append((one.passed, two.passed))
                one.restore()

        url = nvme.address_url(one.address, two.address, digest=digest, **QUICK)
        stats = run(url, local[1], progress=step)
        (first, other), (later, more) = passed
        assert first > 0
        assert other > 0
        assert more > other + MIB  # the path that was left carried the rest
        assert later - first < MIB
        assert stats["losses"] >= 1


@contextmanager
def nvme_relays(target: nvme.TargetProcess) -> Iterator[tuple[Relay, Relay]]:
    """Give two ways to one target."""
    with Relay(target.address) as one, Relay(target.address) as two:
        yield one, two


def test_wrong_data_digests_from_the_target(
    served: Path, local: tuple[Path, NDArray[np.float32]]
) -> None:
    with nvme.TargetProcess(served, "--fault", "digest:3") as target:
        stats = run(nvme.address_url(target.address, digest="data", **QUICK), local[1])
    assert stats["digest_errors"] > 5
    assert stats["losses"] == 0


def test_bytes_that_change_on_the_way(
    served: Path, local: tuple[Path, NDArray[np.float32]]
) -> None:
    """Headers, data and digests in both directions."""
    with nvme.TargetProcess(served) as target, Relay(target.address, seed=1) as relay:

        def begin(*_: object) -> None:
            relay.damage = (0.01, 0.01)

        url = nvme.address_url(relay.address, digest="header,data", timeout=2, **QUICK)
        stats = run(url, local[1], progress=begin)
        assert relay.damaged > 0
        assert stats["digest_errors"] + stats["losses"] > 0


def test_connections_that_are_dropped_all_the_time(
    served: Path, local: tuple[Path, NDArray[np.float32]]
) -> None:
    with nvme.TargetProcess(served, "--fault", "drop:12") as target:
        stats = run(nvme.address_url(target.address, **QUICK), local[1])
    assert stats["losses"] > 2
    assert stats["replays"] > 0


# -- the medium


def check_failure(text: str, target: nvme.TargetProcess, status: str) -> int:
    """Check what *text* names; return the logical block."""
    place = f"nvme+tcp://127.0.0.1:{target.address[1]}/{nvme.NQN} ns 1 LBA "
    found = re.search(re.escape(place) + rf"(\d+) \(NVMe status {re.escape(status)}\)", text)
    assert found, text
    return int(found[1])


@pytest.mark.parametrize("kind", ["features", "tiles"])
def test_blocks_that_cannot_be_read(
    served: Path, local: tuple[Path, NDArray[np.float32]], kind: str
) -> None:
    with hyades.open(served) as volume:
        info = volume.volume.object(kind)
        bad = info.lba(info.pages // 2)
    fault = ("--block-size", "512", "--fault", f"read:{8 * bad + 3}+2")  # within a page's block
    with nvme.TargetProcess(served, *fault) as target:
        url = nvme.address_url(target.address, **QUICK)
        with pytest.raises(DeviceLost) as caught:
            hyades.refresh(url, three_layers("gcn"), out="x", **LEAN)
        lba = check_failure(str(caught.value), target, "read error (SCT 0x2 SC 0x81)")
        assert lba <= 8 * bad < lba + MIB // 512
        assert f"'{kind}'" in str(caught.value)
        resume(target, local[1])


@pytest.mark.parametrize("blocks", [1, 4096])
def test_blocks_that_cannot_be_written(
    served: Path, local: tuple[Path, NDArray[np.float32]], blocks: int
) -> None:
    first = local[0].stat().st_size // BLOCK + 64  # where hidden rows, the log and outputs go
    fault = ("--fault", f"write:{first}+{blocks}=write_fault")
    with nvme.TargetProcess(served, *fault) as target:
        url = nvme.address_url(target.address, **QUICK)
        with pytest.raises(DeviceLost) as caught:
            hyades.refresh(url, three_layers("gcn"), out="x", **LEAN)
        lba = check_failure(str(caught.value), target, "write fault (SCT 0x2 SC 0x80)")
        assert first - MIB // BLOCK < lba < first + blocks
        resume(target, local[1])


@pytest.mark.parametrize("room", ["1MiB", "3MiB"])
def test_a_target_without_space(
    served: Path, local: tuple[Path, NDArray[np.float32]], room: str
) -> None:
    with nvme.TargetProcess(served, "--fault", f"full:{room}") as target:
        url = nvme.address_url(target.address, **QUICK)
        with pytest.raises((DeviceLost, UsageError)) as caught:
            hyades.refresh(url, three_layers("gcn"), out="x", **LEAN)
        check_failure(str(caught.value), target, "capacity exceeded (SCT 0x0 SC 0x81)")
        resume(target, local[1])


def resume(target: nvme.TargetProcess, expected: NDArray[np.float32]) -> None:
    """Go on once the target's medium is whole."""
    target.kill()
    target.flags = ()
    target.start()
    url = nvme.address_url(target.address, **QUICK)
    with hyades.open(url) as volume:
        begun = "x" in volume.catalog.runs  # not where even its first commit could not be written
    run(url, expected, resume=begun)
