"""kill -9, Ctrl-C and SIGTERM at random moments of a run: resumed, it has the same bits.

Every run is a process of its own.  Budgets are so small that hidden rows lie on the volume, and
commits come as often as the device allows, so that there is much to lose and to find again.
"""

import contextlib
import hashlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.reference.processes import forked
from tests.reference.runs import (
    WIDTH,
    bits,
    least_memory,
    own_threads,
    three_layers,
    write_volume,
)

import hyades
from hyades.deploy.api import VolumeHandle
from hyades.deploy.bench.weights import ModelSpec, write_weights
from hyades.deploy.cli import main

pytestmark = pytest.mark.timeout(280)

SEEDS = 20


@dataclass(frozen=True)
class Run:
    """A model and the options of its refresh."""

    kind: str
    options: dict[str, Any] = field(default_factory=dict)


RUNS = [
    Run("gcn", {"plan": "passes:8"}), Run("sage", {"plan": "log:24"}),
    Run("norm", {"plan": "passes:4"}), Run("gat", {"plan": "passes:4", "fanout": (4, 4, 4)}),
]  # fmt: skip


def digest(volume: VolumeHandle, name: str) -> str:
    """Return a hash of the bits of an output."""
    return hashlib.sha256(bits(volume.read(name)).tobytes()).hexdigest()


def lanes_done(volume: VolumeHandle, name: str) -> int:
    """Return how many pages of rows an unfinished run has in the volume."""
    objects = [n for n in volume.catalog.objects if n.startswith(f"running/{name}/")]
    rows = [n for n in objects if not n.endswith("/log")]
    return sum(int(np.count_nonzero(volume.volume.page_table(n)["rows"])) for n in rows)


def refresh(volume: VolumeHandle, run: Run, out: str, memory: int, **more: Any) -> None:
    """Refresh an output, committing all the time."""
    hyades.refresh(
        volume, three_layers(run.kind), out=out, memory=memory, threads=2, checkpoint_seconds=0.0,
        **run.options, **more,
    )  # fmt: skip


def undisturbed(connection: Connection, path: Path, run: Run) -> None:
    """Send the least memory, the seconds of a run with it, and its bits."""
    with hyades.open(path, writable=True) as volume:
        memory = least_memory(volume, three_layers(run.kind), **run.options)
        refresh(volume, run, run.kind, memory)
        begin = time.perf_counter()
        refresh(volume, run, run.kind, memory, force=True)
        connection.send((memory, time.perf_counter() - begin, digest(volume, run.kind)))


def victim(connection: Connection, path: Path, run: Run, memory: int, resume: bool) -> None:
    """Say that the run begins; then run, and say how it ended unless killed."""
    with hyades.open(path, writable=True) as volume:
        try:
            connection.send("begins")
            refresh(volume, run, "x", memory, resume=resume)
            connection.send("ended")
        except KeyboardInterrupt:
            connection.send(("interrupted", own_threads(), lanes_done(volume, "x")))


def survivor(connection: Connection, path: Path, run: Run, memory: int) -> None:
    """Go on with what is in the volume; send what was there, the bits, and what is wrong."""
    with hyades.open(path, writable=True) as volume:
        found = volume.catalog.runs.get("x")
        done = lanes_done(volume, "x")
        if found is not None and found.state == "running":
            refresh(volume, run, "x", memory, resume=True)
        elif found is None:
            refresh(volume, run, "x", memory)
        wrong = [str(f) for f in volume.volume.verify()]
        left = [n for n in volume.catalog.objects if n.startswith("running/")]
        connection.send((found and found.state, done, digest(volume, "x"), wrong + left))
        volume.volume.remove("output/x")
        del volume.catalog.runs["x"]
        volume.volume.commit()


class Child:
    """A forked process that talks to us."""

    def __init__(self, target: Any, *args: Any) -> None:
        self.connection, theirs = forked().Pipe()
        self.process = forked().Process(target=target, args=(theirs, *args))
        self.process.start()
        theirs.close()

    def receive(self, timeout: float = 100) -> Any:
        """Return what it sends next, None where it is gone."""
        try:
            return self.connection.recv() if self.connection.poll(timeout) else None
        except EOFError:
            return None

    def signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        pid = self.process.pid
        if pid is not None and self.process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(self) -> int:
        """Wait for its end and return the exit code."""
        self.process.join(100)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
        assert code is not None, "it hangs"
        return code


@dataclass
class Scene:
    """A volume and what undisturbed runs on it are like."""

    path: Path
    memory: list[int]
    seconds: list[float]
    digests: list[str]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    path = tmp_path_factory.mktemp("kill") / "g.vol"
    write_volume(path, vertices=20_000, edges=120_000)
    facts = []
    for run in RUNS:
        child = Child(undisturbed, path, run)
        facts.append(child.receive())
        assert child.end() == 0
    memory, seconds, digests = zip(*facts, strict=True)
    yield Scene(path, list(memory), list(seconds), list(digests))
    path.unlink()


