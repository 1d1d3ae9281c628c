"""NVMe/TCP as it crosses the wire, byte for byte, built here from the specification's offsets.

Nothing here calls the code under test to make what it expects: fields are put at their offsets by
`lay`, and CRC32C is computed bit by bit.
"""

import pytest
from tests.reference.nvme_pdus import lay

from hyades.common.checksum import crc32c
from hyades.common.errors import DataError, UsageError
from hyades.common.nvme import commands, layout
from hyades.common.nvme.commands import Command, Connect
from hyades.common.nvme.host import HostQueue
from hyades.common.nvme.layout import Fatal, LogPage, Opcode, PduType, Property, Sgl
from hyades.common.nvme.pdu import Violation, build_pdu, build_term, feed
from hyades.common.nvme.target import TargetQueue

HOST_ID = bytes(range(16))
SUBNQN = "nqn.2026-01.org.example:sub"
HOSTNQN = "nqn.2026-01.org.example:host"


def castagnoli(data):
    """CRC32C by its polynomial, a bit at a time."""
    value = 0xFFFFFFFF
    for byte in bytes(data):
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def digest(data):
    return castagnoli(data).to_bytes(4, "little")


def stream(segments):
    return b"".join(bytes(segment) for segment in segments)


# RFC 3720, section B.4, and the check value of the CRC catalogues.
@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"", 0),
    ],
)
def test_crc32c_check_values(data, value):
    assert crc32c(data) == castagnoli(data) == value


# -- PDUs


def test_initialize_connection_request():
    queue = HostQueue(4, header_digest=True, data_digest=True)
    queue.start()
    assert stream(queue.take_output()) == lay(
        128, (0, (0x00, 1)), (2, (128, 1)), (4, (128, 4)), (11, (3, 1))
    )


@pytest.mark.parametrize(
    ("asked", "allowed", "agreed"), [(0, 3, 0), (1, 3, 1), (2, 3, 2), (3, 3, 3), (3, 1, 1)]
)
def test_initialize_connection_response(asked, allowed, agreed):
    queue = TargetQueue(max_h2c=0x20000, allowed_digests=allowed)
    feed(queue, lay(128, (2, (128, 1)), (4, (128, 4)), (11, (asked, 1))))
    assert stream(queue.take_output()) == lay(
        128, (0, (0x01, 1)), (2, (128, 1)), (4, (128, 4)), (11, (agreed, 1)), (12, (0x20000, 4))
    )


def connected(digests=0, cpda=0, hpda=0, max_h2c=4096, in_capsule=8192):
    """Return both queues after a handshake whose bytes are made here."""
    host = HostQueue(8, header_digest=bool(digests & 1), data_digest=bool(digests & 2))
    host.start()
    host.take_output()
    feed(host, lay(
        128, (0, (1, 1)), (2, (128, 1)), (4, (128, 4)), (10, (cpda, 1)), (11, (digests, 1)),
        (12, (max_h2c, 4)),
    ))  # fmt: skip
    target = TargetQueue(max_h2c=max_h2c, in_capsule=in_capsule)
    feed(target, lay(128, (2, (128, 1)), (4, (128, 4)), (10, (hpda, 1)), (11, (digests, 1))))
    target.take_output()
    return host, target


def read_sqe(cid, nbytes):
    return lay(
        64, (0, (0x02, 1)), (1, (0x40, 1)), (2, (cid, 2)), (4, (1, 4)), (32, (nbytes, 4)),
        (39, (0x5A, 1)), (40, (0x1122334455, 8)), (48, (7, 2)),
    )  # fmt: skip


def write_sqe(cid, nbytes, kind):
    return lay(
        64, (0, (0x01, 1)), (1, (0x40, 1)), (2, (cid, 2)), (4, (1, 4)), (32, (nbytes, 4)),
        (39, (kind, 1)), (40, (0x1122334455, 8)), (48, (7, 2)),
    )  # fmt: skip


