"""The host's end of one NVMe queue over shared memory: commands in, completions out.

States: READY -error or close-> CLOSED.  Rules:
1. A command's data is either *direct*: the memory lies in the arena, the command names its place
   there, and the target's engine moves it; or it travels in buffers of fixed size, in chunks with
   headers, which this end copies from and to the memory.  *locate* says which.
2. Chunks of writes are put into buffers in the order of their commands, after these, as buffers
   are free: the target counts those that it has emptied.  Chunks that arrive are copied out and
   counted as emptied, in order.  No buffer is written before it was counted.
3. The rules of memory_host.py; a read that succeeds has had all its bytes.
4. What the target may not do raises Violation and closes the queue: see dma_memory.py, rule 2.
5. `advance` takes what is there, `publish` hands over what is new; either says whether there was
   something.
Must stay in sync: dma_target.py is the other end.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from hyades.common.nvme import dma
from hyades.common.nvme.commands import set_sgl
from hyades.common.nvme.dma import HEADER, SLOTS
from hyades.common.nvme.dma_memory import QueueMemory
from hyades.common.nvme.host import State
from hyades.common.nvme.layout import SGL_DESCRIPTOR, SQE_SGL, Sgl
from hyades.common.nvme.memory_host import MemoryHostQueue
from hyades.common.nvme.pdu import Violation

Locate = Callable[[memoryview], int | None]


@dataclass(slots=True)
class _Transfer:
    """Data of a command that travels in buffers."""

    cid: int
    packet: int
    memory: memoryview
    done: int = 0  # bytes
    chunk: int = 0


class DmaHostQueue(MemoryHostQueue):
    """One queue; see the module."""

    def __init__(
        self, depth: int, memory: QueueMemory, chunk_bytes: int, locate: Locate = lambda _: None
    ) -> None:
        """Keep up to *depth* commands out, one less than the rings have entries."""
        assert depth < memory.shape.entries
        super().__init__(depth, State.READY)  # nothing travels in a capsule
        self.chunks = 0  # that arrived in buffers
        self._memory, self._chunk_bytes, self._locate = memory, chunk_bytes, locate
        self._buffers = memory.shape.buffers
        self._packets: list[int] = [0] * depth
        self._direct: set[int] = set()  # command ids whose data the target moves by itself
        self._landing: dict[int, _Transfer] = {}  # by packet
        self._sends: deque[_Transfer] = deque()
        self._tail = self._rung = 0  # commands: written, published
        self._head = 0  # completions taken
        self._filled = self._emptied = 0  # buffers to the target
        self._taken = 0  # buffers to the host

    @property
    def direct(self) -> bool:
        """Whether the target may be touching the arena for a command of this queue."""
        return bool(self._direct)

    def submit(
        self, sqe: bytearray, *, into: memoryview | None = None, source: memoryview | None = None,
        in_capsule: bool = False, now: float = 0.0,
    ) -> int:  # fmt: skip
        """Write a command (its SGL and command id are filled in) and return its command id.

        *into* takes what it reads, *source* is what it writes.  *in_capsule* means nothing here.
        """
        del in_capsule
        self._check_room()
        memory = into if into is not None else source
        nbytes = 0 if memory is None else memory.nbytes
        cid, packet = self._begin(into, source, now), self._tail
        self._packets[cid] = packet
        set_sgl(sqe, cid, nbytes, Sgl.TRANSPORT)
        if memory is not None and nbytes:
            at = self._locate(memory)
            if at is not None:
                SGL_DESCRIPTOR.pack_into(sqe, SQE_SGL, at, nbytes, SLOTS)
                self._direct.add(cid)
            elif into is not None:
                self._landing[packet] = _Transfer(cid, packet, memory)
            else:
                self._sends.append(_Transfer(cid, packet, memory))
        self._memory.submission(packet)[:] = sqe
        self._tail += 1
        return cid

    def publish(self) -> bool:
        """Hand over commands and chunks; return whether there were any: the target may sleep."""
        if self.state is not State.READY:
            return False
        news = self._rung != self._tail
        if news:
            self._memory.store(dma.SQ_TAIL, self._tail)
            self._rung = self._tail
        return self._checked(self._fill) or news

    def advance(self, now: float = 0.0) -> bool:
        """Take completions and chunks; return whether there were any.  Raises Violation."""
        if self.state is not State.READY:
            return False
        if self._checked(self._take):
            self.last_heard = now
            return True
        return False

    def sleep(self) -> bool:
        """Say that this end sleeps; return False, and do not, where there is something to do."""
        memory = self._memory
        memory.sleep(dma.HOST_SLEEPS)
        busy = memory.load(dma.CQ_TAIL) != self._head or memory.load(dma.IN_FILLED) != self._taken
        if busy or (self._sends and memory.load(dma.OUT_EMPTIED) != self._emptied):
            self.awake()
            return False
        return True

    def awake(self) -> None:
        """Say that this end does not sleep."""
        self._memory.store(dma.HOST_SLEEPS, 0)

    def must_wake(self) -> bool:
        """Return whether the target may be asleep."""
        return self._memory.sleeps(dma.TARGET_SLEEPS)

    def close(self) -> list[int]:
        """Forget the memory; return the command ids that were out."""
        self._landing.clear()
        self._sends.clear()
        self._direct.clear()
        return super().close()

    # -- the parts

    def _checked(self, step: Callable[[], bool]) -> bool:
        try:
            return step()
        except Violation:
            self.state = State.CLOSED
            raise

    def _fill(self) -> bool:
        """Put chunks of writes into the buffers that are free."""
        memory, begin = self._memory, self._filled
        while self._sends:
            if self._filled - self._emptied >= self._buffers:
                self._emptied = memory.check(
                    dma.OUT_EMPTIED, self._emptied, self._filled, "buffers to the target emptied"
                )
                if self._filled - self._emptied >= self._buffers:
                    break
            send = self._sends[0]
            whole = send.memory.nbytes
            nbytes = min(self._chunk_bytes, whole - send.done)
            part = send.memory[send.done : send.done + nbytes]
            memory.data(self._filled, nbytes, outward=True)[:] = part
            HEADER.pack_into(
                memory.header(self._filled, outward=True), 0,
                send.packet, whole, send.chunk, nbytes,
            )  # fmt: skip
            send.done, send.chunk = send.done + nbytes, send.chunk + 1
            self._filled += 1
            memory.store(dma.OUT_FILLED, self._filled)
            if send.done == whole:
                self._sends.popleft()
        return self._filled != begin

    def _take(self) -> bool:
        memory = self._memory
        # In this order: a completion stands behind the chunks of its read.
        tail = memory.check(
            dma.CQ_TAIL, self._head, self._head + self.outstanding, "completions written"
        )
        filled = memory.check(
            dma.IN_FILLED, self._taken, self._taken + self._buffers, "buffers to the host filled"
        )
        found = tail != self._head or filled != self._taken
        while self._taken < filled:
            self._land(self._taken)
            self._taken += 1
            memory.store(dma.IN_EMPTIED, self._taken)
        while self._head < tail:
            self._take_answer(bytes(memory.completion(self._head)))
            self._head += 1
        if found:
            memory.store(dma.CQ_HEAD, self._head)
        return found

    def _land(self, position: int) -> None:
        header = bytes(self._memory.header(position, outward=False))
        packet, whole, chunk, nbytes = HEADER.unpack(header)
        read = self._landing.get(packet)
        if read is None:
            raise Violation(f"a chunk of packet {packet}, which nothing reads")
        left = read.memory.nbytes - read.done
        want = (read.memory.nbytes, read.chunk, min(self._chunk_bytes, left))
        if (whole, chunk, nbytes) != want or not nbytes:
            raise Violation(
                f"packet {packet}: chunk {chunk} of {nbytes} bytes of {whole}, not chunk"
                f" {want[1]} of {want[2]} bytes of {want[0]}"
            )
        read.memory[read.done : read.done + nbytes] = self._memory.data(
            position, nbytes, outward=False
        )
        read.done, read.chunk = read.done + nbytes, chunk + 1
        self.chunks += 1

    def _take_answer(self, entry: bytes) -> None:
        cid, code, result, reads = self._parse_answer(entry)
        read = self._landing.pop(self._packets[cid], None)
        if read is not None and not code and read.done != reads:
            raise Violation(f"command {cid} read {read.done} bytes of {reads}, and succeeded")
        if code:
            self._sends = deque(send for send in self._sends if send.cid != cid)
        self._direct.discard(cid)
        self._finish(cid, code, result, reads)
