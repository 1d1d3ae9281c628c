"""One device of a proxy whose transport is replaced while it goes on: views of the passes of a run.

Rules:
1. `replace` is for when nothing is in flight; any thread may call it.  The arena stays, the limits
   are those of the beginning, and what transports that are gone have counted is added up (so a
   request that was done again counts twice).
2. Requests go to the transport under cookies of the switch: their row in a table, where they stay
   until they are reported.  A transport may take fewer at a time than the limits say.
3. A request that ends with Status.LOST has no device any more.  Then, with a `fallback`, the
   transport is closed, and what it has not done is done by the one that the fallback gives, once
   for each transport, on the thread that polls.  Where it gives none, LOST is passed on, and all
   that comes later is LOST, too.
4. `submit`, `poll`, `replace` and `close` exclude each other; `stats` and the names need no lock.
Must stay in sync: hyades.proxy.transport has the rules that this keeps towards both sides.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import HyadesError, UsageError
from hyades.common.layout import COMPLETION, REQUEST, Status
from hyades.proxy.arena import check_arena
from hyades.proxy.locate import failed_lba, flush_failure, locate, patience
from hyades.proxy.transport import Limits, Records, Transport

Fallback = Callable[[str], Transport]  # from why the transport is lost; HyadesError: there is none
_SUMMED = (
    "bytes_read", "bytes_written", "requests", "errors", "reconnects", "losses", "replays",
    "digest_errors",
)  # fmt: skip
_BATCH = 64
_TURN = 0.01  # seconds


class SwitchableDevice:
    """See the module."""

    def __init__(
        self, transport: Transport, *, fallback: Fallback | None = None, shared_arena: bool = False
    ) -> None:
        """Begin with *transport*, whose limits hold from now on; later ones may need no more.

        *shared_arena*: some of them will need an arena of that kind.
        """
        limits = transport.limits
        shared = limits.shared_arena or shared_arena
        self._limits = Limits(limits.max_transfer, limits.max_inflight, limits.alignment, shared)
        self.fallback = fallback
        self.fell_back = ""  # why the last transport that was lost was, if one was replaced so
        self._inner, self._past = transport, dict.fromkeys(_SUMMED, 0)
        self._arena: NDArray[np.uint8] | None = None
        count = limits.max_inflight
        self._rows: Records = np.zeros(count, REQUEST)  # as they came
        self._free: NDArray[np.int64] = np.arange(count)[::-1].copy()
        self._room = count  # of _free, from the beginning
        self._waiting: deque[int] = deque()  # rows that no transport has
        self._ended: deque[tuple[int, int]] = deque()  # rows to be reported, with their status
        self._done: Records = np.zeros(_BATCH, COMPLETION)
        self._lost = ""  # why everything is
        self._lost_count = 0
        self._spent = False  # the fallback was asked for a transport in place of this one
        self._closed = False
        self._lock = threading.Lock()

    @property
    def limits(self) -> Limits:
        """What one request and the queue may hold."""
        return self._limits

    @property
    def nblocks(self) -> int:
        """Blocks of the transport of now."""
        return self._inner.nblocks

    @property
    def transport(self) -> Transport:
        """The transport of now."""
        return self._inner

    @property
    def in_flight(self) -> int:
        """Requests that were accepted and not yet reported."""
        return len(self._free) - self._room

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the uint8 *arena* that request offsets index."""
        check_arena(arena, self._limits.alignment, registered=self._arena is not None)
        self._inner.register(arena)
        self._arena = arena

    def replace(self, transport: Transport, fallback: Fallback | None = None) -> None:
        """Close the transport of now and go on with *transport*, and *fallback* if one is given.

        UsageError, with everything as before, where something is in flight or it does not fit.
        """
        with self._lock:
            if self._closed:
                raise UsageError("this device is closed: open another one")
            if self.in_flight:
                raise UsageError(
                    f"{self.in_flight} requests are in flight: a device is replaced between passes"
                )
            self._adopt(transport)
            try:
                self._inner.close()
            finally:
                self._exchange(transport)
                self._lost, self._spent = "", False
                if fallback is not None:
                    self.fallback = fallback

    def submit(self, requests: Records) -> int:
        """Take a prefix of REQUEST[n]; return its length."""
        with self._lock:
            if self._closed:
                raise UsageError(f"{self.describe()} is closed")
            if self._arena is None:
                raise UsageError(f"{self.describe()} has no arena: call register first")
            count = min(len(requests), self._room)
            if self._lost:
                return self._refuse(requests[:count])
            if self._waiting and not self._resume():
                return 0
            return self._pass_on(requests[:count])

    def poll(self, completions: Records) -> int:
        """Fill COMPLETION[n] and return how many."""
        with self._lock:
            if self._waiting and not self._closed:
                self._resume()
            count = self._report(completions)
            room = min(len(completions) - count, _BATCH)
            if room and not self._lost:
                found = self._collect(self._done[:room])
                count += self._put(found, completions[count:])
                count += self._report(completions[count:])
        return count

    def wait(self, timeout: float) -> None:
        """Sleep until a completion may be there, at most *timeout* seconds."""
        if self._ended:
            return
        if not self.in_flight:
            time.sleep(timeout)  # the transport may be replaced meanwhile
        else:
            self._inner.wait(timeout)

    def grow(self, nblocks: int) -> None:
        """Grow the transport of now."""
        self._inner.grow(nblocks)

    def close(self) -> None:
        """Cancel what is under way, and close the transport."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            while self._waiting:
                self._ended.append((self._waiting.popleft(), int(Status.CANCELLED)))
            self._inner.close()

    def locate(self, lba: int) -> str:
        """Return where *lba* lies, and why there is nothing there any more."""
        if self._lost:
            return f"LBA {lba} ({self._lost})"
        return locate(self._inner, lba)

    def failed_lba(self, lba: int, nblocks: int) -> int:
        """Return which of *nblocks* blocks the transport says failed."""
        return failed_lba(self._inner, lba, nblocks)

    def flush_failure(self) -> str:
        """Return why the transport's last flush failed."""
        return self._lost or flush_failure(self._inner)

    @property
    def patience(self) -> float:
        """Seconds for which the transport may be silent."""
        return patience(self._inner, 0.0)

    def stats(self) -> dict[str, Any]:
        """Return what all transports counted, and the rest of the one of now."""
        inner, past = self._inner, self._past
        stats = inner.stats()
        summed = {key: n + stats.get(key, 0) for key, n in past.items() if n or key in stats}
        lost = self._lost_count
        summed["requests"] += lost
        summed["errors"] += lost
        return {**stats, **summed, "fell_back": self.fell_back, "describe": self.describe()}

    def describe(self) -> str:
        """Return one line for people."""
        inner = str(self._inner.stats()["describe"])
        why = self._lost or (f"in place of what was lost: {self.fell_back}" * bool(self.fell_back))
        return f"{inner} ({why})" if why else inner

    # -- rows

    def _pass_on(self, requests: Records) -> int:
        """Give *requests* to the transport; return how many it took."""
        count = len(requests)
        if not count:
            return 0
        rows = self._free[self._room - count : self._room][::-1]
        self._rows[rows] = requests
        batch = np.array(requests)
        batch["cookie"] = rows
        taken = self._inner.submit(batch)
        self._room -= taken
        return taken

    def _refuse(self, requests: Records) -> int:
        """Take *requests*, which are lost."""
        for request in requests:
            self._room -= 1
            row = int(self._free[self._room])
            self._rows[row] = request
            self._end_lost(row)
        return len(requests)

    def _end_lost(self, row: int) -> None:
        self._lost_count += 1
        self._ended.append((row, int(Status.LOST)))

    def _resume(self) -> bool:
        """Give the transport what waits; return whether it took everything."""
        rows = np.array(self._waiting)
        batch = self._rows[rows]
        batch["cookie"] = rows
        for _ in range(self._inner.submit(batch)):
            self._waiting.popleft()
        return not self._waiting

    def _collect(self, into: Records) -> Records:
        """Return what the transport has completed, in *into*; replace it where it is lost."""
        done = into[: self._inner.poll(into)]
        if self.fallback is None or self._spent or self._closed:
            return done
        lost = done["status"] == Status.LOST
        if not lost.any():
            return done
        self._fall_back(done["cookie"][lost].astype(np.int64).tolist(), len(done))
        kept: Records = done[~lost]
        return kept

    def _put(self, done: Records, completions: Records) -> int:
        """Report *done* under the cookies that the requests came with, and free their rows."""
        count = len(done)
        rows = done["cookie"].astype(np.int64)
        completions[:count] = done
        completions["cookie"][:count] = self._rows["cookie"][rows]
        self._free[self._room : self._room + count] = rows
        self._room += count
        return count

    def _report(self, completions: Records) -> int:
        """Report what has ended here; return how many."""
        count = min(len(self._ended), len(completions))
        for place in range(count):
            row, status = self._ended.popleft()
            completions[place] = np.zeros(1, COMPLETION)[0]
            completions["cookie"][place] = self._rows["cookie"][row]
            completions["status"][place] = status
            completions["nbytes"][place] = self._rows["nbytes"][row] if status == Status.OK else 0
            self._free[self._room] = row
            self._room += 1
        return count

    # -- transports

    def _fall_back(self, lost: list[int], reported: int) -> None:
        """Close the transport, which has lost some rows; do what it has not done on another.

        *reported* requests are in the caller's hands, those that are lost included.
        """
        old, fallback = self._inner, self.fallback
        assert fallback is not None
        reason = locate(old, int(self._rows["lba"][lost[0]])) or str(old.stats()["describe"])
        nblocks = old.nblocks
        self._spent = True
        old.close()
        self._waiting.extend([*lost, *self._drain(old, reported)])
        try:
            self._take_place(fallback(reason), nblocks)
        except HyadesError as error:
            self._lost = f"{reason}; in its place: {error}"
            while self._waiting:
                self._end_lost(self._waiting.popleft())
        else:
            self.fell_back = reason
            self._resume()

    def _take_place(self, transport: Transport, nblocks: int) -> None:
        try:
            if transport.nblocks != nblocks:
                raise UsageError(f"{transport.nblocks} blocks, not {nblocks}")
            self._adopt(transport)
        except BaseException:
            transport.close()
            raise
        self._exchange(transport)

    def _drain(self, old: Transport, reported: int) -> list[int]:
        """Take what *old*, which is closed, still reports; return the rows that it has not done."""
        left = self.in_flight - reported - len(self._waiting) - len(self._ended)
        again, batch = [], np.zeros(_BATCH, COMPLETION)
        while left:
            count = old.poll(batch)
            for done in batch[:count]:
                row, status = int(done["cookie"]), int(done["status"])
                if status in (Status.LOST, Status.CANCELLED):
                    again.append(row)
                else:
                    self._ended.append((row, status))
            left -= count
            if not count:
                old.wait(_TURN)
        return again

    def _adopt(self, transport: Transport) -> None:
        """Give *transport* the arena; UsageError where it takes less than the limits say."""
        ours, its = self._limits, transport.limits
        if its.max_transfer < ours.max_transfer or its.alignment > ours.alignment:
            raise UsageError(
                f"{transport.stats()['describe']} takes {its.max_transfer} bytes at a time, the"
                f" device it is to be takes {ours.max_transfer}: write max_transfer="
                f"{its.max_transfer} from the beginning"
            )
        if self._arena is not None:
            transport.register(self._arena)

    def _exchange(self, transport: Transport) -> None:
        """Go on with *transport*, and keep what the one before has counted."""
        stats = self._inner.stats()
        self._past = {key: n + int(stats.get(key, 0)) for key, n in self._past.items()}
        self._inner = transport
