"""A load that checks itself: random reads and writes with a model of what every block holds."""

import time

import numpy as np

from hyades.common.layout import BLOCK, COMPLETION, REQUEST, Op, Status
from hyades.proxy.arena import allocate_arena


class Churn:
    """Keeps *depth* requests of up to *longest* blocks at a device, never two on one block.

    Every completion must be OK, come once, and a read must show the newest completed write.
    """

    def __init__(
        self, transport, nblocks: int, *, depth: int = 24, longest: int = 4, seed: int = 0,
        patience: float = 60.0,
    ) -> None:  # fmt: skip
        self.transport, self.depth, self.longest = transport, depth, longest
        self.arena = allocate_arena(depth * longest * BLOCK)
        transport.register(self.arena)
        self.model = np.zeros((nblocks, BLOCK // 8), np.int64)
        self.busy = np.zeros(nblocks, bool)
        self.done = 0
        self.patience = patience
        self._slots = list(range(depth))
        self._out: dict[int, tuple[int, int, int, int]] = {}  # cookie: op, lba, count, slot
        self._random = np.random.default_rng(seed)
        self._serial = 0
        self._completions = np.zeros(16, COMPLETION)
        self._moved = time.monotonic()

    def run(self, until) -> None:
        """Go on until *until* returns true, then wait for everything."""
        while not until():
            self._fill()
            self._reap()
        self.drain()

    def drain(self) -> None:
        """Wait until nothing is out."""
        while self._out:
            self._reap()

    def flush(self) -> int:
        """Flush; return the status."""
        record = np.zeros(1, REQUEST)
        record["op"] = Op.FLUSH
        assert self.transport.submit(record) == 1
        while not self.transport.poll(self._completions):
            self.transport.wait(0.05)
        return int(self._completions["status"][0])

    def verify(self) -> None:
        """Read every block and compare it with the model."""
        nblocks, step = len(self.model), self.longest
        for lba in range(0, nblocks, step):
            self._submit(Op.READ, lba, min(step, nblocks - lba))
            while not self._slots:
                self._reap()
        self.drain()

    def _fill(self) -> None:
        for _ in range(len(self._slots)):
            count = int(self._random.integers(1, self.longest + 1))
            lba = int(self._random.integers(0, len(self.model) - count + 1))
            if not self.busy[lba : lba + count].any():
                op = Op.WRITE if self._random.random() < 0.6 else Op.READ
                if not self._submit(op, lba, count):
                    return

    def _rows(self, slot: int, count: int) -> np.ndarray:
        start = slot * self.longest * BLOCK
        return self.arena[start : start + count * BLOCK].view(np.int64).reshape(count, -1)

    def _submit(self, op: Op, lba: int, count: int) -> bool:
        slot = self._slots.pop()
        self._serial += 1
        rows = self._rows(slot, count)
        if op == Op.WRITE:
            rows[:] = (np.arange(count)[:, None] + lba) << 32 | self._serial
        else:
            rows[:] = -1
        record = np.zeros(1, REQUEST)
        record["op"], record["lba"], record["nbytes"] = op, lba, count * BLOCK
        record["offset"], record["cookie"] = slot * self.longest * BLOCK, self._serial
        if not self.transport.submit(record):
            self._slots.append(slot)
            return False
        self.busy[lba : lba + count] = True
        self._out[self._serial] = (op, lba, count, slot)
        return True

    def _reap(self) -> None:
        count = self.transport.poll(self._completions)
        for record in self._completions[:count]:
            cookie, status = int(record["cookie"]), int(record["status"])
            assert cookie in self._out, f"cookie {cookie} was not given, or came twice"
            op, lba, nblocks, slot = self._out.pop(cookie)
            stats = self.transport.stats()
            assert status == Status.OK, f"{Status(status)!r} {stats['last_failure']}"
            rows = self._rows(slot, nblocks)
            if op == Op.WRITE:
                self.model[lba : lba + nblocks] = rows
            else:
                assert np.array_equal(rows, self.model[lba : lba + nblocks]), f"LBA {lba}"
            self.busy[lba : lba + nblocks] = False
            self._slots.append(slot)
            self.done += 1
        if count:
            self._moved = time.monotonic()
        else:
            self.transport.wait(0.01)
            quiet = time.monotonic() - self._moved
            assert quiet < self.patience or not self._out, f"nothing for {quiet:.0f} s"