def whole_pdu(kind, flags, fields, hlen, data=b"", digests=0, align=4):
    """Return a PDU as the transport specification draws it; *fields* are at PDU offsets."""
    start = hlen + (4 if digests & 1 else 0)
    pdo = (start + align - 1) // align * align if data else 0
    plen = (pdo or start) + len(data) + (4 if data and digests & 2 else 0)
    flags |= digests & 1 | (digests & 2 if data else 0)
    head = lay(
        hlen, (0, (kind, 1)), (1, (flags, 1)), (2, (hlen, 1)), (3, (pdo, 1)), (4, (plen, 4)),
        *fields,
    )  # fmt: skip
    if digests & 1:
        head += digest(head)
    if data:
        head = head.ljust(pdo, b"\0") + data + (digest(data) if digests & 2 else b"")
    assert len(head) == plen
    return head


@pytest.mark.parametrize("digests", range(4))
@pytest.mark.parametrize("pda", [0, 1, 15, 31])
def test_every_pdu_of_a_write_and_a_read(digests, pda):
    """Capsules with and without data, R2T, H2CData in three pieces, C2HData, both answers."""
    host, target = connected(digests, cpda=pda, hpda=pda)
    align = 4 * (pda + 1)
    content = bytes(range(256)) * 40  # 10240 bytes
    sqe = commands.transfer(Opcode.WRITE, 1, 0x1122334455, 8)
    cid = host.submit(sqe, source=memoryview(content))
    capsule = whole_pdu(4, 0, [(8, write_sqe(cid, 10240, 0x5A))], 72, digests=digests)
    assert stream(host.take_output()) == capsule
    feed(target, capsule)
    room = bytearray(10240)
    target.request_data(cid, memoryview(room))
    ask = [(8, (cid, 2)), (10, (cid, 2)), (12, (0, 4)), (16, (10240, 4))]
    ready = whole_pdu(9, 0, ask, 24, digests=digests)
    assert stream(target.take_output()) == ready
    feed(host, ready)
    pieces = b""
    for at, nbytes in ((0, 4096), (4096, 4096), (8192, 2048)):
        where = [(8, (cid, 2)), (10, (cid, 2)), (12, (at, 4)), (16, (nbytes, 4))]
        last = 4 if at == 8192 else 0
        pieces += whole_pdu(6, last, where, 24, content[at : at + nbytes], digests, align)
    assert stream(host.take_output()) == pieces
    if pda == 0:  # the target asks for no alignment, and takes any multiple of 4
        feed(target, pieces)
        assert (target.arrived, room) == ([(cid, True)], content)
        target.complete(cid, 0x281, 0x1234567890)
        # one command was taken, so the head of the submission queue is 1
        fields = [(8, (0x1234567890, 8)), (16, (1, 2)), (20, (cid, 2)), (22, (0x281 << 1, 2))]
        answer = whole_pdu(5, 0, fields, 24, digests=digests)
        assert stream(target.take_output()) == answer
        feed(host, answer)
        assert host.completions == [(cid, 0x281, 0x1234567890)]

    host, target = connected(digests, cpda=pda, hpda=pda)
    host.in_capsule = 8192
    sqe = commands.transfer(Opcode.WRITE, 1, 0x1122334455, 8)
    cid = host.submit(sqe, source=memoryview(content)[:4096])
    data = content[:4096]
    capsule = whole_pdu(4, 0, [(8, write_sqe(cid, 4096, 1))], 72, data, digests, align)
    assert stream(host.take_output()) == capsule
    feed(target, capsule)
    assert bytes(target.commands[0][1]) == data

    host, target = connected(digests, cpda=pda, hpda=pda)
    into = bytearray(4096)
    sqe = commands.transfer(Opcode.READ, 1, 0x1122334455, 8)
    cid = host.submit(sqe, into=memoryview(into))
    capsule = whole_pdu(4, 0, [(8, read_sqe(cid, 4096))], 72, digests=digests)
    assert stream(host.take_output()) == capsule
    feed(target, capsule)
    target.configure(3, 128, flow_control=False)
    target.send_data(cid, memoryview(data), success=True)
    where = [(8, (cid, 2)), (16, (4096, 4))]
    answer = whole_pdu(7, 4 | 8, where, 24, data, digests, align)
    assert stream(target.take_output()) == answer
    feed(host, answer)
    assert (host.completions, into) == ([(cid, 0, 0)], data)


