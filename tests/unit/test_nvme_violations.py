"""Everything a peer may not send: the right fatal error status and information, at any cut."""

import pytest
from tests.reference.nvme_pdus import (
    C2H,
    C2H_TERM,
    COMMAND,
    DDGST,
    H2C,
    H2C_TERM,
    HDGST,
    IC_REQ,
    IC_RESP,
    LAST,
    R2T,
    RESPONSE,
    SUCCESS,
    answer_body,
    data_body,
    fatal_of,
    ic,
    joined_stream,
    pdu,
    sqe,
)

from hyades.common.errors import PeerError
from hyades.common.nvme import commands
from hyades.common.nvme.host import HostQueue, State
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.pdu import Violation, feed
from hyades.common.nvme.target import TargetQueue

FIELD, SEQUENCE, DIGEST, RANGE, LIMIT, UNSUPPORTED = 1, 2, 3, 4, 5, 6
READS, WRITES, IDLE = 0, 1, 5  # command ids of the host: 512 bytes in, 512 bytes out, not out


def ready_host(digests=0):
    host = HostQueue(6, header_digest=bool(digests & 1), data_digest=bool(digests & 2))
    host.start()
    feed(host, ic(IC_RESP, digests=digests, last=4096))
    host.submit(commands.transfer(Opcode.READ, 1, 0, 1), into=memoryview(bytearray(512)))
    host.submit(commands.transfer(Opcode.WRITE, 1, 0, 1), source=memoryview(bytes(512)))
    host.take_output()
    return host


def ready_target(digests=0):
    """Command 1 has asked for 8192 bytes in pieces of up to 4096, command 2 for nothing yet."""
    target = TargetQueue(depth=4, in_capsule=512, max_h2c=4096)
    feed(target, ic(IC_REQ, digests=digests))
    feed(target, pdu(COMMAND, sqe(1, 1, 8192), digests=digests))
    feed(target, pdu(COMMAND, sqe(1, 2, 8192), digests=digests))
    target.request_data(1, memoryview(bytearray(8192)))
    target.take_output()
    return target


