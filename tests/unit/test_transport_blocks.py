"""TransportBlocks: a synchronous block device over a transport, its retries and its errors."""

import contextlib
import os
import signal
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyades.common.errors import DataError, DeviceLost, UsageError
from hyades.common.layout import BLOCK, Op
from hyades.common.volume import Volume
from hyades.proxy import transport_blocks
from hyades.proxy.registry import open_transport
from hyades.proxy.transport_blocks import TransportBlocks


def make(url="mem://?size=128KiB", **options):
    return TransportBlocks(open_transport(url, create=True), url, **options)


@pytest.mark.parametrize("url", ["mem://?size=128KiB", "{}", "{}?engine=threads", "faulty"])
def test_round_trip(tmp_path, url):
    path = tmp_path / "device"
    path.write_bytes(bytes(32 * BLOCK))
    if url == "faulty":
        url = f"faulty+file://{path}?reorder=1&delay=0.001"
    blocks = make(url.format(f"file://{path}"), buffer=3 * BLOCK)  # several rounds, ragged last
    data = np.random.default_rng(0).integers(0, 256, 20 * BLOCK, np.uint8).tobytes()
    blocks.write(7, data)
    assert blocks.read(7, 20) == data
    assert blocks.read(0, 7) == bytes(7 * BLOCK)
    assert blocks.read(31, 1) == bytes(BLOCK)
    assert blocks.read(3, 0) == b""
    blocks.flush()
    blocks.write(0, np.full((2, BLOCK // 8), 5, np.int64))  # arrays are taken as they are
    assert np.frombuffer(blocks.read(1, 1), np.int64)[0] == 5
    blocks.grow(40)
    assert blocks.nblocks == 40
    assert blocks.read(32, 8) == bytes(8 * BLOCK)
    assert blocks.stats()["errors"] == 0
    blocks.close()
    blocks.close()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 31), st.integers(0, 32)), max_size=12))
def test_against_a_bytearray(steps):
    blocks, model = make(buffer=5 * BLOCK), bytearray(32 * BLOCK)
    for number, (write, lba, count) in enumerate(steps):
        count = min(count, 32 - lba)
        span = slice(lba * BLOCK, (lba + count) * BLOCK)
        if write:
            model[span] = bytes([number + 1]) * (count * BLOCK)
            blocks.write(lba, bytes(model[span]))
        assert blocks.read(lba, count) == model[span]
    blocks.close()


def test_misuse():
    blocks = make()
    with pytest.raises(DataError, match="ends at LBA 32, but 2 blocks were expected at LBA 31"):
        blocks.read(31, 2)
    with pytest.raises(UsageError, match="outside the device"):
        blocks.write(32, bytes(BLOCK))
    with pytest.raises(UsageError, match="whole number of blocks"):
        blocks.write(0, bytes(100))
    blocks.close()
    with pytest.raises(UsageError, match="closed"):
        blocks.read(0, 1)


@pytest.mark.parametrize("kind", ["io", "short", "timeout"])
def test_passing_faults_are_retried(kind):
    url = f"faulty+mem://?size=128KiB&fault={kind},at=2"
    blocks = make(url, buffer=BLOCK)
    blocks.write(0, bytes([4]) * 3 * BLOCK)
    assert blocks.read(0, 3) == bytes([4]) * 3 * BLOCK
    assert blocks.stats()["injected"][kind] == 1
    blocks.close()


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("io", DeviceLost, r"read at LBA 9 failed: Status\.IO after 3 attempts: check the device"),
        ("short", DeviceLost, r"Status\.SHORT after 3 attempts"),
        ("lost", DeviceLost, r"read at LBA 9 failed: Status\.LOST: check"),
        ("nospace", UsageError, "no space left on the device"),
        ("invalid", UsageError, "outside the device of 32 blocks or read-only"),
    ],
)
def test_lasting_faults_name_address_and_status(kind, error, words):
    blocks = make(f"faulty+mem://?size=128KiB&fault={kind},lba=9-10", buffer=BLOCK)
    with pytest.raises(error, match=words):
        blocks.read(8, 4)
    assert blocks.read(0, 4) == bytes(4 * BLOCK)
    blocks.close()


def test_a_silent_device_is_given_up(monkeypatch):
    monkeypatch.setattr(transport_blocks, "_PATIENCE", 0.05)
    blocks = make()
    monkeypatch.setattr(type(blocks._transport), "poll", lambda self, out: 0)
    for _ in range(2):
        with pytest.raises(DeviceLost, match="no answer"):
            blocks.read(0, 1)
    blocks.close()


class Slow:
    """A memory device whose requests run only when `release` is set; counts what it holds."""

    def __init__(self):
        self.inner = open_transport("mem://?size=4MiB", create=True)
        self.held, self.deepest, self.release = [], 0, False
        self.fail = set()  # blocks whose writes fail

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def submit(self, requests):
        self.held += [r.copy() for r in requests]
        self.deepest = max(self.deepest, len(self.held))
        return len(requests)

    def poll(self, out):
        if not self.release:
            return 0
        for record in self.held:
            if int(record["lba"]) in self.fail and record["op"] == Op.WRITE:
                record["nbytes"] = 1  # completes as invalid
            assert self.inner.submit(np.array([record])) == 1
        self.held.clear()
        return self.inner.poll(out)

    def wait(self, timeout):
        self.release = True


