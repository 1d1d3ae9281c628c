"""Where a scheduler and a proxy meet: the ring, the ready table and the arena, nothing else.

Rules:
1. The scheduler writes requests and reads ready words; the proxy reads requests and writes ready
   words: the request's generation once its data is in place (release), or a negative Status.
2. `crcs[slot]` is written before the ready word of a request with MAKE_CRC.
3. `Port.failures` is about requests of every device; a failure's `place` is text of the transport,
   since this side knows no transports.
4. A proxy that dies sets the ring's FAILED word; `failures` then says why.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.layout import Status
from hyades.common.ring import Ring


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed after retries."""

    object: int
    page: int
    lba: int
    status: Status
    device: int
    write: bool
    flush: bool = False
    place: str = ""  # where the block lies, where device and LBA do not say it: target, namespace


class FailureSource(Protocol):
    """Says what went wrong on the other side of the ring."""

    def __call__(self) -> list[Failure]: ...


@dataclass(frozen=True, slots=True)
class Port:
    """The memory that both sides see."""

    ring: Ring
    ready: NDArray[np.int64]
    crcs: NDArray[np.uint32]
    arena: NDArray[np.uint8]
    failures: FailureSource
    death: Callable[[], BaseException | None]

    @property
    def slots(self) -> int:
        """Requests of a scan that can be in flight: ready words, and ring slots."""
        return min(len(self.ready) - 1, self.ring.capacity)

    @property
    def flush_slot(self) -> int:
        """The ready word of a run's flushes, which no scan uses."""
        return len(self.ready) - 1

    def require(self, slots: int, nbytes: int) -> None:
        """Raise UsageError unless a scan of this size fits the port."""
        if slots > self.slots:
            raise UsageError(f"this plan needs {slots} page slots, the ring has {self.slots}")
        if nbytes > len(self.arena):
            raise UsageError(f"this plan needs {nbytes} bytes, the arena has {len(self.arena)}")
