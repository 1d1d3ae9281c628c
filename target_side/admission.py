"""Who may connect to which queue of which controller.

Rules:
1. A host's first Connect (queue 0) makes a controller; its I/O queues name that controller, and the
   same host, host id and subsystem.  A queue id is taken once.
2. A refusal is a Reply with the status and, for a bad parameter, where it stands (`bad`).
3. When the admin queue's connection goes, or keep-alive expires, the whole association goes: the
   links that are returned must be cut.  An I/O queue's connection frees its queue id only.
4. No sockets and no clock.  Not thread-safe: the caller holds one lock around every call here and
   in controller.py.
Source: NVM Express Base Specification 2.0, sections 3.3.3 (Connect), 3.9 (keep alive).
"""

from collections.abc import Iterator, Sequence

from hyades.common.nvme.commands import Connect
from hyades.common.nvme.layout import ANY_CONTROLLER, DISCOVERY_NQN
from hyades.common.nvme.status import DNR, StatusCode
from hyades.target_side.controller import Controller, Link, Offer, Reply
from hyades.target_side.namespaces import Namespace
from hyades.target_side.subsystem import Subsystem

MAX_CONTROLLER_ID = 0xFFEF
# Where the parameters of Connect stand.
_HOSTID, _CNTLID, _SUBNQN, _HOSTNQN = 0, 16, 256, 512  # in the data
_QID, _SQSIZE = 42, 44  # in the command


class Target:
    """All subsystems, discovery, and the controllers that hosts have made."""

    def __init__(
        self, subsystems: Sequence[Subsystem], offer: Offer, *, first_controller: int = 1
    ) -> None:
        """Serve *subsystems*."""
        self.subsystems = {subsystem.nqn: subsystem for subsystem in subsystems}
        self.offer = offer
        self.controllers: dict[int, Controller] = {}
        self._next = first_controller
        self._retired: list[Namespace] = []

    def memories(self) -> Iterator[memoryview]:
        """Give the namespaces that are memory, whole: a device may read and write them itself."""
        for subsystem in self.subsystems.values():
            for namespace in subsystem.namespaces.values():
                memory = namespace.view(0, namespace.blocks * namespace.block_bytes)
                if memory is not None:
                    yield memory

    def connect(self, want: Connect, link: Link, now: float) -> tuple[Controller | None, Reply]:
        """Take or refuse a queue; the answer goes back in either case."""
        if link.controller is not None:
            return None, Reply(StatusCode.SEQUENCE_ERROR | DNR)
        if want.recfmt:
            return None, Reply(StatusCode.CONNECT_INCOMPATIBLE | DNR)
        subsystem = self.subsystems.get(want.subnqn)
        if subsystem is None and want.subnqn != DISCOVERY_NQN:
            return None, bad(_SUBNQN, in_data=True)
        if subsystem is not None and not subsystem.admits(want.hostnqn):
            return None, Reply(StatusCode.CONNECT_INVALID_HOST | DNR)
        if not 2 <= want.depth <= self.offer.limits.depth:
            return None, bad(_SQSIZE)
        if want.qid:
            return self._connect_io(want, link)
        return self._connect_admin(want, subsystem, link, now)

    def leave(self, link: Link) -> list[Link]:
        """Forget a connection; return the links that must be cut with it."""
        controller = link.controller
        if controller is None:
            return []
        link.controller = None
        controller.drop(link)
        return self._end(controller) if link.qid == 0 else []

    def expire(self, now: float) -> list[tuple[Controller, list[Link]]]:
        """Return the controllers whose host has been silent for too long, and their links."""
        late = [c for c in self.controllers.values() if c.silent(now)]
        return [(controller, self._end(controller)) for controller in late]

    def take_retired(self) -> list[Namespace]:
        """Return and forget the views that are no longer seen: the caller closes them."""
        retired, self._retired = self._retired, []
        for controller in self.controllers.values():
            retired += controller.views.take_retired()
        return retired

    def _end(self, controller: Controller) -> list[Link]:
        self.controllers.pop(controller.cntlid, None)
        controller.fail()
        self._retired += controller.views.take_retired()
        links = list(controller.queues.values())
        controller.queues.clear()
        return links

    def _connect_admin(
        self, want: Connect, subsystem: Subsystem | None, link: Link, now: float
    ) -> tuple[Controller | None, Reply]:
        if want.cntlid != ANY_CONTROLLER:
            return None, bad(_CNTLID, in_data=True)
        cntlid = self._free_id()
        if cntlid is None:
            return None, Reply(StatusCode.CONNECT_BUSY)
        controller = Controller(cntlid, want, subsystem, self.offer, link.local, now)
        self.controllers[cntlid] = controller
        controller.queues[0] = link
        link.controller, link.qid = controller, 0
        return controller, Reply(result=cntlid)

    def _connect_io(self, want: Connect, link: Link) -> tuple[Controller | None, Reply]:
        controller = self.controllers.get(want.cntlid)
        if controller is None:
            return None, bad(_CNTLID, in_data=True)
        first = controller.connected
        if first.subnqn != want.subnqn:
            return None, bad(_SUBNQN, in_data=True)
        if first.hostnqn != want.hostnqn:
            return None, bad(_HOSTNQN, in_data=True)
        if first.hostid != want.hostid:
            return None, bad(_HOSTID, in_data=True)
        if not controller.ready:
            return None, Reply(StatusCode.SEQUENCE_ERROR | DNR)
        if want.qid > controller.granted:
            return None, bad(_QID)
        if want.qid in controller.queues:
            return None, Reply(StatusCode.INVALID_QUEUE_ID | DNR)
        controller.queues[want.qid] = link
        link.controller, link.qid = controller, want.qid
        return controller, Reply(result=controller.cntlid)

    def _free_id(self) -> int | None:
        for _ in range(MAX_CONTROLLER_ID):
            cntlid, self._next = self._next, self._next % MAX_CONTROLLER_ID + 1
            if cntlid not in self.controllers:
                return cntlid
        return None


def bad(at: int, *, in_data: bool = False) -> Reply:
    """Return Connect Invalid Parameters, which says at what byte of the command or its data."""
    return Reply(StatusCode.CONNECT_INVALID | DNR, at | int(in_data) << 16)
