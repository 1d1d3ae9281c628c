"""How much memory a scan takes: slot counts of every ring, and their bytes in the arena."""

from dataclasses import dataclass

from hyades.common.pages import PageShape
from hyades.common.units import MIB, round_up
from hyades.common.views import SparseShape
from hyades.gpu_side import words as W
from hyades.gpu_side.shapes import ConvShape

_HUGE = 2 * MIB
LOG_PAGE = MIB


@dataclass(frozen=True, slots=True)
class Buffers:
    """Slot counts of one scan."""

    chunk_slots: int
    tile_slots: int
    message_slots: int
    out_slots: int
    log_slots: int = 0
    log_reserve: int = 0  # pages one item may open


@dataclass(frozen=True, slots=True)
class ScanSizes:
    """What the sizes of a scan follow from; bytes unless said otherwise."""

    range_rows: int
    input: PageShape | SparseShape
    output: PageShape | None
    shape: ConvShape
    tile_page_bytes: int
    tile_streams: int  # tiles, and ranks or weights where read
    workers: int
    width_out: int

    @property
    def input_chunk(self) -> int:
        """Bytes of one chunk's pages."""
        return self.input.pages_per_range * self.input.page_bytes

    @property
    def message(self) -> int:
        """Bytes of one chunk's message rows and own rows."""
        return 4 * self.range_rows * (self.shape.message_stride + self.shape.own_stride)

    @property
    def state(self) -> int:
        """Bytes of one lane's state."""
        return 4 * self.range_rows * self.shape.state_stride

    @property
    def output_lane(self) -> int:
        """Bytes of one lane's output pages."""
        return 0 if self.output is None else self.output.pages_per_range * self.output.page_bytes

    @property
    def log_rows(self) -> int:
        """State rows that a log page holds."""
        rows = LOG_PAGE // (4 * self.shape.state_stride + 4)
        while log_page_used(rows, self.shape.state_stride) > LOG_PAGE:
            rows -= 1
        return rows


def log_page_used(rows: int, stride: int) -> int:
    """Return the bytes of a log page with *rows* ids and state rows."""
    return 4 * round_up(rows, 16) + 4 * rows * stride


def buffers_for(sizes: ScanSizes, lean: bool, log_groups: int = 0) -> Buffers:
    """Return slot counts: enough to keep the disk and all workers busy, or as few as can run."""
    chunk = max(sizes.input_chunk, 1)
    workers = sizes.workers
    reserve = log_slots = 0
    if log_groups:
        reserve = -(-sizes.range_rows // sizes.log_rows) + 1
        log_slots = log_groups + (workers + 1) * reserve
    if lean:
        return Buffers(2, 4, 2, 1, log_slots, reserve)
    depth = min(16, max(3, -(-24 * MIB // chunk)))
    tiles = min(64, max(16, 4 * MIB // sizes.tile_page_bytes))
    return Buffers(depth, tiles, workers + 2, workers + 2, log_slots, reserve)


def arena_bytes(sizes: ScanSizes, buffers: Buffers) -> int:
    """Return the bytes of all rings, without lane states."""
    scratch = sizes.workers * W.SCRATCH_EDGES * 6
    parts = (
        buffers.chunk_slots * sizes.input_chunk,
        buffers.tile_slots * sizes.tile_page_bytes * sizes.tile_streams,
        buffers.message_slots * sizes.message,
        buffers.out_slots * sizes.output_lane,
        buffers.log_slots * LOG_PAGE,
        scratch,
    )
    return sum(round_up(part, 4096) for part in parts) + _HUGE
