"""The work of one NVMe/RDMA queue on its way into a queue pair, without a copy of page data.

Rules:
1. Work is posted in order and in batches, as far as the send queue has room; `send` never blocks,
   False means that there is no room now.
2. Memory that a device knows (buffers of RegisteredPool, namespaces in memory) is named by its
   region.  Other memory, which only admin commands have, is copied through a region of its own.
3. The rule of memory_output.py; `abandon` gives back the buffers that are left, after the queue
   pair is closed.
4. A Pull is told to the queue once its data is there.
"""

import mmap
from collections.abc import Iterable
from dataclasses import dataclass, field

from hyades.common.nvme.rdma import RESPONSE_BYTES
from hyades.common.nvme.rdma_target import Answer, Pull, Push, RdmaTargetQueue, Work
from hyades.common.rdma.device import Device, Region, address_of
from hyades.common.rdma.endpoint import Endpoint, Send, Verb
from hyades.target_side.memory_output import MemoryOutput
from hyades.target_side.pool import Buffer, BufferPool

_BATCH = 16


class RegisteredPool(BufferPool):
    """A pool whose buffers a device knows."""

    def __init__(self, limit: int, device: Device) -> None:
        super().__init__(limit)
        self._device = device
        self._regions: dict[int, Region] = {}

    def _make(self, size: int) -> Buffer:
        buffer = super()._make(size)
        self._regions[id(buffer)] = self._device.register(buffer.whole, remote=False)
        return buffer

    def _drop(self, buffer: Buffer) -> None:
        self._device.forget(self._regions.pop(id(buffer)))


@dataclass(slots=True)
class _Item:
    """One piece of work, and the buffers that are free after it."""

    work: Work
    buffers: list[Buffer] = field(default_factory=list)


@dataclass(slots=True)
class _Attached:
    """What happens when a send is done."""

    buffers: list[Buffer]
    pull: Pull | None = None
    copy: "_Copy | None" = None


class _Copy:
    """Memory that stands in for other memory until the device is done with it."""

    __slots__ = ("_device", "memory", "region")

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.memory = memoryview(mmap.mmap(-1, nbytes))
        self.region = device.register(self.memory, remote=False)

    def close(self) -> None:
        self._device.forget(self.region)


class RdmaOutput(MemoryOutput[_Item]):
    """See the module."""

    def __init__(self, endpoint: Endpoint, queue: RdmaTargetQueue, pool: BufferPool) -> None:
        super().__init__(pool)
        self._endpoint, self._queue = endpoint, queue
        capacity = endpoint.ring.capacity
        self._answers = memoryview(mmap.mmap(-1, capacity * RESPONSE_BYTES))
        self._region = endpoint.device.register(self._answers, remote=False)
        self._next, self._capacity = 0, capacity

    def push(self, segments: Iterable[Work]) -> None:
        """Queue work."""
        for work in segments:
            self._items.append(_Item(work))
            self.nbytes += _size(work)

    def send(self) -> bool:
        """Post what there is room for; return whether that was everything."""
        items, ring = self._items, self._endpoint.ring
        while items and ring.room:
            batch: list[Send] = []
            while items and len(batch) < min(_BATCH, ring.room):
                item = items.popleft()
                self.nbytes -= _size(item.work)
                batch.append(self._prepare(item))
            self._endpoint.post(batch)
        return not items

    def done(self, attached: _Attached) -> None:
        """Take what came back with a send that is done."""
        self._release(attached.buffers)
        pull, copy = attached.pull, attached.copy
        if pull is not None:
            self.moved += pull.into.nbytes
            if copy is not None:
                pull.into[:] = copy.memory
            self._queue.pulled(pull.cid)
        if copy is not None:
            copy.close()

    def abandon(self, left: Iterable[_Attached]) -> None:
        """Forget everything; *left* is what the queue pair, which is closed, has not done."""
        for attached in left:
            self._release(attached.buffers)
            if attached.copy is not None:
                attached.copy.close()
        self._forget()
        self._endpoint.device.forget(self._region)

    def _prepare(self, item: _Item) -> Send:
        work = item.work
        if isinstance(work, Answer):
            return self._answer(work, item.buffers)
        if isinstance(work, Push):
            payload = work.payload
            assert isinstance(payload, memoryview)
            local, lkey, copy = self._locate(payload)
            if copy is not None:
                copy.memory[:] = payload
            self.moved += payload.nbytes
            attached = _Attached(item.buffers, copy=copy) if item.buffers or copy else None
            return Send(
                Verb.WRITE, local, payload.nbytes, lkey, work.address, work.key, attached,
                signal=attached is not None,
            )  # fmt: skip
        local, lkey, copy = self._locate(work.into)
        return Send(
            Verb.READ, local, work.into.nbytes, lkey, work.address, work.key,
            _Attached(item.buffers, work, copy), signal=True,
        )  # fmt: skip

    def _answer(self, work: Answer, buffers: list[Buffer]) -> Send:
        # There are as many places as sends that may be out, so this one is free.
        at = self._next % self._capacity * RESPONSE_BYTES
        self._next += 1
        self._answers[at : at + RESPONSE_BYTES] = work.capsule
        invalidate = work.invalidate and self._endpoint.device.invalidates
        return Send(
            Verb.SEND_AND_INVALIDATE if invalidate else Verb.SEND, self._region.base + at,
            RESPONSE_BYTES, self._region.lkey, 0, work.invalidate,
            _Attached(buffers) if buffers else None, signal=bool(buffers),
        )  # fmt: skip

    def _locate(self, memory: memoryview) -> tuple[int, int, _Copy | None]:
        """Return what the device calls *memory*, its key, and what stands in for it, if need be."""
        if not memory.readonly:
            address = address_of(memory)
            region = self._endpoint.device.find(address, memory.nbytes)
            if region is not None:
                return region.translate(address), region.lkey, None
        copy = _Copy(self._endpoint.device, memory.nbytes)
        return copy.region.base, copy.region.lkey, copy


def _size(work: Work) -> int:
    if isinstance(work, Answer):
        return len(work.capsule)
    return work.payload.nbytes if isinstance(work, Push) else 0