def strike(scene: Scene, which: int, delay: float, numbers: list[int], resume: bool) -> Any:
    """Begin a run, send signals after *delay*; return what it said, and its exit code."""
    child = Child(victim, scene.path, RUNS[which], scene.memory[which], resume)
    assert child.receive() == "begins"
    time.sleep(delay)
    for number in numbers:
        child.signal(number)
    said = child.receive()
    return said, child.end()


def go_on(scene: Scene, which: int) -> tuple[str | None, int]:
    """Resume; return the state that the run was in and how many pages were done."""
    child = Child(survivor, scene.path, RUNS[which], scene.memory[which])
    state, done, found, wrong = child.receive()
    assert child.end() == 0
    assert wrong == []
    assert found == scene.digests[which]
    return state, done


def test_kill_9_at_random_moments(scene: Scene) -> None:
    random = np.random.default_rng(17)
    useful = killed = 0
    for seed in range(SEEDS):
        which = seed % len(RUNS)
        delay = float(random.uniform(0, scene.seconds[which]))
        said, code = strike(scene, which, delay, [signal.SIGKILL], resume=False)
        assert (said, code) in ((None, -signal.SIGKILL), ("ended", 0), ("ended", -signal.SIGKILL))
        killed += said is None
        if seed % 4 == 3:  # and the resumed run, too
            with hyades.open(scene.path) as volume:
                run = volume.catalog.runs.get("x")
            if run is not None and run.state == "running":
                half = scene.seconds[which] / 4
                strike(scene, which, half, [signal.SIGKILL], resume=True)
        state, done = go_on(scene, which)
        useful += state == "running" and done > 0
    # Else this tests nothing: runs that were over, or had nothing to go on with.
    assert killed >= SEEDS // 2
    assert useful >= SEEDS // 4


@pytest.mark.parametrize("numbers", [[2], [2, 2], [15], [2, 15, 2]], ids=str)
def test_ctrl_c_stops_cleanly_however_often(scene: Scene, numbers: list[int]) -> None:
    random = np.random.default_rng(sum(numbers))
    interrupted = 0
    for which in range(len(RUNS)):
        delay = float(random.uniform(0.2, 0.8)) * scene.seconds[which]
        # Python's own handler of SIGTERM ends the process at once: as with kill -9.
        said, code = strike(scene, which, delay, numbers, resume=False)
        if 15 in numbers:
            assert code in (-signal.SIGTERM, 0)
        elif said != "ended":
            assert said[0] == "interrupted"
            assert said[1] == []
            assert code == 0
            interrupted += 1
        go_on(scene, which)
    assert interrupted >= 2 or 15 in numbers


# -- the command line


def command(connection: Connection, words: list[str], errors: Path) -> None:
    """Be the command `hyades`, with its messages in a file."""
    handle = os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666)
    os.dup2(handle, 2)
    os.dup2(handle, 1)
    sys.argv = ["hyades", *words]
    connection.send("begins")
    main()


def hyades_refresh(scene: Scene, folder: Path, *words: str) -> tuple[Child, Path]:
    """Start `hyades refresh` with output "cli"; return the process and the file of its messages."""
    model = write_weights(ModelSpec("gcn", (WIDTH, 32, 16)), folder / "model").model
    errors = folder / f"errors-{time.monotonic_ns()}"
    options = ["--memory", f"{scene.memory[0]}", "--plan", "passes:8", "--threads", "2"]
    everything = ["refresh", str(scene.path), "--model", str(model), "--out", "cli", *options]
    child = Child(command, [*everything, "--no-report", "--progress", *words], errors)
    assert child.receive() == "begins"
    return child, errors


@pytest.mark.parametrize(
    ("numbers", "code", "word"),
    [([2], 130, "interrupted"), ([2, 2, 2], 130, "interrupted"), ([15], 143, "terminated"),
     ([15, 15], 143, "terminated")],
    ids=str,
)  # fmt: skip
def test_the_command_says_how_to_go_on(
    scene: Scene, tmp_path: Path, numbers: list[int], code: int, word: str
) -> None:
    child, errors = hyades_refresh(scene, tmp_path)
    while "pass 3/" not in (text := errors.read_text()):
        assert child.process.exitcode is None, text
        time.sleep(0.002)
    for number in numbers:
        child.signal(number)
    assert child.end() == code, errors.read_text()
    last = errors.read_text().replace("\r", "\n").splitlines()[-1]
    hint = "what was done is kept: add --resume to the same command to continue"
    assert last.endswith(f"hyades: {word}; {hint}")
    with hyades.open(scene.path) as volume:
        assert lanes_done(volume, "cli") > 0
        assert list(volume.volume.verify()) == []
    child, errors = hyades_refresh(scene, tmp_path, "--resume")
    assert child.end() == 0, errors.read_text()
    with hyades.open(scene.path) as volume:
        resumed = digest(volume, "cli")
    child, errors = hyades_refresh(scene, tmp_path, "--force")
    assert child.end() == 0, errors.read_text()
    with hyades.open(scene.path, writable=True) as volume:
        assert digest(volume, "cli") == resumed
        volume.volume.remove("output/cli")
        del volume.catalog.runs["cli"]
        volume.volume.commit()
