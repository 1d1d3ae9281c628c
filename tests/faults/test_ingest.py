"""Ingest on a full disk, killed, twice at once: nothing half-written takes the volume's name."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hyades.common.blocks import FileBlocks
from hyades.common.errors import UsageError
from hyades.common.units import MIB
from hyades.common.volume import Volume
from hyades.deploy.ingest import ingest

SMALL = np.array([[0, 1], [1, 2]])
V, E = 20_000, 400_000


def large():
    rng = np.random.default_rng(0)
    return rng.integers(0, V, (2, E)), rng.standard_normal((V, 32)).astype(np.float32)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of a given size, as a function of the size."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(nbytes: int) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "hyades-test", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
        return folder

    yield mount
    subprocess.run(["umount", str(folder)], capture_output=True)


@pytest.mark.parametrize("mebibytes", [1, 2, 3, 4, 5, 6, 7])  # 9 are enough
@pytest.mark.parametrize("spill", [False, True])
def test_disk_full_at_any_point(small_disk, monkeypatch, mebibytes, spill):
    if spill:
        from hyades.deploy.ingest import build
        from hyades.deploy.ingest.budget import Budget

        monkeypatch.setattr(build, "plan_memory", lambda *_, **__: Budget(10_000, 50_000, False))
    folder = small_disk(mebibytes * MIB)
    target = folder / "g.vol"
    ingest(target, edges=SMALL)
    before = target.read_bytes()
    edges, features = large()
    with pytest.raises(UsageError, match=r"no space") as caught:
        ingest(target, edges=edges, features=features, force=True)
    assert "\n" not in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["g.vol"]
    assert target.read_bytes() == before
    with Volume.open(FileBlocks(target, writable=False)) as volume:
        assert list(volume.verify()) == []
    ingest(target, edges=SMALL, force=True)  # and the space is free again


def test_text_is_spooled_to_a_full_disk(small_disk, tmp_path):
    folder = small_disk(2 * MIB)
    (tmp_path / "e.txt").write_text("1 2\n" * 200_000)
    with pytest.raises(UsageError, match=r"no space left in .*disk for temporary files"):
        ingest(folder / "g.vol", edges=tmp_path / "e.txt")
    assert list(folder.iterdir()) == []
    (tmp_path / "roomy").mkdir()
    ingest(folder / "g.vol", edges=tmp_path / "e.txt", scratch=tmp_path / "roomy")


KILLED = """
import sys, numpy as np
from hyades.deploy.ingest import ingest
rng = np.random.default_rng(0)
edges = rng.integers(0, 200_000, (2, 4_000_000))
print("ready", flush=True)
def progress(phase, done, total, unit):
    print(phase, flush=True)
ingest(sys.argv[1], edges=edges, features=np.ones((200_000, 64), np.float32), force=True,
       memory="64MiB", progress=progress)
print("done", flush=True)
"""


def start(target):
    return subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("phase", ["reading edges", "reading features", "sorting edges"])
def test_kill_leaves_the_old_volume_and_no_temporary_files(tmp_path, phase):
    target = tmp_path / "g.vol"
    ingest(target, edges=SMALL)
    before = target.read_bytes()
    with start(target) as process:
        for line in process.stdout:
            if line.strip() == phase:
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
    assert process.returncode == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} <= {"g.vol", "g.vol.partial"}
    assert target.read_bytes() == before
    ingest(target, edges=SMALL, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["g.vol"]


def test_interrupt_leaves_nothing(tmp_path):
    def progress(phase, done, total, unit):
        if phase == "sorting edges":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ingest(tmp_path / "g.vol", edges=SMALL, progress=progress)
    assert list(tmp_path.iterdir()) == []


def test_two_at_once_are_told_apart(tmp_path):
    target = tmp_path / "g.vol"
    with start(target) as process:
        for line in process.stdout:
            if line.strip() == "reading features":
                break
        with pytest.raises(UsageError, match=r"g.vol.partial is being used by process \d+"):
            ingest(target, edges=SMALL)
        process.stdout.read()
    assert process.returncode == 0
    with Volume.open(FileBlocks(target, writable=False)) as volume:
        assert volume.catalog.graph.vertices == 200_000


def test_memory_is_kept(tmp_path):
    """Peak memory over what the imports and compiled code take stays within 1.05 budgets."""
    script = """
import resource, sys, numpy as np
from hyades.deploy.ingest import ingest
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
tiny = np.random.default_rng(0).integers(0, 100, (2, 1000))
np.save(sys.argv[1] + "/tiny.npy", tiny)
ingest(sys.argv[1] + "/t.vol", edges=sys.argv[1] + "/tiny.npy", features=np.ones((100, 4), "f4"))
start = peak()
ingest(sys.argv[1] + "/g.vol", edges=sys.argv[1] + "/e.npy", features=sys.argv[1] + "/x.npy",
       memory=sys.argv[2], reorder=sys.argv[3])
print(peak() - start)
"""
    rng = np.random.default_rng(0)
    np.save(tmp_path / "e.npy", rng.integers(0, 400_000, (2, 6_000_000)))
    np.save(tmp_path / "x.npy", np.ones((400_000, 64), np.float32))
    for budget, reorder in ((64 * MIB, "none"), (128 * MIB, "rcm")):
        command = [sys.executable, "-c", script, str(tmp_path), str(budget), reorder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert int(done.stdout) <= 1.05 * budget, (budget, reorder)
        (tmp_path / "g.vol").unlink()
        (tmp_path / "t.vol").unlink()
