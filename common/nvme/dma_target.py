"""The controller's end of one NVMe queue over shared memory: commands out, answers in.

Rules:
1. `commands` are those that came, each answered once with `complete`, after `request_data` (a
   write) or `send_data` (a read).  A Connect has its 1024 bytes with it.
2. `take_output` gives work in order: Push (move a payload to the host), Answer (`post` it) and Pull
   (move from the arena, then `pulled`).  A Push stands before the Answer that reports it.
3. Chunks of writes that are not direct come through `next_chunk`, in order; whoever has moved one
   says `moved`, and the buffer counts as emptied once all before it are.  A chunk waits until
   its command has memory; those of a command that has ended are skipped.
4. Chunks of reads: `reserve` gives a buffer that the host has emptied, `fill` publishes it, in the
   order of the reservations.
5. Commands come out with the descriptor that NVMe/TCP has for data that travels by itself
   (Sgl.TRANSPORT) and its length.  A direct one that leads out of the arena has no descriptor that
   anybody knows: whoever executes it refuses it.
6. Whatever the host may not do raises Violation and closes the queue: see dma_memory.py, rule 2.
   What a host can make us hold is bounded by the entries of the ring.
7. The rules of memory_target.py.
Must stay in sync: dma_host.py is the other end.
"""

from collections.abc import Callable
from dataclasses import dataclass

from hyades.common.errors import UsageError
from hyades.common.nvme import dma
from hyades.common.nvme.commands import Command
from hyades.common.nvme.dma import HEADER, SLOTS
from hyades.common.nvme.dma_memory import QueueMemory
from hyades.common.nvme.layout import CONNECT_BYTES, FABRICS, Opcode, Sgl
from hyades.common.nvme.memory_target import (
    UNKNOWN_SGL,
    MemoryTargetQueue,
    OpenCommand,
    is_connect,
)
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.target import Payload


@dataclass(frozen=True, slots=True)
class Answer:
    """Post a completion."""

    entry: bytes


@dataclass(frozen=True, slots=True)
class Push:
    """Move *payload* to the host: to byte *at* of the arena, or in chunks where that is None."""

    payload: Payload | memoryview
    packet: int
    at: int | None


