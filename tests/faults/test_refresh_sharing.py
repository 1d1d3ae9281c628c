"""Who may do what while a refresh runs, and after one that was interrupted; and full disks."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.reference.runs import (
    faulty_devices,
    least_memory,
    own_threads,
    refresh_rows,
    same_bits,
    three_layers,
    write_volume,
)

import hyades
from hyades.common.errors import DeviceLost, UsageError
from hyades.common.layout import Op
from hyades.common.units import MIB
from hyades.common.volume import Volume
from hyades.deploy.api import VolumeHandle
from hyades.proxy.transports.faulty import Fault, FaultPlan

pytestmark = pytest.mark.timeout(240)

PLAN = "passes:6"


class StopError(Exception):
    """Raised by a progress callback to interrupt a run."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_volume(tmp_path / "g.vol")


def interrupt(volume: VolumeHandle, kind: str = "gcn", **options: Any) -> None:
    """Begin output x and let writing fail after some pages."""
    fault = Fault("io", op=Op.WRITE, after=20)
    with faulty_devices(lambda: FaultPlan([fault])), pytest.raises(DeviceLost):
        refresh_rows(volume, three_layers(kind), "x", plan=PLAN, **options)


def test_an_error_in_a_callback_leaves_a_run_to_resume(path: Path) -> None:
    def stop(phase: str, done: int, total: int, unit: str) -> None:
        if phase.startswith("2/") and done > 0:
            raise StopError

    with hyades.open(path, writable=True) as volume:
        with pytest.raises(StopError):
            refresh_rows(volume, three_layers("gcn"), "x", plan=PLAN, progress=stop)
        assert own_threads() == []
        rows, _ = refresh_rows(volume, three_layers("gcn"), "x", plan=PLAN, resume=True)
        expected, _ = refresh_rows(volume, three_layers("gcn"), "y", plan=PLAN)
    assert same_bits(rows, expected)


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://{}?direct=0"])
def test_while_a_refresh_runs_nobody_else_opens_the_volume(path: Path, form: str) -> None:
    said: list[str] = []

    def meddle(*_: object) -> None:
        if not said:
            for writable in (True, False):
                with pytest.raises(UsageError) as caught:
                    hyades.open(form.format(path), writable=writable)
                said.append(str(caught.value))

    refresh_rows_of(form.format(path), progress=meddle)
    me = f"by process {os.getpid()} ("
    assert [me in text and "wait for it to end" in text for text in said] == [True, True]
    assert "being used" in said[0]
    assert "being written" in said[1]


def refresh_rows_of(url: str, **options: Any) -> None:
    hyades.refresh(url, three_layers("gcn"), out="x", threads=2, plan=PLAN, **options)


def test_the_same_handle_reads_old_outputs_meanwhile(path: Path) -> None:
    with hyades.open(path, writable=True) as volume:
        old, _ = refresh_rows(volume, three_layers("gcn"), "x")
        seen: list[bool] = []

        def look(*_: object) -> None:
            seen.append(same_bits(volume.read("x"), old))

        new, _ = refresh_rows(
            volume, three_layers("sage"), "x", plan=PLAN, force=True, progress=look
        )
        assert seen
        assert all(seen)
        assert not same_bits(new, old)


def test_an_output_stays_until_the_new_one_is_committed(path: Path) -> None:
    with hyades.open(path, writable=True) as volume:
        old, _ = refresh_rows(volume, three_layers("gcn"), "x")
        interrupt(volume, "sage", force=True)
        assert same_bits(volume.read("x"), old)
    with hyades.open(path, writable=True) as volume:  # also for those who come later
        assert same_bits(volume.read("x"), old)
        new, _ = refresh_rows(volume, three_layers("sage"), "x", plan=PLAN, resume=True)
        assert not same_bits(new, old)
        assert list(volume.volume.verify()) == []


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sage", {"plan": PLAN}), ("gcn", {"plan": "log:12"}), ("gcn", {"plan": PLAN, "seed": 3,
         "fanout": (3, 3, 3)}), ("gcn", {"plan": PLAN, "dtype": "float16"}),
    ],
)  # fmt: skip
def test_resume_with_something_else_is_refused(
    path: Path, kind: str, options: dict[str, Any]
) -> None:
    with hyades.open(path, writable=True) as volume:
        interrupt(volume)
        generation = volume.volume.generation
        with pytest.raises(UsageError, match="started with another model, options or plan"):
            refresh_rows(volume, three_layers(kind), "x", resume=True, **options)
        assert volume.volume.generation == generation
        refresh_rows(volume, three_layers("gcn"), "x", plan=PLAN, resume=True)


