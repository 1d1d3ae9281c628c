"""A BlockDevice (common/blocks.py) over any Transport: what a volume keeps its metadata on.

Rules:
1. Data is moved in pieces of at most 256 KiB, each through a slot of the arena of its own, so that
   several are in flight at once; a piece that fails is tried again from its slot.
2. `write` returns when its data is in slots, not when it is on the device.  Whatever touches the
   blocks of a write in flight waits for it first: reads see it, later writes come later.
3. A write that failed in the end is reported by every write until a flush has reported it (or a
   flush or close at once), so nothing is ever committed on top of it.
4. A read, and a flush, reports its own failure.  Calls from several threads take turns.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hyades.common.blocks import as_bytes, check_span
from hyades.common.errors import DataError, DeviceLost, HyadesError, UsageError
from hyades.common.interrupts import undisturbed
from hyades.common.layout import BLOCK, COMPLETION, REQUEST, Op, Status
from hyades.common.units import KIB, MIB
from hyades.proxy.arena import allocate_arena
from hyades.proxy.locate import flush_failure, locate, patience
from hyades.proxy.transport import Transport

_RETRIED = (Status.IO, Status.SHORT, Status.TIMEOUT)
_ATTEMPTS = 3
_PATIENCE = 60.0  # seconds without any completion before the device counts as lost
_PIECE = 256 * KIB


class TransportBlocks:
    """Reads and writes of whole blocks through a transport that it owns; see the module."""

    def __init__(
        self, transport: Transport, name: str, *, buffer: int = 4 * MIB,
        closing: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Take over *transport* (no arena registered yet); *name* is its URL, for messages.

        *closing* is called at the end of `close`: it gives locks back.
        """
        self.name = name
        self._closing = closing
        self._transport = transport
        self._patience = patience(transport, _PATIENCE)
        limits = transport.limits
        self._piece = min(limits.max_transfer, buffer, _PIECE) // BLOCK * BLOCK
        count = max(1, min(limits.max_inflight, buffer // self._piece))
        self._arena = allocate_arena(self._piece * count, shared=limits.shared_arena)
        self._slots = np.zeros(count, REQUEST)  # what each slot is busy with; its cookie is itself
        self._slots["cookie"] = np.arange(count)
        self._slots["offset"] = np.arange(count) * self._piece
        self._tries = [0] * count
        self._free = deque(range(count))
        self._waiting: deque[int] = deque()  # slots that the transport has not taken yet
        self._writes: set[int] = set()  # slots with a write in flight
        self._ended: dict[int, Status] = {}  # slots whose read or flush has ended
        self._left: set[int] = set()  # slots in flight that nobody waits for, after an interrupt
        self._completions = np.zeros(count, COMPLETION)
        self._failed: HyadesError | None = None  # a write
        self._lost = ""
        self._closed = False
        self._lock = threading.RLock()
        transport.register(self._arena)

    @property
    def nblocks(self) -> int:
        """Length in blocks."""
        return self._transport.nblocks

    def read(self, lba: int, count: int) -> bytearray:
        """Return *count* blocks; DataError where the device ends first, DeviceLost on I/O error."""
        if lba < 0 or lba + count > self.nblocks:
            raise DataError(
                f"{self.name}: ends at LBA {self.nblocks}, but {count} blocks were expected"
                f" at LBA {lba}: truncated"
            )
        data = bytearray(count * BLOCK)
        target = np.frombuffer(data, np.uint8)
        with self._lock:
            self._refuse_closed()
            self._settle(lba, count)
            if count:
                self._transfer(Op.READ, lba, target)
        return data

    def write(self, lba: int, data: Any) -> None:
        """Take the buffer *data*, a whole number of blocks inside the device, for writing."""
        view = as_bytes(data)
        check_span(self, lba, len(view))
        source = np.frombuffer(view, np.uint8)
        with self._lock:
            self._refuse_closed()
            self._settle(lba, len(view) // BLOCK)
            if self._failed is not None:
                raise self._failed
            for start in range(0, len(source), self._piece):
                part = source[start : start + self._piece]
                self._start(Op.WRITE, lba + start // BLOCK, part)
                if self._failed is not None:
                    raise self._failed

    def flush(self) -> None:
        """Return when every write that returned before is durable."""
        with self._lock:
            self._refuse_closed()
            self._drain()
            self._raise_failed()
            self._transfer(Op.FLUSH, 0, np.zeros(0, np.uint8))

    def grow(self, nblocks: int) -> None:
        """Make the device at least *nblocks* long; UsageError with the missing bytes."""
        with self._lock:
            missing = (nblocks - self.nblocks) * BLOCK
            try:
                self._transport.grow(nblocks)
            except UsageError as error:
                raise UsageError(f"{error} ({missing} bytes are missing)") from error

    def close(self) -> None:
        """Finish what was written and close the transport; a write that failed is reported now."""
        with self._lock:
            if self._closed:
                return
            try:
                if not self._lost:
                    self._drain()
            finally:
                self._closed = True
                try:
                    self._transport.close()
                finally:
                    self._closing()
            self._raise_failed()

    def stats(self) -> dict[str, Any]:
        """Return the transport's counters."""
        return self._transport.stats()

    def _transfer(self, op: Op, lba: int, target: Any) -> None:
        """Read uint8 *target* from *lba* on, in as many slots at once as there are; or flush."""
        running: deque[tuple[int, Any]] = deque()
        try:
            self._stream(op, lba, target, running)
        except BaseException:
            for slot, _ in running:
                self._leave(slot)
            raise

    def _stream(self, op: Op, lba: int, target: Any, running: deque[tuple[int, Any]]) -> None:
        failed: HyadesError | None = None
        at, more = 0, True
        while running or more:
            if more and (self._free or not running):
                part = target[at : at + self._piece]
                self._start(op, lba + at // BLOCK, part, running)
                at += self._piece
            else:
                error = self._finish(running)
                failed = failed or error
            more = at < len(target) and failed is None
        if failed is not None:
            raise failed

    def _start(
        self, op: Op, lba: int, part: Any, running: deque[tuple[int, Any]] | None = None
    ) -> None:
        """Give a slot to *part*, from or for uint8[n]; note it in *running*, or as a write."""
        while not self._free:
            self._pump()
        with undisturbed():  # a slot is free or known to be in use at every moment
            slot = self._free.popleft()
            record = self._slots[slot : slot + 1]
            record["op"], record["lba"], record["nbytes"] = op, lba, len(part)
            self._tries[slot] = 1
            if running is None:
                at = slot * self._piece
                self._arena[at : at + len(part)] = part
                self._writes.add(slot)
            else:
                running.append((slot, part))
            self._waiting.append(slot)
            self._submit()

    def _finish(self, running: deque[tuple[int, Any]]) -> HyadesError | None:
        """Wait for the first of *running*, put its bytes in their place, and free its slot."""
        slot, part = running[0]
        while slot not in self._ended:
            self._pump()
        with undisturbed():
            status = self._ended.pop(slot)
            running.popleft()
            self._free.append(slot)
        if status != Status.OK:
            return self._error(slot, status)
        at = slot * self._piece
        part[:] = self._arena[at : at + len(part)]  # nothing was begun since
        return None

    def _leave(self, slot: int) -> None:
        """Free *slot* when its request has ended, whatever came of it."""
        if self._ended.pop(slot, None) is not None:
            self._free.append(slot)
        elif slot not in self._free:
            self._left.add(slot)

    def _settle(self, lba: int, count: int) -> None:
        """Wait for the writes in flight that touch *count* blocks from *lba* on."""
        end = lba + count
        while any(
            int(self._slots["lba"][slot]) < end
            and int(self._slots["lba"][slot]) + int(self._slots["nbytes"][slot]) // BLOCK > lba
            for slot in self._writes
        ):
            self._pump()

    def _drain(self) -> None:
        while self._writes:
            self._pump()

    def _raise_failed(self) -> None:
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError(f"{self.name} is closed")
        if self._lost:  # what is still in flight must not be taken for an answer to something new
            raise DeviceLost(self._lost)

    def _submit(self) -> None:
        with (
            undisturbed()
        ):  # what was submitted twice or forgotten would free its slot twice, never
            if self._waiting:
                for _ in range(self._transport.submit(self._slots[list(self._waiting)])):
                    self._waiting.popleft()

    def _collect(self) -> int:
        """Settle what has completed; return how many."""
        with undisturbed():
            count = self._transport.poll(self._completions)
            for done in self._completions[:count]:
                self._end(int(done["cookie"]), Status(int(done["status"])))
        return count

    def _pump(self) -> None:
        """Take at least one completion; DeviceLost where none comes."""
        deadline = time.monotonic() + self._patience
        while True:
            self._submit()
            if self._collect():
                return
            if time.monotonic() > deadline:
                self._lost = f"{self.name}: no answer for {self._patience:.0f} s"
                raise DeviceLost(self._lost)
            self._transport.wait(0.1)

    def _end(self, slot: int, status: Status) -> None:
        if status in _RETRIED and self._tries[slot] < _ATTEMPTS:
            self._tries[slot] += 1
            self._waiting.append(slot)
        elif slot in self._writes:
            self._writes.remove(slot)
            self._free.append(slot)
            if status != Status.OK and self._failed is None:
                self._failed = self._error(slot, status)
        elif slot in self._left:
            self._left.remove(slot)
            self._free.append(slot)
        else:
            self._ended[slot] = status

    def _error(self, slot: int, status: Status) -> HyadesError:
        op, lba = Op(int(self._slots["op"][slot])), int(self._slots["lba"][slot])
        where = f"LBA {lba}"
        if op != Op.FLUSH:
            blocks = int(self._slots["nbytes"][slot]) // BLOCK
            place = locate(self._transport, lba, blocks)
            where = f" at {where} ({place})" if place else f" at {where}"
        else:
            where, place = "", flush_failure(self._transport)
        what = f"{self.name}: {op.name.lower()}{where} failed: Status.{status.name}"
        if op == Op.FLUSH and place:
            what += f" ({place})"
        if status == Status.NO_SPACE:
            return UsageError(f"{what}: no space left on the device")
        if status == Status.INVALID:
            return UsageError(f"{what}: outside the device of {self.nblocks} blocks or read-only")
        tried = f" after {_ATTEMPTS} attempts" if status in _RETRIED else ""
        return DeviceLost(f"{what}{tried}: check the device or the path to it")
