"""What the proxy makes of failing devices: the right status, retries, and never a waiting slot."""

import time

import numpy as np
import pytest
from tests.reference.rig import Rig, store_of

from hyades.common.layout import BLOCK, Op, RequestFlag, Status
from hyades.common.ring import FAILED, load_word
from hyades.proxy.registry import open_transport
from hyades.proxy.transports import mem
from hyades.proxy.transports.faulty import STATUSES, Fault, FaultPlan, FaultyTransport
from hyades.proxy.transports.mem import MemoryStore, MemTransport

OK = Status.OK


def rig_with(*faults, limit=1 << 22, depth=256, rig_options=None, **plan):
    """Return a rig on one faulty device, and the device."""
    store = store_of(128)
    inner = MemTransport(store, max_transfer=limit, max_inflight=depth)
    device = FaultyTransport(inner, FaultPlan(faults=list(faults), **plan))
    rig = Rig([device], **(rig_options or {}))
    rig.store = store
    return rig, device


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
@pytest.mark.parametrize(
    ("kind", "status", "attempts"),
    [
        ("io", Status.IO, 4), ("short", Status.SHORT, 4), ("timeout", Status.TIMEOUT, 4),
        ("nospace", Status.NO_SPACE, 1), ("lost", Status.LOST, 1), ("invalid", Status.INVALID, 1),
    ],
)  # fmt: skip
def test_lasting_faults_give_their_status(op, kind, status, attempts):
    rig, device = rig_with(Fault(kind, lbas=(10, 12)))
    with rig:
        batch = [rig.request(op, slot, page) for slot, page in [(0, 4), (2, 5), (5, 7)]]
        assert rig.run(*batch) == [OK, status, OK]
        (failure,) = rig.proxy.failures()
        assert (failure.object, failure.page, failure.lba) == (7, 5, 10)
        assert (failure.status, failure.device, failure.write) == (status, 0, op == Op.WRITE)
        assert device.stats()["injected"][kind] >= attempts
        stats = rig.proxy.stats()
        assert (stats["failed"], stats["retries"]) == (1, attempts - 1)
        assert rig.run(rig.request(op, 5, 9)) == [OK]  # it goes on


@pytest.mark.parametrize("kind", ["io", "short", "timeout"])
@pytest.mark.parametrize("op", [Op.READ, Op.WRITE, Op.FLUSH])
def test_passing_faults_are_retried(kind, op):
    rig, _ = rig_with(Fault(kind, op=op, times=3))
    with rig:
        rig.slot(0)[:] = 6
        assert rig.run(rig.request(op, 0, 3)) == [OK]
        stats = rig.proxy.stats()
        assert (stats["retries"], stats["failed"], rig.proxy.failures()) == (3, 0, [])
        assert (rig.store.data[3 * rig.page] == 6) == (op == Op.WRITE)


def test_the_number_of_retries_is_bounded():
    for retries in (0, 1, 5):
        rig, device = rig_with(Fault("io"), rig_options={"retries": retries})
        with rig:
            assert rig.run(rig.request(Op.READ, 0)) == [Status.IO]
            assert device.stats()["injected"]["io"] == retries + 1


@pytest.mark.parametrize("kind", ["io", "nospace", "lost", "invalid"])
def test_one_bad_page_does_not_fail_its_neighbours(kind):
    rig, _ = rig_with(Fault(kind, lbas=(6, 7)), rig_options={"start": False})
    with rig:
        batch = rig.post(rig.reads(list(range(8))))  # one transfer, then page by page
        rig.proxy.start()
        assert rig.results(batch) == [OK, OK, OK, STATUSES[kind], OK, OK, OK, OK]
        assert rig.proxy.stats()["neighbours"] == 7
        assert [f.page for f in rig.proxy.failures()] == [3]


def test_a_page_that_failed_is_not_joined_to_neighbours_again():
    rig, _ = rig_with(Fault("io", lbas=(6, 7)), depth=1, delay=0.01, rig_options={"start": False})
    with rig:
        batch = rig.post(rig.request(Op.READ, 3, 3), rig.request(Op.READ, 9, 9))
        rig.proxy.start()
        while not rig.proxy.stats()["transfers"]:
            time.sleep(0.0001)
        later = rig.post(rig.request(Op.READ, 2, 2), rig.request(Op.READ, 4, 4))
        assert rig.results(np.concatenate([batch, later])) == [Status.IO, OK, OK, OK]
        assert rig.proxy.stats()["neighbours"] == 0


def test_a_failed_piece_fails_the_long_request():
    rig, _ = rig_with(
        Fault("io", lbas=(21, 22)), limit=BLOCK, rig_options={"page_blocks": 8, "slots": 8}
    )
    with rig:
        assert rig.run(rig.reads([2, 3])) == [Status.IO, OK]