HOST = {
    "another side's type": (pdu(COMMAND, bytes(64)), FIELD, 0),
    "no type": (pdu(0x0A), FIELD, 0),
    "the type comes before all else": (pdu(0x08, flags=0xFF, hlen=1, plen=1), FIELD, 0),
    "a second ICResp": (ic(IC_RESP, last=4096), SEQUENCE, 0),
    "header digest not agreed": (pdu(RESPONSE, answer_body(0), flags=HDGST), FIELD, 1),
    "flags come before hlen": (pdu(RESPONSE, answer_body(0), flags=HDGST, hlen=1), FIELD, 1),
    "data digest not agreed": (
        pdu(C2H, data_body(READS, 0, 0, 4), bytes(4), flags=LAST | DDGST), FIELD, 1,
    ),
    "header too long": (pdu(RESPONSE, answer_body(0), hlen=28), FIELD, 2),
    "header too short": (pdu(RESPONSE, answer_body(0), hlen=8), FIELD, 2),
    "hlen comes before plen": (pdu(RESPONSE, answer_body(0), hlen=8, plen=0), FIELD, 2),
    "data inside the header": (pdu(C2H, data_body(0, 0, 0, 4), bytes(4), pdo=20), FIELD, 3),
    "data at an odd place": (pdu(C2H, data_body(0, 0, 0, 4), bytes(4), pdo=26), FIELD, 3),
    "data after the end": (pdu(C2H, data_body(0, 0, 0, 4), bytes(4), pdo=32), FIELD, 3),
    "pdo comes before plen": (pdu(C2H, data_body(0, 0, 0, 4), pdo=0, plen=1 << 31), FIELD, 3),
    "no data after the offset": (pdu(C2H, data_body(0, 0, 0, 4), bytes(4), pdo=28), FIELD, 4),
    "length of nothing": (pdu(RESPONSE, answer_body(0), plen=0), FIELD, 4),
    "an answer with data": (pdu(RESPONSE, answer_body(0), plen=28), FIELD, 4),
    "R2T with data": (pdu(R2T, data_body(1, 0, 0, 512), plen=1 << 20), FIELD, 4),
    "data PDU without data": (pdu(C2H, data_body(READS, 0, 0, 0)), FIELD, 4),
    "more data than is ever taken": (
        pdu(C2H, data_body(READS, 0, 0, 1 << 27), pdo=24, plen=24 + (1 << 27)), LIMIT, 0,
    ),
    "data of no command": (pdu(C2H, data_body(IDLE, 0, 0, 4), bytes(4)), FIELD, 8),
    "data of an impossible command": (pdu(C2H, data_body(0xFFFF, 0, 0, 4), bytes(4)), FIELD, 8),
    "data that is shorter than it says": (pdu(C2H, data_body(READS, 0, 0, 8), bytes(4)), FIELD, 16),
    "data that is longer than it says": (pdu(C2H, data_body(READS, 0, 0, 4), bytes(8)), FIELD, 16),
    "data that leaves a gap": (pdu(C2H, data_body(READS, 0, 4, 4), bytes(4)), SEQUENCE, 0),
    "data beyond the command": (pdu(C2H, data_body(READS, 0, 0, 516), bytes(516)), RANGE, 0),
    "data that wraps around": (pdu(C2H, data_body(READS, 0, 0xFFFFFFFC, 8), bytes(8)), RANGE, 0),
    "data of a write": (pdu(C2H, data_body(WRITES, 0, 0, 4), bytes(4)), RANGE, 0),
    "SUCCESS, not LAST": (
        pdu(C2H, data_body(READS, 0, 0, 512), bytes(512), flags=SUCCESS), FIELD, 1,
    ),
    "SUCCESS with data missing": (
        pdu(C2H, data_body(READS, 0, 0, 4), bytes(4), flags=SUCCESS | LAST), SEQUENCE, 0,
    ),
    "an answer to no command": (pdu(RESPONSE, answer_body(IDLE)), FIELD, 20),
    "an answer to an impossible command": (pdu(RESPONSE, answer_body(0x8000)), FIELD, 20),
    "a read that worked without data": (pdu(RESPONSE, answer_body(READS)), SEQUENCE, 0),
    "a write that worked without data": (pdu(RESPONSE, answer_body(WRITES)), SEQUENCE, 0),
    "a write that worked before its data was sent": (
        pdu(R2T, data_body(WRITES, 0, 0, 512)) + pdu(RESPONSE, answer_body(WRITES)), SEQUENCE, 0,
    ),
    "R2T for no command": (pdu(R2T, data_body(IDLE, 0, 0, 512)), FIELD, 8),
    "R2T for a read": (pdu(R2T, data_body(READS, 0, 0, 512)), RANGE, 0),
    "R2T for nothing": (pdu(R2T, data_body(WRITES, 0, 0, 0)), SEQUENCE, 0),
    "R2T that leaves a gap": (pdu(R2T, data_body(WRITES, 0, 256, 256)), SEQUENCE, 0),
    "R2T beyond the command": (pdu(R2T, data_body(WRITES, 0, 0, 513)), RANGE, 0),
    "R2T that wraps around": (pdu(R2T, data_body(WRITES, 0, 0xFFFFFFFF, 2)), RANGE, 0),
}  # fmt: skip
TARGET = {
    "another side's type": (pdu(C2H, bytes(16), bytes(4)), FIELD, 0),
    "no type": (b"GET / HTTP/1.1\r\nHost: hyades\r\n\r\n", FIELD, 0),
    "a second ICReq": (ic(IC_REQ), SEQUENCE, 0),
    "header digest not agreed": (pdu(COMMAND, sqe(0, 3), flags=HDGST), FIELD, 1),
    "data digest not agreed": (
        pdu(COMMAND, sqe(1, 3, 4, sgl=1), bytes(4), flags=DDGST), FIELD, 1,
    ),
    "header too short": (pdu(COMMAND, sqe(0, 3), hlen=24), FIELD, 2),
    "data inside the header": (pdu(COMMAND, sqe(1, 3, 4, sgl=1), bytes(4), pdo=68), FIELD, 3),
    "length of nothing": (pdu(COMMAND, sqe(0, 3), plen=71), FIELD, 4),
    "data PDU without data": (pdu(H2C, data_body(1, 1, 0, 0), flags=LAST), FIELD, 4),
    "the largest length": (pdu(COMMAND, sqe(0, 3), pdo=72, plen=0xFFFFFFFF), LIMIT, 0),
    "too much in a capsule": (pdu(COMMAND, sqe(1, 3, 516, sgl=1), bytes(516)), LIMIT, 0),
    "capsule shorter than its SGL": (pdu(COMMAND, sqe(1, 3, 512, sgl=1), bytes(508)), FIELD, 4),
    "capsule longer than its SGL": (pdu(COMMAND, sqe(1, 3, 4, sgl=1), bytes(8)), FIELD, 4),
    "capsule without its data": (pdu(COMMAND, sqe(1, 3, 4, sgl=1)), FIELD, 4),
    "data at an offset in the capsule": (
        pdu(COMMAND, sqe(1, 3, 4, sgl=1, at=4), bytes(4)), UNSUPPORTED, 32,
    ),
    "capsule data of a transport SGL": (pdu(COMMAND, sqe(1, 3, 4), bytes(4)), UNSUPPORTED, 47),
    "capsule data of a keyed SGL": (
        pdu(COMMAND, sqe(1, 3, 4, sgl=0x40), bytes(4)), UNSUPPORTED, 47,
    ),
    "a command id that is out": (pdu(COMMAND, sqe(0, 2)), FIELD, 10),
    "a command id that is out, with data": (
        pdu(COMMAND, sqe(1, 2, 4, sgl=1), bytes(4)), FIELD, 10,
    ),
    "more commands than the queue has": (
        b"".join(pdu(COMMAND, sqe(0, cid)) for cid in (3, 4, 5)), SEQUENCE, 0,
    ),
    "a tag that was not given": (pdu(H2C, data_body(1, 7, 0, 4), bytes(4)), FIELD, 10),
    "the tag of a command that asked for nothing": (
        pdu(H2C, data_body(2, 2, 0, 4), bytes(4)), FIELD, 10,
    ),
    "another command's tag": (pdu(H2C, data_body(2, 1, 0, 4), bytes(4)), FIELD, 8),
    "data that is shorter than it says": (pdu(H2C, data_body(1, 1, 0, 8), bytes(4)), FIELD, 16),
    "more than MAXH2CDATA": (pdu(H2C, data_body(1, 1, 0, 4100), bytes(4100)), LIMIT, 0),
    "data that leaves a gap": (pdu(H2C, data_body(1, 1, 4, 4), bytes(4)), SEQUENCE, 0),
    "data that comes again": (
        pdu(H2C, data_body(1, 1, 0, 4), bytes(4)) * 2, SEQUENCE, 0,
    ),
    "data that wraps around": (pdu(H2C, data_body(1, 1, 0xFFFFFFFC, 8), bytes(8)), RANGE, 0),
    "LAST too early": (pdu(H2C, data_body(1, 1, 0, 4096), bytes(4096), flags=LAST), SEQUENCE, 0),
    "LAST missing": (
        pdu(H2C, data_body(1, 1, 0, 4096), bytes(4096))
        + pdu(H2C, data_body(1, 1, 4096, 4096), bytes(4096)), SEQUENCE, 0,
    ),
    "data after the last": (
        pdu(H2C, data_body(1, 1, 0, 4096), bytes(4096))
        + pdu(H2C, data_body(1, 1, 4096, 4096), bytes(4096), flags=LAST)
        + pdu(H2C, data_body(1, 1, 8192, 4), bytes(4), flags=LAST), FIELD, 10,
    ),
}  # fmt: skip


