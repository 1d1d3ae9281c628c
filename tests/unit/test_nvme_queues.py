"""Both ends of an NVMe/TCP queue, joined in memory: nothing here touches a socket."""

import numpy as np
import pytest
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
    deliver,
    ic,
    joined,
    joined_stream,
    pattern,
    pdu,
    sqe,
)

from hyades.common.errors import UsageError
from hyades.common.nvme import commands
from hyades.common.nvme.host import HostQueue
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.pdu import feed
from hyades.common.nvme.status import StatusCode
from hyades.common.nvme.target import TargetQueue

DIGESTS = [(False, False), (True, False), (False, True), (True, True)]


def write(blocks=1):
    return commands.transfer(Opcode.WRITE, 1, 0, blocks)


def read(blocks=1):
    return commands.transfer(Opcode.READ, 1, 7, blocks)


@pytest.mark.parametrize(("header", "data"), DIGESTS)
@pytest.mark.parametrize("step", [None, 1, 7, 4096])
def test_a_read_lands_where_it_belongs(header, data, step):
    host, target = joined(header, data)
    content, slot = pattern(10_000), np.zeros(10_000, np.uint8)
    cid = host.submit(read(3), into=slot.data)
    deliver(host.take_output(), target, step)
    ((command, capsule, intact),) = target.commands
    assert (command.opcode, command.slba, command.blocks) == (Opcode.READ, 7, 3)
    assert command.sgl_bytes == 10_000
    assert capsule is None
    assert intact
    target.send_data(command.cid, content.data, success=True)
    deliver(target.take_output(), host, step)
    assert host.completions == [(cid, 0, 0)]
    assert np.array_equal(slot, content)
    assert host.outstanding == 0


@pytest.mark.parametrize(("header", "data"), DIGESTS)
@pytest.mark.parametrize("step", [None, 1, 13])
def test_a_write_goes_along_with_its_command(header, data, step):
    host, target = joined(header, data)
    host.in_capsule = 8192
    content = pattern(8192)
    cid = host.submit(write(), source=content.data)
    deliver(host.take_output(), target, step)
    ((command, capsule, intact),) = target.commands
    assert intact
    assert bytes(capsule) == content.tobytes()
    target.complete(command.cid)
    deliver(target.take_output(), host, step)
    assert host.completions == [(cid, 0, 0)]


def test_only_what_the_controller_takes_goes_along():
    host, target = joined()
    host.in_capsule = 4096
    host.submit(write(), source=pattern(4097).data)
    host.submit(commands.connect(commands.Connect(0, 8, "nqn.a", "nqn.b", bytes(16)))[0],
                source=pattern(8000).data, in_capsule=True)  # fmt: skip
    deliver(host.take_output(), target)
    assert [data and len(data) for _, data, _ in target.commands] == [None, 8000]


@pytest.mark.parametrize(("header", "data"), DIGESTS)
@pytest.mark.parametrize("step", [None, 1, 4099])
def test_a_write_is_asked_for_and_split_at_maxh2cdata(header, data, step):
    host, target = joined(header, data, max_h2c=4096)
    content, room = pattern(10_000), bytearray(10_000)
    cid = host.submit(write(), source=content.data)
    deliver(host.take_output(), target, step)
    target.request_data(cid, memoryview(room))
    deliver(target.take_output(), host, step)
    sent = host.take_output()
    sizes = [len(s) for s in sent if isinstance(s, memoryview)]
    assert sizes == [4096, 4096, 1808]
    deliver(sent, target, step)
    assert target.arrived == [(cid, True)]
    assert bytes(room) == content.tobytes()
    target.complete(cid)
    deliver(target.take_output(), host, step)
    assert host.completions == [(cid, 0, 0)]