def test_a_passing_fault_in_a_piece():
    rig, _ = rig_with(
        Fault("io", every=5, times=4), limit=2 * BLOCK, depth=3,
        rig_options={"page_blocks": 8, "slots": 8},
    )  # fmt: skip
    with rig:
        assert rig.run(rig.reads([5, 1, 0])) == [OK] * 3
        assert rig.proxy.stats()["retries"] >= 1


# -- checksums


def test_a_corrupted_read_is_read_again():
    rig, device = rig_with(Fault("corrupt", times=1))
    with rig:
        assert rig.run(rig.reads([11])) == [OK]
        assert np.array_equal(rig.slot(0), rig.store.data[11 * rig.page :][: rig.page])
        stats = rig.proxy.stats()
        assert (stats["crc_retries"], stats["crc_failures"]) == (1, 0)
        assert device.stats()["injected"]["corrupt"] == 1
        assert stats["bytes_read"] == 2 * rig.page


def test_a_page_that_stays_wrong_gives_crc():
    rig, _ = rig_with(Fault("corrupt", lbas=(22, 24)))
    with rig:
        assert rig.run(rig.reads([30, 11, 2])) == [OK, Status.CRC, OK]
        stats = rig.proxy.stats()
        assert (stats["crc_retries"], stats["crc_failures"], stats["failed"]) == (1, 1, 1)
        (failure,) = rig.proxy.failures()
        assert (failure.page, failure.lba, failure.status) == (11, 22, Status.CRC)


def test_every_single_byte_is_covered_by_the_checksum():
    rig, _ = rig_with(rig_options={"page_blocks": 1})
    with rig:
        crc = rig.page_crc(3)
        for place in [0, 1, 63, 64, 2047, 4094, 4095]:
            rig.store.data[3 * BLOCK + place] ^= 1
            assert rig.run(rig.request(Op.READ, 0, 3, crc=crc)) == [Status.CRC]
            rig.store.data[3 * BLOCK + place] ^= 1
        assert rig.run(rig.request(Op.READ, 0, 3, crc=crc)) == [OK]


def test_without_the_flag_nothing_is_checked():
    rig, _ = rig_with(Fault("corrupt"))
    with rig:
        record = rig.request(Op.READ, 0, 3)
        record["crc"] = 12345
        assert rig.run(record) == [OK]


def test_twins_share_the_fate_of_the_first():
    rig, _ = rig_with(Fault("corrupt", lbas=(6, 8)), delay=0.003, rig_options={"start": False})
    with rig:
        crc = rig.page_crc(3)
        bad = [rig.request(Op.READ, slot, 3, crc=crc) for slot in (0, 1, 2)]
        batch = rig.post(*bad, rig.request(Op.READ, 9, 4, crc=rig.page_crc(4)))
        rig.proxy.start()
        assert rig.results(batch) == [Status.CRC] * 3 + [OK]
        assert len(rig.proxy.failures()) == 3


def test_corruption_after_io_errors():
    rig, _ = rig_with(Fault("io", times=2), Fault("corrupt", at=3))
    with rig:
        assert rig.run(rig.reads([4])) == [OK]
        stats = rig.proxy.stats()
        assert stats["crc_retries"] == 1


# -- time and order


@pytest.mark.parametrize("seed", range(5))
def test_delays_in_any_order(seed):
    rig, _ = rig_with(delay=0.004, reorder=True, accept=5, seed=seed, depth=20)
    with rig:
        pages = np.random.default_rng(seed).permutation(64)
        assert rig.run(rig.reads(pages.tolist())) == [OK] * 64
        got = rig.arena.reshape(64, -1)
        assert np.array_equal(got, rig.store.data.reshape(64, -1)[pages])


@pytest.mark.parametrize("seed", range(5))
def test_everything_at_once(seed):
    """Faults of all passing kinds, delays, small queues: all answers right, none missing."""
    rig, device = rig_with(
        Fault("io", every=7), Fault("short", every=11), Fault("timeout", every=13),
        Fault("corrupt", every=9, times=6),
        delay=0.002, reorder=True, accept=4, seed=seed, limit=BLOCK, depth=6,
        rig_options={"retries": 20, "jobs": 30},
    )  # fmt: skip
    with rig:
        for turn in range(3):
            pages = np.random.default_rng([seed, turn]).permutation(64)
            batch = rig.reads(pages.tolist())
            answers = rig.run(batch)
            # a second corruption of the same page is a CRC error, as it should be
            good = [a == OK for a in answers]
            assert set(answers) <= {OK, Status.CRC}
            assert sum(good) >= 58
            got = rig.arena.reshape(64, -1)
            assert np.array_equal(got[good], rig.store.data.reshape(64, -1)[pages][good])
        assert device.stats()["injected"]["io"] > 0


# -- the end of things