@pytest.mark.parametrize("first", ["64MiB", None])
def test_resume_with_more_or_less_memory(path: Path, first: str | None) -> None:
    """Hidden rows move between memory and volume; the plan's lanes and their bits stay."""
    with hyades.open(path, writable=True) as volume:
        model = three_layers("gat")  # whose products have one order
        least = least_memory(volume, model, plan=PLAN)
        memory = [first or least, least if first else "64MiB"]
        interrupt(volume, "gat", memory=memory[0])
        rows, result = refresh_rows(volume, model, "x", plan=PLAN, resume=True, memory=memory[1])
        assert any(s.keeps_output for s in result.plan.stages) == (first is None)
        expected, _ = refresh_rows(volume, model, "y", plan=PLAN, memory=memory[1])
    assert same_bits(rows, expected)


def test_resume_of_what_is_not_there(path: Path) -> None:
    with hyades.open(path, writable=True) as volume:
        with pytest.raises(UsageError, match="cannot resume 'x': that run does not exist"):
            refresh_rows(volume, three_layers("gcn"), "x", resume=True)
        refresh_rows(volume, three_layers("gcn"), "x")
        with pytest.raises(UsageError, match="cannot resume 'x': that run is finished"):
            refresh_rows(volume, three_layers("gcn"), "x", resume=True)


def test_force_starts_over_in_the_same_space(path: Path) -> None:
    with hyades.open(path, writable=True) as volume:
        interrupt(volume)
        size = path.stat().st_size
        with pytest.raises(UsageError, match="--resume continues it, --force starts over"):
            refresh_rows(volume, three_layers("gcn"), "x", plan=PLAN)
        for _ in range(3):
            interrupt(volume, force=True)
        rows, _ = refresh_rows(volume, three_layers("gcn"), "x", plan=PLAN, force=True)
        assert path.stat().st_size <= size + MIB // 4  # page tables and catalogs move about
        expected, _ = refresh_rows(volume, three_layers("gcn"), "y", plan=PLAN)
    assert same_bits(rows, expected)


def test_the_working_objects_leave_nothing_behind(path: Path) -> None:
    with hyades.open(path, writable=True) as volume:
        before = volume.volume.free_blocks
        refresh_rows(volume, three_layers("sage"), "x", plan="log:12")
        output = volume.volume.object("output/x").nbytes // 4096
        assert set(volume.catalog.runs) == {"x"}
        assert not [n for n in volume.catalog.objects if n.startswith("running/")]
    with hyades.open(path, writable=True) as volume:
        used = volume.volume.blocks.nblocks - volume.volume.free_blocks
        assert used >= output
        assert volume.volume.free_blocks >= before


# -- small disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB in memory."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path, leave: int) -> Path:
    """Fill the disk but for *leave* bytes."""
    found = os.statvfs(folder)
    filler = folder / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - leave)
    return filler


def test_a_disk_too_small_for_the_output(disk: Path) -> None:
    path = write_volume(disk / "g.vol")
    size = path.stat().st_size
    filler = fill(disk, 128 << 10)
    with hyades.open(path, writable=True) as volume:
        with pytest.raises(UsageError, match=r"no space for .* more: \d+ bytes are missing"):
            refresh_rows(volume, three_layers("gcn"), "x", plan=PLAN)
        assert "x" not in volume.catalog.runs
        assert list(volume.volume.verify()) == []
    assert path.stat().st_size == size
    filler.unlink()
    with hyades.open(path, writable=True) as volume:
        refresh_rows(volume, three_layers("gcn"), "x", plan=PLAN)


def test_a_disk_that_fills_up_in_the_middle(disk: Path) -> None:
    """Rows have their place since the beginning; only commits may find no room."""
    path = write_volume(disk / "g.vol")

    def fill_up() -> FaultPlan:
        fill(disk, 0)
        return FaultPlan()

    with hyades.open(path, writable=True) as volume:
        model = three_layers("gcn")
        expected, _ = refresh_rows(volume, model, "y", plan=PLAN)
        with faulty_devices(fill_up), pytest.raises(UsageError, match="no space for"):
            refresh_rows(volume, model, "x", plan=PLAN, checkpoint_seconds=0.0)
        (disk / "filler").unlink()
        refresh_rows(volume, model, "x", plan=PLAN, resume=True)
        assert same_bits(volume.read("x"), expected)
        assert list(volume.volume.verify()) == []


def test_a_volume_on_a_read_only_disk(disk: Path) -> None:
    path = write_volume(disk / "g.vol")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(UsageError, match="Read-only file system"):
        hyades.refresh(path, three_layers("gcn"), out="x", threads=2)
    with hyades.open(path) as volume:
        assert isinstance(volume.volume, Volume)
        assert "features" in volume.catalog.objects
