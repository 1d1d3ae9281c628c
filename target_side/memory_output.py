"""What outputs share that move data between memories (rdma_output.py, dma_output.py).

Rule: a buffer in the queue goes back to the pool when what stands before it is done.
The interface is that of output.Output.
"""

from collections import deque
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

from hyades.target_side.namespaces import FileRange
from hyades.target_side.pool import Buffer, BufferPool


class Waiting(Protocol):
    """Work that has not been begun, or only in part, and the buffers that are free after it."""

    buffers: list[Buffer]


Item = TypeVar("Item", bound=Waiting)


class MemoryOutput(Generic[Item]):
    """See the module."""

    def __init__(self, pool: BufferPool) -> None:
        self.nbytes = 0  # not begun yet
        self.moved = 0  # bytes that are through
        self._pool = pool
        self._items: deque[Item] = deque()

    @property
    def memory_only(self) -> bool:
        """Say that ranges of files cannot be sent."""
        return True

    def hold(self, buffer: Buffer) -> None:
        """Give *buffer* back when all that is queued now is done."""
        if self._items:
            self._items[-1].buffers.append(buffer)
        else:  # the queue is closed: nothing refers to it
            self._pool.release(buffer)

    def sent(self) -> list[FileRange]:
        """Return nothing: there are no ranges."""
        return []

    def _release(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            self._pool.release(buffer)

    def _forget(self) -> None:
        """Give back what waits."""
        for item in self._items:
            self._release(item.buffers)
        self._items.clear()
        self.nbytes = 0
