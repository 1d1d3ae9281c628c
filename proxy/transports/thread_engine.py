"""Requests that run on a few threads, and the file transport's engine where io_uring is refused:
preadv and pwritev.
"""

import errno
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hyades.common.layout import BLOCK, COMPLETION, REQUEST, Status
from hyades.proxy.records import (
    COUNTERS,
    FLUSH,
    READ,
    Words,
    account,
    check_request,
)
from hyades.proxy.transports.engines import TRIES, Geometry, errno_status

_THREADS = 4  # enough to keep a disk busy with pages of 64 KiB and more


class WorkerThreads:
    """Runs each request on one of a few threads: what engines and transports of threads share."""

    def __init__(
        self, run: Callable[[np.void], tuple[int, int]], *, depth: int, max_transfer: int,
        writable: bool, threads: int, name: str,
    ) -> None:  # fmt: skip
        """Accept *depth* requests at a time; *run* gives status and bytes of a valid one."""
        self.counters: NDArray[np.int64] = np.zeros(COUNTERS, np.int64)
        self._run_one, self._depth = run, depth
        self._max_transfer, self._writable = max_transfer, writable
        self._arena = memoryview(b"")
        self._jobs: queue.SimpleQueue[np.void | None] = queue.SimpleQueue()
        self._ended: deque[tuple[int, int, int, int]] = deque()  # cookie, op, status, nbytes
        self._something = threading.Event()
        self._open = 0  # accepted and not yet reported
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the arena."""
        self._arena = arena.data

    def submit(self, words: Words, nblocks: int) -> int:
        """Accept a prefix of int64[n, 8] and start it."""
        count = min(len(words), self._depth - self._open)
        records = words[:count].view(REQUEST)[:, 0]
        bounds = (nblocks, len(self._arena), self._max_transfer, self._writable)
        for i in range(count):
            status = int(check_request(words, i, *bounds))
            if status == Status.OK:
                self._jobs.put(records[i].copy())
            else:
                self._end(records[i], status, 0)
        self._open += count
        return count

    def poll(self, out: Words) -> int:
        """Fill int64[n, 3] with finished requests."""
        self._something.clear()
        records = out.view(COMPLETION)[:, 0]
        count = 0
        while count < len(out) and self._ended:
            cookie, op, status, nbytes = self._ended.popleft()
            records[count] = (cookie, status, nbytes, 0, 0)
            account(self.counters, op, status, nbytes)
            count += 1
        self._open -= count
        return count

    def wait(self, timeout: float) -> None:
        """Sleep until a request has ended, at most *timeout* seconds."""
        if self._ended:
            return
        if self._open:
            self._something.wait(timeout)
        else:  # the event may be of a request that was reported before
            time.sleep(timeout)

    def close(self) -> None:
        """Cancel what no thread has begun; wait for the rest."""
        self._closing = True
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _end(self, request: np.void, status: int, nbytes: int) -> None:
        self._ended.append((int(request["cookie"]), int(request["op"]), status, nbytes))
        self._something.set()

    def _work(self) -> None:
        while (request := self._jobs.get()) is not None:
            if self._closing:
                self._end(request, int(Status.CANCELLED), 0)
                continue
            self._end(request, *self._run_one(request))


class ThreadEngine(WorkerThreads):
    """Moves pages of an open file; system calls release the GIL."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        super().__init__(
            self._run, depth=geometry.depth, max_transfer=geometry.max_transfer,
            writable=geometry.writable, threads=min(_THREADS, geometry.depth), name="hyades-file",
        )  # fmt: skip

    def describe(self) -> str:
        """Return the engine's part of the transport's line."""
        return f"preadv on {len(self._threads)} threads"

    def _run(self, request: np.void) -> tuple[int, int]:
        """Return status and bytes of one valid request."""
        fd, step = self._geometry.fd, self._geometry.step
        op, nbytes = int(request["op"]), int(request["nbytes"])
        start, place = int(request["offset"]), int(request["lba"]) * BLOCK
        done = tries = 0
        while True:
            try:
                if op == FLUSH:
                    os.fdatasync(fd)
                    return int(Status.OK), 0
                buffer = self._arena[start + done : start + min(done + step, nbytes)]
                call = os.preadv if op == READ else os.pwritev
                moved = call(fd, [buffer], place + done)
            except OSError as error:
                tries += 1
                if error.errno == errno.EAGAIN and tries <= TRIES:
                    continue
                return int(errno_status(error.errno or errno.EIO)), done
            if done + moved >= nbytes:
                return int(Status.OK), nbytes
            # O_DIRECT goes on at whole blocks only; no whole block means the end of the file
            whole = (done + moved) // BLOCK * BLOCK
            if whole <= done:
                return int(Status.SHORT), done
            done, tries = whole, 0
            if self._closing:
                return int(Status.CANCELLED), done