def test_several_writes_wait_for_their_data_at_once():
    host, target = joined(max_h2c=4096)
    contents = [pattern(9000, seed) for seed in range(5)]
    rooms = [bytearray(9000) for _ in contents]
    cids = [host.submit(write(), source=content.data) for content in contents]
    deliver(host.take_output(), target)
    for index in (3, 0, 4, 1, 2):
        target.request_data(cids[index], memoryview(rooms[index]))
    deliver(target.take_output(), host)
    # the PDUs of different commands may come in any order, those of one command in theirs
    stream = joined_stream(host.take_output())
    pieces: dict[int, list[bytes]] = {}
    while stream:
        plen = int.from_bytes(stream[4:8], "little")
        pieces.setdefault(stream[8], []).append(stream[:plen])
        stream = stream[plen:]
    while any(pieces.values()):
        for queue in pieces.values():
            if queue:
                feed(target, queue.pop(0))
    assert sorted(target.arrived) == [(cid, True) for cid in sorted(cids)]
    assert [bytes(room) for room in rooms] == [content.tobytes() for content in contents]


def test_a_controller_that_asks_piece_by_piece():
    host, _ = joined()
    content = pattern(8192)
    cid = host.submit(write(), source=content.data)
    host.take_output()
    got = b""
    for at in (0, 4096):
        feed(host, pdu(R2T, data_body(cid, 77, at, 4096)))
        sent = joined_stream(host.take_output())
        assert sent[:24] == pdu(H2C, data_body(cid, 77, at, 4096), content[:4096].tobytes(),
                                flags=LAST)[:24]  # fmt: skip
        got += sent[24:]
    assert got == content.tobytes()
    feed(host, pdu(RESPONSE, answer_body(cid)))
    assert host.completions == [(cid, 0, 0)]


@pytest.mark.parametrize("success", [False, True])
@pytest.mark.parametrize("step", [None, 1])
def test_data_in_several_pdus(success, step):
    host, _ = joined()
    content, slot = pattern(6000), np.zeros(6000, np.uint8)
    cid = host.submit(read(), into=slot.data)
    for at, nbytes in ((0, 4), (4, 5000), (5004, 996)):
        last = LAST | (SUCCESS if success else 0) if at == 5004 else 0
        data = content[at : at + nbytes].tobytes()
        deliver([pdu(C2H, data_body(cid, 0, at, nbytes), data, flags=last)], host, step)
    if not success:
        assert host.completions == []
        deliver([pdu(RESPONSE, answer_body(cid, result=5))], host, step)
    assert host.completions == [(cid, 0, 0 if success else 5)]
    assert np.array_equal(slot, content)


@pytest.mark.parametrize("flow_control", [False, True])
def test_success_only_where_heads_are_not_counted(flow_control):
    host, target = joined()
    target.configure(1, 4, flow_control=flow_control)
    slot = bytearray(512)
    cid = host.submit(read(), into=memoryview(slot))
    deliver(host.take_output(), target)
    target.send_data(cid, memoryview(bytes(512)), success=True)
    sent = joined_stream(target.take_output())
    assert sent[1] == LAST | (0 if flow_control else SUCCESS)
    assert len(sent) == 24 + 512 + (24 if flow_control else 0)
    deliver([sent], host)
    assert host.completions == [(cid, 0, 0)]
    assert target.outstanding == 0


def test_a_host_takes_success_with_flow_control_too():
    host, _ = joined()  # the queue does not know what Connect asked for: SPDK sets it regardless
    cid = host.submit(read(), into=memoryview(bytearray(4)))
    feed(host, pdu(C2H, data_body(cid, 0, 0, 4), b"abcd", flags=LAST | SUCCESS))
    assert host.completions == [(cid, 0, 0)]


def test_submission_queue_heads():
    target = TargetQueue(depth=32)
    feed(target, ic(IC_REQ))
    target.take_output()
    heads = []
    for number in range(12):
        feed(target, pdu(COMMAND, sqe(0, number)))
        if number == 0:  # Connect: its answer says that entry 0 was taken
            target.configure(1, 5, flow_control=True)
        target.complete(number)
        heads.append(int.from_bytes(joined_stream(target.take_output())[16:18], "little"))
    assert heads == [1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2]


def test_the_head_is_that_of_commands_taken_not_answered():
    target = TargetQueue(depth=32)
    feed(target, ic(IC_REQ))
    feed(target, b"".join(pdu(COMMAND, sqe(0, cid)) for cid in range(5)))
    target.take_output()
    target.complete(3)
    assert joined_stream(target.take_output())[16:18] == bytes((5, 0))


