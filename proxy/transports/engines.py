"""What the two engines of the file transport share: how they look, and what an errno means."""

import errno
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyades.common.jit import jit
from hyades.common.layout import Status
from hyades.proxy.records import Words

TRIES = 64  # EAGAIN and EINTR in a row before a request fails

_NO_SPACE, _LOST = int(Status.NO_SPACE), int(Status.LOST)
_CANCELLED, _TIMEOUT, _IO = int(Status.CANCELLED), int(Status.TIMEOUT), int(Status.IO)
_ENOSPC, _EDQUOT, _ECANCELED, _ETIMEDOUT = (
    errno.ENOSPC, errno.EDQUOT, errno.ECANCELED, errno.ETIMEDOUT,
)  # fmt: skip
_ENODEV, _ENXIO, _ESHUTDOWN, _ESTALE = errno.ENODEV, errno.ENXIO, errno.ESHUTDOWN, errno.ESTALE


@dataclass(frozen=True, slots=True)
class Geometry:
    """What an engine needs to know about the open file and its arena."""

    fd: int
    depth: int
    max_transfer: int
    writable: bool
    step: int  # bytes that one system call may move; smaller ones exercise the continuation


class Engine(Protocol):
    """Runs requests given as int64[n, 8] words; the rules are those of Transport."""

    def register(self, arena: NDArray[np.uint8]) -> None: ...
    def submit(self, words: Words, nblocks: int) -> int: ...
    def poll(self, out: Words) -> int: ...
    def wait(self, timeout: float) -> None: ...
    def close(self) -> None:
        """Wait for what cannot be cancelled; `poll` still reports."""
        ...

    def describe(self) -> str: ...
    @property
    def counters(self) -> NDArray[np.int64]: ...


@jit
def errno_status(code: Any) -> Any:
    """Return the Status word for a system call that failed with errno *code*."""
    if code in (_ENOSPC, _EDQUOT):
        return _NO_SPACE
    if code in (_ENODEV, _ENXIO, _ESHUTDOWN, _ESTALE):
        return _LOST
    if code == _ECANCELED:
        return _CANCELLED
    if code == _ETIMEDOUT:
        return _TIMEOUT
    return _IO
