"""Identify structures and the discovery log, byte for byte, from the specification's offsets."""

from uuid import UUID

import numpy as np
import pytest
from tests.reference.nvme_pdus import lay

from hyades.common.errors import PeerError
from hyades.common.nvme import identify
from hyades.common.nvme.layout import DISCOVERY_NQN

SUBNQN = "nqn.2026-01.org.example:sub"
CONTROLLER = identify.ControllerInfo(
    SUBNQN, 0x0203, "SERIAL", "Model", "1.0", max_transfer=1 << 20, in_capsule=8192,
    namespaces=3, max_commands=128, keep_alive=10,
)  # fmt: skip


def controller_bytes(*changed):
    fields = {
        4: b"SERIAL".ljust(20), 24: b"Model".ljust(40), 64: b"1.0".ljust(8), 76: (2, 1),
        77: (8, 1), 78: (0x0203, 2), 80: (0x00010300, 4), 111: (1, 1), 258: (3, 1), 259: (3, 1),
        260: (3, 1), 261: (4, 1), 320: (10, 2), 512: (0x66, 1), 513: (0x44, 1), 514: (128, 2),
        516: (3, 4), 520: (8, 2), 525: (1, 1), 536: (0x100001, 4), 768: SUBNQN.encode(),
        1792: ((64 + 8192) // 16, 4), 1796: (1, 4), 1800: (0, 2), 1803: (1, 1),
    }  # fmt: skip
    fields.update(changed)
    return lay(4096, *fields.items())


def test_identify_controller():
    assert identify.build_controller(CONTROLLER) == controller_bytes()
    assert identify.parse_controller(controller_bytes()) == CONTROLLER


@pytest.mark.parametrize(
    ("at", "value", "text"),
    [
        (1792, (3, 4), "IOCCSZ 3"),
        (77, (21, 1), "MDTS 21"),
    ],
)
def test_controllers_that_cannot_be_meant(at, value, text):
    with pytest.raises(PeerError, match=text):
        identify.parse_controller(controller_bytes((at, value)))


@pytest.mark.parametrize(
    "changes", [[(111, (2, 1))], [(111, (0, 1)), (768, DISCOVERY_NQN.encode())]]
)
def test_a_discovery_controller_need_not_size_io_commands(changes):
    found = identify.parse_controller(controller_bytes((1792, (0, 4)), *changes))
    assert found.discovery
    assert found.in_capsule == 0


def test_identify_structures_of_other_lengths():
    for parse in (identify.parse_controller, identify.parse_namespace, identify.parse_active_list):
        for nbytes in (0, 1, 4095, 4097):
            with pytest.raises(PeerError, match=f"{nbytes} bytes, not 4096"):
                parse(bytes(nbytes))


def test_no_transfer_limit():
    info = identify.parse_controller(controller_bytes((77, (0, 1))))
    assert info.max_transfer == 0
    assert identify.build_controller(info)[77] == 0


def test_identify_namespace():
    guid = bytes(range(100, 116))
    info = identify.NamespaceInfo(1 << 33, 4096, guid)
    raw = lay(
        4096, (0, (1 << 33, 8)), (8, (1 << 33, 8)), (16, (1 << 33, 8)), (30, (1, 1)), (104, guid),
        (128, (12 << 16, 4)),
    )  # fmt: skip
    assert identify.build_namespace(info) == raw
    assert identify.parse_namespace(raw) == info


def test_the_namespaces_format_is_the_one_in_use():
    raw = lay(
        4096, (0, (1000, 8)), (25, (20, 1)), (26, (0x23, 1)), (99, (1, 1)), (128, (9 << 16, 4)),
        (128 + 4 * 0x13, (12 << 16 | 8, 4)),
    )  # fmt: skip
    info = identify.parse_namespace(raw)  # FLBAS: bits 0-3 and, above 16 formats, 5-6
    assert (info.block_bytes, info.metadata_bytes, info.read_only) == (4096, 8, True)


@pytest.mark.parametrize("shift", [0, 8, 17, 63, 255])
def test_logical_blocks_that_cannot_be_meant(shift):
    with pytest.raises(PeerError, match=rf"2\^{shift} bytes"):
        identify.parse_namespace(lay(4096, (0, (8, 8)), (128, (shift << 16, 4))))


def test_a_namespace_larger_than_any_device():
    with pytest.raises(PeerError, match="blocks of 4096"):
        identify.parse_namespace(lay(4096, (0, ((1 << 64) - 1, 8)), (128, (12 << 16, 4))))


def test_active_namespaces():
    raw = lay(4096, (0, (1, 4)), (4, (7, 4)), (8, (0xFFFFFFFE, 4)))
    assert identify.build_active_list([1, 7, 0xFFFFFFFE]) == raw
    assert identify.parse_active_list(raw) == [1, 7, 0xFFFFFFFE]
    full = np.arange(1, 1025, dtype="<u4").tobytes()
    assert identify.build_active_list(range(1, 2000)) == full
    assert identify.parse_active_list(full) == list(range(1, 1025))
    for first, second in ((7, 7), (7, 3)):
        with pytest.raises(PeerError, match=f"{second} after 7"):
            identify.parse_active_list(lay(4096, (0, (first, 4)), (4, (second, 4))))


def test_namespace_descriptors():
    uuid, guid = UUID("00112233-4455-6677-8899-aabbccddeeff"), bytes(range(1, 17))
    only = (3, 1), (16, 1)
    assert identify.build_descriptors(uuid) == lay(
        4096, (0, only[0]), (1, only[1]), (4, uuid.bytes)
    )
    assert identify.build_descriptors(uuid, guid=guid) == lay(
        4096, (0, (2, 1)), (1, (16, 1)), (4, guid), (20, (3, 1)), (21, (16, 1)), (24, uuid.bytes)
    )
    assert identify.parse_descriptors(identify.build_descriptors(uuid, guid=guid)) == uuid.bytes
    others = lay(4096, (0, (1, 1)), (1, (8, 1)), (4, b"eui-64.."), (12, (4, 1)), (13, (1, 1)))
    assert identify.parse_descriptors(others) == b""
    assert identify.parse_descriptors(bytes(4096)) == b""
    with pytest.raises(PeerError, match="200 bytes at byte 4080"):
        identify.parse_descriptors(
            b"".join(bytes((2, 16, 0, 0)) + bytes(16) for _ in range(204))
            + bytes((2, 200))
            + bytes(14)
        )


def log_entry(at, secure):
    return [
        (at + 0, (3, 1)), (at + 1, (1, 1)), (at + 2, (2, 1)), (at + 3, (1 if secure else 0, 1)),
        (at + 4, (1, 2)), (at + 6, (0xFFFF, 2)), (at + 8, (32, 2)), (at + 32, b"4420".ljust(32)),
        (at + 256, SUBNQN.encode()), (at + 512, b"127.0.0.1".ljust(256)),
        (at + 768, (2 if secure else 0, 1)),
    ]  # fmt: skip


def test_discovery_log():
    entries = [
        identify.DiscoveryEntry(SUBNQN, "127.0.0.1", "4420"),
        identify.DiscoveryEntry(SUBNQN, "127.0.0.1", "4420", secure=True),
    ]
    raw = lay(3072, (0, (77, 8)), (8, (2, 8)), *log_entry(1024, False), *log_entry(2048, True))
    assert identify.build_discovery_log(77, entries) == raw
    assert identify.parse_discovery_log(raw) == (77, entries)
    for bad in (raw[:1023], raw[:3071], lay(1024, (8, (1 << 63, 8))), lay(1024, (16, (1, 2)))):
        with pytest.raises(PeerError, match="discovery log"):
            identify.parse_discovery_log(bad)
