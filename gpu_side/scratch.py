"""Memory for a worker's intermediate results, the same for every chunk and lane.

malloc would hand out fresh pages for each result and keep several times what is alive: slow, and
more than the plan counts on.  A worker sets its Scratch up once; every piece of work starts at its
beginning again.  What does not fit, and what has no form with `out=`, goes to malloc.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_ALIGN = 16  # floats


class Scratch:
    """Room for float32 blocks, handed out from the front."""

    def __init__(self, nbytes: int) -> None:
        self._data = torch.empty(nbytes // 4)
        self._at = 0

    def clear(self) -> None:
        """Take everything back: no block from before is looked at any more."""
        self._at = 0

    def take(self, rows: int, columns: int) -> Tensor:
        """Return a block [rows, columns] of float32 with any content."""
        begin, end = self._at, self._at + rows * columns
        if end > len(self._data):
            return torch.empty(rows, columns)
        self._at = -(-end // _ALIGN) * _ALIGN
        return self._data[begin:end].view(rows, columns)


_NONE = Scratch(0)
_local = threading.local()


def scratch() -> Scratch:
    """Return the calling thread's scratch, an empty one where none was set up."""
    found: Scratch = getattr(_local, "scratch", _NONE)
    return found


@contextmanager
def scratch_of(nbytes: int) -> Iterator[None]:
    """Set up *nbytes* of scratch for this thread inside the block."""
    _local.scratch = Scratch(nbytes)
    try:
        yield
    finally:
        del _local.scratch
