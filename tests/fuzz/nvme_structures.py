"""Mutated structures against their parsers, and bring-up with wrong answers, for nvme_fuzz.py."""

import random
from uuid import UUID

from tests.fuzz.nvme_mutants import ODD, target_side

from hyades.common.errors import DataError, PeerError, UsageError
from hyades.common.nvme import bringup, commands, identify
from hyades.common.nvme.commands import Command, Connect

INFO = identify.ControllerInfo("nqn.a:b", 5, "S", "M", "1", 1 << 20, 8192, 2, keep_alive=10)
ENTRIES = [identify.DiscoveryEntry("nqn.a:b", "127.0.0.1", "4420", secure=bool(i)) for i in (0, 1)]
STRUCTURES = (
    (identify.parse_controller, identify.build_controller(INFO)),
    (identify.parse_namespace, identify.build_namespace(identify.NamespaceInfo(100, 4096))),
    (identify.parse_active_list, identify.build_active_list([1, 2, 9])),
    (identify.parse_discovery_log, identify.build_discovery_log(3, ENTRIES)),
    (lambda data: commands.parse_connect(bytes(64), data), target_side(0)[1][72:]),
    (identify.parse_descriptors, identify.build_descriptors(UUID(int=7), guid=b"g" * 16)),
)


def run_structures(rng: random.Random) -> str:
    """Parse one mutated structure, or bring up with mutated answers; say how it ended."""
    if rng.random() < 0.6:
        parse, right = rng.choice(STRUCTURES)
        end = "parsed"
        try:
            parse(damaged(right, rng))
        except (PeerError, DataError):
            end = "structure refused"
        raw = rng.randbytes(64)
        Command(raw)
        commands.parse_property(raw)
        return end
    want = Connect(0, 32, "nqn.a:b", "nqn.c:d", bytes(16))
    conversation = rng.choice(
        (
            lambda: bringup.bring_up(want, 4),
            lambda: bringup.connect_queue(want),
            bringup.read_namespaces,
            lambda: bringup.read_namespace(1),
            lambda: bringup.read_uuid(1),
            bringup.read_discovery_log,
            bringup.shut_down,
        )
    )()
    bad = rng.choice((0.0, 0.05, 0.3))
    step, call = 0, next(conversation)
    try:
        while step < 4000:
            step += 1
            call = conversation.send(answer(call, bad, rng))
    except StopIteration:
        return "brought up"
    except (PeerError, UsageError, DataError):
        return "bring-up refused"
    raise AssertionError("bring-up does not end")


def answer(call, bad: float, rng: random.Random) -> tuple[int, int, bytes]:
    """Return an answer to *call* that is right, or is not, with probability *bad*."""
    data = b""
    if call.reads == 4096:
        data = STRUCTURES[(1, 0, 2, 5)[call.sqe[40]]][1]  # by CNS
    elif call.reads:
        at = int.from_bytes(call.sqe[48:52], "little")
        data = STRUCTURES[3][1][at : at + call.reads].ljust(call.reads, b"\0")
    code, result = 0, rng.choice((5, 5, 5, 1, 3, 0, 0x20005))
    if rng.random() < bad:
        code = rng.choice((0, 0x182, rng.randrange(1 << 15)))
        result = rng.choice((rng.choice(ODD), rng.randrange(1 << 64)))
        data = damaged(data, rng)
    return code, result, data


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return *data* with bytes changed, cut off or put in."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 2, 5, 30))):
        if changed:
            at = rng.randrange(min(len(changed), rng.choice((16, 200, 4096))))
            changed[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
    how = rng.random()
    if how < 0.1:
        del changed[rng.randrange(len(changed) + 1) :]
    elif how < 0.15:
        changed += rng.randbytes(rng.randrange(1, 2000))
    return bytes(changed)
