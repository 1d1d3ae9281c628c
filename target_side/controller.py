"""One controller: properties and admin commands.

States (CSTS): DISABLED -CC.EN-> READY -CC.SHN-> SHUT; an impossible CC makes it FAILED, and
clearing EN resets it.  Rules:
1. `execute` answers a command with a Reply, or with None where it stays out: an Asynchronous Event
   Request.  Nothing here changes but by the host's own commands (views), so no event ever ends one;
   Abort and reset do.
2. Only Fabrics commands are taken before READY.
3. Data goes back whole: a command whose SGL has another length is refused.
4. No sockets, no clock; see admission.py about threads.
Must stay in sync: logs.py and features.py have the log pages and the features; host_views.py has
the namespaces that are seen, and view_commands.py the commands that change them.
Source: NVM Express Base Specification 2.0, sections 3.1.3 (properties), 3.5, 3.6, 5.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hyades.common.nvme.commands import Command, Connect, parse_property
from hyades.common.nvme.identify import (
    CAP,
    NVME_1_3,
    ControllerInfo,
    DiscoveryEntry,
    NamespaceInfo,
    build_active_list,
    build_controller,
    build_descriptors,
    build_namespace,
)
from hyades.common.nvme.layout import (
    ALL_NAMESPACES,
    DISCOVERY_NQN,
    FABRICS,
    IDENTIFY_BYTES,
    Admin,
    Fabrics,
    Property,
    Sgl,
)
from hyades.common.nvme.status import DNR, StatusCode
from hyades.target_side.counters import Counters
from hyades.target_side.features import Features
from hyades.target_side.host_views import HostViews
from hyades.target_side.limits import Limits, ViewLimits
from hyades.target_side.logs import ErrorLog, build_page
from hyades.target_side.namespaces import Namespace
from hyades.target_side.subsystem import Subsystem

MODEL = "Hyades"
MAX_EVENTS = 4  # Asynchronous Event Requests (AERL + 1)
_ENABLED, _SHUTDOWN_BITS = 1, 3 << 14  # CC
_READY, _FATAL, _SHUT_DOWN = 1, 2, 2 << 2  # CSTS
_ENTRY_SIZES = 4 << 4 | 6  # CC.IOCQES, CC.IOSQES: 16 and 64 bytes
_COMMAND_SET_AND_PAGE = 0x7F0  # CC.CSS and CC.MPS: NVM commands, pages of 4 KiB
_KEEP_ALIVE_UNITS = 10  # KAS: 1 s
NO_VIEWS = ViewLimits(count=0)


@dataclass(frozen=True, slots=True)
class Reply:
    """The completion of a command, and the data that goes before it."""

    status: int = 0
    result: int = 0
    data: bytes = b""


class Link(Protocol):
    """A connection, as far as a controller knows it."""

    controller: "Controller | None"
    qid: int
    last_heard: float
    local: str  # address of this side
    counters: Counters


# From a host's name and the address that it came to, the entries of the discovery log.
Entries = Callable[[str, str], Sequence[DiscoveryEntry]]


@dataclass(frozen=True, slots=True)
class Offer:
    """What all controllers of a target have in common."""

    limits: Limits
    entries: Entries = lambda *_: ()
    firmware: str = ""
    views: ViewLimits = NO_VIEWS


class Controller:
    """See the module; `queues` are the links by queue id."""

    def __init__(
        self, cntlid: int, connected: Connect, subsystem: Subsystem | None, offer: Offer,
        local: str, now: float,
    ) -> None:  # fmt: skip
        """Serve the host of *connected*, which came to the address *local*.

        Without a *subsystem* it is a discovery controller.
        """
        self.cntlid, self.connected, self.subsystem = cntlid, connected, subsystem
        self.limits = offer.limits
        self.keyed = False  # its queues run over RDMA: SGLs are keyed
        self.queues: dict[int, Link] = {}
        self.features = Features(connected.kato, offer.limits.queues)
        fixed = {} if subsystem is None else subsystem.namespaces
        self.views = HostViews(fixed, offer.views)
        self.errors, self._past = ErrorLog(), Counters()
        self.ended: list[tuple[int, Reply]] = []  # commands that ended besides the one executed
        self._cc = self._csts = 0
        self._events: list[int] = []
        self._offer, self._local = offer, local
        self._heard = now

    @property
    def ready(self) -> bool:
        """Whether commands are taken."""
        return self._csts & (_READY | _FATAL | _SHUT_DOWN) == _READY

    @property
    def shut_down(self) -> bool:
        """Whether the host has said that it leaves."""
        return bool(self._csts & _SHUT_DOWN)

    @property
    def granted(self) -> int:
        """I/O queues that the host may connect."""
        return self.features.granted if self.subsystem is not None else 0

    @property
    def namespaces(self) -> Mapping[int, Namespace]:
        """What its host sees; any thread may look."""
        return self.views.namespaces

    @property
    def write_through(self) -> bool:
        """Whether the host has turned the write cache off."""
        return not self.features.write_cache

    def silent(self, now: float) -> bool:
        """Return whether keep-alive has expired: nothing was heard on any queue."""
        heard = max([self._heard, *(link.last_heard for link in self.queues.values())])
        return bool(self.features.kato) and now - heard > self.features.kato / 1000

    def drop(self, link: Link) -> None:
        """Forget a queue, and keep what it has counted."""
        if self.queues.get(link.qid) is link:
            del self.queues[link.qid]
            self._past.add(link.counters)

    def fail(self) -> None:
        """Show that the association is over."""
        self._csts = _FATAL
        self.views.clear()

    def execute(self, command: Command, now: float) -> Reply | None:
        """Return the answer to an admin or Fabrics command, None where there will be none yet."""
        self._heard = now
        reply = self._dispatch(command)
        if reply is not None and reply.status:
            self.errors.add(0, command.cid, reply.status, nsid=command.nsid)
        if reply is not None and reply.data and (problem := check_sgl(command, len(reply.data))):
            return Reply(problem)
        return reply

    def abort_event(self, cid: int) -> bool:
        """End an Asynchronous Event Request; return whether it was out."""
        if cid not in self._events:
            return False
        self._events.remove(cid)
        self.ended.append((cid, Reply(StatusCode.ABORTED)))
        return True

    def forget_event(self, cid: int) -> None:
        """Forget an Asynchronous Event Request whose id the host uses again, without an answer."""
        if cid in self._events:
            self._events.remove(cid)

    def take_ended(self) -> list[tuple[int, Reply]]:
        """Return and forget the commands that ended besides the one executed."""
        ended, self.ended = self.ended, []
        return ended

    def _dispatch(self, command: Command) -> Reply | None:
        if command.raw[1] & 0xC3 != 0x40:  # SGLs, not fused
            return Reply(StatusCode.INVALID_FIELD | DNR)
        opcode = command.opcode
        if opcode == FABRICS:
            return self._fabrics(command)
        if not self.ready:
            return Reply(StatusCode.SEQUENCE_ERROR | DNR)
        if opcode == Admin.IDENTIFY:
            return self._identify(command)
        if opcode == Admin.GET_LOG:
            return self._log(command)
        if opcode == Admin.SET_FEATURES:
            io_queues = any(self.queues)
            return Reply(*self.features.set(command.dwords, io_queues=io_queues))
        if opcode == Admin.GET_FEATURES:
            return Reply(*self.features.get(command.dwords, self.connected.hostid))
        if opcode == Admin.KEEP_ALIVE:
            return Reply()
        if opcode == Admin.ASYNC_EVENT:
            return self._await_event(command.cid)
        if opcode == Admin.ABORT and self.subsystem is not None:
            qid, cid = command.dwords[0] & 0xFFFF, command.dwords[0] >> 16
            aborted = qid == 0 and self.abort_event(cid)
            # Bit 0 says that the command was not aborted: others run to their end at once.
            return Reply(result=0 if aborted else 1)
        return Reply(StatusCode.INVALID_OPCODE | DNR)

    # -- Fabrics

    def _fabrics(self, command: Command) -> Reply:
        if command.fctype not in (Fabrics.PROPERTY_GET, Fabrics.PROPERTY_SET):
            return Reply(StatusCode.INVALID_OPCODE | DNR)
        wide, offset, value = parse_property(command.raw)
        if command.fctype == Fabrics.PROPERTY_SET:
            if wide or offset != Property.CC:
                return Reply(StatusCode.INVALID_FIELD | DNR)
            self._set_configuration(value & 0xFFFFFFFF)
            return Reply()
        if wide:
            if offset != Property.CAP:
                return Reply(StatusCode.INVALID_FIELD | DNR)
            return Reply(result=CAP & ~0xFFFF | self.limits.depth - 1)
        values = {Property.VS: NVME_1_3, Property.CC: self._cc, Property.CSTS: self._csts}
        if offset not in values:
            return Reply(StatusCode.INVALID_FIELD | DNR)
        return Reply(result=values[Property(offset)])

    def _set_configuration(self, cc: int) -> None:
        before, self._cc = self._cc, cc
        if not cc & _ENABLED and before & _ENABLED:
            self._events.clear()
            self.views.clear()
            self._csts = 0
        if cc & _ENABLED and not before & _ENABLED:
            sizes = cc >> 16 & 0xFF
            discovery = self.subsystem is None  # it has no I/O queues to have entries
            fits = sizes == _ENTRY_SIZES or (discovery and not sizes)
            self._csts = _READY if fits and not cc & _COMMAND_SET_AND_PAGE else _FATAL
        if cc & _SHUTDOWN_BITS and not before & _SHUTDOWN_BITS:
            # I/O queues have been drained by now, or are of no interest: nothing is left to do.
            self._csts = self._csts & ~(3 << 2) | _SHUT_DOWN

    # -- admin commands

    def _identify(self, command: Command) -> Reply:
        cns, nsid = command.dwords[0] & 0xFF, command.nsid
        if cns == 1:
            return Reply(data=build_controller(self._info()))
        if self.subsystem is None or cns not in (0, 2, 3):
            return Reply(StatusCode.INVALID_FIELD | DNR)
        namespaces = self.namespaces
        if cns == 2:
            if nsid >= ALL_NAMESPACES - 1:
                return Reply(StatusCode.INVALID_NAMESPACE | DNR)
            return Reply(data=build_active_list([n for n in namespaces if n > nsid]))
        if nsid not in namespaces:
            return Reply(StatusCode.INVALID_NAMESPACE | DNR)
        found, shared = namespaces[nsid], nsid in self.subsystem.namespaces
        # Views of two hosts are two namespaces, even where their bytes are the same.
        identity = found.identity if shared else f"{self.cntlid}/{found.identity}"
        uuid = self.subsystem.uuid(nsid, identity)
        if cns == 3:
            return Reply(data=build_descriptors(uuid, guid=uuid.bytes))
        info = NamespaceInfo(
            found.blocks, found.block_bytes, uuid.bytes, shared=shared, read_only=found.read_only
        )
        return Reply(data=build_namespace(info))

    def _info(self) -> ControllerInfo:
        subsystem, limits = self.subsystem, self.limits
        version = self._offer.firmware[:8]
        if subsystem is None:
            return ControllerInfo(
                DISCOVERY_NQN, self.cntlid, "discovery", MODEL, version, limits.max_transfer, 0, 0,
                limits.depth, discovery=True, keep_alive=_KEEP_ALIVE_UNITS, write_zeroes=False,
                write_cache=False, keyed=self.keyed,
            )  # fmt: skip
        return ControllerInfo(
            subsystem.nqn, self.cntlid, subsystem.serial, MODEL, version, limits.max_transfer,
            limits.in_capsule, self.views.last, limits.depth,
            keep_alive=_KEEP_ALIVE_UNITS, cache_epoch=subsystem.epoch, keyed=self.keyed,
        )  # fmt: skip

    def _log(self, command: Command) -> Reply:
        low, high, start, start_high = command.dwords[:4]
        nbytes = 4 * ((low >> 16 | (high & 0xFFFF) << 16) + 1)
        offset = start | start_high << 32
        entries = None
        if self.subsystem is None:
            entries = self._offer.entries(self.connected.hostnqn, self._local)
        page = build_page(low & 0xFF, entries, self.errors, self._health(), self._offer.firmware)
        if page is None:
            return Reply(StatusCode.INVALID_LOG_PAGE | DNR)
        if offset % 4 or offset > len(page) or nbytes > self.limits.max_transfer:
            return Reply(StatusCode.INVALID_FIELD | DNR)
        return Reply(data=page[offset : offset + nbytes].ljust(nbytes, b"\0"))

    def _health(self) -> Counters:
        total = Counters()
        for counters in (self._past, *(link.counters for link in self.queues.values())):
            total.add(counters)
        return total

    def _await_event(self, cid: int) -> Reply | None:
        if len(self._events) >= MAX_EVENTS:
            return Reply(StatusCode.ASYNC_EVENT_LIMIT | DNR)
        self._events.append(cid)
        return None


def check_sgl(command: Command, nbytes: int) -> int:
    """Return the status code for a command that sends *nbytes* to the host, 0 where it is right."""
    if command.sgl != Sgl.TRANSPORT:
        return StatusCode.SGL_TYPE_INVALID | DNR
    if command.sgl_bytes != nbytes:
        return StatusCode.SGL_LENGTH_INVALID | DNR
    return 0


assert IDENTIFY_BYTES == 4096
