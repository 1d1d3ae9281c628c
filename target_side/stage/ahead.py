"""Work done before it is asked for, sized to the pace of who asks.

Rules:
1. At most `most` results exist or are being made that nobody has asked for: memory is bounded by
   that, and a slow reader stops the work behind it (back-pressure).
2. Each result is handed out once. Asking for what is not there makes it in the caller's thread, so
   random access works, and no order of calls can deadlock.
3. The window begins with one result. It doubles when the reader had to wait, and shrinks by one
   when results lay ready for a whole window's length. A jump further than `most` forgets the
   window; a shorter one does not, since several readers of neighbouring parts jump all the time.
4. An error belongs to its index: it is raised where that is asked for, never elsewhere. Asking
   again tries again.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Makes results of ``produce(index)`` for 0 <= index < count on *pool*, ahead of `get`."""

    def __init__(
        self, produce: Callable[[int], T], count: int, pool: Executor | None, most: int
    ) -> None:
        """Without a pool, or with *most* 0, everything is made when it is asked for."""
        self._produce = produce
        self._count = count
        self._pool = pool
        self._most = most if pool is not None else 0
        self._lock = threading.RLock()  # a done callback may run inside a call that holds it
        self._slots: dict[int, Future[T]] = {}
        self._unasked = 0  # results that exist or are being made, forgotten ones included
        self._next = 0
        self._ready = 0  # gets in a row that did not wait
        self.depth = 1

    @property
    def unasked(self) -> int:
        """Results that exist or are being made and that nobody has asked for."""
        return self._unasked

    def get(self, index: int) -> T:
        """Return result *index*, waiting for it or making it; raises what making it raised."""
        with self._lock:
            future = self._slots.pop(index, None)
            if future is not None:
                self._unasked -= 1
            self._follow(index, waited=future is None or not future.done())
            self._fill()
        if future is None or future.cancel():  # not begun: the caller is here, and can do it
            return self._produce(index)
        return future.result()

    def forget(self) -> None:
        """Drop every result that nobody has asked for."""
        with self._lock:
            for index in list(self._slots):
                self._drop(index)

    def close(self) -> None:
        """Use the pool no more: what is asked for from now on is made by the caller."""
        with self._lock:
            self._pool = None
            self.forget()

    def _follow(self, index: int, *, waited: bool) -> None:
        """Move the window to *index* and set its depth."""
        reach = max(self._most, 1)
        if not self._next - reach <= index <= self._next + reach:
            self.forget()
            self._next, self._ready, self.depth = index + 1, 0, 1
            return
        if waited:
            self._ready = 0
            self.depth = max(1, min(2 * self.depth, self._most))
        else:
            self._ready += 1
            if self._ready > self.depth > 1:
                self._ready = 0
                self.depth -= 1
        self._next = max(self._next, index + 1)
        for old in [i for i in self._slots if i < self._next - self._most]:
            self._drop(old)

    def _fill(self) -> None:
        if self._pool is None:
            return
        for index in range(self._next, min(self._next + self.depth, self._count)):
            if self._unasked >= self._most:
                return
            if index not in self._slots:
                self._unasked += 1
                self._slots[index] = self._pool.submit(self._produce, index)

    def _drop(self, index: int) -> None:
        future = self._slots.pop(index)
        if future.cancel():
            self._unasked -= 1
        else:
            future.add_done_callback(self._dropped)

    def _dropped(self, _future: Future[T]) -> None:
        with self._lock:
            self._unasked -= 1
