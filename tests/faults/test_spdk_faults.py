"""SPDK when things go wrong: lost queues and controllers, late callbacks, dead processes."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.contracts.transport import arena_for, finish, request, sweep
from tests.reference.spdk import ADDRESS, StandIn, needs_compiler, remove_builds

from hyades.common.errors import DeviceLost
from hyades.common.layout import BLOCK, Op, Status

pytestmark = needs_compiler
BLOCKS = 64


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    yield
    remove_builds()


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    stand_in = StandIn(monkeypatch, tmp_path)
    path = stand_in.device(BLOCKS)
    path.write_bytes(np.repeat(np.arange(BLOCKS, dtype=np.uint8), BLOCK).tobytes())
    return stand_in


@pytest.fixture
def opened(stand_in):
    devices = []

    def open_it(options="ns=1", **faults):
        stand_in.faults(**faults)
        device = stand_in.open(options)
        devices.append(device)
        arena = arena_for(device, BLOCKS * BLOCK)
        device.register(arena)
        return device, arena

    yield open_it
    for device in devices:
        device.close()


def every_block(op, cookie=0):
    """Return one request a block, in place."""
    return np.concatenate([request(op, b, 1, b * BLOCK, cookie + b) for b in range(BLOCKS)])


def check_blocks(arena):
    rows = arena.reshape(BLOCKS, BLOCK)
    assert (rows == np.arange(BLOCKS, dtype=np.uint8)[:, None]).all()


ALL_GOOD = dict.fromkeys(range(BLOCKS), (0, BLOCK))


@pytest.mark.parametrize(
    "faults",
    [
        {"break": 20, "breaks": 3, "hold": 1},
        {"break": 20, "breaks": 3, "hold": 1, "fail": 1},
        {"break": 20, "breaks": 3, "hold": 1, "fail": 1, "refuse": 2},
        {"break": 20, "hold": 2, "fail": 1, "orphan": 1},
    ],
    ids=["queue", "controller", "refused at first", "callbacks after the queue"],
)
def test_a_lost_path_loses_no_request(opened, faults):
    """Each read is answered once, with its bytes, whether its callback came, never or late."""
    device, arena = opened("queues=2&depth=16&ctrl_loss_timeout=30", **faults)
    assert finish(device, every_block(Op.READ)) == ALL_GOOD
    check_blocks(arena)
    assert finish(device, every_block(Op.READ, 1000))[1003] == (0, BLOCK)
    stats = device.stats()
    assert stats["reconnects"] == faults.get("breaks", 1)
    assert stats["replayed"] > 0
    assert (stats["late_callbacks"] > 0) == ("orphan" in faults)
    assert stats["errors"] == 0


def test_writes_are_given_again(opened, stand_in):
    device, arena = opened("depth=16", **{"break": 10, "breaks": 4, "hold": 1, "fail": 1})
    arena[:] = np.random.default_rng(1).integers(0, 256, len(arena), np.uint8)
    assert finish(device, every_block(Op.WRITE)) == ALL_GOOD
    device.close()
    (path,) = [p for p in stand_in.folder.iterdir() if p.name.startswith("nqn")]
    assert path.read_bytes() == arena.tobytes()


def test_partial_submits(opened):
    device, arena = opened(enomem=2, hold=1)
    assert finish(device, every_block(Op.READ)) == ALL_GOOD
    check_blocks(arena)
    assert device.stats()["partial_submits"] > 0


def test_commands_that_nobody_answers(opened):
    """The target holds its connections open and says nothing: the timeout breaks them."""
    device, arena = opened("timeout=0.5&depth=8", mute=5)
    assert finish(device, every_block(Op.READ)) == ALL_GOOD
    check_blocks(arena)
    assert device.stats()["reconnects"] == 1


def test_a_device_that_stays_away_is_lost(opened):
    device, _ = opened("ctrl_loss_timeout=0.3&depth=16", **{"break": 9, "fail": 1, "refuse": -1})
    results = finish(device, every_block(Op.READ))
    assert {status for status, _ in results.values()} <= {Status.OK, Status.LOST}
    assert results[BLOCKS - 1] == (Status.LOST, 0)
    assert finish(device, request(Op.FLUSH, cookie=7))[7] == (Status.LOST, 0)
    assert "is lost: no answer for 0.3 s" in device.describe()
    assert "trsvcid:4420" in device.describe()


@pytest.mark.parametrize("change", ["other", "shrink"])
def test_another_namespace_is_not_taken_for_the_old_one(opened, change):
    device, _ = opened("depth=16", **{"break": 9, "fail": 1, change: 1})
    results = finish(device, every_block(Op.READ))
    assert results[BLOCKS - 1] == (Status.LOST, 0)
    assert "is another one since the connection was lost" in device.describe()


@pytest.mark.parametrize(
    ("options", "faults", "expected"),
    [
        ("", {}, Status.LOST),
        ("&trust_cache=1", {}, Status.OK),
        ("", {"epoch": 1}, Status.OK),
        ("", {"epoch": 2}, Status.LOST),
    ],
    ids=["unknown cache", "trusted", "same epoch", "new epoch"],
)
def test_a_flush_after_a_loss(opened, options, faults, expected):
    """Writes that completed on a lost connection are not called durable on another one."""
    device, _ = opened("depth=4" + options, **{"break": 4, "fail": 1, **faults})
    assert finish(device, request(Op.WRITE, 1, 1, 0, 1))[1][0] == Status.OK
    assert finish(device, request(Op.FLUSH, cookie=2))[2][0] == Status.OK
    assert finish(device, request(Op.WRITE, 2, 1, 0, 3))[3][0] == Status.OK
    assert finish(device, request(Op.READ, 2, 1, 0, 4))[4][0] == Status.OK  # breaks the path
    assert finish(device, request(Op.FLUSH, cookie=5))[5][0] == expected
    assert finish(device, request(Op.FLUSH, cookie=6))[6][0] == Status.OK  # said once


def test_nothing_is_in_doubt_where_all_was_flushed(opened):
    device, _ = opened("depth=4", **{"break": 3, "fail": 1})
    assert finish(device, request(Op.WRITE, 1, 1, 0, 1))[1][0] == Status.OK
    assert finish(device, request(Op.FLUSH, cookie=2))[2][0] == Status.OK
    assert finish(device, request(Op.READ, 2, 1, 0, 4))[4][0] == Status.OK
    assert device.stats()["reconnects"] == 1
    assert finish(device, request(Op.FLUSH, cookie=5))[5][0] == Status.OK


def test_media_errors_name_their_blocks_only(opened):
    device, _ = opened(media="10:12")
    reads = finish(device, every_block(Op.READ))
    assert {b: s for b, s in reads.items() if s[0]} == {10: (Status.IO, 0), 11: (Status.IO, 0)}
    writes = finish(device, every_block(Op.WRITE))
    assert {b for b, s in writes.items() if s[0]} == {10, 11}
    assert device.stats()["errors"] == 4


def test_a_full_namespace(opened):
    device, _ = opened(full=60)
    writes = finish(device, every_block(Op.WRITE))
    assert {b: s[0] for b, s in writes.items() if s[0]} == dict.fromkeys(
        range(60, 64), Status.NO_SPACE
    )


def test_a_path_in_transition_is_tried_again(opened):
    device, arena = opened(path="5:3")
    assert finish(device, every_block(Op.READ)) == ALL_GOOD
    check_blocks(arena)
    assert device.stats()["replayed"] == 3


def test_a_command_that_is_refused_for_ever(opened):
    device, _ = opened("ctrl_loss_timeout=0.3", path="5:1000000000")
    assert finish(device, request(Op.READ, 4, 1, 0, 1))[1] == (0, BLOCK)
    assert finish(device, request(Op.READ, 5, 1, 0, 2))[2] == (Status.LOST, 0)
    assert "the target refuses commands" in device.describe()


def test_any_other_status_is_an_error(opened):
    device, _ = opened(bad=f"5:{0x7FF}")
    assert finish(device, request(Op.READ, 5, 1, 0, 2))[2] == (Status.IO, 0)


# -- processes


def test_a_process_that_dies_answers_with_lost(opened):
    device, _ = opened("depth=16", crash=20, hold=1)
    results = finish(device, every_block(Op.READ))
    assert set(results) == set(range(BLOCKS))
    assert {status for status, _ in results.values()} <= {Status.OK, Status.LOST}
    assert results[BLOCKS - 1] == (Status.LOST, 0)
    assert "the SPDK process ended (signal 9)" in device.describe()
    start = time.monotonic()
    device.wait(0.02)
    assert time.monotonic() - start >= 0.015  # no busy loop
    device.close()
    assert sweep(device) == []


def test_a_process_that_dies_while_nothing_is_asked(opened):
    device, _ = opened()
    os.kill(device._child._process.pid, signal.SIGKILL)
    device._child._process.wait()
    device.wait(0.02)  # returns at once
    start = time.monotonic()
    device.wait(0.02)
    assert time.monotonic() - start >= 0.015  # but not for ever
    assert finish(device, request(Op.READ, 1, 1, 0, 1))[1] == (Status.LOST, 0)


def test_a_process_that_dies_while_it_opens(stand_in, monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    with pytest.raises(DeviceLost, match=r"the SPDK process ended \(exit code 1\)"):
        stand_in.open()


def test_close_ends_a_process_that_does_not_answer(opened, monkeypatch):
    """A stopped process is killed after a while; what it had is cancelled."""
    monkeypatch.setattr("hyades.proxy.transports.spdk_child._ENDING", 0.3)
    device, arena = opened("depth=16", stop=5)
    assert device.submit(every_block(Op.READ)) == 16
    deadline = time.monotonic() + 20
    while _state(device._child._process.pid) != "T":
        time.sleep(0.01)
        assert time.monotonic() < deadline
    device.close()
    after = arena.copy()
    found = sweep(device)
    assert sorted(cookie for cookie, _ in found) == list(range(16))
    assert {status for _, status in found} <= {Status.OK, Status.CANCELLED}
    assert np.array_equal(arena, after)


def test_close_while_the_path_is_down(opened):
    """Reconnecting does not keep a close waiting until the device counts as lost."""
    device, _ = opened(
        "ctrl_loss_timeout=1000&depth=16", **{"break": 3, "fail": 1, "refuse": -1, "hold": 1}
    )
    accepted = device.submit(every_block(Op.READ))
    device.wait(0.3)
    device.close()
    found = sweep(device)
    assert sorted(cookie for cookie, _ in found) == list(range(accepted))
    assert Status.CANCELLED in {status for _, status in found}


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "gone"


def _descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


PARENT = """
import sys, threading
from hyades.proxy.registry import open_transport
opened = []
thread = threading.Thread(target=lambda: opened.append(open_transport(sys.argv[1])))
thread.start(); thread.join()
device = opened[0]
print(device._child._process.pid, device._child.alive(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["killed", "terminated"])
def test_the_process_dies_with_its_caller(stand_in, how):
    """It outlives the thread that started it, but not the process."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, f"spdk+tcp://{ADDRESS}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        pid, alive = parent.stdout.readline().split()
        assert alive == "True"
        time.sleep(0.3)  # the thread is gone: a death signal would have come by now
        assert _state(int(pid)) in "SRD"
    finally:
        parent.send_signal(how)
        parent.wait()
        parent.stdin.close()
        parent.stdout.close()
    deadline = time.monotonic() + 20
    while _state(int(pid)) not in ("gone", "Z"):
        time.sleep(0.01)
        assert time.monotonic() < deadline, "the SPDK process lives on"


def test_no_descriptor_and_no_process_is_left(stand_in):
    gc.collect()  # what other tests have left would go meanwhile
    before = _descriptors()
    device = stand_in.open()
    arena = arena_for(device, BLOCK)
    device.register(arena)
    pid = device._child._process.pid
    device.close()
    assert _state(pid) == "gone"
    del device, arena
    gc.collect()
    assert _descriptors() <= before
