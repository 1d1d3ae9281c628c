"""How NVMe/TCP queues end, and what they hold on to: nothing here touches a socket."""

import pytest
from tests.reference.nvme_pdus import (
    C2H,
    C2H_TERM,
    COMMAND,
    H2C,
    H2C_TERM,
    IC_RESP,
    LAST,
    RESPONSE,
    answer_body,
    data_body,
    deliver,
    ic,
    joined,
    joined_stream,
    pdu,
    sqe,
    words,
)

from hyades.common.errors import UsageError
from hyades.common.nvme import commands
from hyades.common.nvme.host import State
from hyades.common.nvme.layout import Admin, Opcode
from hyades.common.nvme.pdu import Violation, feed


def read(blocks=1):
    return commands.transfer(Opcode.READ, 1, 7, blocks)


def write(blocks=1):
    return commands.transfer(Opcode.WRITE, 1, 0, blocks)


def test_a_command_is_answered_once():
    host, target = joined()
    cid = host.submit(write(), source=memoryview(bytes(512)))
    deliver(host.take_output(), target)
    target.request_data(cid, memoryview(bytearray(512)))
    for again in (
        lambda: target.request_data(cid, memoryview(bytearray(512))),
        lambda: target.complete(cid),  # its data is on its way
        lambda: target.send_data(cid, memoryview(bytes(4)), success=False),
        lambda: target.complete(cid + 1),
        lambda: target.send_data(cid + 1, memoryview(bytes(4)), success=False),
    ):
        with pytest.raises(UsageError):
            again()
    deliver(target.take_output(), host)
    deliver(host.take_output(), target)
    target.complete(cid)
    with pytest.raises(UsageError):
        target.complete(cid)
    assert not target.abandon(cid)


def test_no_more_data_than_the_command_says():
    host, target = joined()
    host.submit(write(), source=memoryview(bytes(512)))
    host.submit(read(), into=memoryview(bytearray(512)))
    deliver(host.take_output(), target)
    for nbytes in (0, 513):
        with pytest.raises(UsageError, match=f"{nbytes} bytes now: its SGL has 512"):
            target.request_data(0, memoryview(bytearray(nbytes)))
        with pytest.raises(UsageError, match=f"{nbytes} bytes now: its SGL has 512"):
            target.send_data(1, memoryview(bytes(nbytes)), success=False)


def test_close_returns_what_is_out_and_keeps_what_is_done():
    host, target = joined()
    slots = [bytearray(8) for _ in range(3)]
    cids = [host.submit(read(), into=memoryview(slot)) for slot in slots]
    deliver(host.take_output(), target)
    target.send_data(cids[1], memoryview(b"abcdefgh"), success=False)
    deliver(target.take_output(), host)
    host.submit(commands.flush(1))
    flushing = host.submit(commands.flush(1))
    feed(host, pdu(RESPONSE, answer_body(flushing)))
    assert host.close() == sorted({cids[0], cids[2]} | {cids[1]})
    assert [cid for cid, _, _ in host.completions] == [cids[1], flushing]
    assert host.take_output() == []
    assert (host.outstanding, host.room, host.close()) == (0, 0, [])
    with pytest.raises(UsageError, match="closed"):
        host.received(1)


def test_close_lets_go_of_memory_in_the_middle_of_data():
    host, target = joined()
    slot, room = bytearray(512), bytearray(512)
    cid = host.submit(read(), into=memoryview(slot))
    feed(host, pdu(C2H, data_body(cid, 0, 0, 512), bytes(512), flags=LAST)[:100])
    host.close()
    wrote = 9
    feed(target, pdu(COMMAND, sqe(1, wrote, 512)))
    target.request_data(wrote, memoryview(room))
    feed(target, pdu(H2C, data_body(wrote, wrote, 0, 512), bytes(512), flags=LAST)[:100])
    target.close()
    for memory in (slot, room):
        memory.append(0)  # BufferError while a view of it is held
    for queue in (host, target):
        assert sum(len(buffer) for buffer in queue.buffers()) <= 24


