"""The scheduler's memory map: which int64 word means what.

Three int64 arrays go to the scheduler.  `g` (geometry) is constant during a scan and indexed by the
G_* names; `w` (words) is written by workers, its regions starting at offsets held in `g`; `s`
(schedule) holds constant tables: which pages to read, where they lie, how lanes are placed.
Must stay in sync: scheduler.py, kernels.py and scan.py read these names and nothing else.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

# --- control words of `w`, each on a line of its own
LINE = 16
C_LOCK, C_ERROR, C_NEXT_INPUT, C_NEXT_TILE, C_NEXT_LAND, C_TILE_HEAD = (i * LINE for i in range(6))
C_FIN_TAIL, C_FIN_HEAD, C_FIN_TAKEN, C_OUT_CREDIT, C_DURABLE, C_PAGES_LEFT = (
    i * LINE for i in range(6, 12)
)
C_ERROR_SLOT, C_LOG_LOCK, C_LOG_NEXT, C_LOG_LANE_WAITS = (i * LINE for i in range(12, 16))
CONTROL = 16 * LINE

# --- geometry
(
    G_RANGE, G_VERTICES, G_POSITIONS, G_TILES,
    G_PAGES_PER_CHUNK, G_CHUNK_SLOTS, G_TILE_SLOTS, G_MESSAGE_SLOTS, G_OUT_SLOTS,
    G_INPUT_AT, G_INPUT_PAGE_BYTES, G_INPUT_DEVICE, G_INPUT_OBJECT,
    G_TILE_AT, G_TILE_PAGE_BYTES, G_TILE_DEVICE, G_RANK_AT, G_WEIGHT_AT,
    G_MESSAGE_AT, G_MESSAGE_STRIDE, G_SELF_AT, G_SELF_STRIDE, G_SELF_COLUMN, G_MESSAGE_FLOATS,
    G_STATE_AT, G_STATE_STRIDE, G_AGG_WIDTH,
    G_OUT_PAGES, G_OUT_PAGE_BYTES,
    G_KIND, G_WEIGHTED, G_FANOUT, G_SEED, G_LAYER,
    G_HEADS, G_HEAD_WIDTH, G_SLOPE_BITS,
    G_DST_FACTOR, G_LOOP_FACTOR, G_DST_SCORE,
    G_READY_INPUT, G_READY_TILE, G_READY_RANK, G_READY_WEIGHT, G_READY_OUT, G_READY_LOG,
    G_W_INPUT_DONE, G_W_MESSAGE_READY, G_W_MESSAGE_LEFT, G_W_MESSAGE_DONE,
    G_W_TILE_CLAIM, G_W_TILE_DONE, G_W_TILE_COUNT,
    G_W_LANE_NEXT, G_W_FIN_QUEUE, G_W_OUT_STATE, G_W_DURABLE, G_W_PARKED, G_W_STATS,
    G_S_POSITION_TILE, G_S_INPUT_LBA, G_S_INPUT_CRC, G_S_TILE_POSITION, G_S_TILE_PAGE,
    G_S_TILE_LBA, G_S_TILE_CRC, G_S_RANK_LBA, G_S_RANK_CRC, G_S_WEIGHT_LBA, G_S_WEIGHT_CRC,
    G_S_LANE_SLOT, G_S_LANE_FIRST, G_S_LANE_LAST, G_S_ORIGINAL, G_S_DEGREE,
    G_LANES_TOTAL, G_SCRATCH_SHORTS, G_SCRATCH_FLOATS, G_CHECK,
    G_LOGGING, G_LOG_AT, G_LOG_PAGE_BYTES, G_LOG_ROWS, G_LOG_SLOTS, G_LOG_STRIDE, G_LOG_PAGES,
    G_W_LOG_STATE, G_W_LOG_GROUP, G_W_LOG_PAGE_ROWS, G_W_LOG_PAGE_GROUP, G_W_LOG_PAGE_CRC,
    G_W_SLOT_OWNER, G_S_LANE_GROUP, G_S_LOG_LBA, G_S_LANE_CLOSE, G_S_SLOT_NEXT,
    G_LOG_DEVICE, G_LOG_OBJECT, G_LOG_GROUPS, G_INPUT_CHECK, G_LOG_GROUP_WORDS, G_W_OUT_CRC,
    G_OUT_DEVICE, G_OUT_OBJECT, G_OUT_AT, G_S_OUT_LBA, G_S_INPUT_BYTES,
    G_COUNT,
) = range(108)  # fmt: skip

KIND_SUM, KIND_MAX, KIND_ATTENTION = 0, 1, 2
PARKED_MAX = 64  # items a worker can hold parked
SCRATCH_EDGES = 65_536

# --- a worker's counters, one line of words each
(
    ST_ITEMS, ST_EDGES, ST_SEGMENTS, ST_PARKS, ST_RESUMES, ST_IDLE, ST_POSTED, ST_LANDED,
    ST_MISSES, ST_BUSY_TICKS, ST_IDLE_TICKS, ST_MISSED_TILE, ST_LOGGED_ROWS, ST_PARKED_NOW,
) = range(14)  # fmt: skip
STATS_WORDS = 32

# --- actions that `advance` hands to the host
A_DONE, A_ABORT, A_LAND, A_FINALISE, A_YIELD = range(5)
ACTION_SHIFT = 32

# --- states of an output or log slot
OUT_FREE, OUT_HELD, OUT_POSTED = 0, 1, 2


@dataclass(slots=True)
class WordMap:
    """Allots named regions of an int64 array and records their offsets in the geometry."""

    geometry: NDArray[np.int64]
    size: int = 0
    fills: list[tuple[int, tuple[NDArray[Any], ...]]] = field(default_factory=list)

    def region(self, name: int, words: int) -> int:
        """Reserve *words* zeroed words; remember the offset under geometry word *name*."""
        at = self.size
        self.geometry[name] = at
        self.size = at + -(-max(words, 1) // LINE) * LINE
        return at

    def table(self, name: int, *parts: NDArray[Any]) -> int:
        """Reserve room for the sum of integer arrays and put it in when the array is built."""
        at = self.region(name, parts[0].size)
        self.fills.append((at, parts))
        return at

    def build(self) -> NDArray[np.int64]:
        """Return the array with every table filled in."""
        words = np.zeros(max(self.size, 1), np.int64)
        for at, parts in self.fills:
            place = words[at : at + parts[0].size]
            place[:] = parts[0].reshape(-1)
            for more in parts[1:]:
                place += more.reshape(-1)
        return words
