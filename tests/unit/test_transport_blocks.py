"""TransportBlocks: a synchronous block device over a transport, its retries and its errors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyades.common.errors import DataError, DeviceLost, UsageError
from hyades.common.layout import BLOCK
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
