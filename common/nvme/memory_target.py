"""What the controller's ends of queues share whose data moves between memories (RDMA, DMA).

A subclass takes commands from its wire and says what moves their data.  Rules:
1. `commands` are those that came, each answered once with `complete`, after `request_data` (a
   write) or `send_data` (a read).  `take_output` gives work in order.
2. At most `depth` commands are out; a host that sends more, or uses a command id twice, raises
   Violation.  Once closed, answers are dropped without a word.
3. No I/O and no clock.
Must stay in sync: the interface is that of target.TargetQueue.
"""

from dataclasses import dataclass
from typing import Generic, TypeVar

from hyades.common.errors import UsageError
from hyades.common.nvme.commands import Command
from hyades.common.nvme.layout import CQE, FABRICS, Admin, Fabrics
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.target import Payload

UNKNOWN_SGL = 0xF0  # what no command may have: refused by whoever executes it


@dataclass(slots=True, kw_only=True)
class OpenCommand:
    """A command that is out: bytes that its SGL has, and whether its data is under way to here."""

    nbytes: int = 0
    pulling: bool = False


Open = TypeVar("Open", bound=OpenCommand)
Task = TypeVar("Task")


class MemoryTargetQueue(Generic[Open, Task]):
    """One queue; see the module."""

    def __init__(self, depth: int) -> None:
        self.closed = False
        self.commands: list[tuple[Command, memoryview | None, bool]] = []
        self.arrived: list[tuple[int, bool]] = []
        self.superseded: list[int] = []  # as in target.py, rule 7
        self.depth, self.qid = depth, 0
        self.digests = 0  # nothing is added to memory
        self.last_heard = 0.0
        self._flow_control = True
        self._sqhd = 0
        self._open: dict[int, Open] = {}
        self._events: set[int] = set()  # Asynchronous Event Requests among them
        self._out: list[Task] = []

    @property
    def outstanding(self) -> int:
        """Commands that are out."""
        return len(self._open)

    def configure(self, qid: int, depth: int, *, flow_control: bool) -> None:
        """Take what Connect asked for."""
        self.qid, self.depth, self._flow_control = qid, depth, flow_control
        self._sqhd = 1 % depth

    def send_data(
        self, cid: int, payload: Payload | memoryview, *, success: bool, answer: bool = True
    ) -> None:
        """Send all the data of a read, and its completion unless *answer* is false.

        *success* means nothing here: every command has a completion.
        """
        del success
        if self.closed:
            return
        self._out.append(self._push(payload, self._check_out(cid, payload.nbytes)))
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
        head = self._sqhd if self._flow_control else 0xFFFF
        self._out.append(self._answer(CQE.pack(result, head, self.qid, cid, status << 1), found))

    def abandon(self, cid: int) -> bool:
        """Return whether *cid* is out: whoever executes it decides whether it can be stopped."""
        return cid in self._open

    def take_output(self) -> list[Task]:
        """Return and forget what is to be done, in order."""
        out, self._out = self._out, []
        return out

    def close(self) -> None:
        """Forget the connection and the memory."""
        self.closed, self._out = True, []
        self._open.clear()
        self._events.clear()

    # -- what a subclass does

    def _push(self, payload: Payload | memoryview, found: Open) -> Task:
        """Return the work that moves *payload* to the host."""
        raise NotImplementedError

    def _answer(self, entry: bytes, found: Open) -> Task:
        """Return the work that hands over the completion *entry* of a command that is over."""
        raise NotImplementedError

    # -- what it calls

    def _admit(self, command: Command) -> None:
        """Check that *command* may be out, too, and count it; the subclass enters it."""
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
            self._sqhd = (self._sqhd + 1) % self.depth

    def _check_out(self, cid: int, nbytes: int) -> Open:
        """Return a command that is out and may move *nbytes* now."""
        found = self._open.get(cid)
        if found is None or found.pulling or not 0 < nbytes <= found.nbytes:
            named = None if found is None else found.nbytes
            raise UsageError(f"command {cid} cannot move {nbytes} bytes now: its SGL has {named}")
        return found


def is_connect(command: Command) -> bool:
    """Return whether *command* is a Connect."""
    return bool(command.opcode == FABRICS and command.fctype == Fabrics.CONNECT)