@pytest.mark.parametrize("cid", [0, 1, 0xFFFE, 0xFFFF])
def test_any_command_id(cid):
    target = TargetQueue()
    feed(target, ic(IC_REQ))
    feed(target, pdu(COMMAND, sqe(1, cid, 512)))
    target.request_data(cid, memoryview(bytearray(512)))
    feed(target, pdu(H2C, data_body(cid, cid, 0, 512), bytes(512), flags=LAST))
    assert target.arrived == [(cid, True)]


def broken_data(stream):
    """Return the PDU *stream* with its data digest wrong."""
    return stream[:-1] + bytes((stream[-1] ^ 1,))


@pytest.mark.parametrize("success", [False, True])
def test_a_broken_data_digest_fails_the_read_not_the_connection(success):
    host, _ = joined(False, True)
    cid = host.submit(read(), into=memoryview(bytearray(8)))
    other = host.submit(read(), into=memoryview(bytearray(8)))
    first = pdu(C2H, data_body(cid, 0, 0, 4), b"abcd", digests=2)
    flags = LAST | SUCCESS if success else LAST
    feed(host, broken_data(first) + pdu(C2H, data_body(cid, 0, 4, 4), b"efgh", flags=flags,
                                        digests=2))  # fmt: skip
    if not success:
        feed(host, pdu(RESPONSE, answer_body(cid)))
    assert host.completions == [(cid, StatusCode.TRANSIENT_TRANSPORT, 0)]
    feed(host, pdu(C2H, data_body(other, 0, 0, 8), bytes(8), flags=LAST | SUCCESS, digests=2))
    assert host.completions[1:] == [(other, 0, 0)]


def test_the_controllers_own_status_is_kept():
    host, _ = joined(False, True)
    cid = host.submit(read(), into=memoryview(bytearray(8)))
    feed(host, broken_data(pdu(C2H, data_body(cid, 0, 0, 8), bytes(8), flags=LAST, digests=2)))
    feed(host, pdu(RESPONSE, answer_body(cid, 0x281)))
    assert host.completions == [(cid, 0x281, 0)]


def test_a_broken_data_digest_fails_the_write_not_the_connection():
    target = TargetQueue()
    feed(target, ic(IC_REQ, digests=2))
    feed(target, broken_data(pdu(COMMAND, sqe(1, 1, 8, sgl=1), bytes(8), digests=2)))
    feed(target, pdu(COMMAND, sqe(1, 2, 8)) + pdu(COMMAND, sqe(1, 3, 8)))
    for cid in (2, 3):
        target.request_data(cid, memoryview(bytearray(8)))
    feed(target, broken_data(pdu(H2C, data_body(2, 2, 0, 4), bytes(4), digests=2)))
    feed(target, pdu(H2C, data_body(2, 2, 4, 4), bytes(4), flags=LAST, digests=2))
    feed(target, pdu(H2C, data_body(3, 3, 0, 8), bytes(8), flags=LAST, digests=2))
    assert [(command.cid, intact) for command, _, intact in target.commands] == [
        (1, False), (2, True), (3, True),
    ]  # fmt: skip
    assert target.arrived == [(2, False), (3, True)]
    assert not target.closed


@pytest.mark.parametrize("pda", [0, 1, 7, 31])
@pytest.mark.parametrize("digests", range(4))
def test_alignment_of_data(pda, digests):
    """What each side sends is aligned as the other asked; what it gets may be at any dword."""
    host = HostQueue(8, header_digest=bool(digests & 1), data_digest=bool(digests & 2))
    host.start()
    feed(host, ic(IC_RESP, pda=pda, digests=digests, last=4096))
    host.in_capsule = 4096
    host.take_output()
    host.submit(write(), source=memoryview(b"abcd"))
    cid = host.submit(write(), source=memoryview(bytes(5000)))
    first = joined_stream(host.take_output())
    feed(host, pdu(R2T, data_body(cid, 1, 0, 5000), digests=digests))
    second = joined_stream(host.take_output())
    target = TargetQueue()
    feed(target, ic(IC_REQ, pda=pda, digests=digests))
    target.take_output()
    feed(target, pdu(COMMAND, sqe(2, 0, 4), digests=digests))
    target.send_data(0, memoryview(b"abcd"), success=False)
    third = joined_stream(target.take_output())
    for stream in (first, second, third):
        base = stream[2] + (4 if digests & 1 else 0)
        assert stream[3] % (4 * (pda + 1)) == 0
        assert 0 <= stream[3] - base < 4 * (pda + 1)
        assert not any(stream[base : stream[3]])
    # and back, with another alignment
    feed(target, pdu(COMMAND, sqe(1, 1, 4, sgl=1), b"efgh", digests=digests, align=128))
    assert bytes(target.commands[-1][1]) == b"efgh"
    slot = bytearray(4)
    cid = host.submit(read(), into=memoryview(slot))
    data = pdu(C2H, data_body(cid, 0, 0, 4), b"ijkl", flags=LAST | SUCCESS, digests=digests,
               align=96)  # fmt: skip
    feed(host, data)
    assert slot == b"ijkl"


