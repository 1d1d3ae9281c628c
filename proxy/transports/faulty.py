"""Any transport with faults on purpose: ``faulty+<url>?fault=...&delay=...&seed=...``.

Options of the URL, beside those of the inner transport:

    fault=KIND[,op=read|write|flush][,every=N][,at=N][,after=N][,times=N][,lba=A-B]
        KIND io, short, nospace, lost, timeout, invalid: the request fails with that status
        KIND corrupt: one bit of one byte of a finished read, inside lba if given, is flipped
        KIND crash: submit raises RuntimeError, as a bug would
        every=N hits each Nth matching request, at=N the Nth only, after=N all after the Nth;
        without any of them every matching request; times=N stops after N hits; lba is half-open
    delay=SECONDS       a completion comes at a random time up to this later
    reorder=1           completions come in random order
    accept=K            submit takes K requests at most
    seed=N              of everything random

Nothing is ever lost: every accepted request completes once.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, COMPLETION, REQUEST, Op, Status
from hyades.proxy.locate import failed_lba, flush_failure, locate, patience
from hyades.proxy.transport import Limits, Records, Transport, ViewTransport
from hyades.proxy.urls import Url

STATUSES = {
    "io": Status.IO,
    "short": Status.SHORT,
    "nospace": Status.NO_SPACE,
    "lost": Status.LOST,
    "timeout": Status.TIMEOUT,
    "invalid": Status.INVALID,
}
KINDS = (*STATUSES, "corrupt", "crash")


@dataclass(slots=True)
class Fault:
    """One rule; `seen` and `hits` count matching requests and what was done to them."""

    kind: str
    op: Op | None = None
    every: int = 0
    at: int = 0
    after: int = 0
    times: int = 0
    lbas: tuple[int, int] | None = None  # half-open
    seen: int = 0
    hits: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"no fault {self.kind!r}; there are {', '.join(KINDS)}")
        if self.kind == "corrupt" and self.op not in (None, Op.READ):
            raise UsageError("fault corrupt is for reads only")

    def strikes(self, request: np.void) -> bool:
        """Count *request* and say whether it is hit."""
        op = int(request["op"])
        if op != self.op if self.op is not None else self.kind == "corrupt" and op != Op.READ:
            return False
        if self.lbas is not None and not self._touches(request, *self.lbas):
            return False
        self.seen += 1
        chosen = not (self.every or self.at or self.after)
        chosen |= bool(self.every) and self.seen % self.every == 0
        chosen |= bool(self.at) and self.seen == self.at
        chosen |= bool(self.after) and self.seen > self.after
        if not chosen or (self.times and self.hits >= self.times):
            return False
        self.hits += 1
        return True

    @staticmethod
    def _touches(request: np.void, start: int, end: int) -> bool:
        lba = int(request["lba"])
        return lba < end and lba + int(request["nbytes"]) // BLOCK > start


@dataclass(slots=True)
class FaultPlan:
    """What goes wrong, reproducibly."""

    faults: list[Fault] = field(default_factory=list)
    delay: float = 0.0  # seconds at most
    reorder: bool = False
    accept: int = 0  # requests a submit takes at most; 0: as many as fit
    seed: int = 0


class FaultyTransport:
    """Passes requests to *inner* and does what the plan says to some of them."""

    def __init__(self, inner: Transport, plan: FaultPlan) -> None:
        self.inner = inner
        self.plan = plan
        self._random = np.random.default_rng(plan.seed)
        self._arena: NDArray[np.uint8] | None = None
        self._running: dict[int, tuple[np.void, Fault | None]] = {}  # by inner cookie
        self._next = 0
        self._held: list[tuple[float, np.void]] = []  # due time, completion
        self._injected = dict.fromkeys(KINDS, 0)
        self._delivered = 0
        self._closed = False

    @property
    def limits(self) -> Limits:
        """What one request and the queue may hold."""
        return self.inner.limits

    @property
    def nblocks(self) -> int:
        """Blocks of the inner device."""
        return self.inner.nblocks

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the arena, for the inner transport too."""
        self.inner.register(arena)
        self._arena = arena

    def submit(self, requests: Records) -> int:
        """Pass a prefix of REQUEST[n] on, without those that fail at once; return its length."""
        if self._closed or self._arena is None:
            return self.inner.submit(requests)  # raises UsageError
        room = self.limits.max_inflight - len(self._running) - len(self._held)
        count = min(len(requests), room, self.plan.accept or len(requests))
        for index in range(count):
            if not self._submit_one(requests[index]):
                return index
        return count

    def poll(self, completions: Records) -> int:
        """Fill COMPLETION[n] with what is due; return how many."""
        self._collect()
        now = time.monotonic()
        due = [i for i, (when, _) in enumerate(self._held) if when <= now or self._closed]
        if self.plan.reorder:
            self._random.shuffle(due)
        due = due[: len(completions)]
        for place, index in enumerate(due):
            completions[place] = self._held[index][1]
        for index in sorted(due, reverse=True):
            del self._held[index]
        self._delivered += len(due)
        return len(due)

    def wait(self, timeout: float) -> None:
        """Sleep until a completion is due, at most *timeout* seconds."""
        if self._held:
            first = min(when for when, _ in self._held)
            time.sleep(min(max(0.0, first - time.monotonic()), timeout))
        else:
            self.inner.wait(timeout)

    def grow(self, nblocks: int) -> None:
        """Grow the inner device."""
        self.inner.grow(nblocks)

    def close(self) -> None:
        """Close the inner transport; nothing is delayed any more."""
        self._closed = True
        self.inner.close()

    def stats(self) -> dict[str, Any]:
        """Return the inner counters, with the faults counted as errors."""
        stats = self.inner.stats()
        failed = sum(self._injected[kind] for kind in STATUSES)
        return {
            **stats,
            "requests": self._delivered,
            "errors": stats["errors"] + failed,
            "injected": dict(self._injected),
            "describe": self.describe(),
        }

    def describe(self) -> str:
        """Return one line for people."""
        inner = self.inner.stats()["describe"]
        return f"with {len(self.plan.faults)} kinds of faults on purpose: {inner}"

    def locate(self, lba: int) -> str:
        """Return where the inner transport says that *lba* lies."""
        return locate(self.inner, lba)

    def failed_lba(self, lba: int, nblocks: int) -> int:
        """Return which of *nblocks* blocks the inner transport says failed."""
        return failed_lba(self.inner, lba, nblocks)

    def flush_failure(self) -> str:
        """Return why the inner transport's last flush failed."""
        return flush_failure(self.inner)

    @property
    def patience(self) -> float:
        """Seconds for which the inner transport may be silent."""
        return patience(self.inner, 0.0)

    def _submit_one(self, request: np.void) -> bool:
        record = np.array([request], REQUEST)
        struck = [f for f in self.plan.faults if f.strikes(request)]
        kinds = [f.kind for f in struck]
        if "crash" in kinds:
            self._injected["crash"] += 1
            raise RuntimeError("faulty transport: crash on purpose")
        failing = next((k for k in kinds if k in STATUSES), None)
        if failing is not None:
            self._injected[failing] += 1
            self._hold(_failed(request, STATUSES[failing]))
            return True
        record["cookie"] = self._next
        if not self.inner.submit(record):
            return False
        corrupt = next((f for f in struck if f.kind == "corrupt"), None)
        self._running[self._next] = (request.copy(), corrupt)
        self._next += 1
        return True

    def _collect(self) -> None:
        batch = np.zeros(64, COMPLETION)
        while count := self.inner.poll(batch):
            for done in batch[:count]:
                request, corrupt = self._running.pop(int(done["cookie"]))
                if corrupt and done["status"] == Status.OK and not self._closed:
                    self._corrupt(request, corrupt)
                completion = done.copy()
                completion["cookie"] = request["cookie"]
                self._hold(completion)

    def _hold(self, completion: np.void) -> None:
        late = self._random.uniform(0, self.plan.delay) if self.plan.delay else 0.0
        self._held.append((time.monotonic() + late, completion))

    def _corrupt(self, request: np.void, fault: Fault) -> None:
        assert self._arena is not None
        self._injected["corrupt"] += 1
        first, nbytes = int(request["lba"]), int(request["nbytes"])
        start, end = fault.lbas or (first, first + nbytes)
        low, high = max(start - first, 0) * BLOCK, min((end - first) * BLOCK, nbytes)
        place = int(request["offset"]) + int(self._random.integers(low, high))
        self._arena[place] ^= np.uint8(1 << int(self._random.integers(8)))