@dataclass(frozen=True, slots=True)
class Pull:
    """Move bytes from *at* of the arena *into* memory; `pulled(cid)` when they are there."""

    cid: int
    into: memoryview
    at: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Move *source*, a piece of a buffer, *into* memory; `moved` when that is done."""

    position: int
    source: memoryview
    into: memoryview
    open: "_Open"


Work = Answer | Push | Pull


@dataclass(slots=True, kw_only=True)
class _Open(OpenCommand):
    """A command that is out, and its data."""

    cid: int
    packet: int
    at: int | None = None  # in the arena
    into: memoryview | None = None  # of a write that is not direct
    asked: int = 0  # bytes of chunks that were given out
    chunk: int = 0
    moved: int = 0  # bytes
    connect: Command | None = None


class DmaTargetQueue(MemoryTargetQueue[_Open, Work]):
    """One queue; see the module."""

    def __init__(self, memory: QueueMemory, chunk_bytes: int, *, depth: int) -> None:
        """Take *depth* commands at a time, fewer than the rings have entries."""
        super().__init__(min(depth, memory.shape.entries - 1))
        self.arena_bytes = 0  # the host's arena, once it is mapped
        self.chunk_bytes = chunk_bytes
        self.news = False  # something was published: the host may sleep
        self._memory, self._buffers = memory, memory.shape.buffers
        self._packets: dict[int, _Open] = {}  # writes whose chunks are due
        self._taken = 0  # commands
        self._tail = self._head = 0  # completions: written, known to be taken
        self._filled = self._next = self._emptied = 0  # buffers to the target
        self._early: set[int] = set()  # positions that are empty, behind one that is not
        self._reserved = self._sent = self._free = 0  # buffers to the host; emptied

    def configure(self, qid: int, depth: int, *, flow_control: bool) -> None:
        """Take what Connect asked for, as far as the rings go."""
        super().configure(qid, depth, flow_control=flow_control)
        self.depth = min(depth, self._memory.shape.entries)

    def advance(self, now: float = 0.0, seen: Callable[[], None] = lambda: None) -> bool:
        """Take the commands that are there; return whether there were any.  Raises Violation.

        *seen* is called when it is known which they are, and before they are looked at: what the
        host said before it wrote them (its arena) can be heard then, and not surely any earlier.
        """
        if self.closed:
            raise UsageError("this queue is closed")
        try:
            return self._advance(now, seen)
        except Violation:
            self.closed, self._out = True, []
            raise

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk of a write that can be moved now; raises Violation."""
        while not self.closed and self._next < self._filled:
            found = self._look(self._next)
            if found is not None and found.into is None:
                return None
            position, self._next = self._next, self._next + 1
            if found is None:
                self._empty(position)
                continue
            assert found.into is not None
            nbytes = min(self.chunk_bytes, found.nbytes - found.asked)
            into = found.into[found.asked : found.asked + nbytes]
            found.asked, found.chunk = found.asked + nbytes, found.chunk + 1
            source = self._memory.data(position, nbytes, outward=True)
            return Chunk(position, source, into, found)
        return None

    def moved(self, chunk: Chunk) -> None:
        """Hear that a chunk is in its place."""
        if self.closed:
            return
        self._empty(chunk.position)
        found = chunk.open
        found.moved += chunk.into.nbytes
        if found.moved == found.nbytes:
            del self._packets[found.packet]
            self._arrive(found)

    def pulled(self, cid: int) -> None:
        """Hear that the data of a Pull is there."""
        if not self.closed:
            self._arrive(self._open[cid])

    def request_data(self, cid: int, into: memoryview) -> None:
        """Ask for all the data of a write; it goes *into* this memory."""
        if self.closed:
            return
        found = self._check_out(cid, into.nbytes)
        if into.nbytes != found.nbytes:
            raise UsageError(f"command {cid} has {found.nbytes} bytes, not {into.nbytes}")
        found.pulling = True
        if found.at is None:
            found.into = into.cast("B") if into.itemsize > 1 else into
        else:
            self._out.append(Pull(cid, into, found.at))

    def close(self) -> None:
        """Forget the memory."""
        super().close()
        self._packets.clear()

    # -- what whoever does the work calls

    def post(self, answer: Answer) -> None:
        """Put a completion into the ring."""
        memory, entries = self._memory, self._memory.shape.entries
        if self._tail - self._head >= entries:
            self._head = memory.check(dma.CQ_HEAD, self._head, self._tail, "completions taken")
            if self._tail - self._head >= entries:
                raise Violation("the host sends commands and takes no completions")
        memory.completion(self._tail)[:] = answer.entry
        self._tail += 1
        memory.store(dma.CQ_TAIL, self._tail)
        self.news = True

    def reserve(self, nbytes: int) -> memoryview | None:
        """Return the data of a buffer that the host has emptied, None where there is none."""
        memory = self._memory
        if self._reserved - self._free >= self._buffers:
            self._free = memory.check(
                dma.IN_EMPTIED, self._free, self._sent, "buffers to the host emptied"
            )
            if self._reserved - self._free >= self._buffers:
                return None
        self._reserved += 1
        return memory.data(self._reserved - 1, nbytes, outward=False)

    def fill(self, packet: int, whole: int, chunk: int, nbytes: int) -> None:
        """Publish the first buffer that was reserved and is not published yet."""
        memory = self._memory
        HEADER.pack_into(memory.header(self._sent, outward=False), 0, packet, whole, chunk, nbytes)
        self._sent += 1
        memory.store(dma.IN_FILLED, self._sent)
        self.news = True

    def sleep(self, *, blocked: bool) -> bool:
        """Say that this end sleeps; return False, and do not, where there is something to do.

        *blocked*: it waits for buffers that the host empties.
        """
        memory = self._memory
        memory.sleep(dma.TARGET_SLEEPS)
        busy = memory.load(dma.SQ_TAIL) != self._taken
        busy = busy or memory.load(dma.OUT_FILLED) != self._filled
        if busy or (blocked and memory.load(dma.IN_EMPTIED) != self._free):
            self.awake()
            return False
        return True

    def awake(self) -> None:
        """Say that this end does not sleep."""
        self._memory.store(dma.TARGET_SLEEPS, 0)

    def must_wake(self) -> bool:
        """Return whether something was published since the last call, and the host may sleep."""
        news, self.news = self.news, False
        return news and self._memory.sleeps(dma.HOST_SLEEPS)

    # -- the parts

    def _advance(self, now: float, seen: Callable[[], None]) -> bool:
        memory, entries = self._memory, self._memory.shape.entries
        # In this order: a chunk stands behind its command.
        filled = memory.check(
            dma.OUT_FILLED, self._filled, self._emptied + self._buffers,
            "buffers to the target filled",
        )  # fmt: skip
        tail = memory.check(dma.SQ_TAIL, self._taken, self._taken + entries, "commands written")
        found = tail != self._taken or filled != self._filled
        self._filled = filled
        if tail != self._taken:
            seen()
        while self._taken < tail:
            packet, self._taken = self._taken, self._taken + 1
            self._take(Command(bytes(memory.submission(packet))), packet)
        if found:
            self.last_heard = now
        return found

    def _take(self, command: Command, packet: int) -> None:
        self._admit(command)
        found = self._open[command.cid] = _Open(cid=command.cid, packet=packet)
        if command.sgl == SLOTS and command.sgl_bytes:
            if command.sgl_at + command.sgl_bytes > self.arena_bytes:
                command.sgl = UNKNOWN_SGL
            else:
                found.at, found.nbytes = command.sgl_at, command.sgl_bytes
                command.sgl, command.sgl_at = Sgl.TRANSPORT, 0
        elif command.sgl == Sgl.TRANSPORT:
            found.nbytes = command.sgl_bytes
            if _sends(command) and found.nbytes:
                self._packets[packet] = found
        else:
            command.sgl = UNKNOWN_SGL
        if is_connect(command) and packet in self._packets and found.nbytes == CONNECT_BYTES:
            found.connect, found.pulling = command, True
            found.into = memoryview(bytearray(CONNECT_BYTES))
            return
        self.commands.append((command, None, True))

    def _look(self, position: int) -> _Open | None:
        """Return the open write that the chunk at *position* is of, None where it has ended."""
        header = bytes(self._memory.header(position, outward=True))
        packet, whole, chunk, nbytes = HEADER.unpack(header)
        if packet >= self._taken:
            raise self._violation(f"a chunk of packet {packet}, {self._taken} commands have come")
        found = self._packets.get(packet)
        if found is None:
            return None
        want = (found.nbytes, found.chunk, min(self.chunk_bytes, found.nbytes - found.asked))
        if (whole, chunk, nbytes) != want or not nbytes:
            raise self._violation(
                f"packet {packet}: chunk {chunk} of {nbytes} bytes of {whole}, not chunk"
                f" {want[1]} of {want[2]} bytes of {want[0]}"
            )
        return found

    def _violation(self, text: str) -> Violation:
        self.closed, self._out = True, []
        return Violation(text)

    def _empty(self, position: int) -> None:
        """Count the buffers that are empty, in order."""
        self._early.add(position)
        before = self._emptied
        while self._emptied in self._early:
            self._early.discard(self._emptied)
            self._emptied += 1
        if self._emptied != before:
            self._memory.store(dma.OUT_EMPTIED, self._emptied)
            self.news = True

    def _arrive(self, found: _Open) -> None:
        found.pulling = False
        if found.connect is not None:
            assert found.into is not None
            self.commands.append((found.connect, found.into, True))
        else:
            self.arrived.append((found.cid, True))

    def _push(self, payload: Payload | memoryview, found: _Open) -> Push:
        return Push(payload, found.packet, found.at)

    def _answer(self, entry: bytes, found: _Open) -> Answer:
        self._packets.pop(found.packet, None)
        return Answer(entry)


def _sends(command: Command) -> bool:
    """Return whether the data of a command goes to the controller: bits 0 and 1 of the opcode."""
    code = command.fctype if command.opcode == FABRICS else command.opcode
    return bool(code & Opcode.WRITE)
