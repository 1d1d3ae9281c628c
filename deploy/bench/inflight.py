"""Reading through a transport with a number of requests in flight, for benchmarks."""

import time
from collections.abc import Callable

import numpy as np

from hyades.common.errors import DeviceLost
from hyades.common.layout import COMPLETION, REQUEST, Op, Status
from hyades.proxy.transport import Records, Transport

Fill = Callable[[Records, int], None]


def read_in_flight(
    device: Transport, fill: Fill, count: int, size: int, depth: int, deadline: float = float("inf")
) -> int:
    """Read *count* pieces of at most *size* bytes in order, *depth* at once; return how many were.

    *fill* sets lba and nbytes of REQUEST[n], the pieces from a number on.  The arena of *device*
    has depth x size bytes.  After *deadline* (time.monotonic) no more are begun.  DeviceLost.
    """
    records, completions = np.zeros(depth, REQUEST), np.zeros(depth, COMPLETION)
    records["op"] = Op.READ
    free = np.arange(depth, dtype=np.uint64)
    sent = done = 0
    while done < count and (sent > done or time.monotonic() < deadline):
        room = min(len(free), count - sent) if time.monotonic() < deadline else 0
        if room:
            batch = records[:room]
            fill(batch, sent)
            batch["cookie"], batch["offset"] = free[:room], free[:room] * np.uint64(size)
            accepted = device.submit(batch)
            sent, free = sent + accepted, free[accepted:]
        found = device.poll(completions)
        if not found:
            device.wait(0.1)
            continue
        if (completions["status"][:found] != Status.OK).any():
            worst = Status(int(completions["status"][:found].min()))
            raise DeviceLost(f"{device.stats()['describe']}: a read ended with {worst.name}")
        free = np.concatenate([free, completions["cookie"][:found]])
        done += found
    return done
