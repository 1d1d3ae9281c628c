"""The controller's end of one NVMe/RDMA queue: capsules in, commands out; answers in, work out.

Rules:
1. `commands` are those that came whole, with their in-capsule data; each is answered once with
   `complete`, after `request_data` (a write whose data did not come along) or `send_data` (a read).
2. `take_output` gives work in order: Pull (RDMA READ from the host), Push (RDMA WRITE to it) and
   Answer (SEND of a response).  A Push stands before the Answer that reports it, and a reliable
   connection keeps that order.  Whoever did a Pull says so with `pulled`, which puts the command
   into `arrived`.
3. A host names its memory with keyed descriptors (0x40, or 0x4F: the answer invalidates the key).
   Commands come out with the descriptor that NVMe/TCP has for data that travels by itself
   (Sgl.TRANSPORT) and its length, so what executes them need not know of keys.
4. A Connect whose 1024 bytes did not come along is pulled here, and is a command when they are
   there: Linux sends the data of an admin queue in no other way.
5. At most `depth` commands are out; a host that sends more, or uses a command id twice, or sends
   less than a command raises Violation.  Once closed, answers are dropped without a word.
6. No I/O and no clock: `now` is any clock of the caller's, in seconds.
Must stay in sync: rdma_host.py is the other end; the interface is that of target.TargetQueue.
"""

from dataclasses import dataclass

from hyades.common.errors import UsageError
from hyades.common.nvme.commands import Command
from hyades.common.nvme.layout import (
    CONNECT_BYTES,
    CQE,
    FABRICS,
    SQE_BYTES,
    SQE_SGL,
    Admin,
    Fabrics,
    Sgl,
)
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.rdma import KEYED, KEYED_INVALIDATE, parse_keyed
from hyades.common.nvme.target import Payload

_UNKNOWN_SGL = 0xF0  # what no command may have: refused by whoever executes it


@dataclass(frozen=True, slots=True)
class Answer:
    """SEND a response capsule; *invalidate* is the host's key that goes with it, 0: none."""

    capsule: bytes
    invalidate: int = 0


@dataclass(frozen=True, slots=True)
class Push:
    """RDMA WRITE *payload* to the host."""

    payload: Payload | memoryview
    address: int
    key: int


@dataclass(frozen=True, slots=True)
class Pull:
    """RDMA READ from the host *into* memory; `pulled(cid)` when it is there."""

    cid: int
    into: memoryview
    address: int
    key: int


Work = Answer | Push | Pull


@dataclass(slots=True)
class _Open:
    """A command that is out, and the host's memory that it names."""

    address: int = 0
    nbytes: int = 0
    key: int = 0
    invalidate: bool = False
    pulling: bool = False
    connect: tuple[Command, memoryview] | None = None


