"""Where a receiver says that bytes belong: the slots given to it, this PDU and one more header."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference.nvme_pdus import (
    C2H,
    COMMAND,
    H2C,
    IC_REQ,
    IC_RESP,
    LAST,
    R2T,
    RESPONSE,
    SUCCESS,
    answer_body,
    data_body,
    ic,
    joined_stream,
    pdu,
    sqe,
)

from hyades.common.nvme import commands
from hyades.common.nvme.host import HostQueue
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.target import TargetQueue

GUARD = b"\xa5" * 16


class Guarded:
    """Memory between guards, handed out as one view."""

    def __init__(self, nbytes):
        self.memory = bytearray(GUARD + bytes(nbytes) + GUARD)
        self.view = memoryview(self.memory)[16:-16]

    def check(self):
        assert self.memory[:16] == GUARD
        assert self.memory[-16:] == GUARD

    @property
    def data(self):
        return bytes(self.view)


def pour(queue, stream, cuts):
    """Feed *stream*, cut into the lengths *cuts* in turn, as a socket would; check each offer."""
    lengths = itertools.cycle(cuts)
    view, rest = memoryview(stream), 0
    position = 0
    while view:
        if not rest:
            rest = next(lengths)
        buffers = queue.buffers()
        check_offer(stream, position, [len(buffer) for buffer in buffers])
        taken = 0
        for buffer in buffers:
            step = min(len(buffer), len(view), rest)
            buffer[:step] = view[:step]
            view, rest, taken = view[step:], rest - step, taken + step
        position += taken
        queue.received(taken)


def check_offer(stream, position, sizes):
    """Check that *sizes* is what is missing of the PDU at *position*, or less, and 24 more."""
    assert sum(sizes) > 0
    at = 0
    while at + int.from_bytes(stream[at + 4 : at + 8], "little") <= position:
        at += int.from_bytes(stream[at + 4 : at + 8], "little")
        if len(stream) - at < 8:
            break
    end = at + int.from_bytes(stream[at + 4 : at + 8], "little")
    if position - at < 24:  # the length may not even be there
        assert sizes == [24 - (position - at)]
    else:
        assert position + sum(sizes) <= end + 24


def host_conversation(digests):
    """Return a host queue, its slots, and all that a controller says to it."""
    host = HostQueue(8, header_digest=bool(digests & 1), data_digest=bool(digests & 2))
    host.start()
    pour(host, ic(IC_RESP, digests=digests, last=4096), [1000])
    slots = [Guarded(nbytes) for nbytes in (4, 512, 5000)]
    for slot in slots:
        host.submit(commands.transfer(Opcode.READ, 1, 0, 1), into=slot.view)
    host.submit(commands.transfer(Opcode.WRITE, 1, 0, 1), source=memoryview(bytes(9000)))
    host.submit(commands.flush(1))
    host.take_output()
    d = {"digests": digests}
    stream = (
        pdu(C2H, data_body(1, 0, 0, 100), b"a" * 100, **d)
        + pdu(R2T, data_body(3, 9, 0, 9000), **d)
        + pdu(C2H, data_body(0, 0, 0, 4), b"bcde", flags=LAST | SUCCESS, align=64, **d)
        + pdu(C2H, data_body(2, 0, 0, 4096), b"f" * 4096, **d)
        + pdu(RESPONSE, answer_body(4, 0x06, 7), **d)
        + pdu(C2H, data_body(1, 0, 100, 412), b"g" * 412, flags=LAST, align=128, **d)
        + pdu(C2H, data_body(2, 0, 4096, 904), b"h" * 904, flags=LAST | SUCCESS, **d)
        + pdu(RESPONSE, answer_body(1), **d)
        + pdu(RESPONSE, answer_body(3, 0x280), **d)
    )
    return host, slots, stream


HOST_EVENTS = [(0, 0, 0), (4, 6, 7), (2, 0, 0), (1, 0, 0), (3, 0x280, 0)]


def target_conversation(digests):
    """Return a target queue with two writes that wait, their memory, and what comes next."""
    target = TargetQueue(max_h2c=4096)
    pour(target, ic(IC_REQ, digests=digests), [1000])
    d = {"digests": digests}
    pour(target, pdu(COMMAND, sqe(1, 7, 6000), **d) + pdu(COMMAND, sqe(1, 9, 512), **d), [1000])
    slots = [Guarded(6000), Guarded(512)]
    for cid, slot in zip((7, 9), slots, strict=True):
        target.request_data(cid, slot.view)
    target.take_output()
    stream = (
        pdu(H2C, data_body(7, 7, 0, 4096), b"a" * 4096, **d)
        + pdu(COMMAND, sqe(1, 1, 1024, sgl=1), b"b" * 1024, align=128, **d)
        + pdu(H2C, data_body(9, 9, 0, 512), b"c" * 512, flags=LAST, **d)
        + pdu(COMMAND, sqe(0, 2), **d)
        + pdu(H2C, data_body(7, 7, 4096, 1904), b"d" * 1904, flags=LAST, align=32, **d)
    )
    return target, slots, stream


CUTS = st.lists(
    st.one_of(st.integers(1, 40), st.sampled_from([24, 28, 72, 76, 4096, 4120, 9999])),
    min_size=1,
    max_size=40,
)


@settings(deadline=None, max_examples=80)
@given(digests=st.integers(0, 3), cuts=CUTS)
def test_a_host_hears_the_same_however_the_stream_is_cut(digests, cuts):
    host, slots, stream = host_conversation(digests)
    pour(host, stream, cuts)
    assert host.completions == HOST_EVENTS
    assert [slot.data for slot in slots] == [
        b"bcde", b"a" * 100 + b"g" * 412, b"f" * 4096 + b"h" * 904,
    ]  # fmt: skip
    for slot in slots:
        slot.check()
    sent = joined_stream(host.take_output())
    whole, _, stream = host_conversation(digests)
    pour(whole, stream, [10**6])
    assert joined_stream(whole.take_output()) == sent


@settings(deadline=None, max_examples=80)
@given(digests=st.integers(0, 3), cuts=CUTS)
def test_a_target_hears_the_same_however_the_stream_is_cut(digests, cuts):
    target, slots, stream = target_conversation(digests)
    pour(target, stream, cuts)
    assert target.arrived == [(9, True), (7, True)]
    heard = [(c.cid, data and bytes(data), intact) for c, data, intact in target.commands]
    assert heard[2:] == [(1, b"b" * 1024, True), (2, None, True)]
    assert [slot.data for slot in slots] == [b"a" * 4096 + b"d" * 1904, b"c" * 512]
    for slot in slots:
        slot.check()


@pytest.mark.parametrize("digests", range(4))
def test_one_byte_at_a_time(digests):
    host, slots, stream = host_conversation(digests)
    pour(host, stream, [1])
    assert host.completions == HOST_EVENTS
    for slot in slots:
        slot.check()
    target, _, stream = target_conversation(digests)
    pour(target, stream, [1])
    assert target.arrived == [(9, True), (7, True)]


@settings(deadline=None, max_examples=80)
@given(
    digests=st.integers(0, 3),
    at=st.integers(0, 12_000),
    value=st.integers(1, 255),
    cuts=CUTS,
    side=st.booleans(),
)
def test_one_wrong_byte_has_the_same_end_however_the_stream_is_cut(digests, at, value, cuts, side):
    ends = []
    for lengths in (cuts, [1], [10**6]):
        queue, slots, stream = (host_conversation if side else target_conversation)(digests)
        damaged = bytearray(stream)
        damaged[at % len(stream)] ^= value
        try:
            pour_blindly(queue, bytes(damaged), lengths)
            end = ""
        except Violation as violation:
            end = f"{violation} {violation.fatal} {violation.info}"
        for slot in slots:
            slot.check()
        events = queue.completions if side else [queue.arrived, len(queue.commands)]
        ends.append((end, events, joined_stream(queue.take_output())))
    assert ends[0] == ends[1] == ends[2]


def pour_blindly(queue, stream, cuts):
    """Feed *stream*, whose lengths may be wrong."""
    lengths = itertools.cycle(cuts)
    view = memoryview(stream)
    while view:
        piece, view = view[: (step := next(lengths))], view[step:]
        while piece:
            taken = 0
            for buffer in queue.buffers():
                step = min(len(buffer), len(piece))
                buffer[:step] = piece[:step]
                piece, taken = piece[step:], taken + step
            queue.received(taken)


def test_offers_lead_to_the_slot_itself():
    host = HostQueue(2)
    host.start()
    pour(host, ic(IC_RESP, last=4096), [1000])
    slot = Guarded(4096)
    host.submit(commands.transfer(Opcode.READ, 1, 0, 8), into=slot.view)
    pour(host, pdu(C2H, data_body(0, 0, 0, 4096), bytes(4096), flags=LAST)[:24], [24])
    data, header = host.buffers()
    assert data.obj is slot.memory
    assert (len(data), len(header)) == (4096, 24)
    host.received(1000)
    assert len(host.buffers()[0]) == 3096


def test_offers_with_digests():
    host, _, stream = host_conversation(3)
    pour(host, stream[:28], [28])
    assert [len(buffer) for buffer in host.buffers()] == [100, 4, 24]
    host.buffers()[0][:] = b"a" * 100
    host.received(100)
    assert [len(buffer) for buffer in host.buffers()] == [4, 24]
    host.received(1)
    assert [len(buffer) for buffer in host.buffers()] == [3, 24]
