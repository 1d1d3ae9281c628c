"""The log alone: what is appended under its locks and slots is what merging brings back."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hyades.common.layout import REQUEST, Op
from hyades.common.ring import Ring
from hyades.gpu_side import log, merge
from hyades.gpu_side import words as W
from hyades.gpu_side.buffers import log_page_used

RANGE, LANES, STRIDE, PAGE_BYTES = 8, 6, 16, 4096
ROWS = (PAGE_BYTES - 256) // (4 * STRIDE + 4)  # of a page
VERTICES = RANGE * LANES - 3


class Scan:
    """The words of a scan that only logs: two groups of lanes, windows over piece 1 of 3."""

    def __init__(self, slots: int = 4, pages: int = 50, reserve: int = 3) -> None:
        assert log_page_used(ROWS, STRIDE) <= PAGE_BYTES
        self.g = np.zeros(W.G_COUNT, np.int64)
        g = self.g
        w, s = W.WordMap(g, W.CONTROL), W.WordMap(g)
        g[W.G_KIND], g[W.G_AGG_WIDTH], g[W.G_STATE_STRIDE] = W.KIND_SUM, STRIDE, STRIDE
        g[W.G_RANGE], g[W.G_VERTICES], g[W.G_LOGGING] = RANGE, VERTICES, 1
        g[W.G_LOG_ROWS], g[W.G_LOG_PAGE_BYTES], g[W.G_LOG_SLOTS] = ROWS, PAGE_BYTES, slots
        g[W.G_LOG_PAGES], g[W.G_LOG_GROUPS] = pages, 2
        g[W.G_LOG_GROUP_WORDS] = log.RESERVE + reserve + 1
        g[W.G_STATE_AT] = slots * PAGE_BYTES // 4
        w.region(W.G_W_LOG_STATE, slots)
        w.region(W.G_W_LOG_GROUP, 2 * int(g[W.G_LOG_GROUP_WORDS]))
        for name in (W.G_W_LOG_PAGE_ROWS, W.G_W_LOG_PAGE_GROUP, W.G_W_LOG_PAGE_CRC):
            w.region(name, pages)
        w.region(W.G_W_SLOT_OWNER, LANES)
        w.region(W.G_W_STATS, W.STATS_WORDS)
        every = np.ones(LANES, np.int64)
        s.table(W.G_S_LANE_GROUP, np.arange(LANES) // 3)
        s.table(W.G_S_LOG_LBA, np.arange(pages))
        s.table(W.G_S_SLOT_NEXT, 0 * every)
        s.table(W.G_S_LANE_SLOT, np.arange(LANES))
        s.table(W.G_S_LANE_FIRST, every)
        s.table(W.G_S_LANE_CLOSE, every)
        s.table(W.G_S_LANE_LAST, 2 * every)
        self.w, self.s = w.build(), s.build()
        owner = int(g[W.G_W_SLOT_OWNER])
        self.w[owner : owner + LANES] = np.arange(LANES) + 1
        self.ring = Ring.create(64)
        self.ready = np.zeros(slots, np.int64)
        self.crcs = np.zeros(slots, np.uint32)
        nbytes = slots * PAGE_BYTES + 4 * LANES * RANGE * STRIDE
        self.arena = np.zeros(nbytes, np.uint8)
        self.written: dict[int, NDArray[np.uint8]] = {}

    @property
    def floats(self) -> Any:
        return self.arena.view(np.float32)

    @property
    def words(self) -> Any:
        return self.arena.view(np.int32)

    def admit(self, lane: int, sequence: int, segments: int = 0) -> int:
        return int(log.admit(self.g, self.w, self.s, lane, sequence, lane, segments))

    def append(self, lane: int, locals_: NDArray[np.int64], rows: NDArray[np.float32]) -> None:
        """Fill in an admitted piece, one segment a row of *rows*."""
        shorts, done = locals_.astype(np.uint16), 0
        while done < len(rows):
            count, at = log.open_part(
                self.g, self.w, self.s, self.floats, shorts, self.words, self.flat(),
                self.ring.control, self.ready, lane, len(rows) - done, np.int64(done),
            )  # fmt: skip
            assert count > 0
            place = self.floats[at : at + count * STRIDE].reshape(count, STRIDE)
            assert not place.any(), "rows begin neutral, whatever the slot held before"
            place += rows[done : done + count]
            log.close_part(self.g, self.w, self.s, lane, count)
            done += count
        log.leave(self.g, self.w, self.s, 0, lane, len(rows))

    def close(self, lane: int) -> None:
        """Close a lane's window: its state goes to the log."""
        log.close_window(
            self.g, self.w, self.s, self.floats, self.words, self.flat(), self.ring.control,
            self.ready, 0, lane, 1,
        )  # fmt: skip

    def flat(self) -> NDArray[np.int64]:
        return self.ring.words.reshape(-1)

    def state(self, lane: int) -> NDArray[np.float32]:
        at = int(self.g[W.G_STATE_AT]) + lane * RANGE * STRIDE
        found: NDArray[np.float32] = self.floats[at : at + RANGE * STRIDE].reshape(RANGE, STRIDE)
        return found

    def device(self) -> int:
        """Do what was posted, as a proxy would; return how many pages."""
        batch = np.zeros(64, REQUEST)
        count = self.ring.pop(batch)
        for record in batch[:count]:
            assert record["op"] == Op.WRITE
            at = int(record["offset"])
            self.written[int(record["page"])] = self.arena[at : at + PAGE_BYTES].copy()
            self.arena[at : at + PAGE_BYTES] = 0xAB  # the slot's next user finds a mess
            self.crcs[record["slot"]] = record["page"]
            self.ready[record["slot"]] = record["generation"]
        log.reap(self.g, self.w, self.ready, self.crcs)
        return count

    def finish(self) -> None:
        log.finish(self.g, self.w, self.s, self.ready, self.flat(), self.ring.control)
        while self.device():
            pass

    def pages(self) -> int:
        return int(self.w[W.C_LOG_NEXT])

    def merged(self) -> NDArray[np.float32]:
        """Return the sums [VERTICES, STRIDE] of all logged rows, by the merge's kernel."""
        rows_at, group_at = int(self.g[W.G_W_LOG_PAGE_ROWS]), int(self.g[W.G_W_LOG_PAGE_GROUP])
        homes = np.arange(LANES)
        for lane in range(LANES):
            merge.clear_lane(self.g, self.floats, lane, lane)
        for page in range(self.pages()):
            self.arena[:PAGE_BYTES] = self.written[page]
            rows = int(self.w[rows_at + page])
            own = self.words[:rows] // RANGE // 3
            assert np.all(own == self.w[group_at + page]), "a page holds lanes of one group"
            joined = [
                merge.merge_page(self.g, self.floats, self.words, 0, rows, worker, 2, homes)
                for worker in range(2)
            ]
            assert sum(joined) == rows
        return np.concatenate([self.state(lane) for lane in range(LANES)])[:VERTICES]


