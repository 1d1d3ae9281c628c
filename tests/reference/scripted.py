"""A scan without threads: a script says which worker runs, and which request ends, and how.

Workers are stepped one round at a time (`scheduler.step`); the host's work that a round hands out
ends when the script says so.  The proxy is a list of requests that the script answers in any order.
"""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tests.reference.engine import MEMORY

import hyades
from hyades.common.checksum import crc32c
from hyades.common.layout import BLOCK, REQUEST, Op, Status
from hyades.common.port import Port
from hyades.common.ring import Ring
from hyades.gpu_side import refresh as engine
from hyades.gpu_side import scheduler
from hyades.gpu_side import words as W
from hyades.gpu_side.buffers import Buffers
from hyades.gpu_side.scan import PassScan

ARENA = 1 << 26
# Slots of input, tiles, messages and output.
LEAST, FEW, MANY = (1, 1, 1, 1), (2, 3, 2, 1), (16, 64, 16, 16)
DEADLOCK = "no worker can go on, nothing is on the way"


class _Captured(Exception):  # noqa: N818 - not an error
    pass


@dataclass(frozen=True)
class Case:
    """What a first conv stage is made of, and the volume's bytes."""

    stage: Any
    inputs: Any
    blocks: bytes

    def with_buffers(self, chunk: int, tile: int, message: int, out: int) -> "Case":
        """Return the case with other slot counts; a log has room for one item at a time."""
        candidate = self.inputs.candidate
        reserve = candidate.buffers.log_reserve
        groups = -(-self.inputs.topology.chunks // max(candidate.state_slots, 1))
        log_slots = groups + reserve if reserve else 0
        buffers = Buffers(chunk, tile, message, out, log_slots, reserve)
        return replace(
            self, inputs=replace(self.inputs, candidate=replace(candidate, buffers=buffers))
        )

    def with_workers(self, workers: int) -> "Case":
        """Return the case for another number of workers."""
        return replace(self, inputs=replace(self.inputs, workers=workers))


def capture(monkeypatch: Any, volume: Path, module: Any, **options: Any) -> Case:
    """Start a refresh and take its first pass before it begins."""
    caught: list[Any] = []

    class Capturing(engine.CpuDevice):
        def run(self, scan: PassScan, *_: Any) -> None:
            caught.append(scan)
            raise _Captured

    with monkeypatch.context() as patch:
        patch.setattr(engine, "CpuDevice", Capturing)
        with suppress(_Captured):
            hyades.refresh(
                volume, module, out="captured", force=True, **{"memory": MEMORY, **options}
            )
    [scan] = caught
    return Case(scan.stage, scan.inputs, volume.read_bytes())


@dataclass
class Worker:
    """A worker, and the host's work that it was handed."""

    number: int
    action: int = -1  # of the work in hand, or -1
    value: int = 0
    ended: int = -1  # its last action


@dataclass
class Script:
    """One pass, stepped by hand."""

    case: Case
    workers: list[Worker] = field(init=False)
    pending: list[np.void] = field(default_factory=list)
    written: dict[int, bytes] = field(default_factory=dict)  # by first block
    answered: int = 0
    landed: list[int] = field(default_factory=list)
    finalised: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ring = Ring.create(4096)
        self.port = Port(
            self.ring, np.zeros(4096, np.int64), np.zeros(4096, np.uint32),
            np.zeros(ARENA, np.uint8), lambda: [], lambda: None,
        )  # fmt: skip
        self.scan = PassScan(self.case.stage, self.case.inputs, self.port, None, None)
        self.g, self.w = self.scan.tables.g, self.scan.tables.w
        self.workers = [Worker(n) for n in range(self.case.inputs.workers)]

    # --- the proxy

    def collect(self) -> int:
        """Take what was posted; return how many requests wait for an answer."""
        out = np.zeros(256, REQUEST)
        while count := self.ring.pop(out):
            self.pending += list(out[:count].copy())
        return len(self.pending)

    def answer(self, index: int, status: int = Status.OK) -> np.void:
        """End pending request *index*, moving its bytes unless it fails."""
        request = self.pending.pop(index)
        self.answered += 1
        slot = int(request["slot"])
        if status != Status.OK:
            self.port.ready[slot] = int(status)
            return request
        at, nbytes = int(request["offset"]), int(request["nbytes"])
        place, data = int(request["lba"]) * BLOCK, self.port.arena[at : at + nbytes]
        if request["op"] == Op.READ:
            stored = self.written.get(int(request["lba"]))
            raw = stored if stored is not None else self.case.blocks[place : place + nbytes]
            data[:] = np.frombuffer(raw, np.uint8)
        else:
            self.written[int(request["lba"])] = data.tobytes()
            self.port.crcs[slot] = crc32c(data)
        self.port.ready[slot] = int(request["generation"])
        return request

    # --- workers

    def step(self, worker: Worker) -> bool:
        """Run one round of an idle worker; return whether it did anything."""
        assert worker.action < 0
        assert worker.ended < 0
        word = int(scheduler.step(worker.number, *self.scan.arguments))
        if word <= 0:
            return word < 0
        action, value = (word - 1) >> W.ACTION_SHIFT, (word - 1) & ((1 << W.ACTION_SHIFT) - 1)
        if action in (W.A_LAND, W.A_FINALISE):
            worker.action, worker.value = action, value
        else:
            worker.ended = action
        return True

    def finish(self, worker: Worker) -> None:
        """Do the host's work that a worker was handed."""
        with torch.inference_mode():
            if worker.action == W.A_LAND:
                self.scan.land(worker.value)
                self.landed.append(worker.value)
            else:
                self.scan.finalise(worker.value)
                self.finalised.append(worker.value)
        worker.action = -1

    def able(self) -> list[Worker]:
        """Return the workers that can be stepped."""
        return [w for w in self.workers if w.action < 0 and w.ended < 0]

    def busy(self) -> list[Worker]:
        """Return the workers with host's work in hand."""
        return [w for w in self.workers if w.action >= 0]

    def settle(self) -> None:
        """Step and finish, answering nothing, until no worker does anything."""
        moved = True
        while moved:
            moved = False
            for worker in self.able():
                moved |= self.step(worker)
            for worker in self.busy():
                self.finish(worker)
                moved = True

    def run(self, pick: Any = None) -> None:
        """Go on until every worker has ended; *pick* chooses the request to answer (an index)."""
        while any(worker.ended < 0 for worker in self.workers):
            self.settle()
            if any(worker.ended < 0 for worker in self.workers):
                assert self.collect(), DEADLOCK
                self.answer(0 if pick is None else pick(self.pending))
        self.drain()

    def run_randomly(self, rng: np.random.Generator) -> None:
        """As run, every choice by chance: who steps, whose work ends, which request is answered."""
        idle = 0
        while any(worker.ended < 0 for worker in self.workers):
            choices: list[Any] = [*self.able(), *self.busy()]
            choices += range(min(self.collect(), 3))
            assert choices, DEADLOCK
            chosen = choices[rng.integers(len(choices))]
            if not isinstance(chosen, Worker):
                self.answer(int(rng.integers(len(self.pending))))
                idle = 0
            elif chosen.action >= 0:
                self.finish(chosen)
                idle = 0
            else:
                idle = 0 if self.step(chosen) else idle + 1
            assert idle < 1000 or self.pending or self.busy(), DEADLOCK
        self.drain()

    def drain(self) -> None:
        """Answer what is still on the way."""
        while self.collect():
            self.answer(0)

    # --- what came of it

    def lasts(self) -> list[int]:
        """Return the workers' last actions."""
        return [worker.ended for worker in self.workers]

    def output(self) -> bytes:
        """Return the pages of the lanes in order; all must be durable."""
        assert self.scan.drained()
        lanes = self.scan.tables.lanes
        assert self.scan.durable()[lanes].all()
        target = self.case.inputs.target
        return b"".join(self.written[int(lba)] for lba in target.lbas)

    def count(self, name: int) -> int:
        """Return a counter's sum over the workers."""
        return int(self.scan.stats()[:, name].sum())


# --- what every script must show


def rows_written(script: Script) -> NDArray[Any]:
    """Return the rows of all lanes, [V, width]."""
    target = script.case.inputs.target
    shape = target.shape
    raw = np.frombuffer(script.output(), np.uint8).reshape(-1, target.page_bytes)
    parts = [
        raw[page, : (end - start) * shape.row_bytes].view(target.dtype).reshape(-1, target.width)
        for page in range(shape.pages)
        for start, end in [shape.page_rows(page)]
    ]
    return np.concatenate(parts)


def check_rows(script: Script, rows: NDArray[Any]) -> None:
    """Compare what a script wrote with the rows that threads computed, bit by bit."""
    assert rows_written(script).tobytes() == rows.tobytes()


def check_counts(script: Script) -> None:
    """Every item ran once, every parked item resumed, nothing is held."""
    topology = script.case.inputs.topology
    assert script.scan.drained()
    assert script.lasts() == [W.A_DONE] * len(script.workers)
    assert script.count(W.ST_ITEMS) == len(topology.directory)
    assert script.count(W.ST_SEGMENTS) == topology.directory["segments"].sum()
    assert script.count(W.ST_PARKS) == script.count(W.ST_RESUMES)
    assert script.count(W.ST_PARKED_NOW) == 0
    assert sorted(script.landed) == list(range(topology.chunks))
    assert sorted(script.finalised) == list(range(topology.chunks))
    assert script.w[W.C_PAGES_LEFT] == 0
    assert script.w[W.C_OUT_CREDIT] == script.g[W.G_OUT_SLOTS]


def first_that(pending: list[np.void], good: Any) -> int:
    """Return the index of the first request that is good, or 0."""
    return next((i for i, request in enumerate(pending) if good(request)), 0)


# Which of the requests on the way is answered next.
ORDERS = {
    "first": lambda pending: 0,
    "last": lambda pending: len(pending) - 1,
    "tiles last": lambda pending: first_that(pending, lambda r: r["object"] == 0),
    "inputs last": lambda pending: first_that(pending, lambda r: r["object"] != 0),
    "writes last": lambda pending: first_that(pending, lambda r: r["op"] == Op.READ),
    "highest page": lambda pending: int(np.argmax([int(r["page"]) for r in pending])),
}
