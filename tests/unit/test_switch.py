"""A device of the proxy whose transport is replaced: between passes, and where it is lost."""

import threading

import numpy as np
import pytest
from tests.contracts.transport import finish, pattern, request, sweep
from tests.reference.rig import Rig, store_of

from hyades.common.errors import BackendMissing, UsageError
from hyades.common.layout import BLOCK, Op, Status
from hyades.common.units import KIB
from hyades.proxy.arena import allocate_arena
from hyades.proxy.transports.faulty import Fault, FaultPlan, FaultyTransport
from hyades.proxy.transports.mem import MemoryStore, MemTransport
from hyades.proxy.transports.switch import SwitchableDevice

BLOCKS = 32


def store(seed=1, nblocks=BLOCKS):
    made = MemoryStore(nblocks)
    made.data[:] = pattern(nblocks * BLOCK, seed)
    return made


def reads(count=BLOCKS):
    return np.concatenate([request(Op.READ, b, 1, b * BLOCK, 1000 + b) for b in range(count)])


def lossy(of, **when):
    return FaultyTransport(MemTransport(of), FaultPlan([Fault("lost", **when)]))


def ready(device):
    arena = allocate_arena(BLOCKS * BLOCK)
    device.register(arena)
    return arena


ALL = dict.fromkeys(range(1000, 1000 + BLOCKS), (Status.OK, BLOCK))


def test_between_passes():
    first, second = store(1), store(2, 2 * BLOCKS)
    old = MemTransport(first)
    device = SwitchableDevice(old)
    arena = ready(device)
    assert finish(device, reads()) == ALL
    assert np.array_equal(arena, first.data)
    thread = threading.Thread(target=device.replace, args=(MemTransport(second),))
    thread.start()
    thread.join()
    assert device.nblocks == 2 * BLOCKS
    with pytest.raises(UsageError, match="closed"):
        old.submit(reads(1))
    assert finish(device, reads()) == ALL
    assert np.array_equal(arena, second.data[: BLOCKS * BLOCK])
    stats = device.stats()
    assert stats["bytes_read"] == 2 * BLOCKS * BLOCK
    assert (stats["requests"], stats["errors"], stats["fell_back"]) == (2 * BLOCKS, 0, "")


def test_not_while_something_is_in_flight():
    device, spare = SwitchableDevice(MemTransport(store())), MemTransport(store(2))
    arena = ready(device)
    taken = device.submit(reads(3))
    with pytest.raises(UsageError, match="3 requests are in flight"):
        device.replace(spare)
    assert len(sweep(device)) == taken == 3
    device.replace(spare)
    device.close()
    with pytest.raises(UsageError, match="closed"):
        device.replace(MemTransport(store()))
    assert arena[: 3 * BLOCK].tobytes() == store().data[: 3 * BLOCK].tobytes()


def test_what_does_not_fit_is_refused_and_nothing_changes():
    device = SwitchableDevice(MemTransport(store(), max_transfer=64 * KIB))
    ready(device)
    with pytest.raises(UsageError, match=r"takes 32768 bytes at a time.*max_transfer=32768"):
        device.replace(MemTransport(store(2), max_transfer=32 * KIB))
    assert finish(device, reads()) == ALL
    used = MemTransport(store(2))
    used.register(allocate_arena(BLOCK))
    with pytest.raises(UsageError, match="has an arena already"):
        device.replace(used)
    assert finish(device, reads()) == ALL


@pytest.mark.parametrize("when", [{"at": 1}, {"at": 7}, {"after": 20}, {}])
@pytest.mark.parametrize("inflight", [256, 5])
def test_a_lost_transport_is_replaced_and_nothing_comes_twice(when, inflight):
    same, told, threads = store(), [], []

    def fallback(reason):
        told.append(reason)
        threads.append(threading.current_thread())
        return MemTransport(same, max_inflight=inflight)

    first = lossy(same, **when)
    device = SwitchableDevice(first, fallback=fallback)
    arena = ready(device)
    assert finish(device, reads()) == ALL
    assert np.array_equal(arena, same.data)
    assert finish(device, reads()) == ALL
    assert threads == [threading.current_thread()]
    assert told == [device.fell_back]
    assert "faults on purpose" in device.fell_back
    assert device.fell_back in device.describe()
    assert device.stats()["fell_back"] == device.fell_back
    with pytest.raises(UsageError, match="closed"):
        first.submit(reads(1))