def offender(stream):
    """Return the header of the last PDU of *stream*: what is quoted."""
    while True:
        hlen, plen = stream[2], int.from_bytes(stream[4:8], "little")
        if plen < 24 or len(stream) - plen < 24:
            return stream[:24], stream[:hlen]
        stream = stream[plen:]


def check_term(queue, kind, stream, fatal, info):
    """Check the TermReq in the output of *queue*, and that there is nothing else."""
    (term,) = queue.take_output()
    assert term[0] == kind
    assert (term[1], term[2], term[3]) == (0, 24, 0)
    assert int.from_bytes(term[4:8], "little") == len(term) <= 152
    assert int.from_bytes(term[8:10], "little") == fatal
    assert int.from_bytes(term[10:14], "little") == info
    assert term[14:24] == bytes(10)
    assert term[24:] in offender(stream)


@pytest.mark.parametrize("step", [None, 1, 25])
@pytest.mark.parametrize("name", HOST)
def test_what_a_controller_may_not_send(name, step):
    stream, fatal, info = HOST[name]
    host = ready_host()
    violation = fatal_of(host, stream, step)
    assert isinstance(violation, PeerError)
    assert (violation.fatal, violation.info) == (fatal, info)
    assert host.state is State.CLOSED
    assert host.completions == []
    check_term(host, H2C_TERM, stream, fatal, info)
    assert host.close() == [READS, WRITES]


