"""A BlockDevice (common/blocks.py) over any Transport: what a volume keeps its metadata on."""

import time
from typing import Any

import numpy as np

from hyades.common.blocks import as_bytes, check_span
from hyades.common.errors import DataError, DeviceLost, UsageError
from hyades.common.layout import BLOCK, COMPLETION, REQUEST, Op, Status
from hyades.common.units import MIB
from hyades.proxy.arena import allocate_arena
from hyades.proxy.transport import Transport

_RETRIED = (Status.IO, Status.SHORT, Status.TIMEOUT)
_ATTEMPTS = 3
_PATIENCE = 60.0  # seconds without any completion before the device counts as lost


class TransportBlocks:
    """Synchronous reads and writes of whole blocks through a transport that it owns."""

    def __init__(self, transport: Transport, name: str, *, buffer: int = 4 * MIB) -> None:
        """Take over *transport* (no arena registered yet); *name* is its URL, for messages."""
        self.name = name
        self._transport = transport
        limits = transport.limits
        self._piece = min(limits.max_transfer, buffer) // BLOCK * BLOCK
        self._pieces = max(1, min(limits.max_inflight, buffer // self._piece))
        self._arena = allocate_arena(self._piece * self._pieces, shared=limits.shared_arena)
        self._closed = False
        self._lost = ""
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
        for start, stop in self._rounds(len(data)):
            self._run(Op.READ, lba, start, stop)
            target[start:stop] = self._arena[: stop - start]
        return data

    def write(self, lba: int, data: Any) -> None:
        """Write the buffer *data*, a whole number of blocks inside the device."""
        view = as_bytes(data)
        check_span(self, lba, len(view))
        source = np.frombuffer(view, np.uint8)
        for start, stop in self._rounds(len(view)):
            self._arena[: stop - start] = source[start:stop]
            self._run(Op.WRITE, lba, start, stop)

    def flush(self) -> None:
        """Return when every write that returned before is durable."""
        self._execute(Op.FLUSH, self._requests(Op.FLUSH, 0, 1))

    def grow(self, nblocks: int) -> None:
        """Make the device at least *nblocks* long; UsageError when there is no space."""
        self._transport.grow(nblocks)

    def close(self) -> None:
        """Close the transport."""
        if not self._closed:
            self._closed = True
            self._transport.close()

    def stats(self) -> dict[str, Any]:
        """Return the transport's counters."""
        return self._transport.stats()

    def _rounds(self, nbytes: int) -> list[tuple[int, int]]:
        step = len(self._arena)
        return [(start, min(start + step, nbytes)) for start in range(0, nbytes, step)]

    def _requests(self, op: Op, lba: int, nbytes: int) -> Any:
        count = -(-nbytes // self._piece)
        records = np.zeros(count, REQUEST)
        records["op"] = op
        records["cookie"] = np.arange(count)
        if op != Op.FLUSH:
            starts = np.arange(count, dtype=np.uint64) * np.uint64(self._piece)
            records["offset"] = starts
            records["lba"] = np.uint64(lba) + starts // np.uint64(BLOCK)
            records["nbytes"] = np.minimum(self._piece, nbytes - starts.astype(np.int64))
        return records

    def _run(self, op: Op, lba: int, start: int, stop: int) -> None:
        self._execute(op, self._requests(op, lba + start // BLOCK, stop - start))

    def _execute(self, op: Op, records: Any) -> None:
        left, status = records, np.full(len(records), Status.IO, np.int32)
        for _ in range(_ATTEMPTS):
            if not np.isin(status, _RETRIED).all():
                break
            left["cookie"] = np.arange(len(left))
            status = self._once(left)
            failed = status != Status.OK
            left, status = left[failed], status[failed]
            if not len(left):
                return
        first = int(np.argmin(status))
        raise self._error(op, int(left["lba"][first]), Status(int(status[first])))

    def _once(self, records: Any) -> Any:
        """Run *records*, whose cookies are 0, 1, ...; return their statuses."""
        if self._lost:  # what is still in flight must not be taken for an answer to these
            raise DeviceLost(self._lost)
        transport, total = self._transport, len(records)
        status = np.zeros(total, np.int32)
        completions = np.zeros(total, COMPLETION)
        sent = ended = 0
        deadline = time.monotonic() + _PATIENCE
        while ended < total:
            sent += transport.submit(records[sent:]) if sent < total else 0
            count = transport.poll(completions)
            done = completions[:count]
            status[done["cookie"].astype(np.int64)] = done["status"]
            ended += count
            if count:
                deadline = time.monotonic() + _PATIENCE
            elif time.monotonic() > deadline:
                self._lost = f"{self.name}: no answer for {_PATIENCE:.0f} s"
                raise DeviceLost(self._lost)
            else:
                transport.wait(0.1)
        return status

    def _error(self, op: Op, lba: int, status: Status) -> Exception:
        what = f"{self.name}: {op.name.lower()} at LBA {lba} failed: Status.{status.name}"
        if status == Status.NO_SPACE:
            return UsageError(f"{what}: no space left on the device")
        if status == Status.INVALID:
            return UsageError(f"{what}: outside the device of {self.nblocks} blocks or read-only")
        tried = f" after {_ATTEMPTS} attempts" if status in _RETRIED else ""
        return DeviceLost(f"{what}{tried}: check the device or the path to it")
