"""A device without storage, as SPDK's null bdev: ``null://[?size=1TiB&fill=zero|none]``.

Writes vanish.  Reads give zeros, or with ``fill=none`` leave the buffer as it is, which costs
nothing: a benchmark that reads from it measures everything but the storage.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.jit import jit
from hyades.common.layout import BLOCK, RQ_OFFSET, RQ_OP
from hyades.common.units import GIB, MIB, format_size
from hyades.proxy.records import READ, Words
from hyades.proxy.transports.queued import QueuedTransport, check_batch
from hyades.proxy.urls import Url


class NullTransport(QueuedTransport):
    """Completes every valid request without moving data."""

    def __init__(
        self,
        nblocks: int = 1024 * GIB // BLOCK,
        *,
        fill: bool = True,
        writable: bool = True,
        max_transfer: int = 4 * MIB,
        max_inflight: int = 256,
    ) -> None:
        super().__init__(max_transfer=max_transfer, max_inflight=max_inflight)
        self._nblocks = nblocks
        self._fill = fill
        self._writable = writable

    @property
    def nblocks(self) -> int:
        """Blocks of the device."""
        return self._nblocks

    def grow(self, nblocks: int) -> None:
        """Make the device at least *nblocks* long."""
        self._nblocks = max(self._nblocks, nblocks)

    def describe(self) -> str:
        """Return one line for people."""
        reads = "reads give zeros" if self._fill else "reads leave the buffer as it is"
        return f"null://: {format_size(self._nblocks * BLOCK)} of nothing, {reads}"

    def _transfer(self, batch: Words, out: Words, arena: NDArray[np.uint8]) -> None:
        limit = self._limits.max_transfer
        check_batch(batch, out, self._nblocks, len(arena), limit, self._writable)
        if self._fill:
            _zero(batch, out, arena)


@jit
def _zero(batch: Any, out: Any, arena: Any) -> None:
    for i in range(batch.shape[0]):
        nbytes = out[i, 1] >> 32
        if nbytes > 0 and batch[i, RQ_OP] & 0xFF == READ:
            offset = batch[i, RQ_OFFSET]
            arena[offset : offset + nbytes] = 0


def open_url(url: Url, *, create: bool, writable: bool) -> NullTransport:  # noqa: ARG001
    """Open ``null://[?size=&fill=&max_transfer=&max_inflight=]``."""
    fill = url.text("fill", "zero")
    if fill not in ("zero", "none"):
        raise UsageError(f"{url}: fill is zero or none, not {fill!r}")
    transport = NullTransport(
        -(-url.size("size", 1024 * GIB) // BLOCK),
        fill=fill == "zero",
        writable=writable,
        max_transfer=url.size("max_transfer", 4 * MIB),
        max_inflight=url.integer("max_inflight", 256, least=1),
    )
    url.refuse_unused()
    return transport


def probe() -> str | None:
    """Return None: nothing is needed."""
    return None
