"""The memory that both ends of a queue over shared memory see: words, rings, buffers.

Rules:
1. Every word has one writer (dma.py says who) and is stored with release and loaded with acquire.
   It is a count that only grows, so whoever reads it sees all that was written before.
2. A count that the peer wrote is believed only between what it was and what it can be at most; a
   word that says anything else raises Violation.  So nothing read here can lead out of the memory,
   or make a loop longer than its ring.
3. Whatever the peer can change is copied before it is looked at.
4. A side about to sleep sets its word, fences, looks once more, and then waits for its eventfd; a
   side that has stored something fences and looks at the other's word.
No I/O, no clock.
"""

import numpy as np
from numpy.typing import NDArray

from hyades.common.atomics import fence_sys
from hyades.common.errors import UsageError
from hyades.common.jit import jit
from hyades.common.nvme.dma import CQE_BYTES, HEADER, PAGE, WORDS, Shape
from hyades.common.nvme.layout import SQE_BYTES
from hyades.common.nvme.pdu import Violation
from hyades.common.ring import load_word, store_word


@jit
def fence() -> None:
    """Order earlier stores before later loads."""
    fence_sys()


class QueueMemory:
    """One queue's memory; see the module."""

    def __init__(self, memory: memoryview, shape: Shape) -> None:
        """Lay *shape* over writable *memory*, which has as many bytes."""
        if memory.nbytes != shape.nbytes:
            raise UsageError(f"{memory.nbytes} bytes of memory for a queue of {shape.nbytes}")
        self.shape, self.memory = shape, memory
        self.words: NDArray[np.int64] = np.frombuffer(memory, np.int64, WORDS)

    def load(self, word: int) -> int:
        """Return a count."""
        return int(load_word(self.words, word))

    def check(self, word: int, least: int, most: int, what: str) -> int:
        """Return a count of the peer's; Violation unless it lies from *least* to *most*."""
        value = self.load(word)
        if not least <= value <= most:
            raise Violation(f"{what}: the count {value} is not from {least} to {most}")
        return value

    def store(self, word: int, value: int) -> None:
        """Publish a count of this side's, and all that was written before."""
        store_word(self.words, word, value)

    def sleep(self, word: int) -> None:
        """Say with *word* that this side is about to sleep; then look once more."""
        store_word(self.words, word, 1)
        fence()

    def sleeps(self, word: int) -> bool:
        """Return whether the peer, whose *word* that is, may be asleep."""
        fence()
        return self.load(word) != 0

    def submission(self, position: int) -> memoryview:
        """Return the entry of the submission ring for *position*."""
        at = self.shape.submission + position % self.shape.entries * SQE_BYTES
        return self.memory[at : at + SQE_BYTES]

    def completion(self, position: int) -> memoryview:
        """Return the entry of the completion ring for *position*."""
        at = self.shape.completion + position % self.shape.entries * CQE_BYTES
        return self.memory[at : at + CQE_BYTES]

    def header(self, position: int, *, outward: bool) -> memoryview:
        """Return the header of the buffer for *position*."""
        at = self._data(position, outward)
        return self.memory[at - HEADER.size : at]

    def data(self, position: int, nbytes: int, *, outward: bool) -> memoryview:
        """Return the first *nbytes* of the data of the buffer for *position*."""
        at = self._data(position, outward)
        return self.memory[at : at + nbytes]

    def _data(self, position: int, outward: bool) -> int:
        shape = self.shape
        return shape.first(outward=outward) + position % shape.buffers * shape.stride + PAGE