def test_without_fallback_lost_is_passed_on():
    device = SwitchableDevice(lossy(store(), at=2))
    ready(device)
    done = finish(device, reads())
    assert [c for c, (status, _) in done.items() if status == Status.LOST] == [1001]
    assert device.fell_back == ""


def failing(_):
    raise BackendMissing("no other way")


@pytest.mark.parametrize(
    ("fallback", "text"),
    [
        (failing, "no other way"),
        (lambda _: MemTransport(store(1, BLOCKS - 1)), "31 blocks, not 32"),
        (lambda _: MemTransport(store(), max_transfer=4 * KIB), "takes 4096 bytes at a time"),
    ],
)
def test_where_nothing_takes_its_place_everything_is_lost(fallback, text):
    device = SwitchableDevice(lossy(store(), after=4), fallback=fallback)
    ready(device)
    done = finish(device, reads())
    assert set(done) == set(ALL)
    lost = [cookie for cookie, (status, _) in done.items() if status == Status.LOST]
    assert len(lost) >= BLOCKS - 4 - 1
    assert text in device.locate(0)
    assert text in device.describe()
    assert device.fell_back == ""
    before = device.stats()["errors"]
    later = finish(device, reads(3))
    assert later == dict.fromkeys((1000, 1001, 1002), (Status.LOST, 0))
    assert device.stats()["errors"] == before + 3
    device.close()
    with pytest.raises(UsageError, match="closed"):
        device.submit(reads(1))


def test_a_bug_in_the_fallback_is_not_swallowed():
    device = SwitchableDevice(lossy(store(), at=1), fallback=lambda _: 1 // 0)
    ready(device)
    with pytest.raises(ZeroDivisionError):
        finish(device, reads())


def test_each_transport_may_fall_back_once():
    first, second, asked = store(1), store(2), []

    def fallback(_):
        asked.append(1)
        return lossy(first, at=1)  # is lost itself

    device = SwitchableDevice(lossy(first, at=2), fallback=fallback)
    arena = ready(device)
    assert Status.LOST in {status for status, _ in finish(device, reads()).values()}
    assert asked == [1]
    device.replace(lossy(second, at=2), lambda _: MemTransport(second))
    assert finish(device, reads()) == ALL
    assert np.array_equal(arena, second.data)


def test_close_in_the_middle_of_a_replay():
    """What no transport has taken yet is cancelled."""
    same = store()
    device = SwitchableDevice(lossy(same), fallback=lambda _: MemTransport(same, max_inflight=1))
    ready(device)
    taken = device.submit(reads(8))
    assert taken == 8
    assert device.poll(np.zeros(0, np.dtype(device._done.dtype))) == 0
    first = sweep_some(device, 1)
    device.close()
    rest = sweep(device)
    assert sorted(c for c, _ in first + rest) == list(range(1000, 1008))
    assert {status for _, status in rest} <= {Status.OK, Status.CANCELLED}
    assert device.in_flight == 0


def sweep_some(device, count):
    completions, found = np.zeros(1, device._done.dtype), []
    while len(found) < count:
        if device.poll(completions):
            found.append((int(completions["cookie"][0]), int(completions["status"][0])))
    return found


# -- under a proxy


def test_a_proxy_goes_on_with_another_transport():
    """Pages are checked as they land; another thread replaces the transport between passes."""
    stores = [store_of(128, seed) for seed in range(4)]
    device = SwitchableDevice(MemTransport(stores[0]))
    with Rig([device]) as rig:
        for turn, after in enumerate([*stores[1:], None]):
            rig.store = stores[turn]
            assert rig.run(rig.reads(range(64))) == [Status.OK] * 64
            if after is not None:
                device.replace(MemTransport(after, max_inflight=7))
        assert rig.proxy.stats()["devices"][0]["transport"]["bytes_read"] == 4 * 64 * rig.page


@pytest.mark.parametrize("fails", [False, True])
def test_a_proxy_whose_device_falls_back(fails):
    same = store_of(128)
    fallback = failing if fails else lambda _: MemTransport(same, max_inflight=7)
    device = SwitchableDevice(lossy(same, after=3), fallback=fallback)
    with Rig([device], depth=16) as rig:
        rig.store = same
        first = rig.run(rig.reads(range(0, 64, 2)))
        assert rig.run(rig.reads([1, 3])) == [Status.LOST if fails else Status.OK] * 2
        assert set(first) == ({Status.OK, Status.LOST} if fails else {Status.OK})
        failures = rig.proxy.failures()
    assert bool(failures) == fails
    assert all("no other way" in found.place for found in failures)
