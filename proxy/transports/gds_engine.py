"""The engine of the gds transport: one kvikio future a request, collected when it is polled.

Rules:
1. A request is one task of kvikio's pool (`task_size` is its length).  Cut into several, the first
   error would end the future while other tasks still move bytes in the slot.
2. A future's slice of the arena is kept until the future has ended; `get` is called once.
3. kvikio cannot cancel: `close` waits for every future, and only then closes the file.
4. kvikio has no flush: fdatasync of its file runs on a thread of this engine.
"""

import errno
import os
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyades.common.layout import BLOCK, COMPLETION, REQUEST, Status
from hyades.proxy.records import COUNTERS, FLUSH, READ, Words, account, check_request
from hyades.proxy.transports.engines import Geometry, errno_status

_FIRST_PAUSE, _LONGEST_PAUSE = 20e-6, 1e-3  # seconds between looks while waiting
_EOF = "pread: EOF"  # how kvikio ends the message about a file that is too short
_TOLD = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE)


class _Ending(Protocol):
    """What kvikio's IOFuture offers."""

    def done(self) -> bool: ...
    def get(self) -> int: ...


class _Flush:
    """An fdatasync on a thread, with the methods of an IOFuture."""

    def __init__(self, future: Future[None]) -> None:
        self.done = future.done
        self._future = future

    def get(self) -> int:
        self._future.result()
        return 0


class KvikioEngine:
    """Runs requests through one kvikio.CuFile, which *open_file* opens."""

    def __init__(self, geometry: Geometry, open_file: Callable[[], Any], name: str) -> None:
        self._geometry = geometry
        self._name = name
        self._arena: Any = b""
        self.counters: NDArray[np.int64] = np.zeros(COUNTERS, np.int64)
        # cookie, op, nbytes and the future with its slice, oldest first
        self._running: list[tuple[int, int, int, _Ending, Any]] = []
        self._ended: deque[tuple[int, int, int, int]] = deque()  # cookie, op, status, nbytes
        self.last_error = ""  # of the last request that failed, in kvikio's words
        self._file = open_file()
        self._flusher = ThreadPoolExecutor(1, "hyades-gds-flush")

    def register(self, arena: Any) -> None:
        """Take the arena: uint8, in host memory or with ``__cuda_array_interface__``."""
        self._arena = arena

    def submit(self, words: Words, nblocks: int) -> int:
        """Accept a prefix of int64[n, 8] and start it."""
        geometry = self._geometry
        count = min(len(words), geometry.depth - len(self._running) - len(self._ended))
        records = words[:count].view(REQUEST)[:, 0]
        bounds = (nblocks, len(self._arena), geometry.max_transfer, geometry.writable)
        for i in range(count):
            record = records[i]
            cookie, op = int(record["cookie"]), int(record["op"])
            status = int(check_request(words, i, *bounds))
            if status != Status.OK:
                self._ended.append((cookie, op, status, 0))
            else:
                self._begin(cookie, op, record)
        return count

    def poll(self, out: Words) -> int:
        """Fill int64[n, 3] with finished requests."""
        self._collect()
        records = out.view(COMPLETION)[:, 0]
        count = 0
        while count < len(out) and self._ended:
            cookie, op, status, nbytes = self._ended.popleft()
            records[count] = (cookie, status, nbytes, 0, 0)
            account(self.counters, op, status, nbytes)
            count += 1
        return count

    def wait(self, timeout: float) -> None:
        """Look until a request has ended, at most *timeout* seconds: kvikio wakes nobody."""
        deadline, pause = time.monotonic() + timeout, _FIRST_PAUSE
        if not self._running and not self._ended:
            pause = timeout
        while not self._ended and not any(entry[3].done() for entry in self._running):
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def close(self) -> None:
        """Wait for what runs; close kvikio's file."""
        for entry in self._running:
            self._end(entry)
        self._running = []
        self._flusher.shutdown()
        self._arena = b""
        self._file.close()

    def describe(self) -> str:
        """Return the engine's part of the transport's line."""
        return self._name

    def _begin(self, cookie: int, op: int, record: np.void) -> None:
        nbytes, start = int(record["nbytes"]), int(record["offset"])
        place = int(record["lba"]) * BLOCK
        future: _Ending
        if op == FLUSH:
            future = _Flush(self._flusher.submit(os.fdatasync, self._geometry.fd))
            self._running.append((cookie, op, 0, future, None))
            return
        slot = self._arena[start : start + nbytes]
        call = self._file.pread if op == READ else self._file.pwrite
        try:
            # what is below kvikio's threshold ends, and may fail, in this call
            future = call(slot, nbytes, place, nbytes)
        except (RuntimeError, OSError) as error:
            self._ended.append((cookie, op, self._status(error, op, nbytes), 0))
            return
        self._running.append((cookie, op, nbytes, future, slot))

    def _collect(self) -> None:
        left = []
        for entry in self._running:
            if entry[3].done():
                self._end(entry)
            else:
                left.append(entry)
        self._running = left

    def _end(self, entry: tuple[int, int, int, _Ending, Any]) -> None:
        cookie, op, nbytes, future, _ = entry
        try:
            moved = future.get()
        except (RuntimeError, OSError) as error:
            self._ended.append((cookie, op, self._status(error, op, nbytes), 0))
            return
        status = Status.OK if moved == nbytes else Status.SHORT
        self._ended.append((cookie, op, int(status), moved))

    def _status(self, error: Exception, op: int, nbytes: int) -> int:
        """Return the Status of a request that failed.

        kvikio raises RuntimeError and gives the errno as text at best; its POSIX mode gives the
        text of errno 1 whatever happened.  So a write that fails where less than *nbytes* is free
        counts as out of space.
        """
        self.last_error = str(error)
        if isinstance(error, OSError) and error.errno:
            return int(errno_status(error.errno))
        if self.last_error.endswith(_EOF):
            return int(Status.SHORT)
        for code in _TOLD:
            if self.last_error.endswith(os.strerror(code)):
                return int(errno_status(code))
        if op not in (READ, FLUSH):
            free = os.fstatvfs(self._geometry.fd)
            if free.f_bavail * free.f_frsize < nbytes:
                return int(Status.NO_SPACE)
        return int(Status.IO)
