"""Merge the log of a stage: per group, join logged rows to fresh lane states, then finalise.

Workers share out the state slots by slot number modulo workers; each goes through all pages of a
group in order and takes the rows of lanes in its own slots.  So a destination's parts join in
sequence whatever the number of workers, and a worker that is a group ahead touches no slot that
another still merges into.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from hyades.common.atomics import atomic_add, ld_acquire, st_relaxed, st_release
from hyades.common.jit import jit
from hyades.common.layout import Status
from hyades.common.ring import FAILED, STOP
from hyades.gpu_side import words as W
from hyades.gpu_side.kernels import clear_state, merge_row
from hyades.gpu_side.lanestream import ReadFailed
from hyades.gpu_side.log import finish, lane_rows
from hyades.gpu_side.outputs import take_credit
from hyades.gpu_side.requests import CHECK, READ, has_landed, post
from hyades.gpu_side.scan import PassScan


@jit
def merge_page(
    g: Any, floats: Any, words: Any, slot: Any, rows: Any, worker: Any, workers: Any, homes: Any
) -> Any:  # fmt: skip
    """Join the rows of the log page in *slot* that are this worker's; return how many."""
    page = (g[W.G_LOG_AT] + slot * g[W.G_LOG_PAGE_BYTES]) >> 2
    first = page + -(-g[W.G_LOG_ROWS] // 16) * 16
    size = g[W.G_RANGE] * g[W.G_STATE_STRIDE]
    count = 0
    for index in range(rows):
        vertex = np.int64(np.uint32(words[page + index]))
        lane_index = vertex // g[W.G_RANGE]
        if homes[lane_index] % workers != worker:
            continue
        local = vertex - lane_index * g[W.G_RANGE]
        out = g[W.G_STATE_AT] + homes[lane_index] * size + local * g[W.G_STATE_STRIDE]
        merge_row(g, floats, first + index * g[W.G_STATE_STRIDE], out)
        count += 1
    return count


@jit
def clear_lane(g: Any, floats: Any, lane_index: Any, home: Any) -> None:
    """Clear the state slot that *lane_index* takes during the merge."""
    at = g[W.G_STATE_AT] + home * g[W.G_RANGE] * g[W.G_STATE_STRIDE]
    clear_state(g, floats, at, lane_rows(g, lane_index))


@jit
def post_log_read(
    g: Any, w: Any, s: Any, ready: Any, ring_words: Any, control: Any, page: Any, slot: Any,
    number: Any,
) -> None:  # fmt: skip
    """Read log page *page* into *slot*; its ready word becomes *number* + 1."""
    word = g[W.G_READY_LOG] + slot
    st_relaxed(ready, word, np.int64(0))
    post(
        ring_words, control, READ, CHECK, g[W.G_LOG_DEVICE], word, number + 1,
        s[g[W.G_S_LOG_LBA] + page], g[W.G_LOG_AT] + slot * g[W.G_LOG_PAGE_BYTES],
        g[W.G_LOG_PAGE_BYTES], w[g[W.G_W_LOG_PAGE_CRC] + page], g[W.G_LOG_OBJECT], page,
    )  # fmt: skip


@jit
def release_page(users: Any, done: Any, slot: Any, number: Any, workers: Any) -> None:
    """Count a worker's use of a page; the last one frees the slot for number + slots."""
    if atomic_add(users, slot, np.int64(1)) + 1 == workers:
        st_relaxed(users, slot, np.int64(0))
        st_release(done, slot, number + 1)


@jit
def slot_done(done: Any, slot: Any) -> Any:
    """Return the number + 1 of the last page that every worker has used in *slot*."""
    return ld_acquire(done, slot)


class LogMerge:
    """The merge phase of a PassScan whose plan logs."""

    def __init__(self, scan: PassScan) -> None:
        self.scan = scan
        tables = scan.tables
        g, w = tables.g, tables.w
        used = int(w[W.C_LOG_NEXT])
        at = int(g[W.G_W_LOG_PAGE_GROUP])
        groups = w[at : at + used]
        self.pages = np.argsort(groups, kind="stable")  # by group, in number order
        self.page_groups = groups[self.pages]
        rows_at = int(g[W.G_W_LOG_PAGE_ROWS])
        self.page_rows = w[rows_at : rows_at + used][self.pages]
        self.slots = int(g[W.G_LOG_SLOTS])
        self.workers = scan.inputs.workers
        self.users = np.zeros(self.slots, np.int64)
        self.done = np.zeros(self.slots, np.int64)
        self.posted = 0
        self._lock = threading.Lock()
        windows = scan.inputs.candidate.windows
        assert windows is not None
        lanes = scan.inputs.topology.chunks
        self.group_count = int(g[W.G_LOG_GROUPS])
        self.per_group = -(-lanes // self.group_count)
        todo = scan.inputs.todo & ~windows.whole
        self.lanes = np.flatnonzero(todo)
        self.homes = np.arange(lanes) % self.per_group
        self.merged_lanes = 0

    def work(self, worker: int) -> None:
        """Merge and finalise this worker's lanes of every group."""
        number = 0
        g = self.scan.tables.g
        for group in range(self.group_count):
            mine = self.lanes[
                (self.lanes // self.per_group == group)
                & (self.homes[self.lanes] % self.workers == worker)
            ]
            for lane in mine:
                clear_lane(g, self.scan.floats, int(lane), int(self.homes[lane]))
            self._check()
            while number < len(self.pages) and self.page_groups[number] == group:
                self._merge(worker, number)
                number += 1
            for lane in mine:
                self._finalise(int(lane))

    def _merge(self, worker: int, number: int) -> None:
        scan, slot = self.scan, number % self.slots
        self._check()
        self._await(number, slot)
        merge_page(
            scan.tables.g, scan.floats, scan.arguments[5], slot,
            int(self.page_rows[number]), worker, self.workers, self.homes,
        )  # fmt: skip
        release_page(self.users, self.done, slot, number, self.workers)

    def _post_ahead(self) -> None:
        scan, tables = self.scan, self.scan.tables
        with self._lock:
            while self.posted < len(self.pages):
                slot = self.posted % self.slots
                before = self.posted - self.slots + 1
                if before > 0 and int(slot_done(self.done, slot)) != before:
                    return
                post_log_read(
                    tables.g, tables.w, tables.s, scan.port.ready, scan.arguments[9],
                    scan.port.ring.control, int(self.pages[self.posted]), slot, self.posted,
                )  # fmt: skip
                self.posted += 1

    def _await(self, number: int, slot: int) -> None:
        tables, port = self.scan.tables, self.scan.port
        word = int(tables.g[W.G_READY_LOG]) + slot
        while True:
            self._post_ahead()
            if number < self.posted and has_landed(tables.w, port.ready, word, number + 1):
                return
            self._check()
            time.sleep(5e-5)

    def _check(self) -> None:
        control = self.scan.port.ring.control
        if self.scan.stopped() != 0 or control[STOP] != 0 or control[FAILED] != 0:
            raise ReadFailed

    def _finalise(self, lane: int) -> None:
        """Wait for an output slot's credit, then finalise from the merge's own state slot."""
        tables = self.scan.tables
        while not take_credit(tables.w):
            self.scan.drained()
            self._check()
            time.sleep(5e-5)
        self.scan.finalise(lane, int(self.homes[lane]))
        with self._lock:
            self.merged_lanes += 1


def finish_log(scan: PassScan) -> None:
    """Post the pages that are still open and wait until the whole log is written."""
    tables, port = scan.tables, scan.port
    finish(
        tables.g, tables.w, tables.s, port.ready, scan.arguments[9], port.ring.control
    )  # fmt: skip
    at, slots = int(tables.g[W.G_W_LOG_STATE]), int(tables.g[W.G_LOG_SLOTS])
    while np.any(tables.w[at : at + slots] >= W.OUT_POSTED):
        scan.drained()
        control = port.ring.control
        if scan.stopped() != 0 or control[STOP] != 0 or control[FAILED] != 0:
            raise ReadFailed(Status.IO)
        time.sleep(5e-5)


def compile_kernels(compile_for: Callable[..., None], words: Any, floats: Any, ints: Any) -> None:
    """Compile the kernels of the merge; ``compile_for(kernel, *example arguments)``."""
    g = w = s = ready = ring = control = users = words
    compile_for(merge_page, g, floats, ints, 0, 0, 0, 1, words)
    compile_for(clear_lane, g, floats, 0, 0)
    compile_for(post_log_read, g, w, s, ready, ring, control, 0, 0, 0)
    compile_for(release_page, users, users, 0, 0, 1)
    compile_for(slot_done, users, 0)
    compile_for(has_landed, w, ready, 0, 1)
