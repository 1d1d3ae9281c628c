"""A growable device in the memory of this process: ``mem://`` or, shared by name, ``mem://name``."""

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.jit import jit
from hyades.common.layout import BLOCK, RQ_LBA, RQ_OFFSET, RQ_OP
from hyades.common.units import MIB, format_size
from hyades.proxy.records import READ, WRITE, Words
from hyades.proxy.transport import Limits
from hyades.proxy.transports.queued import QueuedTransport, check_batch
from hyades.proxy.urls import Url

_stores: dict[str, "MemoryStore"] = {}
_stores_lock = threading.Lock()


class MemoryStore:
    """The bytes of one in-memory device; several transports may share it, each on its thread."""

    def __init__(self, nblocks: int = 0) -> None:
        self.lock = threading.Lock()
        self.nblocks = nblocks
        self.data = np.zeros(nblocks * BLOCK, np.uint8)

    def grow(self, nblocks: int) -> None:
        """Make the store at least *nblocks* long; new blocks are zero."""
        with self.lock:
            if nblocks <= self.nblocks:
                return
            if nblocks * BLOCK > len(self.data):
                # Untouched zero pages cost nothing, so twice the room avoids copying at each step.
                try:
                    larger = np.zeros(max(nblocks * BLOCK, 2 * len(self.data)), np.uint8)
                except MemoryError:
                    raise UsageError(
                        f"a memory device of {format_size(nblocks * BLOCK)} does not fit in memory:"
                        " use a file"
                    ) from None
                used = self.nblocks * BLOCK
                larger[:used] = self.data[:used]
                self.data = larger
            self.nblocks = nblocks


class MemTransport(QueuedTransport):
    """Copies between the arena and a MemoryStore, in order, when polled."""

    def __init__(
        self,
        store: MemoryStore | None = None,
        *,
        name: str = "",
        writable: bool = True,
        max_transfer: int = 4 * MIB,
        max_inflight: int = 256,
    ) -> None:
        super().__init__(max_transfer=max_transfer, max_inflight=max_inflight)
        self.store = store if store is not None else MemoryStore()
        self.name = name
        self._writable = writable

    @property
    def nblocks(self) -> int:
        """Blocks of the store now."""
        return self.store.nblocks

    def grow(self, nblocks: int) -> None:
        """Make the device at least *nblocks* long."""
        if not self._writable:
            raise UsageError(f"{self.describe()} is open for reading only")
        self.store.grow(nblocks)

    def describe(self) -> str:
        """Return one line for people."""
        return f"mem://{self.name}: {format_size(self.nblocks * BLOCK)} in memory"

    def _transfer(self, batch: Words, out: Words, arena: NDArray[np.uint8]) -> None:
        store, limits = self.store, self._limits
        with store.lock:
            args = (store.nblocks, len(arena), limits.max_transfer, self._writable)
            check_batch(batch, out, *args)
            _copy(batch, out, store.data, arena)


@jit
def _copy(batch: Any, out: Any, data: Any, arena: Any) -> None:
    for i in range(batch.shape[0]):
        nbytes = out[i, 1] >> 32
        if nbytes <= 0:  # refused, or a flush
            continue
        start = batch[i, RQ_LBA] * BLOCK
        offset = batch[i, RQ_OFFSET]
        op = batch[i, RQ_OP] & 0xFF
        if op == READ:
            arena[offset : offset + nbytes] = data[start : start + nbytes]
        elif op == WRITE:
            data[start : start + nbytes] = arena[offset : offset + nbytes]


def open_url(url: Url, *, create: bool, writable: bool) -> MemTransport:
    """Open ``mem://[name][?size=&max_transfer=&max_inflight=]``; a name lives until `forget`."""
    size = url.size("size", 0)
    limits = Limits(
        url.size("max_transfer", 4 * MIB), url.integer("max_inflight", 256, least=1), BLOCK
    )
    url.refuse_unused()
    name = url.path
    with _stores_lock:
        store = _stores.get(name) if name else MemoryStore()
        if store is None:
            if not create:
                known = ", ".join(f"mem://{n}" for n in sorted(_stores)) or "none"
                raise UsageError(f"this process has no mem://{name}; it has: {known}")
            store = _stores[name] = MemoryStore()
    store.grow(-(-size // BLOCK))
    return MemTransport(
        store,
        name=name,
        writable=writable,
        max_transfer=limits.max_transfer,
        max_inflight=limits.max_inflight,
    )


def forget(name: str) -> None:
    """Drop the store ``mem://name``; transports that are open keep theirs."""
    with _stores_lock:
        _stores.pop(name, None)


def probe() -> str | None:
    """Return None: memory is always there."""
    return None
