"""DMA engines: the CPU, and DOCA's, for which a library that is compiled here stands in."""

import numpy as np
import pytest
from tests.reference import doca

from hyades.common.dma import doca as engines
from hyades.common.dma import library
from hyades.common.dma.engine import COPY, DONE, open_device
from hyades.common.errors import BackendMissing, UsageError

NBYTES = 1 << 16


@pytest.fixture(scope="module", autouse=True)
def builds():
    yield
    doca.remove_builds()


class Bench:
    """A device, an engine, and two blocks of memory that the device knows."""

    def __init__(self, name, depth=8):
        self.device = open_device(name)
        self.source = np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)
        self.destination = np.zeros(NBYTES, np.uint8)
        for memory in (self.source, self.destination):
            self.device.register(memory.ctypes.data, NBYTES)
        self.engine = self.device.engine(depth)

    def copies(self, *ranges):
        """Return a COPY record for each (begin, bytes)."""
        found = np.zeros(len(ranges), COPY)
        for index, (begin, nbytes) in enumerate(ranges):
            source, destination = self.source.ctypes.data, self.destination.ctypes.data
            found[index] = (source + begin, destination + begin, nbytes, 100 + index)
        return found

    def run(self, copies):
        """Submit all; return {cookie: status}."""
        done, found = np.zeros(3, DONE), {}
        for _ in range(1000):
            copies = copies[self.engine.submit(copies) :]
            count = self.engine.poll(done)
            found.update(done[:count].tolist())
            if not len(copies) and not self.engine.outstanding:
                return found
        raise AssertionError(f"{self.engine.outstanding} copies do not end")

    def close(self):
        self.engine.close()
        self.device.close()


@pytest.fixture(params=["memcpy", "doca", "doca late=4,tasks=2"])
def bench(request, monkeypatch):
    name, _, faults = request.param.partition(" ")
    if name == "doca":
        doca.use(monkeypatch, faults)
    found = Bench(name)
    yield found
    found.close()
    if name == "doca":
        assert doca.leaks() == 0


def test_copies(bench):
    ranges = [(0, 1), (4096, 4096), (10_000, 777), (20_000, 30_000), (60_000, NBYTES - 60_000)]
    assert bench.run(bench.copies(*ranges)) == {100 + i: 0 for i in range(len(ranges))}
    wanted = np.zeros(NBYTES, np.uint8)
    for begin, nbytes in ranges:
        wanted[begin : begin + nbytes] = bench.source[begin : begin + nbytes]
    assert (bench.destination == wanted).all()


def test_more_than_fit_at_a_time(bench):
    assert len(bench.run(bench.copies(*[(i, 1) for i in range(50)]))) == 50
    assert (bench.destination[:50] == bench.source[:50]).all()


def test_closing_waits_for_what_is_under_way(bench):
    taken = bench.engine.submit(bench.copies((0, 5000), (5000, 5000)))
    assert taken == 2
    bench.engine.close()
    assert (bench.destination[:10_000] == bench.source[:10_000]).all()
    bench.engine = bench.device.engine(4)


def test_a_copy_that_fails_is_reported_and_the_others_go_on(monkeypatch):
    doca.use(monkeypatch, "fail=2,tasks=3,late=2")
    bench = Bench("doca")
    found = bench.run(bench.copies(*[(i * 100, 100) for i in range(6)]))
    assert {cookie: status for cookie, status in found.items() if status} == {101: 17}
    assert bench.engine.explain(17) == "Input/Output Operation Failed (17)"
    bench.close()
    assert doca.leaks() == 0


def test_a_submission_that_is_refused_for_now_is_made_again(monkeypatch):
    doca.use(monkeypatch, "again=3")
    bench = Bench("doca")
    assert set(bench.run(bench.copies(*[(i * 100, 100) for i in range(6)])).values()) == {0}
    bench.close()


def test_a_submission_that_is_refused_for_good_is_a_failed_copy(monkeypatch):
    doca.use(monkeypatch, "again=1")
    bench = Bench("doca")
    assert bench.run(bench.copies((0, 100))) == {100: 5}
    bench.close()
    assert doca.leaks() == 0


def test_memory_that_nobody_registered(monkeypatch):
    doca.use(monkeypatch)
    bench = Bench("doca")
    start = bench.source.ctypes.data
    assert bench.device.knows(start, NBYTES)
    assert not bench.device.knows(start + 1, NBYTES)
    copies = bench.copies((0, 100))
    copies["destination"] += NBYTES
    if not bench.device.knows(int(copies["destination"][0]), 100):
        with pytest.raises(UsageError, match="not registered for DMA"):
            bench.engine.submit(copies)
    bench.close()


def test_what_the_device_can_is_asked(monkeypatch):
    doca.use(monkeypatch, "max=4097,tasks=3")
    device = open_device("doca:03:00.0")
    engine = device.engine(100)
    assert (device.max_copy, device.pci) == (4097, "0000:03:00.0")
    assert (engine.max_copy, engine.depth) == (4097, 3)
    engine.close()
    device.close()
    assert engines.probe() is None
    assert engines.detail() == "device 0000:03:00.0, at most 4097 bytes a copy"


@pytest.mark.parametrize(
    ("faults", "said"),
    [("unsupported", "0000:03:00.0: Operation not supported"), ("none", "devices: none")],
)
def test_no_device_that_can_copy(monkeypatch, faults, said):
    doca.use(monkeypatch, faults)
    with pytest.raises(BackendMissing, match=f"{said}.*a BlueField in DPU mode is needed"):
        open_device("doca")
    assert said in str(engines.probe())


def test_another_address(monkeypatch):
    doca.use(monkeypatch)
    with pytest.raises(BackendMissing, match=r"DOCA device 0000:99:00\.0 does not exist"):
        open_device("doca:0000:99:00.0")


def test_no_library(tmp_path):
    said = library.find({library.VARIABLE: str(tmp_path)})
    assert f"{library.VARIABLE}={tmp_path} does not hold libdoca_common.so" in str(said)
    if not any((tmp_path / folder).exists() for folder in library.FOLDERS):
        assert f"{library.VARIABLE} is not set" in str(library.find({}))
    with pytest.raises(BackendMissing):
        library.load({library.VARIABLE: str(tmp_path)})


def test_a_library_that_is_none(tmp_path):
    for name in library.NAMES:
        (tmp_path / name).write_bytes(b"no library")
    with pytest.raises(BackendMissing, match="cannot be loaded"):
        library.load({library.VARIABLE: str(tmp_path)})


def test_a_library_that_is_too_old():
    folder = doca.build(without="doca_pe_progress")
    with pytest.raises(BackendMissing, match=r"has no doca_pe_progress: DOCA 2\.5 or newer"):
        library.load({library.VARIABLE: str(folder)})


@pytest.mark.parametrize("name", ["", "memcpy:1", "dsa"])
def test_another_engine(name):
    with pytest.raises(UsageError, match="memcpy, doca, or doca:PCI-ADDRESS"):
        open_device(name)
