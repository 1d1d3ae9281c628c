"""Base of the transports that run a request when it is polled for: mem and null."""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.jit import jit
from hyades.common.layout import BLOCK, RQ_COOKIE, RQ_LEN_SLOT, RQ_OP, Status
from hyades.common.units import MIB
from hyades.proxy.arena import check_arena
from hyades.proxy.records import (
    COUNTERS,
    FLUSH,
    REQUEST_WORDS,
    Words,
    account,
    check_request,
    completion_words,
    counter_dict,
    put_completion,
    request_words,
)
from hyades.proxy.transport import Limits, Records

_OK, _CANCELLED = int(Status.OK), int(Status.CANCELLED)


class QueuedTransport:
    """Holds accepted requests in order; a subclass moves the bytes in `_transfer`."""

    def __init__(self, *, max_transfer: int = 4 * MIB, max_inflight: int = 256) -> None:
        self._limits = Limits(max_transfer, max_inflight, BLOCK)
        self._arena: NDArray[np.uint8] | None = None
        self._queue: Words = np.zeros((max_inflight, REQUEST_WORDS), np.int64)
        self._head = 0
        self._waiting = 0
        self._closed = False
        self._writable = True
        self._counters = np.zeros(COUNTERS, np.int64)

    @property
    def limits(self) -> Limits:
        """What one request and the queue may hold."""
        return self._limits

    @property
    def nblocks(self) -> int:
        """Blocks of the device."""
        raise NotImplementedError

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the uint8 *arena* that request offsets index."""
        check_arena(arena, BLOCK, registered=self._arena is not None)
        self._arena = arena

    def submit(self, requests: Records) -> int:
        """Queue a prefix of REQUEST[n]; return its length."""
        if self._closed:
            raise UsageError(f"{self.describe()} is closed")
        if self._arena is None:
            raise UsageError(f"{self.describe()} has no arena: call register first")
        capacity = self._limits.max_inflight
        count = min(len(requests), capacity - self._waiting)
        if count:
            words = request_words(requests[:count])
            places = (self._head + self._waiting + np.arange(count)) % capacity
            self._queue[places] = words
            self._waiting += count
        return count

    def poll(self, completions: Records) -> int:
        """Run the oldest requests; fill COMPLETION[n] and return how many came."""
        count = min(len(completions), self._waiting)
        if not count:
            return 0
        capacity = self._limits.max_inflight
        batch = self._queue[(self._head + np.arange(count)) % capacity]
        out = completion_words(completions[:count])
        if self._closed:
            _cancel(batch, out)
        else:
            assert self._arena is not None
            self._transfer(batch, out, self._arena)
        _account(batch, out, self._counters)
        self._head = (self._head + count) % capacity
        self._waiting -= count
        return count

    def wait(self, timeout: float) -> None:
        """Return at once if requests wait to be run, else after *timeout* seconds."""
        if not self._waiting:
            time.sleep(timeout)

    def close(self) -> None:
        """Cancel what is queued; later polls report it."""
        self._closed = True

    def stats(self) -> dict[str, Any]:
        """Return the counters."""
        return {**counter_dict(self._counters), "describe": self.describe()}

    def describe(self) -> str:
        """Return one line for people."""
        raise NotImplementedError

    def _transfer(self, batch: Words, out: Words, arena: NDArray[np.uint8]) -> None:
        raise NotImplementedError


@jit
def _cancel(batch: Any, out: Any) -> None:
    for i in range(batch.shape[0]):
        put_completion(out, i, batch[i, RQ_COOKIE], _CANCELLED, 0)


@jit
def _account(batch: Any, out: Any, counters: Any) -> None:
    for i in range(batch.shape[0]):
        status = np.int32(out[i, 1] & 0xFFFFFFFF)
        account(counters, batch[i, RQ_OP] & 0xFF, status, out[i, 1] >> 32)


@jit
def check_batch(
    batch: Any, out: Any, nblocks: Any, arena_bytes: Any, max_transfer: Any, writable: Any
) -> None:
    """Fill int64[n, 3] *out* with what each request gets if moving its bytes succeeds."""
    for i in range(batch.shape[0]):
        status = check_request(batch, i, nblocks, arena_bytes, max_transfer, writable)
        nbytes = batch[i, RQ_LEN_SLOT] & 0xFFFFFFFF
        if status != _OK or batch[i, RQ_OP] & 0xFF == FLUSH:
            nbytes = 0
        put_completion(out, i, batch[i, RQ_COOKIE], status, nbytes)
