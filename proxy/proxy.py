"""The proxy: one thread that takes requests from the ring and answers them in the ready table.

It knows devices and pages and nothing about graphs.  Rules:
1. A request is answered once: ready[slot] becomes its generation when its bytes are in place
   (release), or a negative Status.  `crcs[slot]` is written before that.
2. Requests in flight to the same blocks have no order, but for FLUSH: it is answered when all
   writes that came before it are answered and durable.
3. Status.IO, SHORT and TIMEOUT are retried; a read whose checksum is wrong is read once more.
4. Whatever goes wrong in the thread sets the ring's FAILED word; all that is under way, and all
   that is posted until `stop`, is answered with Status.LOST: nobody waits for ever.
Must stay in sync: common/port.py says the same from the scheduler's side.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.atomics import doze, ld_acquire_sys, ld_relaxed, pause
from hyades.common.checksum import crc32c
from hyades.common.errors import PeerError, UsageError
from hyades.common.interrupts import undisturbed
from hyades.common.jit import jit
from hyades.common.layout import BLOCK, COMPLETION, REQUEST, Op, RequestFlag, Status
from hyades.common.port import Failure, Port
from hyades.common.ring import FAILED, HEAD, Ring, pop_batch, store_word
from hyades.common.trace import NullSink, Sink, Span
from hyades.common.units import KIB
from hyades.proxy import tables as t
from hyades.proxy import transfers
from hyades.proxy.locate import flush_failure, locate
from hyades.proxy.records import completion_words, request_words
from hyades.proxy.transport import Transport

PROXY_WORKER = -2  # in trace spans
KEPT_FAILURES = 64
_BATCH = 64  # requests that one round takes
_REAP = 16  # completions that one round takes: checksums must not keep the devices waiting
_GROUP = 256 * KIB  # bytes that are checked before their pages are published
# How long it sleeps grows with each fruitless round: waking costs the workers' cores 10-20 us.
_WAIT, _LONGEST_WAIT = 100e-6, 1e-3  # seconds in a device's wait, which a completion ends
_NAP, _LONGEST_NAP = 50_000, 800_000  # nanoseconds between two looks at an empty ring
_SPINS, _NAPS = 64, 20  # looks before the first nap; naps in a round
_CHECK, _MAKE = int(RequestFlag.CHECK_CRC), int(RequestFlag.MAKE_CRC)


class Proxy:
    """Moves pages between *devices* (request field `device` is the index) and *arena*."""

    def __init__(
        self,
        ring: Ring,
        ready: NDArray[np.int64],
        arena: NDArray[np.uint8],
        devices: Sequence[Transport],
        sink: Sink | None = None,
        *,
        crcs: NDArray[np.uint32] | None = None,
        retries: int = 3,
        depth: int = 0,
        jobs: int = 512,
    ) -> None:
        """Register *arena* (uint8) with every device.

        *ready* is int64[slots], *crcs* uint32[slots]; *depth* bounds what is in flight at a device
        (0: what the device takes); *jobs* bounds the requests that are out of the ring.
        """
        self.ring, self.ready, self.arena, self.devices = ring, ready, arena, list(devices)
        self.crcs = crcs if crcs is not None else np.zeros(len(ready), np.uint32)
        self._sink = sink if sink is not None else NullSink()
        self._retries = retries
        self._memory = arena.data
        self._tables(jobs, depth)
        self._failures: list[Failure] = []
        self._failed = self._crc_retries = self._crc_failures = 0
        self._io_wait = self._idle = 0.0
        self._busy_since = 0.0
        self._quiet = 0  # rounds without progress
        self._error: BaseException | None = None
        self._draining = np.zeros(1, np.int64)
        self._cancelling = False
        self._thread = threading.Thread(target=self._run, name="hyades-proxy", daemon=True)
        for device in self.devices:
            device.register(arena)

    def start(self) -> None:
        """Start the thread."""
        with undisturbed():
            self._thread.start()

    def stop(self, drain: bool = True) -> None:
        """End the thread: after all requests are answered, or at once.

        With ``drain=False`` the devices are closed, and what did not run is answered with
        Status.CANCELLED.  No buffer changes after this returns.
        """
        self._cancelling = self._cancelling or not drain
        store_word(self._draining, 0, 1)
        if self._thread.ident is not None:
            self._thread.join()

    def failures(self) -> list[Failure]:
        """Return the first requests that failed after retries."""
        return list(self._failures)

    def death(self) -> BaseException | None:
        """Return what ended the thread early, if anything did."""
        return self._error

    def port(self) -> Port:
        """Return the memory that the scheduler shares with this proxy."""
        return Port(self.ring, self.ready, self.crcs, self.arena, self.failures, self.death)

    def stats(self) -> dict[str, Any]:
        """Return counters; bytes are those that devices moved, re-reads included."""
        devices = [
            {
                "requests": int(row[t.D_REQUESTS]),
                "transfers": int(row[t.D_TRANSFERS]),
                "bytes_read": int(row[t.D_READ]),
                "bytes_written": int(row[t.D_WRITTEN]),
                "max_depth": int(row[t.D_MAX_DEPTH]),
                "transport": device.stats(),
            }
            for row, device in zip(self._devices, self.devices, strict=True)
        ]
        shared = self._shared
        total = self._devices.sum(axis=0)
        return {
            "requests": int(total[t.D_REQUESTS]),
            "transfers": int(total[t.D_TRANSFERS]),
            "bytes_read": int(total[t.D_READ]),
            "bytes_written": int(total[t.D_WRITTEN]),
            "duplicates": int(shared[t.G_TWINS]),
            "neighbours": int(shared[t.G_CHAINED]),
            "pieces": int(shared[t.G_SPLIT]),
            "retries": int(shared[t.G_RETRIES]),
            "crc_retries": self._crc_retries,
            "crc_failures": self._crc_failures,
            "failed": self._failed,
            "io_wait_seconds": self._io_wait,
            "idle_seconds": self._idle,
            "devices": devices,
        }

    def _tables(self, jobs: int, depth: int) -> None:
        limits = [device.limits for device in self.devices]
        if not limits:
            raise UsageError("a proxy needs at least one device")
        depths = [min(x.max_inflight, depth or x.max_inflight) for x in limits]
        count, deepest = len(limits), max(depths)
        self._jobs = np.zeros((jobs, t.J_COLUMNS), np.int64)
        self._free = np.arange(jobs)[::-1].copy()
        self._spans = np.full((t.S_ROWS, jobs), -1, np.int64)
        self._devices = np.zeros((count, t.D_COLUMNS), np.int64)
        self._devices[:, t.D_DEPTH] = self._devices[:, t.D_FREE] = depths
        self._devices[:, t.D_LIMIT] = [x.max_transfer for x in limits]
        self._queues = np.full((count, jobs + t.LOOK_AHEAD), -1, np.int64)
        self._flushes = np.zeros((count, jobs), np.int64)
        self._transfers = np.full((count, deepest, t.T_COLUMNS), -1, np.int64)
        self._places = np.tile(np.arange(deepest), (count, 1))
        self._staged = np.zeros((count, deepest, 8), np.int64)
        self._shared = np.zeros(t.G_WORDS, np.int64)
        self._shared[t.G_FREE] = jobs
        self._batch = np.zeros(_BATCH, REQUEST)
        self._completions = np.zeros(_REAP, COMPLETION)
        self._ended = np.zeros(jobs, np.int64)
        self._rows = np.zeros((jobs, t.J_COLUMNS), np.int64)

    # -- the thread

    def _run(self) -> None:
        try:
            self._loop()
            if self._cancelling:
                self._cancel()
        except BaseException as error:  # handed to those who wait
            self._error = error
            store_word(self.ring.control, FAILED, 1)
            self._abandon(Status.LOST)
            while not self._draining[0]:
                self._wait_for_ring(_LONGEST_NAP)
                self._answer_ring(Status.LOST)
        self._trace()

    def _loop(self) -> None:
        count = len(self.devices)
        while not self._cancelling:
            moved = self._admit()
            for index in range(count):
                moved += self._issue(index)
            for index in range(count):
                moved += self._reap(index)
            if moved:
                self._quiet = 0
            elif not self._rest():
                return

    def _admit(self) -> int:
        room = min(_BATCH, int(self._shared[t.G_FREE]))
        batch = self._batch[:room]
        words = request_words(batch)
        count = int(pop_batch(self.ring.words.reshape(-1), self.ring.control, words)) if room else 0
        if not count:
            return 0
        batch = batch[:count]
        if batch["slot"].max() >= len(self.ready):
            raise PeerError(f"a request names slot {batch['slot'].max()} of {len(self.ready)}")
        self._make_checksums(batch)
        refused = t.admit(
            words[:count], self._jobs, self._free, self._spans, self._devices, self._queues,
            self._flushes, self._shared, len(self.arena), self._ended,
        )  # fmt: skip
        if refused:
            self._publish(self._ended[:refused])
        return count

    def _make_checksums(self, batch: NDArray[np.void]) -> None:
        chosen = batch[(batch["flags"] & _MAKE != 0) & (batch["op"] == Op.WRITE)]
        if not len(chosen):
            return
        memory, crcs = self._memory, self.crcs
        columns = (chosen["offset"].tolist(), chosen["nbytes"].tolist(), chosen["slot"].tolist())
        for offset, nbytes, slot in zip(*columns, strict=True):
            crcs[slot] = crc32c(memory[offset : offset + nbytes])

    def _issue(self, index: int) -> int:
        device = self._devices[index]
        if device[t.D_FLUSHES]:
            t.release_flushes(self._jobs, self._devices, self._queues, self._flushes, index)
        if not device[t.D_COUNT] and not device[t.D_STAGED]:
            return 0
        staged = transfers.stage(
            self._jobs, self._devices, self._queues, self._transfers, self._places, self._staged,
            self._shared, index,
        )  # fmt: skip
        if not staged:
            return 0
        if not self._busy_since:
            self._busy_since = time.perf_counter()
        records = self._staged[index, :staged].view(REQUEST)[:, 0]
        accepted = self.devices[index].submit(records)
        transfers.unstage(self._devices, self._staged, index, accepted)
        return accepted

    def _reap(self, index: int) -> int:
        device = self._devices[index]
        if device[t.D_FREE] == device[t.D_DEPTH]:
            return 0
        count = self.devices[index].poll(self._completions)
        if not count:
            return 0
        ended = transfers.complete(
            completion_words(self._completions[:count]), self._jobs, self._devices, self._queues,
            self._transfers, self._places, self._shared, index, self._retries, self._ended,
        )  # fmt: skip
        if ended < 0:
            raise PeerError(f"device {index} completed a transfer that it was not given")
        if ended:
            self._settle(self._ended[:ended].copy())
        return count

    def _settle(self, ended: NDArray[np.int64]) -> None:
        size = int(self._jobs[ended, t.J_NBYTES].max())
        step = max(1, _GROUP // max(1, size))
        for start in range(0, len(ended), step):
            self._publish(self._check(ended[start : start + step]))

    def _check(self, ended: NDArray[np.int64]) -> NDArray[np.int64]:
        """Compare checksums; return the jobs that are done, without those that are read again."""
        rows = self._jobs[ended]
        wanted = (rows[:, t.J_FLAGS] & _CHECK != 0) & (rows[:, t.J_OP] == Op.READ)
        wanted &= rows[:, t.J_STATUS] == Status.OK
        if not wanted.any():
            return ended
        memory, again = self._memory, []
        columns = (t.J_OFFSET, t.J_NBYTES, t.J_CRC)
        places = np.flatnonzero(wanted)
        for place, row in zip(places.tolist(), rows[places][:, columns].tolist(), strict=True):
            offset, nbytes, expected = row
            if crc32c(memory[offset : offset + nbytes]) != expected:
                again.append(place)
        return self._recheck(ended, again) if again else ended

    def _recheck(self, ended: NDArray[np.int64], wrong: list[int]) -> NDArray[np.int64]:
        keep = np.ones(len(ended), bool)
        for place in wrong:
            job = int(ended[place])
            if self._jobs[job, t.J_CRC_TRIES]:
                self._jobs[job, t.J_STATUS] = Status.CRC
                self._crc_failures += 1
                continue
            self._jobs[job, t.J_CRC_TRIES] = 1
            self._crc_retries += 1
            transfers.retry(self._jobs, self._devices, self._queues, self._shared, job)
            keep[place] = False
        return ended[keep]

    def _publish(self, ended: NDArray[np.int64]) -> None:
        failed = transfers.publish(
            ended, self._jobs, self._free, self._spans, self._shared, self.arena, self.ready,
            self._rows,
        )  # fmt: skip
        if failed:
            self._failed += failed
            room = KEPT_FAILURES - len(self._failures)
            rows = self._rows[: min(failed, room)].tolist()
            self._failures += [_failure(row, self.devices) for row in rows]

    def _rest(self) -> bool:
        """Wait for something to do; return False when there will be nothing any more."""
        begin = time.perf_counter()
        quiet = self._quiet
        self._quiet = min(quiet + 1, 10)
        if self._shared[t.G_ACTIVE]:
            running = self._devices[:, t.D_DEPTH] - self._devices[:, t.D_FREE]
            self.devices[int(np.argmax(running))].wait(min(_WAIT * 2**quiet, _LONGEST_WAIT))
            self._io_wait += time.perf_counter() - begin
            return True
        self._trace()
        if self._draining[0]:
            return False
        nap = min(_NAP << quiet, _LONGEST_NAP)
        self._wait_for_ring(nap)
        self._idle += time.perf_counter() - begin
        return True

    def _wait_for_ring(self, nap: int) -> None:
        _idle(self.ring.words.reshape(-1), self.ring.control, self._draining, nap)

    def _trace(self) -> None:
        if self._busy_since:
            now = time.perf_counter()
            self._sink.emit(Span("io", -1, PROXY_WORKER, self._busy_since, now))
            self._busy_since = 0.0

    def _cancel(self) -> None:
        for device in self.devices:
            device.close()
        self._retries = 0
        for index, device in enumerate(self.devices):
            staged = int(self._devices[index, t.D_STAGED])
            while self._devices[index, t.D_FREE] + staged < self._devices[index, t.D_DEPTH]:
                if not self._reap(index):
                    device.wait(_WAIT)
        self._abandon(Status.CANCELLED)

    def _abandon(self, status: Status) -> None:
        """Answer everything in the table and in the ring with *status*."""
        ended = transfers.abandon(self._jobs, int(status), self._ended)
        args = (self._jobs, self._free, self._spans, self._shared, self.arena, self.ready)
        transfers.publish(self._ended[:ended], *args, self._rows)
        self._answer_ring(status)

    def _answer_ring(self, status: Status) -> None:
        while count := self.ring.pop(self._batch):
            slots = self._batch["slot"][:count]
            for slot in slots[slots < len(self.ready)].tolist():
                store_word(self.ready, slot, int(status))


def _failure(row: list[int], devices: Sequence[Transport]) -> Failure:
    place, device = "", row[t.J_DEVICE]
    if device < len(devices) and row[t.J_OP] == Op.FLUSH:
        place = flush_failure(devices[device])
    elif device < len(devices):
        place = locate(devices[device], row[t.J_LBA], row[t.J_NBYTES] // BLOCK)
    return Failure(
        object=row[t.J_OBJECT],
        page=row[t.J_PAGE],
        lba=row[t.J_LBA],
        status=Status(row[t.J_STATUS]),
        device=device,
        write=row[t.J_OP] == Op.WRITE,
        flush=row[t.J_OP] == Op.FLUSH,
        place=place,
    )


@jit
def _idle(words: Any, control: Any, draining: Any, nap: Any) -> None:
    """Sleep until the ring has a record, at most _NAPS times *nap* nanoseconds."""
    capacity = words.shape[0] >> 3
    head = ld_relaxed(control, HEAD)
    place = (head & (capacity - 1)) << 3
    for turn in range(_SPINS + _NAPS):
        if ld_acquire_sys(words, place) == head + 1 or ld_acquire_sys(draining, 0) != 0:
            return
        if turn < _SPINS:
            pause(0)
        else:
            doze(nap)