@pytest.mark.parametrize("step", [None, 1, 25])
@pytest.mark.parametrize("name", TARGET)
def test_what_a_host_may_not_send(name, step):
    stream, fatal, info = TARGET[name]
    target = ready_target()
    violation = fatal_of(target, stream, step)
    assert (violation.fatal, violation.info) == (fatal, info)
    assert target.closed
    check_term(target, C2H_TERM, stream, fatal, info)


def test_every_step_gives_the_same_request():
    for cases, make in ((HOST, ready_host), (TARGET, ready_target)):
        for stream, _, _ in cases.values():
            terms = set()
            for step in (None, 1, 3, 24, 100):
                queue = make()
                text = str(fatal_of(queue, stream, step))
                terms.add((text, joined_stream(queue.take_output())))
            assert len(terms) == 1


@pytest.mark.parametrize("step", [None, 1])
def test_a_broken_header_digest_ends_the_connection(step):
    good = pdu(RESPONSE, answer_body(READS, 0x281), digests=3)
    for at in (0, 8, 20, 23, 24, 27):
        if at == 0:
            continue  # another type: that is told before the digest
        bad = bytearray(good)
        bad[at] ^= 0x80
        host = ready_host(3)
        violation = fatal_of(host, bytes(bad), step)
        found = int.from_bytes(bad[24:28], "little")
        assert (violation.fatal, violation.info) == (DIGEST, found)
        check_term(host, H2C_TERM, bytes(bad), DIGEST, found)
    target = ready_target(3)
    bad = bytearray(pdu(H2C, data_body(1, 1, 0, 4), bytes(4), digests=3))
    bad[12] ^= 1
    assert fatal_of(target, bytes(bad), step).fatal == DIGEST
    bad = bytearray(pdu(COMMAND, sqe(0, 3), digests=1))
    bad[40] ^= 1
    target = ready_target(1)
    violation = fatal_of(target, bytes(bad), step)
    check_term(target, C2H_TERM, bytes(bad), DIGEST, violation.info)


@pytest.mark.parametrize("digests", [1, 2, 3])
def test_digests_that_were_agreed_are_missing(digests):
    bare = pdu(C2H, data_body(READS, 0, 0, 4), bytes(4), flags=LAST)
    violation = fatal_of(ready_host(digests), bare)
    assert (violation.fatal, violation.info) == (FIELD, 1)
    bare = pdu(COMMAND, sqe(1, 3, 4, sgl=1), bytes(4))
    violation = fatal_of(ready_target(digests), bare)
    assert (violation.fatal, violation.info) == (FIELD, 1)


def test_data_too_short_for_its_digest():
    for plen in (24, 25, 28):
        bad = pdu(C2H, data_body(READS, 0, 0, 4), flags=DDGST, pdo=24, plen=plen)
        violation = fatal_of(ready_host(2), bad)
        assert (violation.fatal, violation.info) == (FIELD, 4)