class FaultyView(FaultyTransport):
    """The same around a view."""

    def __init__(self, inner: ViewTransport, plan: FaultPlan) -> None:
        super().__init__(inner, plan)
        self.head = inner.head


def _failed(request: np.void, status: Status) -> np.void:
    completion: np.void = np.zeros(1, COMPLETION)[0]
    completion["cookie"] = request["cookie"]
    completion["status"] = status
    if status == Status.SHORT:  # some of it arrived
        completion["nbytes"] = int(request["nbytes"]) // 2 // BLOCK * BLOCK
    return completion


def parse_fault(text: str) -> Fault:
    """Return the Fault that ``KIND,key=value,...`` means; UsageError says what is wrong."""
    kind, *options = text.split(",")
    fault = Fault(kind)
    for option in options:
        key, _, value = option.partition("=")
        if key == "op" and value.upper() in Op.__members__:
            fault.op = Op[value.upper()]
        elif key in ("every", "at", "after", "times") and value.isdecimal() and int(value):
            setattr(fault, key, int(value))
        elif key == "lba" and all(part.isdecimal() for part in value.split("-", 1)):
            first, _, last = value.partition("-")
            fault.lbas = (int(first), int(last) if last else int(first) + 1)
        else:
            raise UsageError(f"fault={text}: cannot read {option!r}")
    fault.__post_init__()
    return fault


def open_url(url: Url, *, create: bool, writable: bool) -> FaultyTransport:
    """Open the inner URL and wrap it; see the module's text for the options."""
    from hyades.proxy.registry import open_transport

    plan = _parse_plan(url)
    return FaultyTransport(open_transport(_inner(url), create=create, writable=writable), plan)


def open_view(url: Url, request: bytes) -> "FaultyView":
    """Open the view that *request* asks for at the inner URL, and wrap it."""
    from hyades.proxy import views

    plan = _parse_plan(url)
    return FaultyView(views.open_view(_inner(url), request), plan)


def _inner(url: Url) -> str:
    """Return the inner URL, with the options that were not for the faults."""
    from hyades.proxy.registry import FAULTY

    return f"{url.scheme.removeprefix(FAULTY)}://{url.path}{url.rest()}"


def _parse_plan(url: Url) -> FaultPlan:
    delay = url.text("delay", "0")
    try:
        seconds = float(delay)
    except ValueError:
        raise UsageError(f"{url}: delay is in seconds, not {delay!r}") from None
    return FaultPlan(
        faults=[parse_fault(text) for text in url.take_all("fault")],
        delay=seconds,
        reorder=url.flag("reorder", False),
        accept=url.integer("accept", 0),
        seed=url.integer("seed", 0),
    )


def probe() -> str | None:
    """Return None: it needs only its inner transport."""
    return None
