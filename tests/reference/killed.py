"""Refreshes whose target is killed and restarted in the middle."""

import random
import threading
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tests.reference import nvme
from tests.reference.runs import refresh_rows, same_bits, three_layers, write_volume

import hyades
from hyades.common.units import MIB

LEAN = {"memory": "64MiB", "plan": "log:12", "force": True, "checkpoint_seconds": 0.05}


def local_run(folder: Path) -> tuple[Path, NDArray[np.float32]]:
    """Make a volume with room behind it; return its path, and the rows of a local run."""
    path = write_volume(folder / "pages.vol")
    with hyades.open(path, writable=True) as volume:
        rows, _ = refresh_rows(volume, three_layers("gcn"), "here", **LEAN)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + 64 * MIB)
    return path, rows


class Killer(threading.Thread):
    """Kills a target and starts it again, up to three times, at random moments."""

    def __init__(self, target: nvme.TargetProcess, seed: int) -> None:
        super().__init__(daemon=True)
        self.target, self.kills = target, 0
        self._random = random.Random(seed)
        self._end = threading.Event()

    def run(self) -> None:
        for turn in range(3):
            if self._end.wait(self._random.uniform(0.0, 0.2 * (1 + turn))):
                return
            self.target.kill()
            self.kills += 1
            self._end.wait(self._random.uniform(0.0, 0.2))
            self.target.start()

    def stop(self) -> None:
        self._end.set()
        self.join()


def refresh_while_killed(
    target: nvme.TargetProcess, url: str, expected: NDArray[np.float32], seed: int
) -> None:
    """Refresh the volume at *url*, at least one kill long: *expected* comes out, here and there."""
    with hyades.open(url, writable=True) as volume:
        killer = Killer(target, seed)
        killer.start()
        try:
            rows, _ = refresh_rows(volume, three_layers("gcn"), "there", **LEAN)
            while not killer.kills:  # it was faster
                rows, _ = refresh_rows(volume, three_layers("gcn"), "there", **LEAN)
        finally:
            killer.stop()
    assert same_bits(rows, expected)
    with hyades.open(url) as volume:  # what lies there, through a new connection
        assert same_bits(volume.read("there"), expected)
        assert list(volume.volume.verify(["output/there"])) == []
