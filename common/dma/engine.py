"""DMA engines: what copies bytes between memory of this side and memory that the host shares.

Rules:
1. A *device* knows memory (`register`, `forget`; any thread) and makes *engines*; an engine
   belongs to one thread.  Only memory that the device `knows` may be named in a copy.
2. `submit` takes a prefix of COPY[n] and never waits; every copy that was taken is reported once
   by `poll`, in any order, with its cookie and a status: 0, or the engine's own error code.
3. A copy has at most `max_copy` bytes.  Source and destination are not touched any more once the
   copy is reported, or `close` has returned: it waits for what is under way.
The user names the engine; nothing takes the place of one that cannot run.
"""

import ctypes
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError

COPY = np.dtype([("source", "<u8"), ("destination", "<u8"), ("nbytes", "<u8"), ("cookie", "<u8")])
DONE = np.dtype([("cookie", "<u8"), ("status", "<i8")])
Records = NDArray[np.void]  # structured: COPY or DONE

assert COPY.itemsize == 32
assert DONE.itemsize == 16


class Engine(Protocol):
    """Copies, for one thread; see the module."""

    max_copy: int

    @property
    def outstanding(self) -> int:
        """Copies that are not reported yet."""
        ...

    def submit(self, copies: Records) -> int:
        """Take a prefix of COPY[n]; return its length."""
        ...

    def poll(self, done: Records) -> int:
        """Fill DONE[n]; return how many."""
        ...

    def explain(self, status: int) -> str:
        """Return what a status means."""
        ...

    def close(self) -> None:
        """Wait for what is under way and free everything."""
        ...


class Device(Protocol):
    """Makes engines, and knows the memory that they may touch."""

    name: str
    max_copy: int

    def register(self, address: int, nbytes: int) -> None: ...
    def forget(self, address: int) -> None: ...
    def knows(self, address: int, nbytes: int) -> bool: ...
    def engine(self, depth: int) -> Engine: ...
    def close(self) -> None: ...


class MemcpyEngine:
    """The CPU, without the interpreter's lock."""

    def __init__(self, max_copy: int) -> None:
        self.max_copy = max_copy
        self._done: list[int] = []

    @property
    def outstanding(self) -> int:
        """Copies that are done and not reported."""
        return len(self._done)

    def submit(self, copies: Records) -> int:
        """Copy; all of them."""
        for source, destination, nbytes, cookie in copies.tolist():
            ctypes.memmove(destination, source, nbytes)
            self._done.append(cookie)
        return len(copies)

    def poll(self, done: Records) -> int:
        """Report what was copied."""
        count = min(len(done), len(self._done))
        if count:
            done["cookie"][:count] = self._done[:count]
            done["status"][:count] = 0
            del self._done[:count]
        return count

    def explain(self, status: int) -> str:
        """Return the number: there are no errors."""
        return f"error {status}"

    def close(self) -> None:
        """Forget what was not reported."""
        self._done.clear()


class MemcpyDevice:
    """The CPU, which knows all memory."""

    name = "memcpy"
    max_copy = 1 << 30

    def register(self, address: int, nbytes: int) -> None:
        """Do nothing."""

    def forget(self, address: int) -> None:
        """Do nothing."""

    def knows(self, address: int, nbytes: int) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    def engine(self, depth: int) -> Engine:  # noqa: ARG002
        """Return an engine."""
        return MemcpyEngine(self.max_copy)

    def close(self) -> None:
        """Do nothing."""


def open_device(name: str) -> Device:
    """Return the device ``memcpy``, ``doca`` or ``doca:0000:03:00.0`` (a PCI address).

    BackendMissing says what DOCA lacks here; UsageError for another name.
    """
    kind, _, address = name.partition(":")
    if kind == "memcpy" and not address:
        return MemcpyDevice()
    if kind == "doca":
        from hyades.common.dma.doca import DocaDevice

        return DocaDevice(address)
    raise UsageError(f"no DMA engine {name!r}: memcpy, doca, or doca:PCI-ADDRESS")
