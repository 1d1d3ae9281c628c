"""An NVMe namespace through SPDK's user-space driver, in a process of its own.

``spdk+tcp://host:port/subnqn?ns=1&queues=1&digest=header,data&hostnqn=NQN``,
``spdk+rdma://host:port/subnqn?...`` and ``spdk+pcie://0000:01:00.0?ns=1``.

This side is thin: it checks requests, puts them into a ring that the SPDK process takes them from
(spdk_memory.py), and takes answers out of another.  The process moves the bytes straight between
the device and the arena, which both have mapped.  Rules:
1. A request has a slot here from submit to poll.  The cookie that crosses is slot and generation,
   so whatever the process says, a request is reported once.
2. A process that is gone answers no more: all that is out, and all that comes, is Status.LOST.
3. Closing ends the process; only then is what it did not answer reported as CANCELLED.
"""

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.atomics import fence_sys, ld_acquire_sys
from hyades.common.errors import BackendMissing, PeerError, UsageError
from hyades.common.jit import jit
from hyades.common.layout import BLOCK, RQ_COOKIE, RQ_LEN_SLOT, RQ_OP, Status
from hyades.common.ring import HEAD, claim, has_next, load_word, publish, store_word
from hyades.common.units import format_size
from hyades.proxy.arena import check_arena, shared_handle
from hyades.proxy.records import (
    COUNTERS,
    FLUSH,
    account,
    check_request,
    completion_words,
    counter_dict,
    put_completion,
    request_words,
)
from hyades.proxy.transport import Limits, Records
from hyades.proxy.transports import spdk_library
from hyades.proxy.transports import spdk_memory as shared
from hyades.proxy.transports.spdk_child import SpdkChild
from hyades.proxy.transports.spdk_memory import (
    AN_COOKIE,
    AN_NBYTES,
    AN_STATUS,
    GENERATION_MASK,
    SLOT_BITS,
    SLOT_MASK,
)
from hyades.proxy.transports.spdk_url import settings_of
from hyades.proxy.urls import Url

_OK, _LOST, _CANCELLED = int(Status.OK), int(Status.LOST), int(Status.CANCELLED)
# columns of `slots`
_COOKIE, _OP, _NBYTES, _GENERATION, _OUT, _STATUS, _COLUMNS = range(7)
# rows of `stacks`, and the words of `state` that hold their heights
_FREE, _ENDED = range(2)
_RUNNING, _BROKEN, _WORDS = 2, 3, 4
_CHECK = 0.01  # seconds between two looks at a process that says nothing


