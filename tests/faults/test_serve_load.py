"""Many hosts at once against `hyades serve`, everything verified, and memory flat.

A few seconds and hosts here; 64 hosts with 8 queues each for 60 s where HYADES_LONG is set.
"""

import os
import random
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.reference.nvme_host import NQN, Host, pattern

from hyades.common.nvme import commands
from hyades.common.nvme.layout import Opcode
from hyades.common.units import KIB, MIB

LONG = bool(os.environ.get("HYADES_LONG"))
HOSTS, QUEUES, SECONDS = (64, 8, 60.0) if LONG else (8, 2, 3.0)
AREA = 128  # blocks of 4 KiB that one queue has to itself
SIZES = (1, 2, 8, 16, 64)  # blocks of a command
GROWTH = 48 * MIB  # more than buffers and threads come to once all hosts are there


class Lane:
    """One queue and what its area of the namespace must hold."""

    def __init__(self, host: Host, queue, first: int, seed: int) -> None:
        self.host, self.queue, self.first = host, queue, first
        self.random = random.Random(seed)
        self.content = bytearray(AREA * 4096)
        self.started: dict[int, tuple[int, int, bytearray | None]] = {}
        self.busy: set[int] = set()  # blocks under way
        self.done = 0

    def start(self) -> None:
        """Send a few commands whose blocks do not touch."""
        while len(self.started) < 6:
            blocks = self.random.choice(SIZES)
            at = self.random.randrange(AREA - blocks + 1)
            touched = set(range(at, at + blocks))
            if touched & self.busy:
                return
            self.busy |= touched
            if self.random.random() < 0.5:
                data = pattern(blocks * 4096, self.random.randrange(1 << 30))
                self.content[at * 4096 : (at + blocks) * 4096] = data
                sqe = commands.transfer(Opcode.WRITE, 1, self.first + at, blocks)
                cid, slot = self.queue.start(sqe, source=memoryview(data)), None
            else:
                slot = bytearray(blocks * 4096)
                sqe = commands.transfer(Opcode.READ, 1, self.first + at, blocks)
                cid = self.queue.start(sqe, into=memoryview(slot))
            self.started[cid] = (at, blocks, slot)

    def finish(self) -> None:
        """Take completions; what was read must be what was written."""
        for cid, code, _ in self.queue.queue.completions:
            at, blocks, slot = self.started.pop(cid)
            assert code == 0, hex(code)
            expected = self.content[at * 4096 : (at + blocks) * 4096]
            assert slot is None or slot == expected, f"block {self.first + at}"
            self.busy -= set(range(at, at + blocks))
            self.done += 1
        self.queue.queue.completions.clear()


def drive(lanes: list[Lane], until: float, wrong: list[str]) -> None:
    """Keep all *lanes* busy until then, and take what is left."""
    poll = select.poll()
    by_fd = {lane.queue.sock.fileno(): lane for lane in lanes}
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    try:
        for lane in lanes:
            lane.start()
        while any(lane.started for lane in lanes):
            ready = poll.poll(60_000)
            assert ready, "no answer for a minute"
            for fd, _ in ready:
                lane = by_fd[fd]
                lane.queue.receive()
                lane.finish()
                if time.monotonic() < until:
                    lane.start()
    except (AssertionError, EOFError, OSError) as error:
        wrong.append(repr(error))


def resident(pid: int) -> int:
    """Return resident bytes."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4 * KIB


@pytest.mark.timeout(280)
@pytest.mark.parametrize("digests", [False, True])
def test_nothing_is_lost_and_memory_stays(tmp_path, digests):
    if LONG and digests:
        pytest.skip("the long run is one of 60 s, without digests")
    path, ready = tmp_path / "namespace", tmp_path / "ready"
    size = HOSTS * QUEUES * AREA * 4096
    command = [
        sys.executable, "-m", "hyades.deploy.cli", "serve", "-n", str(path), "--create", str(size),
        "--nqn", NQN, "-l", "127.0.0.1:0", "--ready-file", str(ready), "--buffers", "32MiB",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            while not ready.exists():
                assert process.poll() is None
                time.sleep(0.02)
            host, _, port = ready.read_text().strip().rpartition(":")
            flags = {"header_digest": digests, "data_digest": digests}
            hosts = [
                Host((host, int(port)), queues=QUEUES, depth=16, **flags) for _ in range(HOSTS)
            ]
            lanes = [
                Lane(h, queue, (i * QUEUES + j) * AREA, i * QUEUES + j)
                for i, h in enumerate(hosts)
                for j, queue in enumerate(h.queues)
            ]
            wrong: list[str] = []
            begin = time.monotonic()
            warm, until = begin + SECONDS / 3, begin + SECONDS
            drive_all(lanes, warm, wrong)
            before = resident(process.pid)
            drive_all(lanes, until, wrong)
            after = resident(process.pid)
            assert wrong == []
            assert all(lane.done for lane in lanes)
            assert after - before < GROWTH, f"{before} bytes resident, then {after}"
            for lane in lanes:
                for at in range(0, AREA, 64):
                    found = lane.queue.read(lane.first + at, 64)
                    assert found == (0, bytes(lane.content[at * 4096 : (at + 64) * 4096]))
            for each in hosts:
                each.close()
        finally:
            process.terminate()
        assert process.wait(60) == 0
    whole = b"".join(bytes(lane.content) for lane in lanes)
    assert path.read_bytes() == whole


def drive_all(lanes: list[Lane], until: float, wrong: list[str]) -> None:
    """Drive the lanes from two threads."""
    threads = [
        threading.Thread(target=drive, args=(lanes[part::2], until, wrong)) for part in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