@pytest.mark.parametrize("at", [1, 5, 20])
def test_a_crash_of_the_transport_reaches_everybody(at):
    rig, device = rig_with(Fault("crash", at=at), delay=0.01, limit=BLOCK)
    try:
        batch = rig.post(rig.reads(list(range(30))))
        answers = rig.results(batch)
        assert set(answers) <= {OK, Status.LOST}
        assert Status.LOST in answers
        assert load_word(rig.ring.control, FAILED) == 1
        death = rig.proxy.death()
        assert isinstance(death, RuntimeError)
        assert "crash on purpose" in str(death)
        later = rig.post(rig.reads([40, 41]))
        assert rig.results(later) == [Status.LOST] * 2
    finally:
        rig.proxy.stop()
        device.close()


def test_a_crash_in_poll():
    rig, device = rig_with()

    def poll(completions):
        raise OSError(5, "broken ring")

    device.poll = poll
    assert rig.results(rig.post(rig.reads([1, 2]))) == [Status.LOST] * 2
    assert load_word(rig.ring.control, FAILED) == 1
    assert "broken ring" in str(rig.proxy.death())
    rig.proxy.stop()


def test_requests_that_stand_in_the_ring_are_answered_when_the_proxy_dies():
    rig, device = rig_with(Fault("crash"), rig_options={"jobs": 4, "start": False})
    batch = rig.post(rig.reads(list(range(50))))
    rig.proxy.start()
    assert rig.results(batch) == [Status.LOST] * 50
    rig.proxy.stop()
    device.close()


def test_a_slot_outside_the_table_ends_the_proxy():
    rig, _ = rig_with()
    wrong = rig.request(Op.READ, 0, 0)
    wrong["slot"] = 64
    rig.ring.push(wrong)
    deadline = time.monotonic() + 10
    while not load_word(rig.ring.control, FAILED):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert "slot 64 of 64" in str(rig.proxy.death())
    rig.proxy.stop()


def test_an_unknown_cookie_ends_the_proxy():
    rig, device = rig_with(rig_options={"start": False})
    real = device.poll

    def poll(completions):
        count = real(completions)
        completions["cookie"][:count] += 1
        return count

    device.poll = poll
    batch = rig.post(rig.reads([1]))
    rig.proxy.start()
    assert rig.results(batch) == [Status.LOST]
    assert "not given" in str(rig.proxy.death())
    rig.proxy.stop()


def test_a_completion_with_too_few_bytes_is_short():
    rig, device = rig_with(rig_options={"start": False})
    real = device.poll

    def poll(completions):
        count = real(completions)
        completions["nbytes"][:count] -= 512
        return count

    device.poll = poll
    batch = rig.post(rig.reads([1]))
    rig.proxy.start()
    assert rig.results(batch) == [Status.SHORT]
    rig.proxy.stop()


@pytest.mark.parametrize("seed", range(3))
def test_cancel_while_everything_is_under_way(seed):
    rig, _ = rig_with(
        Fault("io", every=5), Fault("corrupt", every=6), delay=0.05, reorder=True, seed=seed,
        depth=10, limit=BLOCK, rig_options={"start": False, "retries": 9},
    )  # fmt: skip
    writes = [rig.request(Op.WRITE, 40 + i, 40 + i, flags=RequestFlag.MAKE_CRC) for i in range(8)]
    batch = rig.post(rig.reads(list(range(30))), *writes, rig.request(Op.FLUSH, 60))
    rig.proxy.start()
    time.sleep(0.02 * seed)
    rig.proxy.stop(drain=False)
    after = rig.arena.copy()
    answers = rig.results(batch)
    # an answer that came before the stop stands; a fault met while stopping is no longer retried
    assert set(answers) <= {OK, Status.CANCELLED, Status.IO}
    assert rig.proxy.death() is None
    time.sleep(0.06)
    assert np.array_equal(rig.arena, after)


def test_a_url_is_all_it_takes():
    mem.forget("proxy-faults")
    open_transport("mem://proxy-faults?size=1MiB", create=True)
    device = open_transport("faulty+mem://proxy-faults?fault=io,op=read,times=2&delay=0.001")
    with Rig([device]) as rig:
        assert rig.run(rig.request(Op.READ, 0, 1)) == [OK]
        assert rig.proxy.stats()["retries"] == 2
        assert rig.proxy.stats()["devices"][0]["transport"]["injected"]["io"] == 2
    mem.forget("proxy-faults")


def test_no_space_while_writing_a_file_leaves_the_rest_alone():
    store = MemoryStore(128)
    plan = FaultPlan(faults=[Fault("nospace", op=Op.WRITE, after=3)])
    with Rig([FaultyTransport(MemTransport(store), plan)]) as rig:
        answers = rig.run(*[rig.request(Op.WRITE, i, 2 * i) for i in range(6)])
        assert answers == [OK] * 3 + [Status.NO_SPACE] * 3
        assert {f.status for f in rig.proxy.failures()} == {Status.NO_SPACE}
        assert rig.run(rig.request(Op.READ, 0, 1)) == [OK]
