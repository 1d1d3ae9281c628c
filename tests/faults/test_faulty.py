"""The faulty transport itself: each fault strikes where its rule says, and nothing is lost."""

import time

import numpy as np
import pytest

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, COMPLETION, REQUEST, Op, Status
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport
from hyades.proxy.transports.faulty import Fault, FaultPlan, FaultyTransport, parse_fault
from hyades.proxy.transports.mem import MemoryStore, MemTransport

BLOCKS = 32


def faulty(*faults, **plan):
    store = MemoryStore(BLOCKS)
    store.data[:] = np.repeat(np.arange(BLOCKS, dtype=np.uint8), BLOCK)
    device = FaultyTransport(MemTransport(store), FaultPlan(faults=list(faults), **plan))
    arena = allocate_arena(BLOCKS * BLOCK)
    device.register(arena)
    return device, arena.reshape(BLOCKS, BLOCK)


def batch(op, lbas):
    out = np.zeros(len(lbas), REQUEST)
    out["op"], out["lba"], out["nbytes"] = op, lbas, BLOCK
    out["offset"], out["cookie"] = np.array(lbas) * BLOCK, np.arange(len(lbas)) + 50
    return out


def run(device, requests):
    """Return [(index, status, nbytes)] in order of completion."""
    found, total = [], len(requests)
    completions = np.zeros(8, COMPLETION)
    while len(found) < total:
        requests = requests[device.submit(requests) :]
        for done in completions[: device.poll(completions)]:
            found.append((int(done["cookie"]) - 50, int(done["status"]), int(done["nbytes"])))
        device.wait(0.01)
    assert device.poll(completions) == 0
    assert sorted(i for i, _, _ in found) == list(range(total))
    return found


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("io", Status.IO), ("short", Status.SHORT), ("nospace", Status.NO_SPACE),
        ("lost", Status.LOST), ("timeout", Status.TIMEOUT), ("invalid", Status.INVALID),
    ],
)  # fmt: skip
def test_each_status(kind, status):
    device, rows = faulty(Fault(kind, at=2))
    rows[:] = 0xEE
    found = {i: (s, n) for i, s, n in run(device, batch(Op.READ, [4, 5, 6]))}
    assert found[0] == found[2] == (Status.OK, BLOCK)
    assert found[1] == (status, 0)
    assert (rows[5] == 0xEE).all(), "a failed read must not touch the buffer"
    assert device.stats()["errors"] == 1


@pytest.mark.parametrize(
    ("rule", "hit"),
    [
        ("io", range(12)), ("io,every=3", [2, 5, 8, 11]), ("io,at=5", [4]),
        ("io,after=9", [9, 10, 11]), ("io,at=2,after=10", [1, 10, 11]),
        ("io,times=2", [0, 1]), ("io,every=2,times=3", [1, 3, 5]), ("io,lba=3-5", [3, 4]),
        ("io,lba=7", [7]), ("io,op=write", []), ("io,op=read,at=1", [0]),
    ],
)  # fmt: skip
def test_rules(rule, hit):
    device, _ = faulty(parse_fault(rule))
    found = run(device, batch(Op.READ, list(range(12))))
    assert sorted(i for i, s, _ in found if s) == list(hit)


def test_a_failed_write_does_not_write():
    device, rows = faulty(Fault("nospace", op=Op.WRITE, lbas=(3, 4)))
    rows[:] = 0xAA
    found = {i: s for i, s, _ in run(device, batch(Op.WRITE, [2, 3, 4]))}
    assert found == {0: 0, 1: Status.NO_SPACE, 2: 0}
    assert device.inner.store.data[3 * BLOCK] == 3
    assert device.inner.store.data[4 * BLOCK] == 0xAA


def test_corruption_flips_one_bit_of_one_read():
    device, rows = faulty(Fault("corrupt", every=4), seed=3)
    found = run(device, batch(Op.READ, list(range(8))))
    assert {s for _, s, _ in found} == {Status.OK}
    wrong = rows ^ np.arange(BLOCKS, dtype=np.uint8)[:, None]
    wrong[8:] = 0
    assert list(np.flatnonzero(wrong.any(axis=1))) == [3, 7]
    assert [int(np.bitwise_count(wrong[i]).sum()) for i in (3, 7)] == [1, 1]
    assert device.stats()["injected"]["corrupt"] == 2
    rows[:] = 0
    run(device, batch(Op.READ, [3]))
    assert (rows[3] == 3).all(), "the device itself is intact"


def test_reordering_is_reproducible():
    orders = []
    for seed in (1, 1, 2):
        device, _ = faulty(reorder=True, seed=seed)
        orders.append([i for i, _, _ in run(device, batch(Op.READ, list(range(8))))])
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert orders[0] != sorted(orders[0])


def test_delays():
    device, _ = faulty(delay=0.05, seed=1)
    start = time.monotonic()
    found = run(device, batch(Op.READ, list(range(16))))
    assert 0.02 < time.monotonic() - start < 1
    assert [i for i, _, _ in found] != list(range(16))


def test_partial_submit():
    device, _ = faulty(accept=3)
    assert device.submit(batch(Op.READ, list(range(10)))) == 3
    assert device.submit(batch(Op.READ, [1])) == 1


def test_crash():
    device, _ = faulty(Fault("crash", at=3))
    with pytest.raises(RuntimeError, match="crash on purpose"):
        device.submit(batch(Op.READ, [0, 1, 2, 3]))


def test_close_reports_held_completions_without_delay():
    device, rows = faulty(Fault("corrupt"), delay=10.0)
    requests = batch(Op.READ, [1, 2, 3])
    assert device.submit(requests) == 3
    completions = np.zeros(8, COMPLETION)
    assert device.poll(completions) == 0  # ran, but late
    assert device.submit(requests[:1]) == 1  # not run yet
    device.close()
    before = rows.copy()
    assert device.poll(completions) == 4
    assert sorted(completions["status"][:4]) == [Status.CANCELLED, 0, 0, 0]
    assert np.array_equal(rows, before)


def test_url():
    device = open_transport(
        "faulty+mem://?size=64KiB&fault=io,op=read,every=7&fault=corrupt,at=3&delay=0.5"
        "&reorder=yes&accept=4&seed=9"
    )
    assert device.nblocks == 16
    plan = device.plan
    assert [(f.kind, f.op, f.every, f.at) for f in plan.faults] == [
        ("io", Op.READ, 7, 0), ("corrupt", None, 0, 3)
    ]  # fmt: skip
    assert (plan.delay, plan.reorder, plan.accept, plan.seed) == (0.5, True, 4, 9)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("fault=fire", "no fault 'fire'; there are io, short"), ("fault=io,every=x", "cannot read"),
        ("fault=io,op=seek", "cannot read 'op=seek'"), ("fault=io,lba=a-b", "cannot read"),
        ("fault=corrupt,op=write", "reads only"), ("delay=soon", "in seconds"),
        ("unknown=1", "no option unknown"), ("fault=io,at=0", "cannot read"),
    ],
)  # fmt: skip
def test_url_mistakes(option, words):
    with pytest.raises(UsageError, match=words):
        open_transport(f"faulty+mem://?{option}")
