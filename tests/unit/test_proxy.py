"""The proxy: splitting, merging, checksums, flushes, waiting and stopping."""

import threading
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.reference.rig import Rig, store_of

from hyades.common.checksum import crc32c
from hyades.common.layout import BLOCK, REQUEST, RQ_OP, Op, RequestFlag, Status
from hyades.proxy.transports.faulty import Fault, FaultPlan, FaultyTransport
from hyades.proxy.transports.mem import MemoryStore, MemTransport

OK = Status.OK


def held(store, **plan):
    """Return a transport whose completions come late, so that queues build up."""
    options = {"max_inflight": plan.pop("depth", 256), "max_transfer": plan.pop("limit", 1 << 22)}
    return FaultyTransport(MemTransport(store, **options), FaultPlan(**plan))


def test_reads_land_in_their_slots():
    with Rig() as rig:
        pages = [5, 3, 63, 0]
        assert rig.run(rig.reads(pages)) == [OK] * 4
        for slot, page in enumerate(pages):
            expected = rig.store.data[page * rig.page : (page + 1) * rig.page]
            assert np.array_equal(rig.slot(slot), expected)
        stats = rig.proxy.stats()
        assert stats["requests"] == 4
        assert stats["bytes_read"] == 4 * rig.page
        assert stats["failed"] == 0


def test_writes_make_checksums():
    with Rig() as rig:
        rig.slot(0)[:] = 0x5A
        rig.slot(1)[:] = 0xA5
        flags = RequestFlag.MAKE_CRC
        first = rig.request(Op.WRITE, 0, 9, flags=flags)
        second = rig.request(Op.WRITE, 1, 20)
        assert rig.run(first, second) == [OK, OK]
        assert int(rig.crcs[0]) == crc32c(b"\x5a" * rig.page) == rig.page_crc(9)
        assert rig.crcs[1] == 0
        assert (rig.store.data[20 * rig.page : 21 * rig.page] == 0xA5).all()
        assert rig.proxy.stats()["bytes_written"] == 2 * rig.page


