"""Stream whole lanes of objects through a function: rows stages, attention scores, moments.

Each worker takes the next lane, reads its pages of every input through the ring, with the lane
after it already on the way, and may write the result's pages. Lanes are independent, so the bits do
not depend on the number of workers.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyades.common.layout import REQUEST, Op, RequestFlag
from hyades.common.port import Port
from hyades.common.ring import FAILED, STOP
from hyades.common.units import round_up
from hyades.gpu_side.decode import decode_range
from hyades.gpu_side.scan import fill_pages, torch_dtype_view
from hyades.gpu_side.scratch import scratch
from hyades.gpu_side.stores import PageStoreInfo

_DEPTH = 2


class ReadFailed(Exception):  # noqa: N818 - internal: the coordinator turns it into one of the five
    """A request failed (the port's failures say which), or the run was told to stop."""


@dataclass(slots=True)
class _Buffer:
    """Slots and arena bytes of one lane of one object."""

    store: PageStoreInfo
    at: int
    slot: int
    generation: int = 0
    pages: range = range(0)

    @property
    def nbytes(self) -> int:
        return self.store.shape.pages_per_range * self.store.page_bytes


LaneFunction = Callable[[int, list[Tensor]], Tensor | None]


class LaneStream:
    """Runs a function over lanes; see the module."""

    def __init__(
        self, port: Port, sources: Sequence[PageStoreInfo], target: PageStoreInfo | None,
        lanes: NDArray[np.int64], workers: int, check: bool, room: int,
    ) -> None:  # fmt: skip
        """Use at most *room* bytes at the start of the arena: hidden rows may lie behind."""
        self.port = port
        self.sources = tuple(sources)
        self.target = target
        self.lanes = lanes
        self.check = check
        self.finished = 0
        total = 0 if target is None else target.shape.ranges
        self.durable = np.zeros(total, bool)
        per_lane = 0 if target is None else target.shape.pages_per_range
        self.crcs = np.zeros((total, per_lane), np.int64)
        self._next = 0
        self._lock = threading.Lock()
        self._at = self._slot = 0
        self.workers, self._depth = self._share_out(workers, room)
        self._inputs = [
            [[self._buffer(s) for s in self.sources] for _ in range(self._depth)]
            for _ in range(self.workers)
        ]
        self._outputs = [
            None if target is None else self._buffer(target) for _ in range(self.workers)
        ]
        port.require(self._slot, self._at)
        port.ready[: self._slot] = 0

    def _share_out(self, workers: int, room: int) -> tuple[int, int]:
        """Return how many workers the arena holds lanes for, and how many lanes each."""
        lanes = [s.shape.pages_per_range * s.page_bytes for s in self.sources]
        target = self.target
        out = 0 if target is None else target.shape.pages_per_range * target.page_bytes
        worker = _DEPTH * sum(lanes) + out
        if worker > room:
            return 1, 1
        return min(workers, room // max(worker, 1)), _DEPTH

    def _buffer(self, store: PageStoreInfo) -> _Buffer:
        buffer = _Buffer(store, self._at, self._slot)
        self._at += round_up(buffer.nbytes, 4096)
        self._slot += store.shape.pages_per_range
        return buffer

    def work(self, worker: int, function: LaneFunction) -> None:
        """Process lanes until none is left; raise ReadFailed or what *function* raises."""
        if worker >= self.workers:  # memory is short: the others take its lanes
            return
        ahead: list[tuple[int, list[_Buffer]]] = []
        turn = 0
        while True:
            while len(ahead) < self._depth:
                lane = self._take()
                if lane < 0:
                    break
                buffers = self._inputs[worker][turn % self._depth]
                turn += 1
                for buffer in buffers:
                    self._post(buffer, lane, Op.READ)
                ahead.append((lane, buffers))
            if not ahead:
                break
            self._check_alive()
            lane, buffers = ahead.pop(0)
            scratch().clear()
            blocks = [self._rows(buffer, lane) for buffer in buffers]
            result = function(lane, blocks)
            if result is not None:
                self._write(worker, lane, result)
            with self._lock:
                self.finished += 1

    def _take(self) -> int:
        with self._lock:
            if self._next >= len(self.lanes):
                return -1
            lane = int(self.lanes[self._next])
            self._next += 1
            return lane

    def _post(self, buffer: _Buffer, lane: int, op: Op) -> None:
        store = buffer.store
        buffer.pages = range(store.shape.first_page(lane), store.shape.first_page(lane + 1))
        buffer.generation += 1
        count = len(buffer.pages)
        if lane < store.kept:
            return
        records = np.zeros(count, REQUEST)
        slots = buffer.slot + np.arange(count)
        self.port.ready[slots] = 0
        records["lba"] = store.lbas[buffer.pages.start : buffer.pages.stop]
        records["offset"] = buffer.at + np.arange(count) * store.page_bytes
        pages = slice(buffer.pages.start, buffer.pages.stop)
        records["nbytes"] = store.page_bytes if store.nbytes is None else store.nbytes[pages]
        records["slot"], records["op"] = slots, int(op)
        records["device"], records["generation"] = store.device, buffer.generation
        records["object"], records["cookie"] = store.number, slots
        records["page"] = np.arange(buffer.pages.start, buffer.pages.stop)
        if op == Op.WRITE:
            records["flags"] = int(RequestFlag.MAKE_CRC)
        elif self.check and store.crcs is not None:
            records["flags"] = int(RequestFlag.CHECK_CRC)
            records["crc"] = store.crcs[pages]
        absent = store.lbas[pages] < 0  # a sampled view has no row there
        self.port.ready[slots[absent]] = buffer.generation
        records = records[~absent]
        done, count = 0, len(records)
        while done < count:
            done += self.port.ring.push(records[done:])
            if done < count:
                self._check_alive()
                time.sleep(1e-4)

    def _check_alive(self) -> None:
        if self.port.ring.control[FAILED] != 0 or self.port.ring.control[STOP] != 0:
            raise ReadFailed

    def _wait(self, buffer: _Buffer) -> None:
        if buffer.pages.start < buffer.store.shape.first_page(buffer.store.kept):
            return
        words = self.port.ready[buffer.slot : buffer.slot + len(buffer.pages)]
        while True:
            if np.any(words < 0):
                raise ReadFailed
            if np.all(words == buffer.generation):
                return
            self._check_alive()
            time.sleep(5e-5)

    def _place(self, buffer: _Buffer) -> int:
        """Return where the pages of the buffer's lane lie in the arena."""
        store = buffer.store
        return (
            store.arena_at + buffer.pages.start * store.page_bytes
            if buffer.pages.start < store.shape.first_page(store.kept)
            else buffer.at
        )

    def _rows(self, buffer: _Buffer, lane: int) -> Tensor:
        self._wait(buffer)
        store = buffer.store
        shape = store.shape
        rows = min(shape.range_rows, shape.rows - lane * shape.range_rows)
        at = self._place(buffer)
        raw = self.port.arena[at : at + len(buffer.pages) * store.page_bytes]
        if store.view is not None:
            return decode_range(store, lane, raw)
        per_page, used = shape.rows_per_page, shape.rows_per_page * shape.row_bytes
        if used == store.page_bytes:
            return torch_dtype_view(raw[: rows * shape.row_bytes], store.dtype, store.width)
        whole = scratch().take(rows, store.width)
        for index, page in enumerate(raw.reshape(-1, store.page_bytes)):
            part = whole[index * per_page : (index + 1) * per_page]
            values = page[: len(part) * shape.row_bytes].view(store.dtype).reshape(part.shape)
            part.copy_(torch.from_numpy(values))
        return whole

    def _write(self, worker: int, lane: int, rows: Tensor) -> None:
        buffer = self._outputs[worker]
        assert buffer is not None
        assert self.target is not None
        shape = self.target.shape
        count = shape.first_page(lane + 1) - shape.first_page(lane)
        first = shape.first_page(lane)
        buffer.pages = range(first, first + count)
        at = self._place(buffer)
        fill_pages(self.target, rows, self.port.arena[at : at + count * shape.page_bytes])
        self._post(buffer, lane, Op.WRITE)
        self._wait(buffer)
        self.crcs[lane, :count] = self.port.crcs[buffer.slot : buffer.slot + count]
        self.durable[lane] = True
