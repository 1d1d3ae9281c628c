"""Both ends of an NVMe/RDMA queue, joined in memory: nothing here touches an RDMA device."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyades.common.errors import PeerError, UsageError
from hyades.common.nvme import commands
from hyades.common.nvme.commands import Connect
from hyades.common.nvme.host import State
from hyades.common.nvme.layout import Opcode, Sgl
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.rdma import MAX_LENGTH
from hyades.common.nvme.rdma_host import RdmaHostQueue
from hyades.common.nvme.rdma_sends import SendRing
from hyades.common.nvme.rdma_target import Answer, Pull, Push, RdmaTargetQueue
from hyades.target_side.execution import locate
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import MemoryNamespace

BLOCK = 4096


class Fabric:
    """Two queues, and a device that moves data between host memory, found by key, and the rest."""

    def __init__(self, depth=8, in_capsule=0):
        self.memory = {}
        self.host = RdmaHostQueue(depth, self.describe)
        self.host.accepted(depth)
        self.host.in_capsule = in_capsule
        self.target = RdmaTargetQueue(depth=depth + 1)
        self.target.configure(1, depth + 1, flow_control=True)
        self.invalidated = []

    def describe(self, memory):
        key = len(self.memory) + 1
        self.memory[key] = memory
        return 0x1000 * key, key

    def to_target(self):
        """Deliver what the host sends."""
        for sqe, data in self.host.take_output():
            self.target.received(memoryview(sqe + bytes(data)), 1.0)

    def work(self):
        """Do what the target asks for, in order."""
        for work in self.target.take_output():
            if isinstance(work, Answer):
                self.host.received(work.capsule, 2.0)
                self.invalidated.append(work.invalidate)
                continue
            memory = self.memory[work.key]
            assert work.address == 0x1000 * work.key
            if isinstance(work, Push):
                memory[: work.payload.nbytes] = work.payload
            else:
                work.into[:] = memory[: work.into.nbytes]
                self.target.pulled(work.cid)


def blocks(n, seed=1):
    return memoryview(bytearray(random.Random(seed).randbytes(n * BLOCK)))


def test_a_read():
    fabric = Fabric()
    into, content = memoryview(bytearray(2 * BLOCK)), blocks(2)
    cid = fabric.host.submit(commands.transfer(Opcode.READ, 1, 7, 2), into=into)
    fabric.to_target()
    ((command, data, intact),) = fabric.target.commands
    assert (command.slba, command.blocks, data, intact) == (7, 2, None, True)
    assert (command.sgl, command.sgl_bytes) == (Sgl.TRANSPORT, 2 * BLOCK)
    fabric.target.send_data(command.cid, content, success=True)
    assert [type(work) for work in fabric.target._out] == [Push, Answer]
    fabric.work()
    assert fabric.host.completions == [(cid, 0, 0)]
    assert into == content
    assert fabric.invalidated == [0]
    assert fabric.host.outstanding == fabric.target.outstanding == 0
    assert fabric.host.bytes_in == 2 * BLOCK + 16


def test_a_write_is_pulled():
    fabric = Fabric()
    source, into = blocks(3), memoryview(bytearray(3 * BLOCK))
    cid = fabric.host.submit(commands.transfer(Opcode.WRITE, 1, 0, 3), source=source)
    fabric.to_target()
    fabric.target.request_data(cid, into)
    with pytest.raises(UsageError, match="cannot be answered now"):
        fabric.target.complete(cid)
    assert fabric.target.arrived == []
    fabric.work()
    assert fabric.target.arrived == [(cid, True)]
    assert into == source
    fabric.target.complete(cid)
    fabric.work()
    assert fabric.host.completions == [(cid, 0, 0)]


@pytest.mark.parametrize("limit", [0, BLOCK - 1, BLOCK])
def test_a_small_write_goes_along_where_it_fits(limit):
    fabric = Fabric(in_capsule=limit)
    source = blocks(1)
    fabric.host.submit(commands.transfer(Opcode.WRITE, 1, 0, 1), source=source)
    fabric.to_target()
    ((command, data, _),) = fabric.target.commands
    assert (data == source) if limit == BLOCK else (data is None)
    assert command.sgl == (Sgl.IN_CAPSULE if limit == BLOCK else Sgl.TRANSPORT)


def test_the_data_of_connect_is_fetched_before_it_is_a_command():
    fabric = Fabric()
    want = Connect(0, 32, "nqn.2026-01.org.example:a", "nqn.2026-01.org.example:h", bytes(16))
    sqe, data = commands.connect(want)
    fabric.host.submit(sqe, source=memoryview(bytearray(data)), in_capsule=True)
    fabric.to_target()
    assert fabric.target.commands == []
    (pull,) = fabric.target._out
    assert isinstance(pull, Pull)
    fabric.work()
    ((command, got, _),) = fabric.target.commands
    assert commands.parse_connect(command.raw, got) == want
    assert fabric.target.arrived == []


def test_no_more_are_out_than_the_controller_has_receives():
    queue = RdmaHostQueue(16, lambda _: (0, 0))
    assert queue.room == 0
    queue.accepted(3)
    for _ in range(3):
        queue.submit(commands.flush(1))
    assert (queue.room, queue.outstanding, queue.depth) == (0, 3, 3)
    with pytest.raises(UsageError, match="3 are out"):
        queue.submit(commands.flush(1))
    assert queue.close() == [0, 1, 2]


def test_what_one_descriptor_cannot_name():
    queue = RdmaHostQueue(2, lambda _: (0, 0))
    queue.accepted(2)
    with pytest.raises(UsageError, match=f"at most {MAX_LENGTH}"):
        queue.submit(commands.transfer(Opcode.READ, 1, 0, 1), into=memoryview(bytearray(1 << 24)))
    assert queue.outstanding == 0


@pytest.mark.parametrize("response", [bytes(15), bytes(17), b"", bytes(12) + b"\x05\0\0\0"])
def test_responses_that_answer_nothing(response):
    fabric = Fabric()
    fabric.host.submit(commands.flush(1))
    with pytest.raises(Violation):
        fabric.host.received(response)
    assert fabric.host.state is State.CLOSED
    assert fabric.host.close() == [0]


def test_an_answer_comes_once():
    fabric = Fabric()
    fabric.host.submit(commands.flush(1))
    fabric.host.received(bytes(16))
    with pytest.raises(Violation, match="command 0, which is not out"):
        fabric.host.received(bytes(16))


def sqe(cid, kind=0x40, opcode=Opcode.READ, nbytes=BLOCK, key=7):
    raw = bytearray(64)
    raw[0], raw[1], raw[2:4] = opcode, 0x40, cid.to_bytes(2, "little")
    raw[4] = 1
    raw[32:35], raw[35:39] = nbytes.to_bytes(3, "little"), key.to_bytes(4, "little")
    raw[39] = kind
    return memoryview(raw)


@pytest.mark.parametrize(
    "capsules",
    [
        [memoryview(bytes(63))],
        [memoryview(bytes(64 + 8193))],
        [sqe(1), sqe(1)],
        [sqe(i) for i in range(5)],
    ],
    ids=["short", "long", "twice", "many"],
)
def test_capsules_that_end_the_connection(capsules):
    target = RdmaTargetQueue(depth=4)
    for capsule in capsules[:-1]:
        target.received(capsule)
    with pytest.raises(Violation):
        target.received(capsules[-1])
    target.complete(1)  # dropped without a word
    assert target.take_output() == []


@pytest.mark.parametrize(
    ("kind", "status"),
    [(0x40, 0), (0x4F, 0), (0x41, 0x4011), (0x5A, 0x4011), (0x00, 0x4011), (0x20, 0x400D),
     (0x30, 0x400D), (0x01, 0x4011)],
)  # fmt: skip
def test_descriptors_that_are_refused(kind, status):
    """A read is refused where its descriptor is none that names memory of the host with a key."""
    target = RdmaTargetQueue()
    target.received(sqe(0, kind))
    ((command, _, _),) = target.commands
    found = locate(command, {1: MemoryNamespace(1 << 20)}, Limits())
    assert (found if isinstance(found, int) else 0) == status


def test_the_memory_of_a_capsule_is_free_again():
    """Its slot takes the next message before this one is executed."""
    target = RdmaTargetQueue()
    raw = bytearray(sqe(0, 1, Opcode.WRITE)) + bytes(b"a" * BLOCK)
    target.received(memoryview(raw))
    raw[:] = bytes(len(raw))
    ((command, data, _),) = target.commands
    assert command.opcode == Opcode.WRITE
    assert bytes(data) == b"a" * BLOCK


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_against_a_disk(data):
    """Reads and writes in flight at once, answered in any order, over a disk in memory."""
    fabric = Fabric(depth=6, in_capsule=BLOCK)
    disk, model = blocks(8), bytearray(blocks(8))
    slots = [memoryview(bytearray(2 * BLOCK)) for _ in range(6)]
    expected, busy = {}, set()
    for _ in range(data.draw(st.integers(1, 20))):
        if fabric.host.room and len(busy) < 7 and data.draw(st.booleans()):
            lba = data.draw(st.sampled_from([b for b in range(7) if not {b, b + 1} & busy] or [-1]))
            if lba < 0:
                continue
            count, place = data.draw(st.integers(1, 2)), lba * BLOCK
            nbytes = count * BLOCK
            if data.draw(st.booleans()):
                free = next(i for i in range(6) if i not in {e[0] for e in expected.values()})
                cid = fabric.host.submit(
                    commands.transfer(Opcode.READ, 1, lba, count), into=slots[free][:nbytes]
                )
                expected[cid] = (free, bytes(model[place : place + nbytes]), lba)
            else:
                source = blocks(count, data.draw(st.integers(2, 99)))
                model[place : place + nbytes] = source
                cid = fabric.host.submit(
                    commands.transfer(Opcode.WRITE, 1, lba, count), source=source
                )
                expected[cid] = (-1 - cid, b"", lba)
            busy |= {lba, lba + 1}
            fabric.to_target()
        elif fabric.target.commands:
            execute(fabric, disk, data.draw(st.integers(0, len(fabric.target.commands) - 1)))
        check(fabric, slots, expected, busy)
    while expected:
        execute(fabric, disk, 0)
        check(fabric, slots, expected, busy)
    assert disk == model


def execute(fabric, disk, index):
    """Execute one command to its end."""
    if not fabric.target.commands:
        return
    command, along, _ = fabric.target.commands.pop(index)
    place = command.slba * BLOCK
    part = disk[place : place + command.blocks * BLOCK]
    if command.opcode == Opcode.READ:
        fabric.target.send_data(command.cid, part, success=True)
    elif along is not None:
        part[:] = along
        fabric.target.complete(command.cid)
    else:
        fabric.target.request_data(command.cid, part)
        fabric.work()
        fabric.target.arrived.clear()
        fabric.target.complete(command.cid)
    fabric.work()


def check(fabric, slots, expected, busy):
    """Compare what has ended."""
    for cid, code, _ in fabric.host.completions:
        slot, content, lba = expected.pop(cid)
        assert code == 0
        assert slot < 0 or bytes(slots[slot][: len(content)]) == content
        busy -= {lba, lba + 1}
    fabric.host.completions.clear()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=8))
def test_a_target_survives_any_capsules(capsules):
    target = RdmaTargetQueue(depth=4, in_capsule=64)
    for raw in capsules:
        try:
            target.received(memoryview(raw))
        except Violation:
            assert target.closed
            return
    for command, data, _ in target.commands:
        assert data is None or command.sgl == Sgl.IN_CAPSULE
        target.complete(command.cid)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(min_size=14, max_size=18), max_size=8))
def test_a_host_survives_any_responses(responses):
    host = RdmaHostQueue(4, lambda _: (0, 0))
    host.accepted(4)
    for _ in range(4):
        host.submit(commands.flush(1))
    for raw in responses:
        try:
            host.received(raw)
        except Violation:
            break
    ended = [cid for cid, _, _ in host.completions]
    assert sorted(ended + host.close()) == [0, 1, 2, 3]


# -- sends


def test_every_nth_send_is_signalled():
    ring = SendRing(16, 4)
    assert [ring.post()[1] for _ in range(8)] == [False, False, False, True] * 2
    assert list(ring.retire(3)) == [0, 1, 2, 3]
    assert ring.room == 12
    assert ring.post(signal=True) == (8, True)
    assert [ring.post()[1] for _ in range(4)] == [False, False, False, True]


def test_completions_that_cannot_be():
    ring = SendRing(4, 2)
    for serial in (0, 7):
        with pytest.raises(PeerError, match=f"send {serial}, which is not out"):
            ring.retire(serial)
    ring.post()
    ring.post()
    assert list(ring.retire(1)) == [0, 1]
    with pytest.raises(PeerError):
        ring.retire(0)
    with pytest.raises(UsageError):
        SendRing(4, 5)


@given(st.integers(1, 12), st.data())
def test_a_full_ring_always_has_a_completion_coming(capacity, data):
    ring = SendRing(capacity, data.draw(st.integers(1, capacity)))
    signalled, retired = [], []
    for _ in range(60):
        if ring.room and data.draw(st.booleans()):
            serial, signal = ring.post(signal=data.draw(st.booleans()))
            signalled += [serial] if signal else []
            assert ring.slot(serial) == serial % capacity
        elif signalled:
            retired += ring.retire(signalled.pop(0))
        if not ring.room:
            assert signalled
            assert not ring.quiet
    assert retired == list(range(len(retired)))
    while ring.room:
        ring.post()
    with pytest.raises(UsageError, match="in use"):
        ring.post()