@pytest.mark.parametrize("limit", [BLOCK, 3 * BLOCK, 8 * BLOCK])
@pytest.mark.parametrize("depth", [1, 2, 64])
def test_long_requests_are_split(limit, depth):
    store = store_of(64)
    with Rig([MemTransport(store, max_transfer=limit)], page_blocks=8, slots=8, depth=depth) as rig:
        rig.store = store
        assert rig.run(rig.reads([7, 0, 3])) == [OK] * 3
        assert np.array_equal(rig.slot(0), store.data[7 * rig.page : 8 * rig.page])
        rig.slot(4)[:] = 3
        assert rig.run(rig.request(Op.WRITE, 4, 2)) == [OK]
        assert (store.data[2 * rig.page : 3 * rig.page] == 3).all()
        stats = rig.proxy.stats()
        pieces = -(-8 * BLOCK // limit)
        assert stats["transfers"] == 4 * pieces
        assert stats["devices"][0]["max_depth"] <= depth


def test_neighbours_become_one_transfer():
    store = store_of(128)
    with Rig([held(store, depth=64)], start=False) as rig:
        rig.store = store
        # on the device and in the arena: 0-3 one run, 9 alone (its buffer is elsewhere), 20-21 one
        batch = rig.post(
            rig.request(Op.READ, 3, 3), rig.request(Op.READ, 0, 0), rig.request(Op.READ, 9, 4),
            rig.request(Op.READ, 2, 2), rig.request(Op.READ, 1, 1), rig.request(Op.READ, 20, 20),
            rig.request(Op.READ, 21, 21),
        )  # fmt: skip
        rig.proxy.start()
        assert rig.results(batch) == [OK] * 7
        for slot, page in [(0, 0), (1, 1), (2, 2), (3, 3), (9, 4), (20, 20), (21, 21)]:
            assert np.array_equal(rig.slot(slot), store.data[page * rig.page :][: rig.page])
        stats = rig.proxy.stats()
        # 3 is cut first, from the head of the queue, before its predecessors are looked for
        assert stats["transfers"] == 4
        assert stats["neighbours"] == 3


def test_neighbours_stay_within_max_transfer_and_operation():
    store = store_of(64)
    with Rig([MemTransport(store, max_transfer=5 * BLOCK)], start=False) as rig:
        reads = [rig.request(Op.READ, i, i) for i in range(4)]  # 2 blocks each: pairs
        writes = [rig.request(Op.WRITE, i, i) for i in range(4, 6)]
        batch = rig.post(*reads, *writes)
        rig.proxy.start()
        assert rig.results(batch) == [OK] * 6
        assert rig.proxy.stats()["transfers"] == 3


def test_duplicate_reads_are_read_once_and_copied():
    store = store_of(128)
    with Rig([held(store, delay=0.01)], start=False) as rig:
        rig.store = store
        crc = rig.page_crc(5)
        batch = rig.post(
            rig.request(Op.READ, 0, 5, crc=crc), rig.request(Op.READ, 10, 5, crc=crc),
            rig.request(Op.READ, 20, 5, crc=crc), rig.request(Op.READ, 30, 5),
        )  # fmt: skip
        rig.proxy.start()
        late = np.concatenate([batch, rig.post(rig.request(Op.READ, 40, 5, crc=crc))])
        assert rig.results(late) == [OK] * 5
        for slot in (0, 10, 20, 30, 40):
            assert np.array_equal(rig.slot(slot), store.data[5 * rig.page :][: rig.page])
        stats = rig.proxy.stats()
        assert stats["duplicates"] in (2, 3)  # the late one may find the first answered
        assert stats["transfers"] == 5 - stats["duplicates"]  # the unchecked one is another request


class ReadsFirst(MemTransport):
    """Runs the reads of a batch before its writes, as a device may."""

    def _transfer(self, batch, out, arena):
        order = np.argsort(batch[:, RQ_OP] & 0xFF, kind="stable")
        sorted_out = out[order]
        super()._transfer(batch[order], sorted_out, arena)
        out[order] = sorted_out


def test_a_read_after_an_answered_write_never_sees_older_bytes():
    """An older read of the same page is still in flight: the new read must not become its twin."""
    store = MemoryStore(8)
    device = FaultyTransport(ReadsFirst(store), FaultPlan(delay=0.02, seed=4))
    with Rig([device], slots=4) as rig:
        for value in range(1, 40):
            rig.slot(1)[:] = value
            old = rig.request(Op.READ, 0, 1)
            write = rig.request(Op.WRITE, 1, 1)
            batch = rig.post(old, write) if value % 2 else rig.post(write, old)
            deadline = time.monotonic() + 10
            while not rig.ready[1]:
                assert time.monotonic() < deadline
            fresh = rig.post(rig.request(Op.READ, 2, 1))
            assert rig.results(fresh) == [OK]
            assert (rig.slot(2) == value).all()
            rig.results(batch)


def test_flush_waits_for_the_writes_before_it():
    events = []

    class Recorder(MemTransport):
        def submit(self, requests):
            accepted = super().submit(requests)
            events.extend(("submit", Op(int(op))) for op in requests["op"][:accepted])
            return accepted

        def poll(self, completions):
            count = super().poll(completions)
            events.extend(("done", int(s)) for s in completions["status"][:count])
            return count

    store = MemoryStore(128)
    device = FaultyTransport(Recorder(store), FaultPlan(delay=0.005, seed=2))
    with Rig([device]) as rig:
        writes = [rig.request(Op.WRITE, 2 * i, 2 * i) for i in range(4)]
        flush = rig.request(Op.FLUSH, 50)
        after = [rig.request(Op.WRITE, 20, 20), rig.request(Op.READ, 21, 21)]
        batch = rig.post(*writes, flush, *after)
        assert rig.results(batch) == [OK] * 7
        place = events.index(("submit", Op.FLUSH))
        assert events[:place].count(("submit", Op.WRITE)) == 5
        assert events[:place].count(("done", 0)) >= 4
        assert rig.run(rig.request(Op.FLUSH, 51)) == [OK]


def test_flush_waits_for_a_write_that_is_retried():
    store = MemoryStore(128)
    faults = [Fault("io", op=Op.WRITE, times=2)]
    device = FaultyTransport(MemTransport(store), FaultPlan(faults=faults, delay=0.003))
    with Rig([device]) as rig:
        rig.slot(0)[:] = 8
        batch = rig.post(rig.request(Op.WRITE, 0, 0), rig.request(Op.FLUSH, 1))
        deadline = time.monotonic() + 10
        while not rig.ready[1]:
            assert time.monotonic() < deadline
        assert rig.ready[0] > 0, "flush was answered before the write"
        assert rig.results(batch) == [OK, OK]


def test_several_devices():
    stores = [store_of(64, seed) for seed in (1, 2, 3)]
    with Rig([MemTransport(s, max_transfer=BLOCK) for s in stores], slots=6) as rig:
        batch = [rig.request(Op.READ, i, i, device=i % 3) for i in range(6)]
        assert rig.run(*batch) == [OK] * 6
        for i in range(6):
            assert np.array_equal(rig.slot(i), stores[i % 3].data[i * rig.page :][: rig.page])
        assert [d["requests"] for d in rig.proxy.stats()["devices"]] == [2, 2, 2]
        assert [d["transfers"] for d in rig.proxy.stats()["devices"]] == [4, 4, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"op": 0}, {"op": 9}, {"device": 1}, {"device": 65535}, {"nbytes": 0}, {"offset": 1 << 62},
        {"offset": 2**64 - BLOCK}, {"lba": 1 << 40}, {"nbytes": 100}, {"offset": 8},
    ],
    ids=str,
)  # fmt: skip
def test_invalid_requests_are_answered(change):
    with Rig() as rig:
        bad = rig.request(Op.READ, 1, 4)
        for name, value in change.items():
            bad[name] = value
        assert rig.run(bad, rig.request(Op.READ, 2, 5)) == [Status.INVALID, OK]
        (failure,) = rig.proxy.failures()
        assert (failure.object, failure.page, failure.status) == (7, 4, Status.INVALID)


