"""The resident loop: what a CUDA block of one warp runs from a scan's begin to its end.

A CPU thread leaves `advance` to do the host's part of the work.  A resident kernel cannot leave: it
asks the host by mailbox, and runs the rest of the protocol itself.

Rules:
1. Each worker has two words on lines of their own, in memory that both sides see: ASK, which only
   the worker writes, and ANSWER, which only the host writes (st_release_sys, ld_acquire_sys).
2. An ask is turn << 48 | output slot << 36 | what `advance` returned.  The host does it and then
   stores the turn as the answer.  A worker has one ask at a time, and each has a turn of its own.
3. The host fills rows (`PassScan.land_rows`, `finalise_rows`) and writes no word of the scan:
   `landed`, `hold_output` and `finalised` run on the device, so no atomic crosses PCIe.
4. DONE and ABORT are a worker's last ask and get no answer.  A worker that waits for an answer
   leaves with ABORT when STOP, FAILED or C_ERROR is set, whatever becomes of the answer.
5. Every worker must be resident at once (a grid of at most what the GPU holds): workers wait for
   each other's words.
Must stay in sync: devices/compile.py compiles `kernel`; devices/cpu.py is the loop for threads.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.atomics import block, ld_acquire_sys, st_release_sys, ticks
from hyades.common.jit import jit
from hyades.gpu_side import words as W
from hyades.gpu_side.outputs import finalised, hold_output
from hyades.gpu_side.requests import bump
from hyades.gpu_side.scan import PassScan
from hyades.gpu_side.scheduler import advance, landed
from hyades.gpu_side.waiting import back_off, stopped

_ANSWER = W.LINE
MAILBOX_WORDS = 2 * W.LINE  # words of a worker
SLOT_SHIFT, TURN_SHIFT = 36, 48
_SLOT_MASK = (1 << (TURN_SHIFT - SLOT_SHIFT)) - 1
_TURN_MASK = (1 << 15) - 1  # an ask is never negative
_ACTION_MASK = (1 << (SLOT_SHIFT - W.ACTION_SHIFT)) - 1
_VALUE_MASK = (1 << W.ACTION_SHIFT) - 1


@jit
def post_ask(mail: Any, worker: Any, turn: Any, slot: Any, word: Any) -> None:
    """Ask the host for *word*, an action of `advance`."""
    packed = (turn << TURN_SHIFT) | (slot << SLOT_SHIFT) | word
    st_release_sys(mail, worker * MAILBOX_WORDS, packed)


@jit
def await_answer(mail: Any, worker: Any, turn: Any, g: Any, w: Any, control: Any) -> Any:
    """Return 1 once the host has answered *turn*, 0 when the scan stops first."""
    stats = g[W.G_W_STATS] + worker * W.STATS_WORDS
    before = ticks()
    idle = np.int64(0)
    answered = 0
    while answered == 0:
        if ld_acquire_sys(mail, worker * MAILBOX_WORDS + _ANSWER) == turn:
            answered = 1
        elif stopped(w, control):
            break
        else:
            back_off(idle)
            idle += 1
    bump(w, stats + W.ST_IDLE, idle)
    bump(w, stats + W.ST_IDLE_TICKS, ticks() - before)
    return answered


@jit
def run_resident(
    worker: Any, mail: Any, g: Any, w: Any, s: Any, floats: Any, shorts: Any, words: Any,
    factors: Any, ready: Any, crcs: Any, ring_words: Any, control: Any, slope: Any,
) -> Any:  # fmt: skip
    """Work until the scan is done or stopped; return the last action."""
    turn = np.int64(0)
    while True:
        word = advance(
            worker, g, w, s, floats, shorts, words, factors, ready, crcs, ring_words, control, slope
        )
        action, value = word >> W.ACTION_SHIFT, word & _VALUE_MASK
        turn = (turn + 1) & _TURN_MASK
        slot = np.int64(0)
        if action == W.A_FINALISE:
            slot = hold_output(g, w)
        post_ask(mail, worker, turn, slot, word)
        if action == W.A_DONE or action == W.A_ABORT:
            return action
        if await_answer(mail, worker, turn, g, w, control) == 0:
            abort = np.int64(W.A_ABORT)
            post_ask(mail, worker, (turn + 1) & _TURN_MASK, np.int64(0), abort << W.ACTION_SHIFT)
            return abort
        if action == W.A_LAND:
            landed(g, w, s, value)
        else:
            finalised(g, w, s, ready, ring_words, control, slot, value)


def kernel(
    mail: Any, g: Any, w: Any, s: Any, floats: Any, shorts: Any, words: Any, factors: Any,
    ready: Any, crcs: Any, ring_words: Any, control: Any, slope: Any,
) -> None:  # fmt: skip
    """Run one worker a block; the CUDA entry point."""
    run_resident(
        block(), mail, g, w, s, floats, shorts, words, factors, ready, crcs, ring_words, control,
        slope,
    )  # fmt: skip


# --- the host's side


@jit
def _load(mail: Any, index: Any) -> Any:
    return ld_acquire_sys(mail, index)


@jit
def _store(mail: Any, index: Any, value: Any) -> None:
    st_release_sys(mail, index, np.int64(value))


@dataclass(frozen=True, slots=True)
class Ask:
    """What a worker wants of its host."""

    worker: int
    turn: int
    action: int
    value: int  # position to land, or lane to finalise
    slot: int  # output slot of a lane

    @property
    def is_last(self) -> bool:
        """Say whether the worker has ended."""
        return self.action in (W.A_DONE, W.A_ABORT)


class Mailbox:
    """The words of all workers, int64 [workers * MAILBOX_WORDS]; one thread reads and answers."""

    def __init__(self, words: NDArray[np.int64]) -> None:
        self.words = words
        self._turns = [0] * (len(words) // MAILBOX_WORDS)

    @classmethod
    def create(cls, workers: int) -> "Mailbox":
        """Return a mailbox in the host's own memory."""
        return cls(np.zeros(workers * MAILBOX_WORDS, np.int64))

    def asks(self) -> Iterator[Ask]:
        """Yield the asks that came since the last call."""
        for worker, turn in enumerate(self._turns):
            word = int(_load(self.words, worker * MAILBOX_WORDS))
            if word >> TURN_SHIFT == turn:
                continue
            self._turns[worker] = word >> TURN_SHIFT
            yield Ask(
                worker, word >> TURN_SHIFT, (word >> W.ACTION_SHIFT) & _ACTION_MASK,
                word & _VALUE_MASK, (word >> SLOT_SHIFT) & _SLOT_MASK,
            )  # fmt: skip

    def answer(self, ask: Ask) -> None:
        """Tell the worker that *ask* is done."""
        _store(self.words, ask.worker * MAILBOX_WORDS + _ANSWER, ask.turn)


def serve(scan: PassScan, mailbox: Mailbox, workers: int) -> list[int]:
    """Do what *workers* workers ask until each has ended; return their last actions."""
    last: dict[int, int] = {}
    while len(last) < workers:
        idle = True
        for ask in mailbox.asks():
            idle = False
            if ask.is_last:
                last[ask.worker] = ask.action
                continue
            if ask.action == W.A_LAND:
                scan.land_rows(ask.value)
            else:
                scan.finalise_rows(ask.value, ask.slot)
            mailbox.answer(ask)
        if idle:
            time.sleep(5e-5)
    return [last[worker] for worker in range(workers)]