def test_writes_return_before_they_are_done():
    device = Slow()
    blocks = TransportBlocks(device, "slow")
    pages = [bytes([i + 1]) * (64 * BLOCK) for i in range(8)]
    for i, page in enumerate(pages):
        blocks.write(i * 64, page)
    assert len(device.held) == 8
    blocks.write(3 * 64 + 5, bytes([99]) * BLOCK)  # touches one in flight: comes after it
    assert device.release
    assert blocks.read(3 * 64 + 4, 3) == bytes([4]) * BLOCK + bytes([99]) * BLOCK + pages[3][:BLOCK]
    device.release = False
    blocks.write(0, bytes([7]) * BLOCK)
    assert len(device.held) == 1
    assert blocks.read(8, 1) == pages[0][:BLOCK]
    assert blocks.read(0, 1) == bytes([7]) * BLOCK
    blocks.close()


def test_long_writes_and_reads_keep_several_in_flight():
    device = Slow()
    blocks = TransportBlocks(device, "slow")
    data = np.random.default_rng(1).integers(0, 256, 512 * BLOCK, np.uint8).tobytes()
    blocks.write(100, data)
    assert device.deepest == 8
    blocks.flush()
    device.deepest, device.release = 0, False
    assert blocks.read(100, 512) == data
    assert device.deepest == 8
    blocks.close()


def test_a_write_that_fails_later_is_reported_until_a_flush():
    device = Slow()
    device.fail = {5}
    blocks = TransportBlocks(device, "slow")
    blocks.write(5, bytes(BLOCK))
    device.release = True
    assert blocks.read(5, 1) == bytes(BLOCK)
    for lba in (20, 21):
        with pytest.raises(UsageError, match="write at LBA 5 failed"):
            blocks.write(lba, bytes(BLOCK))
    with pytest.raises(UsageError, match="write at LBA 5 failed"):
        blocks.flush()
    blocks.write(22, bytes(BLOCK))
    blocks.flush()
    blocks.write(5, bytes(BLOCK))
    with pytest.raises(UsageError, match="write at LBA 5 failed"):
        blocks.close()
    blocks.close()


def test_nothing_is_committed_on_top_of_a_failed_write():
    device = Slow()
    device.release = True
    volume = Volume.create(TransportBlocks(device, "slow"), 1 << 16)
    info = volume.allocate_pages("x", 3, 1 << 16)
    device.fail = {info.lba(1)}
    with pytest.raises(UsageError, match=f"LBA {info.lba(1)}"):  # noqa: PT012
        for page in range(3):
            with contextlib.suppress(UsageError):
                volume.write_page(info, page, bytes(1 << 16), 1)
        volume.commit()
    volume.rollback()
    assert volume.generation == 1
    with contextlib.suppress(UsageError):  # told again where a write of the commit met it first
        volume.close()


def test_an_interrupted_read_leaves_no_slot_behind():
    device = Slow()
    blocks = TransportBlocks(device, "slow", buffer=2 * BLOCK)
    device.wait = interrupt
    for _ in range(4):
        device.release = False
        with pytest.raises(KeyboardInterrupt):
            blocks.read(0, 9)
        device.release = True
        assert blocks.read(7, 3) == bytes(3 * BLOCK)
    blocks.close()


def interrupt(timeout):
    raise KeyboardInterrupt


def test_messages_say_where_a_block_lies():
    device = open_transport("faulty+mem://?size=128KiB&fault=lost,lba=9-10", create=True)
    device.failed_lba = lambda lba, nblocks: 9
    device.locate = lambda lba: f"target t ns 1 LBA {lba}"
    blocks = TransportBlocks(device, "url")
    with pytest.raises(DeviceLost, match=r"url: read at LBA 8 \(target t ns 1 LBA 9\) failed"):
        blocks.read(8, 4)
    blocks.close()


def test_signals_at_any_moment_lose_no_slot():
    """Ctrl-C all the time, in reads and in writes: what is done afterwards is right."""
    url = "faulty+mem://?size=1MiB&reorder=1&delay=0.0005&seed=1"
    blocks, interrupted = make(url, buffer=3 * BLOCK), 0
    armed, over = threading.Event(), threading.Event()

    def interrupt_if_armed(number, frame):
        if armed.is_set():
            armed.clear()
            raise KeyboardInterrupt

    def shoot():
        random = np.random.default_rng(0)
        while not over.wait(random.uniform(0, 0.003)):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt_if_armed)
    thread = threading.Thread(target=shoot)
    thread.start()
    try:
        for turn in range(150):
            try:
                armed.set()
                blocks.write(turn % 9, bytes([turn]) * 7 * BLOCK)
                blocks.read(0, 20)
                armed.clear()
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert interrupted > 20
    data = np.random.default_rng(4).integers(0, 256, 100 * BLOCK, np.uint8).tobytes()
    blocks.write(3, data)
    assert blocks.read(3, 100) == data
    blocks.flush()
    assert sorted(blocks._free) == sorted(set(blocks._free))
    assert not blocks._ended
    blocks.close()
