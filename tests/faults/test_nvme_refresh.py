"""A refresh whose volume lies on a target that is killed and restarted in the middle.

HYADES_KILL_RUNS sets the number of runs: 20 in the long run.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.reference import nvme
from tests.reference.killed import LEAN, local_run, refresh_while_killed
from tests.reference.runs import refresh_rows, same_bits, three_layers

import hyades
from hyades.common.errors import DeviceLost

RUNS = int(os.environ.get("HYADES_KILL_RUNS", "3"))


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.float32]]:
    """Return a volume with room behind it, and the rows of a local run."""
    return local_run(tmp_path_factory.mktemp("local"))


@pytest.mark.parametrize("seed", range(RUNS))
def test_the_target_is_killed(
    tmp_path: Path, local: tuple[Path, NDArray[np.float32]], seed: int
) -> None:
    path = tmp_path / "pages.vol"
    path.write_bytes(local[0].read_bytes())
    with nvme.TargetProcess(path) as target:
        url = nvme.address_url(target.address, reconnect_delay=0.02, kato=2, depth=8)
        refresh_while_killed(target, url, local[1], seed)


def test_the_target_stays_away_and_the_run_is_resumed(
    tmp_path: Path, local: tuple[Path, NDArray[np.float32]]
) -> None:
    path = tmp_path / "pages.vol"
    path.write_bytes(local[0].read_bytes())
    lean = {**LEAN, "force": False}
    with nvme.TargetProcess(path) as target:
        quick = {"reconnect_delay": 0.02, "kato": 2, "depth": 8, "ctrl_loss_timeout": 0.3}
        url = nvme.address_url(target.address, **quick)

        def kill(phase: str, *_: object) -> None:
            if phase.startswith("3/3"):
                target.kill()

        with pytest.raises(DeviceLost) as caught:
            hyades.refresh(url, three_layers("gcn"), out="there", progress=kill, threads=2, **lean)
        place = f"nvme+tcp://127.0.0.1:{target.address[1]}/{nvme.NQN} ns 1 LBA "
        assert place in str(caught.value) or "a flush failed" in str(caught.value)
        assert "no path for 0.3 s" in str(caught.value)
        target.start()
        with hyades.open(url, writable=True) as volume:
            rows, _ = refresh_rows(volume, three_layers("gcn"), "there", resume=True, **lean)
        assert same_bits(rows, local[1])