@pytest.mark.parametrize(
    ("stream", "fatal", "info"),
    [
        (ic(IC_RESP, pfv=1, last=4096), UNSUPPORTED, 8),
        (ic(IC_RESP, pda=32, last=4096), FIELD, 10),
        (ic(IC_RESP, digests=0, last=4096), FIELD, 11),
        (ic(IC_RESP, digests=1, last=4096), FIELD, 11),
        (ic(IC_RESP, digests=7, last=4096), FIELD, 11),
        (ic(IC_RESP, digests=3, last=4092), FIELD, 12),
        (ic(IC_RESP, digests=3, last=4097), FIELD, 12),
        (pdu(IC_RESP, bytes(120), plen=132), FIELD, 4),
        (pdu(IC_RESP, bytes(120), hlen=24), FIELD, 2),
        (pdu(IC_RESP, bytes(120), flags=HDGST), FIELD, 1),
        (pdu(RESPONSE, answer_body(0)), SEQUENCE, 0),
        (pdu(R2T, data_body(0, 0, 0, 4)), SEQUENCE, 0),
        (pdu(C2H, data_body(0, 0, 0, 4), bytes(4)), SEQUENCE, 0),
        (ic(IC_REQ), FIELD, 0),
    ],
)
def test_handshakes_that_a_host_refuses(stream, fatal, info):
    host = HostQueue(4, header_digest=True, data_digest=True)
    host.start()
    host.take_output()
    violation = fatal_of(host, stream)
    assert (violation.fatal, violation.info) == (fatal, info)
    check_term(host, H2C_TERM, stream, fatal, info)


def test_an_answer_to_a_handshake_that_was_not_begun():
    host = HostQueue(4)
    assert fatal_of(host, ic(IC_RESP, last=4096)).fatal == SEQUENCE


@pytest.mark.parametrize(
    ("stream", "fatal", "info"),
    [
        (ic(IC_REQ, pfv=0x100), UNSUPPORTED, 8),
        (ic(IC_REQ, pda=32), FIELD, 10),
        (pdu(IC_REQ, bytes(120), plen=127), FIELD, 4),
        (pdu(COMMAND, sqe(0, 0)), SEQUENCE, 0),
        (pdu(COMMAND, sqe(1, 0, 4, sgl=1), bytes(4)), SEQUENCE, 0),
        (pdu(H2C, data_body(0, 0, 0, 4), bytes(4)), SEQUENCE, 0),
        (ic(IC_RESP), FIELD, 0),
    ],
)
def test_handshakes_that_a_target_refuses(stream, fatal, info):
    target = TargetQueue()
    violation = fatal_of(target, stream)
    assert (violation.fatal, violation.info) == (fatal, info)
    check_term(target, C2H_TERM, stream, fatal, info)


@pytest.mark.parametrize("fields", [{"plen": 23}, {"plen": 153}, {"hlen": 28}, {"plen": 1 << 31}])
def test_a_malformed_terminate_request_is_not_answered(fields):
    for queue, kind in ((ready_host(3), C2H_TERM), (ready_target(3), H2C_TERM)):
        violation = fatal_of(queue, pdu(kind, bytes(16), **fields))
        assert violation.fatal is None
        assert queue.take_output() == []


def test_a_second_r2t_before_the_data_of_the_first():
    host = ready_host()
    first, second = (pdu(R2T, data_body(WRITES, 3, at, 4)) for at in (0, 4))
    violation = fatal_of(host, first + second)
    assert (violation.fatal, violation.info) == (LIMIT, 0)
    host = ready_host()
    feed(host, first)
    host.take_output()
    feed(host, second)


def test_events_before_a_violation_stay():
    host = ready_host()
    good = pdu(RESPONSE, answer_body(READS, 0x281))
    with pytest.raises(Violation):
        feed(host, good + pdu(0x55))
    assert host.completions == [(READS, 0x281, 0)]
    assert host.close() == [WRITES]
    target = ready_target()
    with pytest.raises(Violation):
        feed(target, pdu(COMMAND, sqe(0, 3)) + pdu(0x55))
    assert [command.cid for command, _, _ in target.commands] == [1, 2, 3]


def test_maxh2cdata_holds_where_capsules_may_be_larger():
    target = TargetQueue(in_capsule=8192, max_h2c=4096)
    feed(target, ic(IC_REQ) + pdu(COMMAND, sqe(1, 1, 8192)))
    target.request_data(1, memoryview(bytearray(8192)))
    target.take_output()
    violation = fatal_of(target, pdu(H2C, data_body(1, 1, 0, 4100), bytes(4100)))
    assert (violation.fatal, violation.info) == (LIMIT, 0)
