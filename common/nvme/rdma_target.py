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
5. A capsule that is less than a command raises Violation.
6. The rules of memory_target.py; `now` is any clock of the caller's, in seconds.
Must stay in sync: rdma_host.py is the other end.
"""

from dataclasses import dataclass

from hyades.common.errors import UsageError
from hyades.common.nvme.commands import Command
from hyades.common.nvme.layout import CONNECT_BYTES, SQE_BYTES, SQE_SGL, Sgl
from hyades.common.nvme.memory_target import (
    UNKNOWN_SGL,
    MemoryTargetQueue,
    OpenCommand,
    is_connect,
)
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.rdma import KEYED, KEYED_INVALIDATE, parse_keyed
from hyades.common.nvme.target import Payload


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


@dataclass(slots=True, kw_only=True)
class _Open(OpenCommand):
    """A command that is out, and the host's memory that it names."""

    address: int = 0
    key: int = 0
    invalidate: bool = False
    connect: tuple[Command, memoryview] | None = None


class RdmaTargetQueue(MemoryTargetQueue[_Open, Work]):
    """One connection; see the module."""

    def __init__(self, *, depth: int = 32, in_capsule: int = 8192) -> None:
        """Take *depth* commands at a time, each with at most *in_capsule* bytes along."""
        super().__init__(depth)
        self._in_capsule = in_capsule

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

    # -- the parts

    def _take(self, capsule: memoryview) -> None:
        if len(capsule) < SQE_BYTES:
            raise Violation(f"a command of {len(capsule)} bytes, at least {SQE_BYTES}")
        if len(capsule) > SQE_BYTES + self._in_capsule:
            text = f"{len(capsule) - SQE_BYTES} bytes in a capsule, at most {self._in_capsule}"
            raise Violation(text)
        command = Command(bytes(capsule[:SQE_BYTES]))
        self._admit(command)
        self._open[command.cid] = found = self._describe(command)
        if found.nbytes == CONNECT_BYTES and is_connect(command) and found.key:
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
            return _Open(nbytes=nbytes, address=address, key=key, invalidate=invalidate)
        if command.sgl == Sgl.TRANSPORT:
            command.sgl = UNKNOWN_SGL
        return _Open()

    def _push(self, payload: Payload | memoryview, found: _Open) -> Push:
        return Push(payload, found.address, found.key)

    def _answer(self, entry: bytes, found: _Open) -> Answer:
        return Answer(entry, found.key if found.invalidate else 0)
