"""Bringing a controller up, driven by a peer that follows a script."""

from uuid import UUID

import pytest

from hyades.common.errors import PeerError, UsageError
from hyades.common.nvme import bringup, identify
from hyades.common.nvme.commands import Command, Connect, parse_connect, parse_property
from hyades.common.nvme.layout import Admin, Fabrics, Property
from hyades.common.nvme.status import StatusCode

NQN = "nqn.2026-01.org.example:sub"
WANT = Connect(0, 32, NQN, "nqn.2026-01.org.example:host", bytes(16), kato=15000)
INFO = identify.ControllerInfo(NQN, 5, "S", "M", "1", 1 << 20, 8192, 2, keep_alive=10)
CAP = 127 | 4 << 24  # 128 entries, ready within 2 s


class Controller:
    """Answers calls; `refuse` maps an opcode or property to a status code."""

    def __init__(self, **changes):
        self.refuse, self.calls, self.pauses = {}, [], []
        self.ready_after, self.csts, self.cntlid, self.identified = 0, 1, 5, INFO
        self.granted, self.authreq = (1, 1), 0
        self.__dict__.update(changes)

    def answer(self, call):
        command = Command(bytes(call.sqe))
        self.pauses.append(call.pause)
        name, reply = self._fabrics(command, call) if command.opcode == 0x7F else (
            Admin(command.opcode), self._admin(command, call))  # fmt: skip
        self.calls.append(name)
        if name in self.refuse:
            return self.refuse[name], 0, b""
        return reply

    def _fabrics(self, command, call):
        if command.fctype == Fabrics.CONNECT:
            assert parse_connect(command.raw, call.source) == WANT
            return "connect", (0, self.cntlid | self.authreq << 16, b"")
        wide, offset, value = parse_property(command.raw)
        if command.fctype == Fabrics.PROPERTY_SET:
            assert (wide, offset) == (False, Property.CC)
            return f"set {value:#x}", (0, 0, b"")
        if offset == Property.CAP:
            assert wide
            return "cap", (0, CAP, b"")
        self.ready_after -= 1
        return "csts", (0, self.csts if self.ready_after < 0 else 0, b"")

    def _admin(self, command, call):
        if command.opcode == Admin.IDENTIFY:
            assert call.reads == 4096
            return 0, 0, identify.build_controller(self.identified)
        return 0, (self.granted[1] - 1) << 16 | (self.granted[0] - 1), b""


def drive(conversation, peer):
    """Run *conversation* against *peer* and return what it returns."""
    call = next(conversation)
    for _ in range(1000):
        try:
            call = conversation.send(peer.answer(call))
        except StopIteration as end:
            return end.value
    raise AssertionError("the conversation does not end")


def test_a_controller_comes_up():
    peer = Controller(granted=(4, 3))
    got = drive(bringup.bring_up(WANT, 8), peer)
    assert got == bringup.Controller(INFO, 5, 128, 3)
    assert peer.calls == [
        "connect", "cap", "set 0x460001", "csts", Admin.IDENTIFY, Admin.SET_FEATURES,
    ]  # fmt: skip


def test_no_more_queues_than_asked_for():
    assert drive(bringup.bring_up(WANT, 2), Controller(granted=(64, 64))).queues == 2
    peer = Controller()
    assert drive(bringup.bring_up(WANT, 0), peer).queues == 0
    assert Admin.SET_FEATURES not in peer.calls


def test_the_driver_waits_between_looks():
    peer = Controller(ready_after=6)
    drive(bringup.bring_up(WANT, 1), peer)
    assert peer.calls.count("csts") == 7
    waits = peer.pauses[3:10]
    assert waits[0] == 0
    assert waits[1:] == sorted(waits[1:])
    assert 0 < waits[1] <= waits[-1] <= 0.1


def test_a_controller_that_never_gets_ready():
    peer = Controller(ready_after=10**9)
    with pytest.raises(PeerError, match=r"not ready after 2\.\d s"):
        drive(bringup.bring_up(WANT, 1), peer)
    assert 2 < sum(peer.pauses) < 3.5


def test_a_controller_that_fails():
    with pytest.raises(PeerError, match="fatal status: CSTS 0x2"):
        drive(bringup.bring_up(WANT, 1), Controller(csts=2))


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ("connect", "refused queue 0 of host nqn.2026-01.org.example:host"),
        ("cap", "reading property CAP was refused"),
        ("set 0x460001", "enabling the controller was refused"),
        ("csts", "reading property CSTS was refused"),
        (Admin.IDENTIFY, "Identify Controller was refused"),
        (Admin.SET_FEATURES, "asking for I/O queues was refused"),
    ],
)
def test_every_refusal_says_what_was_refused(step, text):
    peer = Controller(refuse={step: StatusCode.INTERNAL | 1 << 14})
    with pytest.raises(PeerError, match=text) as caught:
        drive(bringup.bring_up(WANT, 1), peer)
    assert "internal (SCT 0x0 SC 0x06, do not retry)" in str(caught.value)
    assert peer.calls[-1] == step