def test_more_requests_than_ring_jobs_and_queue_hold():
    store = store_of(128)
    device = MemTransport(store, max_inflight=2)
    with Rig([device], slots=128, page_blocks=1, capacity=16, jobs=5) as rig:
        rig.store = store
        batch = rig.reads(list(range(127, -1, -1)))
        rig.ready[:] = 0
        sent, deadline = 0, time.monotonic() + 20
        while sent < len(batch):
            sent += rig.ring.push(batch[sent:])
            assert time.monotonic() < deadline
        assert rig.results(batch) == [OK] * 128
        assert np.array_equal(rig.arena.reshape(128, BLOCK), store.data.reshape(128, BLOCK)[::-1])


def test_many_producers():
    with Rig(slots=64) as rig:

        def produce(first):
            for turn in range(30):
                slots = range(first, first + 16)
                pages = [(s * 7 + turn) % 64 for s in slots]
                batch = [rig_request(rig, s, p, turn) for s, p in zip(slots, pages, strict=True)]
                assert rig.run(*batch) == [OK] * 16
                for slot, page in zip(slots, pages, strict=True):
                    assert np.array_equal(
                        rig.slot(slot), rig.store.data[page * rig.page :][: rig.page]
                    )
            done.append(first)

        done = []
        threads = [threading.Thread(target=produce, args=(i * 16,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(done) == [0, 16, 32, 48]
        assert rig.proxy.stats()["requests"] + rig.proxy.stats()["duplicates"] >= 4 * 30 * 16


def rig_request(rig, slot, page, generation):
    record = np.zeros(1, REQUEST)
    record["op"], record["slot"], record["page"] = Op.READ, slot, page
    record["lba"], record["nbytes"] = page * rig.page_blocks, rig.page
    record["offset"], record["generation"] = slot * rig.page, generation + 1
    record["flags"], record["crc"] = RequestFlag.CHECK_CRC, rig.page_crc(page)
    return record


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_against_a_model(data):
    """Random batches over random limits, late and out of order, against plain arrays."""
    pages = 24
    store = store_of(pages)
    device = held(
        store,
        limit=data.draw(st.integers(1, 6)) * BLOCK,
        depth=data.draw(st.integers(1, 20)),
        accept=data.draw(st.integers(0, 3)),
        seed=data.draw(st.integers(0, 9)),
        reorder=True,
        delay=0.001,
    )
    model = store.data.reshape(pages, BLOCK).copy()
    with Rig([device], slots=40, page_blocks=1, jobs=40) as rig:
        rows = rig.arena.reshape(40, BLOCK)
        for turn in range(data.draw(st.integers(1, 3))):
            rows[:] = np.random.default_rng(turn).integers(0, 256, rows.shape, np.uint8)
            written = data.draw(st.sets(st.integers(0, pages - 1), max_size=10))
            batch, expected = [], rows.copy()
            slots = iter(data.draw(st.permutations(range(40))))
            for page in sorted(written):
                slot = next(slots)
                batch.append(rig.request(Op.WRITE, slot, page, flags=RequestFlag.MAKE_CRC))
                model[page] = rows[slot]
            free = sorted(set(range(pages)) - written)
            for page in data.draw(st.lists(st.sampled_from(free), max_size=20)):
                slot = next(slots)
                batch.append(rig.request(Op.READ, slot, page, crc=crc32c(model[page])))
                expected[slot] = model[page]
            if batch:
                assert rig.run(*batch) == [OK] * len(batch)
            assert np.array_equal(rows, expected)
            assert np.array_equal(store.data.reshape(pages, BLOCK), model)