@pytest.mark.parametrize("step", [None, 1])
def test_a_terminate_request_is_not_answered(step):
    quoted = pdu(COMMAND, sqe(0, 1))
    host, target = joined()
    host.submit(commands.flush(1))
    for queue, kind, who in ((host, C2H_TERM, "controller"), (target, H2C_TERM, "host")):
        body = words((3, 2), (0xABCD, 4))
        term = pdu(kind, body, flags=0, plen=24 + len(quoted)) + quoted
        with pytest.raises(Violation, match=f"{who} ended .* header digest, information 0xabcd"):
            deliver([term], queue, step)
        assert queue.take_output() == []
    assert host.state is State.CLOSED
    assert target.closed
    assert host.close() == [0]


def test_a_terminate_request_comes_without_digests():
    for kind, queue in zip((C2H_TERM, H2C_TERM), joined(True, True), strict=True):
        with pytest.raises(Violation, match="ended the connection: status 99"):
            feed(queue, pdu(kind, words((99, 2)), plen=24 + 72) + bytes(72))


def test_answers_after_the_end_are_dropped():
    host, target = joined()
    host.submit(write(), source=memoryview(bytes(512)))
    host.submit(read(), into=memoryview(bytearray(512)))
    deliver(host.take_output(), target)
    with pytest.raises(Violation):
        feed(target, pdu(RESPONSE, answer_body(0)))
    (term,) = target.take_output()
    assert term[0] == C2H_TERM
    target.request_data(0, memoryview(bytearray(512)))
    target.send_data(1, memoryview(bytes(512)), success=True)
    target.complete(0)
    assert target.take_output() == []
    target.close()
    target.complete(0)
    with pytest.raises(UsageError, match="closed"):
        target.received(1)


def test_a_terminate_request_survives_close():
    host, target = joined()
    for queue in (host, target):
        with pytest.raises(Violation):
            feed(queue, bytes((0xEE,)) * 24)
        queue.close()
        assert joined_stream(queue.take_output())[24:] == bytes((0xEE,)) * 24


def test_what_is_quiet():
    host, target = joined()
    assert host.quiet_since() is None
    host.submit(commands.flush(1), now=5.0)
    assert host.quiet_since() == 5.0
    host.submit(commands.flush(1), now=6.0)
    assert host.quiet_since() == 5.0  # a busy caller does not keep a dead peer alive
    deliver(host.take_output(), target)
    target.complete(0)
    stream = joined_stream(target.take_output())
    host.buffers()[0][:] = stream[: len(host.buffers()[0])]
    host.received(len(stream), now=7.0)
    assert host.quiet_since() == 7.0
    assert host.bytes_in == len(ic(IC_RESP)) + 24


def test_a_target_is_idle_between_pdus_only():
    _, target = joined()
    assert target.idle
    command = pdu(COMMAND, sqe(0, 1))
    feed(target, command[:5])
    assert not target.idle
    feed(target, command[5:])
    assert not target.idle
    target.complete(1)
    assert target.idle


def test_a_command_may_take_the_id_of_an_event_request_that_is_out():
    # SPDK forgets its requests when it detaches, and uses their ids again.
    _, target = joined()
    feed(target, pdu(COMMAND, sqe(Admin.ASYNC_EVENT, 3)))
    feed(target, pdu(COMMAND, sqe(Admin.KEEP_ALIVE, 3)))
    assert [c.opcode for c, _, _ in target.commands] == [Admin.ASYNC_EVENT, Admin.KEEP_ALIVE]
    assert target.superseded == [3]
    assert target.outstanding == 1
    with pytest.raises(Violation, match="command id 3 is in use"):
        feed(target, pdu(COMMAND, sqe(Admin.KEEP_ALIVE, 3)))


def test_an_event_request_that_was_answered_is_nothing_special():
    _, target = joined()
    feed(target, pdu(COMMAND, sqe(Admin.ASYNC_EVENT, 3)))
    target.complete(3, 7)
    feed(target, pdu(COMMAND, sqe(Admin.KEEP_ALIVE, 3)))
    assert target.superseded == []
    target.configure(1, 8, flow_control=False)  # 0x0C is no event request on an I/O queue
    feed(target, pdu(COMMAND, sqe(Admin.ASYNC_EVENT, 4)))
    with pytest.raises(Violation, match="command id 4 is in use"):
        feed(target, pdu(COMMAND, sqe(Admin.KEEP_ALIVE, 4)))
