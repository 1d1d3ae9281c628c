"""The request ring: bounded, lock-free, many producers and one consumer, in memory both sides see.

Rules (D. Vyukov's bounded queue, one 64-byte record a slot):
1. Slot i starts with sequence i.  A producer that claims position p waits for sequence p, writes
   the record, then releases sequence p + 1.
2. The consumer takes position p when it acquires sequence p + 1, copies the record out, then
   releases sequence p + capacity.
3. `control` words sit on lines of their own: producers share TAIL on the device's side; HEAD has
   one writer.  STOP and FAILED are single-writer words that every wait loop checks.
Must stay in sync: layout.REQUEST (word 0 is the sequence) and proxy.proxy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common import layout
from hyades.common.atomics import (
    atomic_cas,
    ld_acquire_sys,
    ld_relaxed,
    st_relaxed,
    st_release_sys,
)
from hyades.common.errors import UsageError
from hyades.common.jit import jit

LINE = 16  # int64 words between control words: two cache lines, so neighbours never share one
TAIL, HEAD, STOP, FAILED = 0, LINE, 2 * LINE, 3 * LINE
CONTROL_WORDS = 4 * LINE


@dataclass(frozen=True, slots=True)
class Ring:
    """Ring memory: `words` is int64 [capacity, 8], `records` the same bytes as layout.REQUEST."""

    words: NDArray[np.int64]
    control: NDArray[np.int64]

    @classmethod
    def create(cls, capacity: int) -> "Ring":
        """Return an empty ring; *capacity* is a power of two."""
        if capacity < 2 or capacity & (capacity - 1):
            raise UsageError(f"ring capacity {capacity} is not a power of two of at least 2")
        words = np.zeros((capacity, 8), np.int64)
        words[:, 0] = np.arange(capacity)
        return cls(words, np.zeros(CONTROL_WORDS, np.int64))

    @property
    def capacity(self) -> int:
        """Number of slots."""
        return int(self.words.shape[0])

    @property
    def records(self) -> NDArray[np.void]:
        """The slots as layout.REQUEST records [capacity]."""
        return self.words.view(layout.REQUEST)[:, 0]

    def push(self, records: NDArray[np.void]) -> int:
        """Append layout.REQUEST *records*; return how many fitted."""
        rows = np.ascontiguousarray(records).view(np.int64).reshape(-1, 8)
        return int(push_batch(self.words.reshape(-1), self.control, rows))

    def pop(self, out: NDArray[np.void]) -> int:
        """Fill *out* (contiguous layout.REQUEST) from the ring; return how many came."""
        return int(
            pop_batch(self.words.reshape(-1), self.control, out.view(np.int64).reshape(-1, 8))
        )

    def stop(self) -> None:
        """Tell every loop that checks STOP to leave."""
        store_word(self.control, STOP, 1)


@jit
def store_word(control: Any, index: Any, value: Any) -> Any:
    """Release *value* into a single-writer control word."""
    st_release_sys(control, index, np.int64(value))


@jit
def load_word(control: Any, index: Any) -> Any:
    """Acquire a control word."""
    return ld_acquire_sys(control, index)


@jit
def claim(words: Any, control: Any) -> Any:
    """Return a claimed position, or -1 where the ring is full; *words* is the flat int64 ring."""
    capacity = words.shape[0] >> 3
    position = ld_relaxed(control, TAIL)
    while True:
        distance = ld_acquire_sys(words, (position & (capacity - 1)) << 3) - position
        if distance == 0:
            found = atomic_cas(control, TAIL, position, position + 1)
            if found == position:
                return position
            position = found
        elif distance < 0:
            return np.int64(-1)
        else:
            position = ld_relaxed(control, TAIL)


@jit
def publish(words: Any, position: Any) -> Any:
    """Hand the record at a claimed *position* to the consumer."""
    capacity = words.shape[0] >> 3
    st_release_sys(words, (position & (capacity - 1)) << 3, position + 1)


@jit
def push_batch(words: Any, control: Any, rows: Any) -> Any:
    """Append int64 [n, 8] *rows*; return how many fitted."""
    capacity = words.shape[0] >> 3
    for index in range(rows.shape[0]):
        position = claim(words, control)
        if position < 0:
            return index
        base = (position & (capacity - 1)) << 3
        for word in range(1, 8):
            words[base + word] = rows[index, word]
        publish(words, position)
    return rows.shape[0]


@jit
def has_next(words: Any, control: Any) -> Any:
    """Tell the consumer whether a record is there to pop."""
    head = ld_relaxed(control, HEAD)
    return ld_acquire_sys(words, (head & ((words.shape[0] >> 3) - 1)) << 3) == head + 1


@jit
def pop_batch(words: Any, control: Any, out: Any) -> Any:
    """Move up to ``len(out)`` records into int64 [n, 8] *out*; single consumer."""
    capacity = words.shape[0] >> 3
    head = ld_relaxed(control, HEAD)
    count = 0
    while count < out.shape[0]:
        base = (head & (capacity - 1)) << 3
        if ld_acquire_sys(words, base) != head + 1:
            break
        for word in range(8):
            out[count, word] = words[base + word]
        st_release_sys(words, base, head + capacity)
        head += 1
        count += 1
    st_relaxed(control, HEAD, head)
    return count
