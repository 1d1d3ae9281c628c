"""Buffers that page data is on its way in, bounded in all.

Rules:
1. `acquire` never blocks: it gives a buffer, or None and later a call of the waiter's `wake`.
2. Waiters are served in order, so a large request is not starved by small ones.
3. What is lent and what is kept for reuse never exceed the limit together.
4. A holder always gives back: peers that neither send nor take data are cut (connection.py).  So
   whoever waits is served in the end, and nobody holds a buffer while waiting for a second one
   that only he himself could give back.
"""

import mmap
import threading
from collections import deque
from typing import Protocol

from hyades.common.errors import UsageError

_LEAST = 4096


class Waiter(Protocol):
    """Who wants a buffer."""

    def wake(self) -> None:
        """Be told, from any thread, to try again."""
        ...


class Buffer:
    """Memory of a power of two; `view` is the part that was asked for."""

    __slots__ = ("_map", "size", "view", "whole")

    def __init__(self, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(-1, size)
        self.whole = memoryview(self._map)
        self.view = self.whole


class BufferPool:
    """See the module; *limit* bytes in all."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.lent = 0  # bytes
        self.peak = 0
        self._kept: dict[int, list[Buffer]] = {}
        self._kept_bytes = 0
        self._waiters: deque[Waiter] = deque()
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        """Waiters."""
        return len(self._waiters)

    def acquire(self, nbytes: int, waiter: Waiter) -> Buffer | None:
        """Return a buffer of *nbytes*, or None: then *waiter* is woken when it may try again."""
        size = max(_LEAST, 1 << (nbytes - 1).bit_length())
        if size > self.limit:
            raise UsageError(f"a buffer of {nbytes} bytes, the pool has {self.limit}")
        with self._lock:
            first = not self._waiters or self._waiters[0] is waiter
            if not first or self.lent + size > self.limit:
                if waiter not in self._waiters:
                    self._waiters.append(waiter)
                return None
            if self._waiters:
                self._waiters.popleft()
                self._wake_first()
            buffer = self._take(size)
        buffer.view = buffer.whole[:nbytes]
        return buffer

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back: nothing refers to it any more."""
        with self._lock:
            self.lent -= buffer.size
            self._kept.setdefault(buffer.size, []).append(buffer)
            self._kept_bytes += buffer.size
            self._wake_first()

    def forget(self, waiter: Waiter) -> None:
        """Let a waiter go."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
                self._wake_first()

    def _take(self, size: int) -> Buffer:
        kept = self._kept.get(size)
        if kept:
            buffer = kept.pop()
            self._kept_bytes -= size
        else:
            self._make_room(size)
            buffer = self._make(size)
        self.lent += size
        self.peak = max(self.peak, self.lent)
        return buffer

    def _make_room(self, size: int) -> None:
        for other, kept in self._kept.items():
            while kept and self.lent + self._kept_bytes + size > self.limit:
                self._drop(kept.pop())
                self._kept_bytes -= other

    def _make(self, size: int) -> Buffer:
        return Buffer(size)

    def _drop(self, buffer: Buffer) -> None:
        """Hear that *buffer* is not kept any more."""

    def _wake_first(self) -> None:
        if self._waiters:
            self._waiters[0].wake()