def test_more_than_its_depth_is_not_taken():
    host, target = joined(depth=3)
    for _ in range(3):
        host.submit(commands.flush(1))
    assert (host.room, host.outstanding) == (0, 3)
    with pytest.raises(UsageError, match="3 are out"):
        host.submit(commands.flush(1))
    deliver(host.take_output(), target)
    target.complete(1)
    deliver(target.take_output(), host)
    assert (host.room, host.outstanding) == (1, 2)


def test_nothing_is_taken_before_the_handshake():
    host = HostQueue(3)
    assert host.room == 0
    with pytest.raises(UsageError, match="this queue is new"):
        host.submit(commands.flush(1))
    host.start()
    with pytest.raises(UsageError, match="this queue is initializing"):
        host.submit(commands.flush(1))


def test_memory_of_other_types():
    host, target = joined()
    content, slot = np.arange(64, dtype="<f4").reshape(8, 8), np.zeros((8, 8), "<f4")
    wrote = host.submit(write(), source=content.data)
    cid = host.submit(read(), into=slot.data)
    deliver(host.take_output(), target)
    assert [command.sgl_bytes for command, _, _ in target.commands] == [256, 256]
    room = np.zeros(64, "<f4")
    target.request_data(wrote, room.data)
    target.send_data(cid, memoryview(content.tobytes()), success=True)
    deliver(target.take_output(), host)
    deliver(host.take_output(), target)
    assert target.arrived == [(wrote, True)]
    assert np.array_equal(room, content.ravel())
    assert np.array_equal(slot, content)


class FileRange:
    """Data that only its owner can read."""

    nbytes = 512


def test_data_by_reference():
    host, target = joined()
    host.submit(read(), into=memoryview(bytearray(512)))
    deliver(host.take_output(), target)
    target.send_data(0, FileRange(), success=True)
    sent = target.take_output()
    assert isinstance(sent[1], FileRange)
    assert [type(segment) for segment in sent] == [bytes, FileRange, bytes]  # with flow control


def test_data_by_reference_has_no_digest():
    host, target = joined(False, True)
    host.submit(read(), into=memoryview(bytearray(512)))
    deliver(host.take_output(), target)
    with pytest.raises(UsageError, match="needs the data in memory"):
        target.send_data(0, FileRange(), success=True)
    assert target.take_output() == []
    target.complete(0, StatusCode.INTERNAL)  # still out


def test_a_read_may_be_answered_after_its_data():
    host, target = joined()
    target.configure(1, 8, flow_control=False)
    cid = host.submit(read(), into=memoryview(bytearray(4)))
    deliver(host.take_output(), target)
    target.send_data(cid, memoryview(b"abcd"), success=True, answer=False)
    assert target.outstanding == 1
    deliver(target.take_output(), host)
    assert host.completions == []
    target.complete(cid, StatusCode.READ_ERROR)
    deliver(target.take_output(), host)
    assert host.completions == [(cid, StatusCode.READ_ERROR, 0)]


@pytest.mark.parametrize("max_h2c", [0, 4095, 4098])
def test_a_limit_that_no_host_accepts(max_h2c):
    with pytest.raises(UsageError, match=f"MAXH2CDATA {max_h2c}"):
        TargetQueue(max_h2c=max_h2c)