def test_without_flow_control_the_answer_has_no_head():
    _, target = connected()
    feed(target, whole_pdu(4, 0, [(8, lay(64, (0, (0, 1)), (1, (0x40, 1)), (4, (1, 4))))], 72))
    target.configure(3, 128, flow_control=False)
    target.complete(0)
    assert stream(target.take_output()) == whole_pdu(5, 0, [(16, (0xFFFF, 2)), (18, (3, 2))], 24)


def test_terminate_connection_requests():
    quoted = bytes(range(72))
    violation = Violation("text", Fatal.HEADER_FIELD, 0x01020304)
    for kind, number in ((PduType.H2C_TERM, 2), (PduType.C2H_TERM, 3)):
        assert build_term(kind, violation, quoted) == lay(
            96, (0, (number, 1)), (2, (24, 1)), (4, (96, 4)), (8, (1, 2)),
            (10, (0x01020304, 4)), (24, quoted),
        )  # fmt: skip
    longest = build_term(PduType.C2H_TERM, violation, bytes(200))
    assert len(longest) == 152
    assert longest[4:8] == bytes((152, 0, 0, 0))


def test_a_header_only_pdu_is_its_header():
    assert build_pdu(PduType.R2T, 0, bytes(16)) == lay(24, (0, (9, 1)), (2, (24, 1)), (4, (24, 4)))


# -- commands


@pytest.mark.parametrize(
    ("made", "fields"),
    [
        (commands.flush(5), [(0, (0, 1)), (4, (5, 4))]),
        (
            commands.transfer(Opcode.READ, 9, 0x0123456789ABCDEF, 65536),
            [(0, (2, 1)), (4, (9, 4)), (40, (0x0123456789ABCDEF, 8)), (48, (0xFFFF, 2))],
        ),
        (commands.transfer(Opcode.WRITE, 1, 3, 1), [(0, (1, 1)), (4, (1, 4)), (40, (3, 8))]),
        (
            commands.transfer(Opcode.WRITE_ZEROES, 1, 3, 2),
            [(0, (8, 1)), (4, (1, 4)), (40, (3, 8)), (48, (1, 2))],
        ),
        (commands.identify(1), [(0, (6, 1)), (40, (1, 1))]),
        (
            commands.identify(5, 7, csi=2),
            [(0, (6, 1)), (4, (7, 4)), (40, (5, 1)), (47, (2, 1))],
        ),
        (
            commands.get_log(LogPage.DISCOVERY, 0x50000, 0x1_2345_6788, nsid=0),
            [
                (0, (2, 1)), (40, (0x70, 1)), (42, (0x3FFF, 2)), (44, (1, 2)),
                (48, (0x23456788, 4)), (52, (1, 4)),
            ],
        ),
        (
            commands.get_log(LogPage.ERRORS, 64),
            [(0, (2, 1)), (4, (0xFFFFFFFF, 4)), (40, (1, 1)), (42, (15, 2))],
        ),
        (
            commands.set_features(7, 0x0003_0003),
            [(0, (9, 1)), (40, (7, 1)), (44, (0x0003_0003, 4))],
        ),
        (commands.get_features(0x0F), [(0, (0x0A, 1)), (40, (0x0F, 1))]),
        (commands.keep_alive(), [(0, (0x18, 1))]),
        (commands.async_event(), [(0, (0x0C, 1))]),
        (commands.abort(3, 0x1234), [(0, (8, 1)), (40, (3, 2)), (42, (0x1234, 2))]),
        (
            commands.property_get(Property.CAP, wide=True),
            [(0, (0x7F, 1)), (4, (4, 1)), (40, (1, 1))],
        ),
        (
            commands.property_get(Property.CSTS),
            [(0, (0x7F, 1)), (4, (4, 1)), (44, (0x1C, 4))],
        ),
        (
            commands.property_set(Property.CC, 0x460001),
            [(0, (0x7F, 1)), (44, (0x14, 4)), (48, (0x460001, 8))],
        ),
    ],
)  # fmt: skip
def test_commands(made, fields):
    assert bytes(made) == lay(64, (1, (0x40, 1)), *fields)