def test_what_is_appended_comes_back() -> None:
    """Pieces before and after the window and the states at its end, over many pages."""
    scan, rng = Scan(slots=6), np.random.default_rng(0)
    expected = np.zeros((VERTICES, STRIDE), np.float32)
    logged = 0
    for lane in rng.permutation(LANES):
        limit = min(RANGE, VERTICES - lane * RANGE)
        for sequence in range(3):
            if sequence == 1:
                scan.state(lane)[:] = rng.integers(-9, 9, (RANGE, STRIDE))
                expected[lane * RANGE : lane * RANGE + limit] += scan.state(lane)[:limit]
                assert scan.admit(lane, 1) == 0
                scan.close(lane)
                logged += limit
            else:
                locals_ = rng.integers(0, limit, 150)
                rows = rng.integers(-9, 9, (150, STRIDE)).astype(np.float32)
                np.add.at(expected, lane * RANGE + locals_, rows)
                assert scan.admit(lane, sequence, 150) == 1
                scan.append(lane, locals_, rows)
                logged += 150
            scan.device()
    scan.finish()
    at = int(scan.g[W.G_W_LOG_PAGE_ROWS])
    assert scan.w[at : at + scan.pages()].sum() == logged
    assert np.array_equal(scan.merged(), expected)
    assert scan.w[int(scan.g[W.G_W_STATS]) + W.ST_LOGGED_ROWS] == logged


def test_only_the_last_page_of_a_group_may_be_short() -> None:
    scan = Scan()
    for lane in (0, 5, 1, 4):
        assert scan.admit(lane, 0, 100) == 1
        scan.append(lane, np.zeros(100, np.int64), np.ones((100, STRIDE), np.float32))
        scan.device()
    scan.finish()
    at, groups = int(scan.g[W.G_W_LOG_PAGE_ROWS]), int(scan.g[W.G_W_LOG_PAGE_GROUP])
    for group in range(2):
        rows = [
            int(scan.w[at + page])
            for page in range(scan.pages()) if scan.w[groups + page] == group
        ]  # fmt: skip
        assert rows == [ROWS] * (200 // ROWS) + [200 % ROWS]


def test_a_group_is_one_piece_at_a_time() -> None:
    scan = Scan()
    assert scan.admit(0, 0, 5) == 1
    assert scan.admit(1, 0, 5) == -1, "the same group"
    assert scan.admit(4, 0, 5) == 1, "another group"
    scan.append(0, np.arange(5), np.ones((5, STRIDE), np.float32))
    assert scan.admit(1, 0, 5) == 1


def test_pieces_inside_the_window_need_the_slot() -> None:
    scan = Scan()
    owner = int(scan.g[W.G_W_SLOT_OWNER])
    scan.w[owner + 2] = 99
    assert scan.admit(2, 1) == -1
    scan.w[owner + 2] = 3
    assert scan.admit(2, 1) == 0


def test_a_lane_that_is_never_logged_takes_no_slots() -> None:
    scan = Scan(slots=1)
    scan.s[int(scan.g[W.G_S_LANE_FIRST])] = 0
    scan.s[int(scan.g[W.G_S_LANE_CLOSE])] = 2
    assert [scan.admit(0, sequence, 9) for sequence in range(3)] == [0, 0, 0]
    assert scan.admit(1, 0, 9) == 1, "no lock is held"


def test_short_slots_park_the_piece_until_pages_are_written() -> None:
    scan = Scan(slots=2)
    rows = np.ones((2 * ROWS, STRIDE), np.float32)
    assert scan.admit(0, 0, len(rows)) == 1
    assert scan.admit(3, 0, 1) == -1, "both slots are reserved"
    scan.append(0, np.zeros(len(rows), np.int64), rows)
    assert scan.admit(3, 0, 1) == -1, "one page is on its way, one is open"
    scan.device()
    assert scan.admit(3, 0, 1) == 1


def test_more_pages_than_planned_is_an_error() -> None:
    scan = Scan(pages=1)
    rows = np.ones((ROWS + 1, STRIDE), np.float32)
    assert scan.admit(0, 0, len(rows)) == 1
    with pytest.raises(AssertionError):
        scan.append(0, np.zeros(len(rows), np.int64), rows)
    assert scan.w[W.C_ERROR] < 0
