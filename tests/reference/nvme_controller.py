"""Targets of memory without sockets, and links that stand for connections, for tests."""

from hyades.common.nvme import commands
from hyades.common.nvme.commands import Command, Connect
from hyades.common.nvme.identify import DiscoveryEntry
from hyades.common.nvme.layout import ANY_CONTROLLER, Property, Sgl
from hyades.target_side.admission import Target
from hyades.target_side.controller import Offer
from hyades.target_side.counters import Counters
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import MemoryNamespace
from hyades.target_side.subsystem import Subsystem

NQN = "nqn.2026-01.org.example:a"
HOST = "nqn.2026-01.org.example:host"
OTHER = "nqn.2026-01.org.example:other"
ENTRY = DiscoveryEntry(NQN, "127.0.0.1", "4420")
LIMITS = Limits(queues=4, depth=64)
ENABLE = 6 << 16 | 4 << 20 | 1


class Link:
    """A connection of which only the controller's side is here."""

    def __init__(self):
        self.controller, self.qid, self.last_heard = None, 0, 0.0
        self.local, self.counters = "127.0.0.1", Counters()


def make_target(hosts=None, first=1):
    namespaces = {
        1: MemoryNamespace(1 << 20),
        3: MemoryNamespace(1 << 19, block_bytes=512, read_only=True),
    }
    subsystem = Subsystem(NQN, namespaces, hosts, epoch=b"e" * 16)
    return Target([subsystem], Offer(LIMITS, lambda *_: [ENTRY], "9.8.7"), first_controller=first)


def want(qid=0, **other):
    fields = {
        "qid": qid, "depth": 32, "subnqn": NQN, "hostnqn": HOST, "hostid": b"h" * 16,
        "cntlid": ANY_CONTROLLER, **other,
    }  # fmt: skip
    return Connect(**fields)


def ask(controller, sqe, reads=0, cid=7, now=0.0):
    commands.set_sgl(sqe, cid, reads, Sgl.TRANSPORT)
    return controller.execute(Command(bytes(sqe)), now)


def admin(target, *, enable=True, now=0.0, **other):
    """Return (controller, link) of a new association."""
    link = Link()
    controller, reply = target.connect(want(**other), link, now)
    assert reply.status == 0
    assert reply.result == controller.cntlid
    if enable:
        assert ask(controller, commands.property_set(Property.CC, ENABLE)).status == 0
        assert controller.ready
    return controller, link