@pytest.mark.parametrize(("kind", "number"), [(Sgl.IN_CAPSULE, 0x01), (Sgl.TRANSPORT, 0x5A)])
def test_scatter_gather_list(kind, number):
    sqe = commands.flush(1)
    commands.set_sgl(sqe, 0xABCD, 0x10203, kind)
    assert bytes(sqe) == lay(
        64, (1, (0x40, 1)), (2, (0xABCD, 2)), (4, (1, 4)), (32, (0x10203, 4)), (39, (number, 1))
    )


def test_a_command_is_parsed_field_by_field():
    raw = lay(
        64, (0, (0x7F, 1)), (1, (0x40, 1)), (2, (0x1234, 2)), (4, (0xA1B2C304, 4)),
        (24, (0x1111222233334444, 8)), (32, (0x55556666, 4)), (39, (0x5A, 1)),
        *((40 + 4 * i, (0xC0DE0000 + i, 4)) for i in range(6)),
    )  # fmt: skip
    command = Command(raw)
    assert (command.opcode, command.cid, command.nsid) == (0x7F, 0x1234, 0xA1B2C304)
    assert command.fctype == 4
    assert command.sgl_at == 0x1111222233334444
    assert (command.sgl_bytes, command.sgl) == (0x55556666, 0x5A)
    assert command.dwords == tuple(0xC0DE0000 + i for i in range(6))
    assert command.slba == 0xC0DE0001_C0DE0000
    assert command.blocks == 3
    assert command.raw == raw


@pytest.mark.parametrize("blocks", [0, 65537])
def test_a_transfer_of_impossible_length(blocks):
    with pytest.raises(UsageError, match=f"for {blocks} blocks"):
        commands.transfer(Opcode.READ, 1, 0, blocks)


def test_connect():
    want = Connect(
        2, 128, SUBNQN, HOSTNQN, HOST_ID, cntlid=0x0102, kato=15000, no_flow_control=True
    )
    sqe, data = commands.connect(want)
    assert bytes(sqe) == lay(
        64, (0, (0x7F, 1)), (1, (0x40, 1)), (4, (1, 1)), (42, (2, 2)), (44, (127, 2)),
        (46, (4, 1)), (48, (15000, 4)),
    )  # fmt: skip
    assert data == lay(
        1024, (0, HOST_ID), (16, (0x0102, 2)), (256, SUBNQN.encode()), (512, HOSTNQN.encode())
    )
    assert commands.parse_connect(bytes(sqe), data) == want


def test_connect_of_an_admin_queue():
    want = Connect(0, 32, SUBNQN, HOSTNQN, HOST_ID, no_flow_control=False)
    sqe, data = commands.connect(want)
    assert bytes(sqe) == lay(64, (0, (0x7F, 1)), (1, (0x40, 1)), (4, (1, 1)), (44, (31, 2)))
    assert data[16:18] == b"\xff\xff"
    assert commands.parse_connect(bytes(sqe), data) == want


def test_connect_data_that_is_none():
    sqe, data = commands.connect(Connect(0, 32, SUBNQN, HOSTNQN, HOST_ID))
    for short in (b"", data[:100], data[:-1], data + b"\0"):
        with pytest.raises(DataError, match="not 1024"):
            commands.parse_connect(bytes(sqe), short)
    broken = bytearray(data)
    broken[513] = 0xFF
    with pytest.raises(DataError, match="byte 512"):
        commands.parse_connect(bytes(sqe), bytes(broken))


def test_properties_are_parsed():
    assert commands.parse_property(bytes(commands.property_get(8, wide=True))) == (True, 8, 0)
    raw = bytes(commands.property_set(0x14, 0x460001))
    assert commands.parse_property(raw) == (False, 0x14, 0x460001)


@pytest.mark.parametrize("name", ["", "nqn", "iqn.2026-01.x:y", "nqn.a b", "nqn." + "é" * 120])
def test_names_that_are_none(name):
    with pytest.raises(UsageError, match="no NVMe qualified name"):
        commands.check_nqn(name)


def test_sizes():
    assert (layout.SQE.size, layout.CQE.size, layout.COMMON_HEADER.size) == (64, 16, 8)
    assert layout.MAX_TERM_BYTES == 24 + 128
