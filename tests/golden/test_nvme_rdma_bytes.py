"""NVMe/RDMA as it crosses the wire, byte for byte, from the offsets of the specification."""

import pytest

from hyades.common.errors import PeerError
from hyades.common.nvme import commands, identify, rdma
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.rdma import CmRequest, Reject, Rejected
from hyades.common.nvme.rdma_host import RdmaHostQueue
from hyades.common.nvme.rdma_target import Answer, RdmaTargetQueue


def lay(size, fields):
    """Return *size* bytes with values at their offsets."""
    raw = bytearray(size)
    for at, value in fields.items():
        raw[at : at + len(value)] = value
    return bytes(raw)


def host(describe=lambda memory: (0x1122334455667788, 0xA1B2C3D4)):
    queue = RdmaHostQueue(4, describe)
    queue.accepted(4)
    return queue


def test_private_data_of_a_request():
    """RDMA transport: recfmt 0, qid 2, hrqsize 4, hsqsize 6 (0-based), cntlid 8, of 32."""
    expected = lay(32, {2: b"\x03\x00", 4: b"\x21\x00", 6: b"\x1f\x00", 8: b"\x34\x12"})
    assert CmRequest(3, receives=33, sends=32, cntlid=0x1234).pack() == expected
    padded = expected + bytes(24)  # rdma_cm gives all of its 56 bytes
    assert rdma.parse_request(padded, depth=32) == CmRequest(3, 33, 32, 0x1234)


def test_what_linux_sends():
    """Admin queue of nvme-rdma: hrqsize 32, hsqsize 31, no controller id."""
    raw = bytes.fromhex("0000 0000 2000 1f00" + "00" * 48)
    assert rdma.parse_request(raw, depth=128) == CmRequest(0, 32, 32)


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (bytes(31), Reject.INVALID_LENGTH),
        (lay(32, {0: b"\x01\x00"}), Reject.INVALID_RECORD_FORMAT),
        (lay(32, {4: b"\x20\x00"}), Reject.INVALID_SEND_SIZE),  # one entry
        (lay(32, {4: b"\x20\x00", 6: b"\x20\x00"}), Reject.INVALID_SEND_SIZE),  # 33 of 32
        (lay(32, {6: b"\x1f\x00"}), Reject.INVALID_RECEIVE_SIZE),
    ],
    ids=lambda x: x.name if isinstance(x, Reject) else "",
)
def test_requests_that_are_refused(raw, status):
    with pytest.raises(Rejected) as caught:
        rdma.parse_request(raw, depth=32)
    assert caught.value.status == status


def test_private_data_of_the_answers():
    assert rdma.pack_accept(0x0120) == lay(32, {2: b"\x20\x01"})
    assert rdma.parse_accept(lay(196, {2: b"\x20\x01"})) == 0x0120
    assert rdma.pack_reject(Reject.NO_RESOURCES) == b"\x00\x00\x06\x00"
    error = rdma.parse_reject(b"\x00\x00\x03\x00" + bytes(144))
    assert (error.status, "invalid queue id (3)" in str(error)) == (3, True)
    assert rdma.parse_reject(b"\x00\x00\x63\x00").status == 0x63
    assert "nothing listens" in str(rdma.parse_reject(bytes(148)))
    for raw in (bytes(31), lay(32, {0: b"\x01\x00", 2: b"\x01\x00"}), bytes(32)):
        with pytest.raises(PeerError, match="accepted with"):
            rdma.parse_accept(raw)


def test_a_read_names_memory_with_its_key():
    queue = host()
    cid = queue.submit(commands.transfer(Opcode.READ, 1, 7, 3), into=memoryview(bytearray(0x3000)))
    ((sqe, data),) = queue.take_output()
    assert sqe == lay(
        64,
        {
            0: b"\x02\x40", 2: cid.to_bytes(2, "little"), 4: b"\x01\x00\x00\x00",
            24: bytes.fromhex("8877665544332211" + "003000" + "d4c3b2a1" + "40"),
            40: b"\x07", 48: b"\x02",
        },
    )  # fmt: skip
    assert len(data) == 0


def test_a_command_without_data_has_an_empty_keyed_descriptor():
    queue = host()
    queue.submit(commands.flush(1))
    ((sqe, _),) = queue.take_output()
    assert sqe[24:40] == bytes(15) + b"\x40"


def test_a_small_write_goes_along():
    """Offset 0, length, type 01 (data block, offset); the data follows the command."""
    queue = host()
    queue.in_capsule = 4096
    source = memoryview(bytearray(b"x" * 4096))
    queue.submit(commands.transfer(Opcode.WRITE, 1, 0, 1), source=source)
    ((sqe, data),) = queue.take_output()
    assert sqe[24:40] == bytes(8) + b"\x00\x10\x00\x00" + bytes(3) + b"\x01"
    assert data == source


def test_a_response():
    """CQE: result 0, sqhd 8, sqid 10, cid 12, status 14 (code from bit 1)."""
    target = RdmaTargetQueue(depth=8)
    target.configure(5, 8, flow_control=True)  # Connect was entry 0
    sqe = lay(64, {0: b"\x00\x40", 2: b"\x34\x12", 39: b"\x40"})
    target.received(memoryview(sqe))
    target.complete(0x1234, 0x4281, 0x99)
    assert target.take_output() == [
        Answer(lay(16, {0: b"\x99", 8: b"\x02", 10: b"\x05", 12: b"\x34\x12", 14: b"\x02\x85"}))
    ]


@pytest.mark.parametrize(("kind", "invalidate"), [(0x40, 0), (0x4F, 0xA1B2C3D4)])
def test_the_key_that_an_answer_invalidates(kind, invalidate):
    target = RdmaTargetQueue()
    descriptor = bytes.fromhex("8877665544332211" + "001000" + "d4c3b2a1") + bytes((kind,))
    target.received(memoryview(lay(64, {0: b"\x02\x40", 24: descriptor})))
    target.complete(0, 0x281)  # also where nothing was read
    (answer,) = target.take_output()
    assert answer.invalidate == invalidate


def test_identify_and_discovery():
    """SGLS at 536: bit 2, keyed descriptors; transport 1 with its specific fields at 768."""
    base = ("nqn.x", 1, "serial", "model", "1", 1 << 20, 8192, 1)
    tcp = identify.build_controller(identify.ControllerInfo(*base))
    keyed = identify.build_controller(identify.ControllerInfo(*base, keyed=True))
    assert [a ^ b for a, b in zip(tcp, keyed, strict=True) if a != b] == [4]
    assert keyed[536:540] == b"\x05\x00\x10\x00"
    assert identify.parse_controller(keyed).keyed
    assert not identify.parse_controller(tcp).keyed
    entry = identify.DiscoveryEntry("nqn.x", "192.0.2.1", "4420", transport=1)
    log = identify.build_discovery_log(1, [entry])
    assert log[1024] == 1
    assert log[1024 + 768 : 1024 + 776] == b"\x01\x01\x01" + bytes(5)
    assert identify.parse_discovery_log(log)[1] == [entry]
