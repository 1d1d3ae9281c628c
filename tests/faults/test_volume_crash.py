"""A crash at any moment leaves the last committed state: the old one or the new one, whole.

The device records each block written, each growth and each flush.  A crash keeps what was flushed
and any part of what was not, so the tests replay prefixes (cut at every block) and random subsets.
"""

import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyades.common.blocks import FileBlocks, MemoryBlocks, as_bytes
from hyades.common.catalog import GraphInfo, RunInfo
from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK
from hyades.common.volume import Volume

# ("write", lba, block), ("grow", nblocks, b"") or ("flush", 0, b"")
Event = tuple[str, int, bytes]


class RecordingBlocks(MemoryBlocks):
    """Records what a power loss could keep or lose, block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []

    def write(self, lba: int, data: Any) -> None:
        view = as_bytes(data)
        super().write(lba, view)
        for at in range(0, len(view), BLOCK):
            self.events.append(("write", lba + at // BLOCK, bytes(view[at : at + BLOCK])))

    def grow(self, nblocks: int) -> None:
        if nblocks > self.nblocks:
            self.events.append(("grow", nblocks, b""))
        super().grow(nblocks)

    def flush(self) -> None:
        self.events.append(("flush", 0, b""))


def replay(events: list[Event]) -> MemoryBlocks:
    """Return the device after *events*; a write beyond its end makes it longer, as in a file."""
    nblocks = max([lba + (kind == "write") for kind, lba, _ in events if kind != "flush"] or [0])
    blocks = MemoryBlocks(nblocks)
    for kind, lba, data in events:
        if kind == "write":
            blocks.data[lba * BLOCK : (lba + 1) * BLOCK] = np.frombuffer(data, np.uint8)
    return blocks


def state(blocks: MemoryBlocks) -> tuple[int, dict[str, Any]]:
    """Return generation and everything in the volume; fails on any damage but of a superblock."""
    volume = Volume.open(blocks)
    content: dict[str, Any] = {
        "graph": volume.catalog.graph,
        "runs": volume.catalog.runs,
        "attributes": volume.catalog.attributes,
    }
    for name, info in volume.catalog.objects.items():
        rows = volume.page_table(name)["rows"]
        content[f"object {name}"] = [
            (int(rows[page]), volume.read_page(info, page).tobytes()) if rows[page] else None
            for page in range(info.pages)
        ]
    findings = [found for found in volume.verify() if "never written" not in found.text]
    assert {found.object for found in findings} <= {"superblock"}
    return volume.generation, content


@dataclass
class History:
    """What was recorded, and for each commit its state and where its superblock was written."""

    events: list[Event]
    states: list[dict[str, Any]] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)  # event index of the first superblock write

    def expected(self, kept: set[int]) -> int:
        """Return how many commits the events of *kept* indices contain."""
        return sum(head in kept for head in self.heads)


def change(volume: Volume, step: int) -> None:
    """Do everything that a transaction can do."""
    if step == 1:
        rows = np.arange(3000 * 40, dtype=np.float32).reshape(3000, 40)
        info = volume.allocate_rows("features", "float32", 3000, 40, 1024)
        for page in range(info.pages):
            start, stop = info.shape().page_rows(page)
            volume.write_page(info, page, rows[start:stop], stop - start)
        volume.catalog.graph = GraphInfo(3000, 10, 0, 1024, 3)
    elif step == 2:
        volume.write_table("order", np.arange(4000))
        volume.allocate_pages("log", 6, 2 * BLOCK)
        volume.write_page(volume.object("log"), 0, b"zero", 1)
        volume.catalog.runs["r"] = RunInfo("r")
    elif step == 3:  # reuse of what step 2 left, a page table that changes in place of a new one
        volume.write_page(volume.object("log"), 3, b"three", 2)
        volume.remove("order")
        volume.allocate_pages("forgotten", 30, BLOCK)
        volume.write_page(volume.object("forgotten"), 7, b"seven", 1)
        volume.remove("forgotten")
    elif step == 4:
        volume.write_table("order", np.arange(4000)[::-1])
        volume.write_page(volume.object("log"), 5, b"five", 2)
        volume.rename("log", "journal")
        volume.catalog.runs["r"].state = "done"
    elif step == 5:
        volume.write_table("lost", np.arange(5000))
        volume.store_page_table("lost")
        volume.rollback()
        volume.remove("features")
    elif step == 6:  # writes into the space of the features
        info = volume.allocate_rows("features", "float16", 3000, 40, 1024)
        for page in range(info.pages):
            start, stop = info.shape().page_rows(page)
            volume.write_page(info, page, np.full((stop - start, 40), 7, np.float16), stop - start)
        volume.catalog.attributes["padding"] = "x" * 9000  # a catalog of several blocks


@pytest.fixture(scope="module")
def history() -> History:
    blocks = RecordingBlocks()
    volume = Volume.create(blocks, 64 << 10)
    history = History(blocks.events)

    def note(first: int) -> None:
        heads = [
            index
            for index in range(first, len(blocks.events))
            if blocks.events[index][0] == "write"
            and blocks.events[index][1] < 2
            and any(blocks.events[index][2])
        ]
        assert len(heads) == 2, "a commit writes one superblock, then mirrors it"
        assert blocks.events[heads[0] - 1][0] == blocks.events[heads[0] + 1][0] == "flush"
        history.heads.append(heads[0])
        history.states.append(state(blocks)[1])

    note(0)
    for step in range(1, 7):
        first = len(blocks.events)
        change(volume, step)
        volume.commit()
        note(first)
    return history


def check(history: History, events: list[Event], commits: int) -> None:
    """Require that what a crash left behind is the state after *commits* commits."""
    generation, content = state(replay(events))
    assert generation == commits
    assert content == history.states[commits - 1]


def test_the_history_reuses_space(history: History) -> None:
    """Or else the other tests would prove little."""
    written = [lba for kind, lba, _ in history.events if kind == "write" and lba >= 2]
    assert len(written) > len(set(written)) + 50
    assert len({repr(sorted(content)) for content in history.states}) >= 5


def test_a_cut_at_every_block_leaves_a_whole_state(history: History) -> None:
    for cut in range(history.heads[0] + 1, len(history.events) + 1):
        check(history, history.events[:cut], history.expected(set(range(cut))))


def test_any_subset_of_unflushed_blocks_leaves_a_whole_state(history: History) -> None:
    rng = np.random.default_rng(5)
    flushes = [index for index, event in enumerate(history.events) if event[0] == "flush"]
    tried = 0
    for before, after in zip(flushes, [*flushes[1:], len(history.events)], strict=True):
        if before <= history.heads[0]:
            continue
        pending = np.arange(before + 1, after)
        for keep in (0.0, 0.02, 0.2, 0.5, 0.8, 0.98, *rng.random(20)):
            lucky = set(pending[rng.random(len(pending)) < keep].tolist())
            kept = set(range(before + 1)) | lucky
            check(history, [history.events[i] for i in sorted(kept)], history.expected(kept))
            tried += 1
    assert tried > 300


def test_a_superblock_torn_at_any_byte_leaves_a_whole_state(history: History) -> None:
    for number, head in enumerate(history.heads[1:], start=1):
        _, lba, new = history.events[head]
        blocks = replay(history.events[:head])
        old = blocks.data[lba * BLOCK : (lba + 1) * BLOCK].copy()
        after = np.frombuffer(new, np.uint8)
        for at in [*range(0, 80), *range(80, BLOCK, 101), BLOCK]:
            for torn in (
                np.concatenate([after[:at], old[at:]]),
                np.concatenate([old[:at], after[at:]]),
            ):
                blocks.data[lba * BLOCK : (lba + 1) * BLOCK] = torn
                generation = Volume.open(blocks).generation
                assert generation == number + bool((torn == after).all())


def test_a_volume_goes_on_after_any_crash(history: History) -> None:
    rng = np.random.default_rng(6)
    for cut in rng.integers(history.heads[0] + 1, len(history.events), 60):
        blocks = replay(history.events[:cut])
        generation, content = state(blocks)
        with Volume.open(blocks, writable=True) as volume:
            volume.write_table("after the crash", np.arange(6000))
            volume.commit()
        assert np.array_equal(Volume.open(blocks).read_table("after the crash"), np.arange(6000))
        went_on, more = state(blocks)
        assert went_on == generation + 1
        assert {key: more[key] for key in content} == content
        assert not [found for found in Volume.open(blocks).verify() if found.object == "superblock"]


class FailingBlocks(MemoryBlocks):
    """Raises OSError at the write or flush number *fail_at*, having written half of it."""

    fail_at = -1
    count = 0

    def _step(self) -> None:
        self.count += 1
        if self.count - 1 == self.fail_at:
            raise OSError("power failed")

    def write(self, lba: int, data: Any) -> None:
        view = as_bytes(data)
        super().write(lba, view[: len(view) // 2 // BLOCK * BLOCK])
        self._step()
        super().write(lba, view)

    def flush(self) -> None:
        self._step()


def test_a_failed_commit_can_be_repeated_or_is_refused() -> None:
    outcomes = set()
    for fail_at in range(20):
        blocks = FailingBlocks()
        volume = Volume.create(blocks)
        blocks.count, blocks.fail_at = 0, fail_at
        try:
            volume.write_table("t", np.arange(3000))
            volume.commit()
        except OSError:
            pass
        else:
            outcomes.add("done")
            break
        generation, content = state(blocks)
        assert (generation, "object t" in content) in {(1, False), (2, True)}
        blocks.fail_at = -1
        before = blocks.data.copy()
        volume.rollback()
        if volume._broken:
            outcomes.add("refused")
            for use in (volume.commit, lambda name=volume: name.write_table("u", np.arange(7))):
                with pytest.raises(UsageError, match="an earlier commit failed halfway; open it"):
                    use()
            volume.close()
            assert np.array_equal(blocks.data, before)
            volume = Volume.open(blocks, writable=True)
        else:
            outcomes.add("repeated")
        volume.write_table("u", np.arange(7))
        volume.commit()
        assert np.array_equal(Volume.open(blocks).read_table("u"), np.arange(7))
        assert list(Volume.open(blocks).verify()) == []
    assert outcomes == {"done", "refused", "repeated"}


CHILD = """
import sys
import numpy as np
from hyades.common.blocks import FileBlocks
from hyades.common.volume import Volume
volume = Volume.open(FileBlocks(sys.argv[1]), writable=True)
step = int(volume.catalog.attributes.get("step", "0"))
while True:
    step += 1
    if "t" in volume.catalog.objects:
        volume.remove("t")
    volume.write_table("t", np.full(50_000, step))
    volume.catalog.attributes["step"] = str(step)
    volume.commit()
    print(step, flush=True)
"""


def test_kill_at_random_moments(tmp_path: Path) -> None:
    path = tmp_path / "g.vol"
    Volume.create(FileBlocks(path, create=True)).close()
    rng = np.random.default_rng(1)
    done = 0
    for _ in range(6):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(path)], stdout=subprocess.PIPE, text=True
        ) as child:
            assert child.stdout is not None
            assert int(child.stdout.readline()) > done
            time.sleep(rng.random() * 0.05)
            child.send_signal(signal.SIGKILL)
            printed = child.stdout.read().split()
        with Volume.open(FileBlocks(path, writable=False)) as volume:
            step = int(volume.catalog.attributes["step"])
            assert step >= max([done, *map(int, printed)])
            assert (volume.read_table("t") == step).all()
            assert {found.object for found in volume.verify()} <= {"superblock"}
        done = step