class RdmaTargetQueue:
    """One connection; see the module."""

    def __init__(self, *, depth: int = 32, in_capsule: int = 8192) -> None:
        """Take *depth* commands at a time, each with at most *in_capsule* bytes along."""
        self.closed = False
        self.commands: list[tuple[Command, memoryview | None, bool]] = []
        self.arrived: list[tuple[int, bool]] = []
        self.superseded: list[int] = []  # as in target.py, rule 7
        self.depth, self.qid = depth, 0
        self.digests = 0  # RDMA has its own
        self.last_heard = 0.0
        self._in_capsule = in_capsule
        self._flow_control = True
        self._head = 0  # SQHD
        self._open: dict[int, _Open] = {}
        self._events: set[int] = set()  # Asynchronous Event Requests among them
        self._out: list[Work] = []

    @property
    def outstanding(self) -> int:
        """Commands that are out."""
        return len(self._open)

    @property
    def idle(self) -> bool:
        """Whether nothing is out."""
        return not self._open

    def configure(self, qid: int, depth: int, *, flow_control: bool) -> None:
        """Take what Connect asked for."""
        self.qid, self.depth, self._flow_control = qid, depth, flow_control
        self._head = 1 % depth

    def received(self, capsule: memoryview, now: float = 0.0) -> None:
        """Take one command capsule, whose memory is free again on return; raises Violation."""
        if self.closed:
            raise UsageError("this queue is closed")
        self.last_heard = now
        try:
            self._take(capsule)
        except Violation:
            self.closed, self._out = True, []
            raise

    def pulled(self, cid: int) -> None:
        """Hear that the data of a Pull is there."""
        if self.closed:
            return
        found = self._open[cid]
        found.pulling = False
        if found.connect is not None:
            command, data = found.connect
            found.connect = None
            self.commands.append((command, data, True))
        else:
            self.arrived.append((cid, True))

    def request_data(self, cid: int, into: memoryview) -> None:
        """Ask for all the data of a write; it goes *into* this memory."""
        if self.closed:
            return
        found = self._check_out(cid, into.nbytes)
        found.pulling = True
        self._out.append(Pull(cid, into, found.address, found.key))

    def send_data(
        self, cid: int, payload: Payload | memoryview, *, success: bool, answer: bool = True
    ) -> None:
        """Send all the data of a read, and its completion unless *answer* is false.

        *success* means nothing here: every command has a response.
        """
        del success
        if self.closed:
            return
        found = self._check_out(cid, payload.nbytes)
        self._out.append(Push(payload, found.address, found.key))
        if answer:
            self.complete(cid)

    def complete(self, cid: int, status: int = 0, result: int = 0) -> None:
        """Answer a command with a status code (status.py) and a result."""
        if self.closed:
            return
        found = self._open.get(cid)
        if found is None or found.pulling:
            raise UsageError(f"command {cid} cannot be answered now: not out, or its data is due")
        del self._open[cid]
        self._events.discard(cid)
        head = self._head if self._flow_control else 0xFFFF
        capsule = CQE.pack(result, head, self.qid, cid, status << 1)
        self._out.append(Answer(capsule, found.key if found.invalidate else 0))

    def abandon(self, cid: int) -> bool:
        """Return whether *cid* is out: whoever executes it decides whether it can be stopped."""
        return cid in self._open

    def take_output(self) -> list[Work]:
        """Return and forget what is to be done, in order."""
        out, self._out = self._out, []
        return out

    def close(self) -> None:
        """Forget the connection and the memory."""
        self.closed, self._out = True, []
        self._open.clear()
        self._events.clear()

    # -- the parts

    def _take(self, capsule: memoryview) -> None:
        if len(capsule) < SQE_BYTES:
            raise Violation(f"a command of {len(capsule)} bytes, at least {SQE_BYTES}")
        if len(capsule) > SQE_BYTES + self._in_capsule:
            text = f"{len(capsule) - SQE_BYTES} bytes in a capsule, at most {self._in_capsule}"
            raise Violation(text)
        command = Command(bytes(capsule[:SQE_BYTES]))
        if command.cid in self._events:
            self._events.discard(command.cid)
            self.superseded.append(command.cid)
        elif command.cid in self._open:
            raise Violation(f"command id {command.cid} is in use")
        if command.opcode == Admin.ASYNC_EVENT and not self.qid:
            self._events.add(command.cid)
        if len(self._open) >= self.depth:
            raise Violation(f"command {self.depth + 1} on a queue of {self.depth}")
        if self._flow_control:
            self._head = (self._head + 1) % self.depth
        self._open[command.cid] = found = self._describe(command)
        if found.nbytes == CONNECT_BYTES and _is_connect(command) and found.key:
            found.connect = (command, memoryview(bytearray(CONNECT_BYTES)))
            found.pulling = True
            self._out.append(Pull(command.cid, found.connect[1], found.address, found.key))
            return
        data = None
        if command.sgl == Sgl.IN_CAPSULE and len(capsule) > SQE_BYTES:
            data = memoryview(bytes(capsule[SQE_BYTES:]))
        self.commands.append((command, data, True))

    def _describe(self, command: Command) -> _Open:
        """Note the host's memory, and give *command* the descriptor of rule 3."""
        if command.sgl in (KEYED, KEYED_INVALIDATE):
            address, nbytes, key = parse_keyed(command.raw, SQE_SGL)
            invalidate = command.sgl == KEYED_INVALIDATE and nbytes > 0
            command.sgl, command.sgl_bytes, command.sgl_at = Sgl.TRANSPORT, nbytes, 0
            return _Open(address, nbytes, key, invalidate)
        if command.sgl == Sgl.TRANSPORT:
            command.sgl = _UNKNOWN_SGL
        return _Open()

    def _check_out(self, cid: int, nbytes: int) -> _Open:
        """Return a command that is out and may move *nbytes* now."""
        found = self._open.get(cid)
        if found is None or found.pulling or not 0 < nbytes <= found.nbytes:
            named = None if found is None else found.nbytes
            raise UsageError(f"command {cid} cannot move {nbytes} bytes now: its SGL has {named}")
        return found


def _is_connect(command: Command) -> bool:
    return bool(command.opcode == FABRICS and command.fctype == Fabrics.CONNECT)
