"""The work of one queue over shared memory, done by a DMA engine.

Rules:
1. Pushes and answers are begun and retired in order: an answer is posted once the copies of what
   stands before it have ended.  Several pushes are under way at once, as far as the engine and the
   buffers that the host has emptied allow.  `send` never blocks; False means that something waits.
2. Pulls and chunks of writes end by themselves, in any order.
3. A copy is cut at the engine's `max_copy`.  Page data lies in memory that the device knows
   (buffers of DmaPool, namespaces in memory); other memory, which only admin commands have, is
   copied by the CPU.
4. A copy that fails ends the connection: DeviceLost.
5. The rule of memory_output.py, where done is retired; `abandon` gives back the buffers that are
   left, after the engine is closed.
"""

import ctypes
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hyades.common.dma.engine import COPY, DONE, Device, Engine
from hyades.common.errors import DeviceLost
from hyades.common.nvme.dma_target import Answer, Chunk, DmaTargetQueue, Pull, Push, Work
from hyades.common.rdma.device import address_of
from hyades.target_side.memory_output import MemoryOutput
from hyades.target_side.pool import Buffer, BufferPool

_REPORTS = 64


class DmaPool(BufferPool):
    """A pool whose buffers a device knows."""

    def __init__(self, limit: int, device: Device) -> None:
        super().__init__(limit)
        self._device = device

    def _make(self, size: int) -> Buffer:
        buffer = super()._make(size)
        self._device.register(address_of(buffer.whole), size)
        return buffer

    def _drop(self, buffer: Buffer) -> None:
        self._device.forget(address_of(buffer.whole))


@dataclass(slots=True)
class _Step:
    """Something that is under way: what happens when its copies have ended."""

    finish: Callable[[], None]
    ordered: bool = True  # finished by `_retire`, else when its last copy has ended
    copies: int = 0  # that have not ended
    memory: object = None  # what they touch, kept that long
    buffers: list[Buffer] = field(default_factory=list)


@dataclass(slots=True)
class _Item:
    """A push or an answer that has not been begun, or only in part."""

    work: Push | Answer
    buffers: list[Buffer] = field(default_factory=list)
    done: int = 0  # bytes in chunks that were begun
    chunk: int = 0


class DmaOutput(MemoryOutput[_Item]):
    """See the module."""

    def __init__(
        self, queue: DmaTargetQueue, pool: BufferPool, device: Device, engine: Engine
    ) -> None:
        super().__init__(pool)
        self.arena = memoryview(b"")  # the host's
        self._queue, self._device, self._engine = queue, device, engine
        self._flight: deque[_Step] = deque()  # in order
        self._loose: dict[int, _Step] = {}  # by cookie: copies that are under way
        self._copies: deque[tuple[int, int, int, int]] = deque()  # that the engine has not taken
        self._next = 0
        self._reports = np.zeros(_REPORTS, DONE)

    @property
    def copying(self) -> bool:
        """Whether copies are under way, which nobody but a look at the engine tells of."""
        return bool(self._loose)

    def push(self, segments: Iterable[Work]) -> None:
        """Queue work."""
        for work in segments:
            if isinstance(work, Pull):
                into, cid = work.into, work.cid
                step = _Step(partial(self._queue.pulled, cid), ordered=False)
                self._copy(step, self.arena[work.at : work.at + into.nbytes], into)
                if not step.copies:
                    step.finish()
                continue
            self._items.append(_Item(work))
            self.nbytes += _size(work)

    def send(self) -> bool:
        """Begin and retire what can be; return whether nothing is left."""
        self.progress()
        while self._items and self._begin(self._items[0]):
            item = self._items.popleft()
            self._flight[-1].buffers.extend(item.buffers)
            self._retire()
        self._give()
        self.progress()
        return not (self._items or self._flight)

    def receive(self) -> bool:
        """Begin the chunks of writes that are there; return whether anything happened."""
        queue = self._queue
        found = False
        while (chunk := queue.next_chunk()) is not None:
            found = True
            step = _Step(partial(self._landed, chunk), ordered=False)
            self._copy(step, chunk.source, chunk.into)
            if not step.copies:
                step.finish()
        self._give()
        return self.progress() or found

    def progress(self) -> bool:
        """Take what the engine has done; return whether there was anything."""
        found = False
        while self._loose or self._engine.outstanding:
            count = self._engine.poll(self._reports)
            if not count:
                break
            found = True
            for cookie, status in self._reports[:count].tolist():
                if status:
                    text = self._engine.explain(status)
                    raise DeviceLost(f"{self._device.name} DMA engine: a copy failed: {text}")
                step = self._loose.pop(cookie)
                step.copies -= 1
                if not step.copies and not step.ordered:
                    step.finish()
            self._give()
        self._retire()
        return found

    def abandon(self) -> None:
        """Forget everything; the engine is closed."""
        self._forget()
        for step in self._flight:
            self._release(step.buffers)
        self._flight.clear()
        self._loose.clear()
        self._copies.clear()
        self.arena = memoryview(b"")

    # -- the parts

    def _begin(self, item: _Item) -> bool:
        """Begin *item*, as far as there are buffers; return whether all of it is under way."""
        work = item.work
        if isinstance(work, Answer):
            self._flight.append(_Step(partial(self._queue.post, work)))
            self.nbytes -= _size(work)
            return True
        payload = work.payload
        assert isinstance(payload, memoryview)
        if work.at is not None:
            step = _Step(lambda: None)
            self._flight.append(step)
            self._copy(step, payload, self.arena[work.at : work.at + payload.nbytes])
            self._moved(payload.nbytes)
            return True
        while item.done < payload.nbytes:
            nbytes = min(self._queue.chunk_bytes, payload.nbytes - item.done)
            into = self._queue.reserve(nbytes)
            if into is None:
                return False
            header = (work.packet, payload.nbytes, item.chunk, nbytes)
            step = _Step(partial(self._queue.fill, *header))
            self._flight.append(step)
            self._copy(step, payload[item.done : item.done + nbytes], into)
            item.done, item.chunk = item.done + nbytes, item.chunk + 1
            self._moved(nbytes)
        return True

    def _moved(self, nbytes: int) -> None:
        self.nbytes -= nbytes
        self.moved += nbytes

    def _landed(self, chunk: Chunk) -> None:
        self.moved += chunk.into.nbytes
        self._queue.moved(chunk)

    def _copy(self, step: _Step, source: memoryview, destination: memoryview) -> None:
        """Let the engine copy; what the device does not know the CPU copies, now."""
        begin, end, nbytes = address_of(source), address_of(destination), source.nbytes
        if not (self._device.knows(begin, nbytes) and self._device.knows(end, nbytes)):
            ctypes.memmove(end, begin, nbytes)
            return
        step.memory = (source, destination)
        most = self._engine.max_copy
        for at in range(0, nbytes, most):
            self._copies.append((begin + at, end + at, min(most, nbytes - at), self._next))
            self._loose[self._next] = step
            step.copies += 1
            self._next += 1

    def _give(self) -> None:
        """Give the engine what it takes."""
        if self._copies:
            taken = self._engine.submit(np.array(self._copies, COPY))
            for _ in range(taken):
                self._copies.popleft()

    def _retire(self) -> None:
        """Finish what stands first and has ended."""
        while self._flight and not self._flight[0].copies:
            step = self._flight.popleft()
            step.finish()
            self._release(step.buffers)


def _size(work: Push | Answer) -> int:
    return len(work.entry) if isinstance(work, Answer) else work.payload.nbytes
