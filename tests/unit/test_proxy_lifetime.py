"""The proxy: how it stops, what it traces, and that it leaves the cores alone."""

import time

import numpy as np
import pytest
from tests.reference.rig import Rig, store_of

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, Op, Status
from hyades.common.ring import Ring
from hyades.common.trace import ListSink
from hyades.proxy.arena import allocate_arena
from hyades.proxy.proxy import PROXY_WORKER, Proxy
from hyades.proxy.transports.faulty import FaultPlan, FaultyTransport
from hyades.proxy.transports.file import FileTransport
from hyades.proxy.transports.mem import MemoryStore, MemTransport
from hyades.proxy.transports.null import NullTransport

OK = Status.OK


def held(store, **plan):
    """Return a transport whose completions come late, so that queues build up."""
    options = {"max_inflight": plan.pop("depth", 256), "max_transfer": plan.pop("limit", 1 << 22)}
    return FaultyTransport(MemTransport(store, **options), FaultPlan(**plan))


def test_stop_drains():
    store = store_of(128)
    rig = Rig([held(store, delay=0.05)], start=False)
    rig.store = store
    batch = rig.post(rig.reads(list(range(40))))
    rig.proxy.start()
    rig.proxy.stop()
    assert (rig.ready[batch["slot"]] == batch["generation"]).all()
    assert rig.proxy.death() is None
    rig.proxy.stop()


def test_stop_without_drain_cancels_and_closes():
    store = store_of(128)
    device = held(store, delay=30.0, depth=8)
    rig = Rig([device], start=False, depth=8)
    rig.store = store
    batch = rig.post(rig.reads(list(range(39, -1, -1))))  # no neighbours
    rig.proxy.start()
    deadline = time.monotonic() + 10
    while rig.proxy.stats()["transfers"] < 8:
        assert time.monotonic() < deadline
    start = time.monotonic()
    rig.proxy.stop(drain=False)
    assert time.monotonic() - start < 5
    answers = rig.results(batch)
    assert set(answers) <= {OK, Status.CANCELLED}
    assert Status.CANCELLED in answers
    after = rig.arena.copy()
    time.sleep(0.05)
    assert np.array_equal(rig.arena, after)
    with pytest.raises(UsageError, match="closed"):
        device.submit(batch)


def test_stop_before_start():
    rig = Rig(start=False)
    rig.proxy.stop()
    assert rig.proxy.death() is None


def test_needs_a_device():
    with pytest.raises(UsageError, match="at least one device"):
        Proxy(Ring.create(8), np.zeros(4, np.int64), allocate_arena(BLOCK), [])


def test_port_shares_the_memory():
    with Rig() as rig:
        port = rig.proxy.port()
        assert port.ring is rig.ring
        assert port.ready is rig.ready
        assert port.crcs is rig.crcs
        assert port.arena is rig.arena
        assert port.failures() == []
        assert port.death() is None


def test_trace_shows_when_devices_were_busy():
    sink = ListSink()
    with Rig(sink=sink) as rig:
        rig.run(rig.reads([1, 2, 3]))
    spans = [(e.name, e.worker) for e in sink.events]
    assert ("io", PROXY_WORKER) in spans
    assert all(e.begin < e.end for e in sink.events)


def test_an_idle_proxy_leaves_the_cores_alone():
    with Rig([NullTransport()]) as rig:
        rig.run(rig.request(Op.READ, 0))
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        used = time.process_time() - before
        assert used < 0.05, f"{used / 0.5:.0%} of a core while idle"
        begin = time.perf_counter()
        rig.run(rig.request(Op.READ, 0))
        assert time.perf_counter() - begin < 0.1


def test_file_end_to_end(tmp_path):
    path = tmp_path / "device"
    content = np.random.default_rng(3).integers(0, 256, 128 * BLOCK, np.uint8)
    path.write_bytes(content.tobytes())
    transport = FileTransport(path)
    with Rig([transport]) as rig:
        rig.store = MemoryStore(128)
        rig.store.data[:] = content
        assert rig.run(rig.reads([9, 8, 7, 60])) == [OK] * 4
        rig.slot(0)[:] = 1
        assert rig.run(rig.request(Op.WRITE, 0, 3)) == [OK]
        assert rig.run(rig.request(Op.FLUSH, 1)) == [OK]
    transport.close()
    assert path.read_bytes()[3 * 2 * BLOCK : 4 * 2 * BLOCK] == b"\x01" * 2 * BLOCK