@pytest.mark.parametrize(
    ("code", "result", "kind", "text"),
    [
        (0x182, 1 << 16 | 256, UsageError, "it does not accept the subsystem's name"),
        (0x182, 1 << 16 | 512, UsageError, "it does not accept the host's name"),
        (0x182, 1 << 16 | 16, UsageError, "it does not accept the controller id"),
        (0x182, 44, UsageError, "it does not accept the queue's depth"),
        (0x182, 42, UsageError, "it does not accept the queue id"),
        (0x182, 48, UsageError, "it does not accept byte 48 of the command"),
        (0x182, 1 << 16 | 99, UsageError, "it does not accept byte 99 of the data"),
        (0x184, 0, UsageError, "list of allowed hosts"),
        (0x4184, 0, UsageError, "list of allowed hosts"),
        (0x181, 0, PeerError, "connect busy"),
        (0x7FF, 0, PeerError, "SCT 0x7 SC 0xff"),
    ],
)
def test_connect_refused(code, result, kind, text):
    conversation = bringup.connect_queue(WANT)
    next(conversation)
    with pytest.raises(kind, match=text):
        conversation.send((code, result, b""))


@pytest.mark.parametrize("wanted", [2, 4, 6])
def test_authentication_is_not_supported(wanted):
    with pytest.raises(UsageError, match="in-band authentication"):
        drive(bringup.connect_queue(WANT), Controller(authreq=wanted))


def test_another_controller_answers():
    with pytest.raises(PeerError, match="controller 5 answers on the connection of 6"):
        drive(bringup.bring_up(WANT, 1), Controller(cntlid=6))


def test_namespaces():
    def run(conversation, *answer):
        next(conversation)
        with pytest.raises(StopIteration) as end:
            conversation.send(answer)
        return end.value.value

    listed = identify.build_active_list([1, 4])
    assert run(bringup.read_namespaces(), 0, 0, listed) == [1, 4]
    info = identify.NamespaceInfo(100, 512)
    assert run(bringup.read_namespace(4), 0, 0, identify.build_namespace(info)) == info
    assert run(bringup.shut_down(), 0x06, 0, b"") is None
    for code, kind in ((0x0B, UsageError), (0x400B, UsageError), (0x06, PeerError)):
        conversation = bringup.read_namespace(4)
        next(conversation)
        with pytest.raises(kind, match="Identify Namespace 4 was refused"):
            conversation.send((code, 0, b""))
    for data, kind, text in (
        (b"x" * 10, PeerError, "10 bytes, not 4096"),
        (bytes(4096), UsageError, "namespace 4 is not active"),
    ):
        conversation = bringup.read_namespace(4)
        next(conversation)
        with pytest.raises(kind, match=text):
            conversation.send((0, 0, data))


@pytest.mark.parametrize(("code", "uuid"), [(0, UUID(int=5).bytes), (0x02, b"")])
def test_uuids(code, uuid):
    conversation = bringup.read_uuid(4)
    command = Command(bytes(next(conversation).sqe))
    assert (command.nsid, command.dwords[0]) == (4, 3)
    with pytest.raises(StopIteration) as end:
        conversation.send((code, 0, identify.build_descriptors(UUID(int=5), guid=b"g" * 16)))
    assert end.value.value == uuid


def test_shutting_down():
    call = next(bringup.shut_down())
    assert parse_property(bytes(call.sqe)) == (False, Property.CC, 0x464001)


class Log:
    """A discovery log that changes before the reads whose numbers are in *changes*."""

    def __init__(self, entries, changes=()):
        self.entries, self.changes = list(entries), set(changes)
        self.generation, self.reads, self.largest = 1, 0, 0

    def answer(self, call):
        if self.reads in self.changes:
            self.generation += 1
            self.entries.append(identify.DiscoveryEntry(NQN, f"10.0.0.{self.reads}", "4420"))
        self.reads += 1
        command = Command(bytes(call.sqe))
        low, high, at = command.dwords[0] >> 16, command.dwords[1], command.dwords[2]
        nbytes = 4 * ((high << 16 | low) + 1)
        assert nbytes == call.reads
        self.largest = max(self.largest, nbytes)
        data = identify.build_discovery_log(self.generation, self.entries)[at : at + nbytes]
        return 0, 0, data.ljust(nbytes, b"\0")


def entries(count):
    return [identify.DiscoveryEntry(NQN, f"10.1.0.{i}", "4420") for i in range(count)]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 200])
def test_a_discovery_log(count):
    log = Log(entries(count))
    assert drive(bringup.read_discovery_log(), log) == entries(count)
    assert log.largest <= 64 << 10
    assert log.reads == 2 + -(-count // 64)


def test_a_discovery_log_that_changes_meanwhile():
    log = Log(entries(3), changes={1, 5})
    got = drive(bringup.read_discovery_log(), log)
    assert got == log.entries
    assert len(got) == 5


def test_a_discovery_log_that_always_changes():
    with pytest.raises(PeerError, match="changes faster"):
        drive(bringup.read_discovery_log(), Log(entries(1), changes=range(1000)))


def test_a_discovery_log_that_cannot_be_meant():
    conversation = bringup.read_discovery_log()
    next(conversation)
    with pytest.raises(PeerError, match="has 4097 entries"):
        conversation.send((0, 0, bytes(8) + (4097).to_bytes(8, "little") + bytes(1008)))
    conversation = bringup.read_discovery_log()
    next(conversation)
    with pytest.raises(PeerError, match="reading the discovery log was refused"):
        conversation.send((0x109, 0, b""))