class SpdkTransport:
    """Moves pages between a shared arena and a namespace, by way of the SPDK process."""

    def __init__(
        self, settings: shared.Settings, found: spdk_library.Found, *, name: str, writable: bool
    ) -> None:
        """Start the process and connect; *name* is the URL, for messages."""
        self.name = name
        self._writable = writable
        self._child = SpdkChild(settings, found)
        opened = self._child.opened
        self.namespace, self.sector, self.release = opened.namespace, opened.sector, opened.release
        self._nblocks, depth = opened.nblocks, settings.depth
        self._limits = Limits(opened.max_transfer, depth, BLOCK, shared_arena=True)
        self._arena_bytes: int | None = None
        self._closed = False
        memory = self._child.memory
        self._words = memory.words
        self._requests = (memory.requests.words.reshape(-1), memory.requests.control)
        self._answers = (memory.answers.words.reshape(-1), memory.answers.control)
        self._slots = np.zeros((depth, _COLUMNS), np.int64)
        self._stacks = np.zeros((2, depth), np.int64)
        self._stacks[_FREE] = np.arange(depth)[::-1]
        self._state = np.zeros(_WORDS, np.int64)
        self._state[_FREE] = depth
        self._counters = np.zeros(COUNTERS, np.int64)
        self._looked = 0.0

    @property
    def limits(self) -> Limits:
        """What one request and the queues may hold."""
        return self._limits

    @property
    def nblocks(self) -> int:
        """Blocks of the namespace."""
        return self._nblocks

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the shared *arena* that request offsets index, and let the process map it."""
        self._refuse_closed()
        check_arena(arena, BLOCK, registered=self._arena_bytes is not None)
        handle = shared_handle(arena)
        if handle is None:
            raise UsageError(
                f"{self.name} moves pages in a process of its own and needs an arena that both can"
                " map: use hyades.proxy.arena.allocate_arena(nbytes, shared=True)"
            )
        self._child.register(*handle, len(arena))
        self._arena_bytes = len(arena)

    def submit(self, requests: Records) -> int:
        """Hand a prefix of REQUEST[n] to the process; return its length."""
        self._refuse_closed()
        if self._arena_bytes is None:
            raise UsageError(f"{self.name} has no arena: call register first")
        count = int(
            _submit(
                request_words(requests), *self._requests, self._slots, self._stacks, self._state,
                self._nblocks, self._arena_bytes, self._limits.max_transfer, self._writable,
                not self._child.death,
            )
        )  # fmt: skip
        if count and _asleep(self._words):
            self._child.ring()
        return count

    def poll(self, completions: Records) -> int:
        """Fill COMPLETION[n] with finished requests; return how many."""
        if not self._closed:
            self._collect(len(completions))
        out = completion_words(completions)
        return int(_report(out, self._slots, self._stacks, self._state, self._counters))

    def wait(self, timeout: float) -> None:
        """Sleep until a request has finished or the process is gone, at most *timeout* seconds."""
        if self._state[_ENDED]:
            return
        if self._closed or self._child.death:
            time.sleep(timeout)
            return
        store_word(self._words, shared.CALLER_SLEEPS, 1)
        if not _answered(*self._answers):
            self._child.listen(timeout)
        store_word(self._words, shared.CALLER_SLEEPS, 0)

    def grow(self, nblocks: int) -> None:
        """Raise UsageError where *nblocks* are more than the namespace has: its size is fixed."""
        self._refuse_closed()
        if nblocks > self._nblocks:
            raise UsageError(
                f"{self.name} is a namespace of {format_size(self._nblocks * BLOCK)};"
                f" {format_size(nblocks * BLOCK)} are needed: use a larger namespace"
            )

    def close(self) -> None:
        """End the process: what runs may finish for a while, the rest is cancelled."""
        if self._closed:
            return
        self._closed = True
        alive = self._child.alive()
        self._child.stop()
        _drain(*self._answers, self._slots, self._stacks, self._state)
        _end_all(self._slots, self._stacks, self._state, _CANCELLED if alive else _LOST)

    def stats(self) -> dict[str, Any]:
        """Return the counters, what the process counts, and what `describe` says."""
        words = self._words
        return {
            **counter_dict(self._counters),
            "reconnects": int(words[shared.RECONNECTS]),
            "replayed": int(words[shared.REPLAYED]),
            "partial_submits": int(words[shared.PARTIAL]),
            "late_callbacks": int(words[shared.LATE]),
            "describe": self.describe(),
        }

    def describe(self) -> str:
        """Return one line for people."""
        state = ""
        if self._child.death:
            state = f"; {self._child.death}"
        elif load_word(self._words, shared.LOST):
            state = "; lost"
            if not self._closed:
                state = f"; lost ({self._child.last_words()})"
        return (
            f"{self.name}: SPDK {self.release}, namespace {self.namespace} of"
            f" {format_size(self._nblocks * BLOCK)} in {self.sector}-byte blocks{state}"
        )

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError(f"{self.name} is closed")

    def _collect(self, wanted: int) -> None:
        """Move answers to the ended slots; what a dead process had is lost."""
        state = self._state
        before = state[_ENDED]
        if before >= wanted or not state[_RUNNING]:
            return
        _drain(*self._answers, self._slots, self._stacks, state)
        if state[_BROKEN]:
            raise PeerError(f"{self.name}: the SPDK process answered a request that is not out")
        if state[_ENDED] > before or not state[_RUNNING]:
            return
        now = time.monotonic()
        if now - self._looked < _CHECK and not self._child.death:
            return
        self._looked = now
        if not self._child.alive():
            _drain(*self._answers, self._slots, self._stacks, state)  # its last ones
            _end_all(self._slots, self._stacks, state, _LOST)


@jit
def _end(slots: Any, stacks: Any, state: Any, slot: Any, status: Any, nbytes: Any) -> None:
    slots[slot, _STATUS] = status
    slots[slot, _NBYTES] = nbytes
    slots[slot, _OUT] = 0
    stacks[_ENDED, state[_ENDED]] = slot
    state[_ENDED] += 1


@jit
def _submit(
    words: Any, ring: Any, control: Any, slots: Any, stacks: Any, state: Any,
    nblocks: Any, arena_bytes: Any, max_transfer: Any, writable: Any, alive: Any,
) -> Any:  # fmt: skip
    count = min(words.shape[0], state[_FREE])
    for i in range(count):
        slot = stacks[_FREE, state[_FREE] - 1]
        status = check_request(words, i, nblocks, arena_bytes, max_transfer, writable)
        if status == _OK and alive:
            position = claim(ring, control)
            if position < 0:
                return i
            generation = (slots[slot, _GENERATION] + 1) & GENERATION_MASK
            slots[slot, _GENERATION] = generation
            slots[slot, _OUT] = 1
            base = (position & ((ring.shape[0] >> 3) - 1)) << 3
            for word in range(1, 8):
                ring[base + word] = words[i, word]
            ring[base + RQ_COOKIE] = generation << SLOT_BITS | slot
            publish(ring, position)
            state[_RUNNING] += 1
        state[_FREE] -= 1
        slots[slot, _COOKIE] = words[i, RQ_COOKIE]
        slots[slot, _OP] = words[i, RQ_OP] & 0xFF
        slots[slot, _NBYTES] = words[i, RQ_LEN_SLOT] & 0xFFFFFFFF
        if status != _OK:
            _end(slots, stacks, state, slot, status, 0)
        elif not alive:
            _end(slots, stacks, state, slot, _LOST, 0)
    return count


@jit
def _asleep(words: Any) -> Any:
    fence_sys()
    return ld_acquire_sys(words, shared.PROCESS_SLEEPS) != 0


@jit
def _answered(ring: Any, control: Any) -> Any:
    fence_sys()
    return has_next(ring, control)


@jit
def _drain(ring: Any, control: Any, slots: Any, stacks: Any, state: Any) -> None:
    """Take every answer that is there."""
    capacity = ring.shape[0] >> 3
    while has_next(ring, control):
        head = control[HEAD]
        base = (head & (capacity - 1)) << 3
        cookie, status = ring[base + AN_COOKIE], ring[base + AN_STATUS]
        nbytes = ring[base + AN_NBYTES]
        store_word(ring, base, head + capacity)
        control[HEAD] = head + 1
        slot = cookie & SLOT_MASK
        if slot >= slots.shape[0] or slots[slot, _OUT] == 0:
            state[_BROKEN] = 1
            return
        if slots[slot, _GENERATION] != cookie >> SLOT_BITS:
            state[_BROKEN] = 1
            return
        state[_RUNNING] -= 1
        _end(slots, stacks, state, slot, status, nbytes)


@jit
def _end_all(slots: Any, stacks: Any, state: Any, status: Any) -> None:
    for slot in range(slots.shape[0]):
        if slots[slot, _OUT]:
            _end(slots, stacks, state, slot, status, 0)
    state[_RUNNING] = 0


@jit
def _report(out: Any, slots: Any, stacks: Any, state: Any, counters: Any) -> Any:
    count = min(out.shape[0], state[_ENDED])
    for i in range(count):
        state[_ENDED] -= 1
        slot = stacks[_ENDED, state[_ENDED]]
        status, nbytes = slots[slot, _STATUS], slots[slot, _NBYTES]
        if slots[slot, _OP] == FLUSH:
            nbytes = 0
        put_completion(out, i, slots[slot, _COOKIE], status, nbytes)
        account(counters, slots[slot, _OP], status, nbytes)
        stacks[_FREE, state[_FREE]] = slot
        state[_FREE] += 1
    return count


def open_url(url: Url, *, create: bool, writable: bool) -> SpdkTransport:
    """Connect to a namespace; it has its size, so *create* changes nothing."""
    del create
    found = spdk_library.find()
    if isinstance(found, str):
        raise BackendMissing(f"{url}: {found}")
    return SpdkTransport(settings_of(url), found, name=url.original, writable=writable)


def probe() -> str | None:
    """Return None where usable SPDK libraries were found, else what was searched and the fix."""
    found = spdk_library.find()
    return found if isinstance(found, str) else None


def detail() -> str:
    """Return which SPDK would be used."""
    found = spdk_library.find()
    return found if isinstance(found, str) else f"SPDK {found.release} in {found.folder}"
