"""The one protocol that every transport implements; tests/contracts/transport.py is its suite.

Rules:
1. `register(arena)` comes before the first submit; request offsets index that arena.
2. `submit` accepts a prefix of the batch and returns its length; it never blocks, and never raises
   for what the device answers.  Misuse of the API itself (no arena, closed) raises UsageError.
   A request outside the device or arena, misaligned, longer than `max_transfer` or of unknown op
   completes with Status.INVALID.
3. Every accepted request completes exactly once, in any order, with its cookie unchanged.
4. Short transfers are continued inside the transport; a completion is whole or carries an error.
5. FLUSH completes after every WRITE that *completed* before the flush was submitted is durable.
6. `close` cancels what it can; what was accepted and not yet reported is reported by later polls,
   with Status.CANCELLED where it did not run.  After close, submit raises UsageError.
   Buffers are never touched after close returns.
7. One thread at a time calls submit, poll and wait.
8. A transport whose name and LBA do not say where a block lies has `locate(lba) -> str`: target,
   namespace and LBA there.  One that cuts requests into parts may have `failed_lba(lba, nblocks)`:
   the first block of a part in that range that failed lately, else *lba*.  One that knows why a
   flush failed has `flush_failure() -> str`.  Any thread may call them, also after close;
   hyades.proxy.locate does, for messages.
9. One that by itself waits for lost paths has `patience`: seconds without any completion after
   which everything has ended, with Status.LOST if need be.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyades.common.viewspec import ViewHead

Records = NDArray[np.void]  # structured: layout.REQUEST or layout.COMPLETION


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request and one queue may hold."""

    max_transfer: int  # bytes in one request (MDTS)
    max_inflight: int
    alignment: int  # bytes, of offset, nbytes and the arena
    shared_arena: bool = False  # register takes only arenas of allocate_arena(..., shared=True)


class Transport(Protocol):
    """Moves pages between an arena and a device of 4096-byte blocks."""

    @property
    def limits(self) -> Limits: ...
    @property
    def nblocks(self) -> int: ...
    def register(self, arena: NDArray[np.uint8]) -> None: ...
    def submit(self, requests: Records) -> int: ...
    def poll(self, completions: Records) -> int: ...
    def wait(self, timeout: float) -> None:
        """Return when a completion may be there, or after *timeout* seconds."""
        ...

    def grow(self, nblocks: int) -> None:
        """Make the device at least *nblocks* long; UsageError where it has a fixed size."""
        ...

    def close(self) -> None: ...
    def stats(self) -> dict[str, Any]:
        """Return at least bytes_read, bytes_written, requests, errors and the text describe."""
        ...


class ViewTransport(Transport, Protocol):
    """A transport of the blocks of a view, which are only read."""

    @property
    def head(self) -> ViewHead:
        """What the first blocks say: what the view is of, and where its pages lie."""
        ...
