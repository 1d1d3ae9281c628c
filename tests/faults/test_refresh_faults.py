"""What a refresh makes of failing devices: it heals what passes, else it says what failed."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.reference.runs import (
    Faults,
    faulty_devices,
    least_memory,
    own_threads,
    refresh_rows,
    same_bits,
    three_layers,
    write_volume,
)

import hyades
from hyades.common.catalog import ObjectInfo
from hyades.common.errors import DataError, DeviceLost, UsageError
from hyades.common.layout import Op
from hyades.deploy.api import VolumeHandle
from hyades.proxy.transports.faulty import Fault, FaultPlan

pytestmark = pytest.mark.timeout(240)  # nothing may hang; compiling the kernels counts


@dataclass(frozen=True)
class Setting:
    """A model and options under which a refresh uses an object."""

    kind: str
    plan: str
    options: dict[str, Any] = field(default_factory=dict)
    lean: bool = False  # so little memory that hidden rows lie on the volume


PLAIN = Setting("gcn", "resident")
LEAN = Setting("gcn", "passes:3", lean=True)
LOG = Setting("sage", "log:12", lean=True)
SAMPLED = Setting("sage", "passes:2", {"fanout": (3, 3, 3), "seed": 5})
NORM = Setting("norm", "passes:2", lean=True)
GAT = Setting("gat", "passes:2", lean=True)

READS = {
    "features": PLAIN, "tiles": PLAIN, "weights": PLAIN, "ranks": SAMPLED,
    "running/x/hidden-0": LEAN, "running/x/log": LOG,
}  # fmt: skip
MORE_READS = {"features": GAT, "running/x/hidden-1": NORM}  # through streams of lanes
WRITES = {"running/x/output": PLAIN, "running/x/hidden-1": LEAN, "running/x/log": LOG}
ACCESSES = [
    *[("read", name, setting) for name, setting in [*READS.items(), *MORE_READS.items()]],
    *[("write", name, setting) for name, setting in [*WRITES.items(), ("running/x/output", NORM)]],
]
on_every_access = pytest.mark.parametrize(
    ("op", "name", "setting"), ACCESSES, ids=[f"{op}-{n}-{s.kind}" for op, n, s in ACCESSES]
)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VolumeHandle]:
    path = write_volume(tmp_path_factory.mktemp("faults") / "g.vol")
    with hyades.open(path, writable=True) as opened:
        yield opened


class Bench:
    """Runs settings on a volume and remembers what undisturbed runs gave."""

    def __init__(self, volume: VolumeHandle) -> None:
        self.volume = volume
        self._kept: dict[str, tuple[int, NDArray[Any]]] = {}

    def options(self, setting: Setting) -> dict[str, Any]:
        """Return the options of a refresh under *setting*."""
        memory, _ = self._undisturbed(setting)
        return {"plan": setting.plan, "memory": memory, **setting.options}

    def expected(self, setting: Setting) -> NDArray[Any]:
        """Return the rows of an undisturbed run."""
        return self._undisturbed(setting)[1]

    def run(self, setting: Setting, **more: Any) -> NDArray[Any]:
        """Refresh output x."""
        model = three_layers(setting.kind)
        rows, _ = refresh_rows(self.volume, model, "x", **self.options(setting), **more)
        return rows

    def resume(self, setting: Setting) -> NDArray[Any]:
        """Go on with a run that failed: it must be there, and nothing of it must be running."""
        assert own_threads() == []
        assert self.volume.catalog.runs["x"].state == "running"
        return self.run(setting, resume=True)

    def _undisturbed(self, setting: Setting) -> tuple[int, NDArray[Any]]:
        key = repr(setting)
        if key not in self._kept:
            model = three_layers(setting.kind)
            options = {"plan": setting.plan, **setting.options}
            options.pop("seed", None)
            least = least_memory(self.volume, model, **options) if setting.lean else 64 << 20
            options = {"plan": setting.plan, "memory": least, **setting.options}
            rows, result = refresh_rows(self.volume, model, "whole", force=True, **options)
            assert setting.lean != any(s.keeps_output for s in result.plan.stages)
            self._kept[key] = (least, rows)
        return self._kept[key]


@pytest.fixture(scope="module")
def bench(volume: VolumeHandle) -> Bench:
    return Bench(volume)


@pytest.fixture(autouse=True)
def nothing_left(volume: VolumeHandle) -> Iterator[None]:
    yield
    assert own_threads() == []
    if "x" in volume.catalog.runs:
        assert volume.catalog.runs["x"].state == "done"
        volume.volume.remove("output/x")
        del volume.volume.catalog.runs["x"]
        volume.volume.commit()
    assert not [n for n in volume.catalog.objects if n.startswith("running/")]


@dataclass
class Target:
    """The page that a fault hits; known when the devices are opened."""

    volume: VolumeHandle
    name: str
    page: int = -1
    lba: int = -1

    def find(self) -> tuple[int, int]:
        """Return the blocks of a page in the middle of the object (the first of a log)."""
        info: ObjectInfo = self.volume.volume.object(self.name)
        self.page = 0 if info.kind == "pages" and info.name.endswith("log") else info.pages // 2
        self.lba = info.lba(self.page)
        return self.lba, self.lba + info.page_blocks

    def words(self) -> tuple[str, str, str]:
        """Return what a message about it must contain."""
        return repr(self.name), f"page {self.page} ", f"(LBA {self.lba})"


@contextmanager
def fault_at(target: Target, kind: str, op: str, times: int) -> Iterator[Faults]:
    def plan() -> FaultPlan:
        return FaultPlan([Fault(kind, op=Op[op.upper()], lbas=target.find(), times=times)])

    with faulty_devices(plan) as faults:
        yield faults


@on_every_access
@pytest.mark.parametrize("kind", ["io", "short", "timeout"])
def test_a_passing_error_changes_no_bit(
    bench: Bench, op: str, name: str, setting: Setting, kind: str
) -> None:
    expected = bench.expected(setting)
    with fault_at(Target(bench.volume, name), kind, op, times=2) as faults:
        rows = bench.run(setting)
    assert faults.injected(kind) == 2
    assert same_bits(rows, expected)


@on_every_access
@pytest.mark.parametrize("kind", ["io", "lost"])
def test_a_lasting_error_is_one_line_and_resumable(
    bench: Bench, op: str, name: str, setting: Setting, kind: str
) -> None:
    expected, target = bench.expected(setting), Target(bench.volume, name)
    with (
        fault_at(target, kind, op, times=0) as faults,
        pytest.raises(DeviceLost) as caught,
    ):
        bench.run(setting)
    text = str(caught.value)
    for word in (*target.words(), op, kind.upper(), "--resume"):
        assert word in text
    assert "\n" not in text
    # Once more where its first read was part of a longer transfer.
    assert faults.injected(kind) in ((4, 5) if kind == "io" else (1, 2))
    assert same_bits(bench.resume(setting), expected)


on_every_read = pytest.mark.parametrize(
    ("name", "setting"), [(n, s) for op, n, s in ACCESSES if op == "read"]
)


@on_every_read
def test_corruption_on_the_way_is_healed(bench: Bench, name: str, setting: Setting) -> None:
    expected = bench.expected(setting)
    with fault_at(Target(bench.volume, name), "corrupt", "read", times=1) as faults:
        rows = bench.run(setting)
    assert faults.injected("corrupt") == 1
    assert same_bits(rows, expected)


@on_every_read
def test_a_corrupted_page_is_read_twice_then_named(
    bench: Bench, name: str, setting: Setting
) -> None:
    expected, target = bench.expected(setting), Target(bench.volume, name)
    with (
        fault_at(target, "corrupt", "read", times=0) as faults,
        pytest.raises(DataError) as caught,
    ):
        bench.run(setting)
    text = str(caught.value)
    for word in (*target.words(), "CRC"):
        assert word in text
    assert faults.injected("corrupt") == 2
    assert same_bits(bench.resume(setting), expected)


@pytest.mark.parametrize("setting", [PLAIN, LEAN, LOG, SAMPLED, NORM, GAT], ids=repr)
def test_completions_in_any_order_change_no_bit(bench: Bench, setting: Setting) -> None:
    expected = bench.expected(setting)
    seeds = iter(range(100))

    def plan() -> FaultPlan:
        return FaultPlan(delay=0.004, reorder=True, accept=3, seed=next(seeds))

    with faulty_devices(plan) as faults:
        assert same_bits(bench.run(setting), expected)
    assert faults.devices


@pytest.mark.parametrize("setting", [PLAIN, LOG, NORM], ids=repr)
def test_errors_all_over_the_place_change_no_bit(bench: Bench, setting: Setting) -> None:
    expected = bench.expected(setting)

    def plan() -> FaultPlan:
        # Rare enough that no page is struck by the same rule at every one of its retries.
        faults = [Fault("io", every=23), Fault("corrupt", every=61), Fault("short", every=37)]
        return FaultPlan(faults, delay=0.001, reorder=True)

    with faulty_devices(plan) as faults:
        assert same_bits(bench.run(setting), expected)
    assert faults.injected("io") > 1  # how many depends on how many neighbours travel together


@pytest.mark.parametrize("setting", [LEAN, LOG], ids=repr)
def test_a_full_disk_in_the_middle(bench: Bench, setting: Setting) -> None:
    expected = bench.expected(setting)
    with (
        faulty_devices(lambda: FaultPlan([Fault("nospace", op=Op.WRITE, after=5)])),
        pytest.raises(UsageError, match=r"object '\S+' page \d+ \(LBA \d+\): no space left"),
    ):
        bench.run(setting)
    assert list(bench.volume.volume.verify(["features", "tiles"])) == []
    assert same_bits(bench.resume(setting), expected)


@pytest.mark.parametrize("setting", [LEAN, NORM], ids=repr)
def test_a_bug_in_a_transport_is_no_hang(bench: Bench, setting: Setting) -> None:
    expected = bench.expected(setting)
    with (
        faulty_devices(lambda: FaultPlan([Fault("crash", after=20, times=1)])),
        pytest.raises(DeviceLost, match="RuntimeError: faulty transport") as caught,
    ):
        bench.run(setting)
    assert isinstance(caught.value.__cause__, RuntimeError)  # its traceback is not lost
    assert same_bits(bench.resume(setting), expected)


def test_a_volume_that_is_cut_off_under_a_run(tmp_path: Path) -> None:
    path = write_volume(tmp_path / "g.vol")
    with hyades.open(path, writable=True) as volume:
        end = volume.volume.object("tiles").lba(3) * 4096

        def cut(*_: object) -> None:
            os.truncate(path, end)

        # Which it is depends on what is read first: pages, or the next stage's page tables.
        text = (
            r"object '(tiles|weights|features)' page \d+ .* volume truncated|blocks .*: truncated"
        )
        with pytest.raises((DeviceLost, DataError), match=text):
            refresh_rows(volume, three_layers("gcn"), "x", plan="passes:9", progress=cut)
        assert own_threads() == []
    assert path.stat().st_size == end
    with pytest.raises(DataError, match="truncated"):
        hyades.open(path)


def test_errors_in_the_volume_itself(tmp_path: Path) -> None:
    # The URL makes every access faulty: tables, commits, page tables and pages.
    path = write_volume(tmp_path / "g.vol")
    model = three_layers("gcn")
    with hyades.open(path, writable=True) as volume:
        expected, _ = refresh_rows(volume, model, "whole")
    with hyades.open(f"faulty+file://{path}?fault=io,every=9", writable=True) as volume:
        rows, _ = refresh_rows(volume, model, "x")
    assert same_bits(rows, expected)
    with hyades.open(path) as volume:
        assert list(volume.volume.verify()) == []
        assert np.array_equal(volume.read("x"), expected)


@pytest.mark.parametrize(("setting", "at"), [(LEAN, 1), (LEAN, 3), (PLAIN, 1)], ids=repr)
def test_a_flush_of_the_device_that_fails(bench: Bench, setting: Setting, at: int) -> None:
    """Nothing is committed that the run's own device does not call durable."""
    expected = bench.expected(setting)
    generations = []
    plan = FaultPlan([Fault("lost", op=Op.FLUSH, at=at)])
    with (
        faulty_devices(lambda: plan) as faults,
        pytest.raises(DeviceLost, match=r"a flush failed with status LOST: what was written"),
    ):
        bench.run(
            setting, checkpoint_seconds=0.0,
            progress=lambda *_: generations.append(bench.volume.volume.generation),
        )  # fmt: skip
    assert faults.injected("lost") == 1
    # The commit that begins the run, and one after each flush that went well.
    assert bench.volume.volume.generation - generations[0] == at
    assert same_bits(bench.resume(setting), expected)
