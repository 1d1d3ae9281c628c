"""Build the scheduler's three word arrays for one pass of a stage (see words.py)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hyades.common.port import Port
from hyades.common.units import round_up
from hyades.gpu_side import words as W
from hyades.gpu_side.buffers import LOG_PAGE
from hyades.gpu_side.factors import Factors, Sample, VertexTables
from hyades.gpu_side.featureview import ViewColumns
from hyades.gpu_side.log import RESERVE
from hyades.gpu_side.price import Candidate
from hyades.gpu_side.stores import Ints, PageStoreInfo
from hyades.gpu_side.topology import Topology

Words = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TileStores:
    """Where tile pages lie, and the pages that go with them."""

    tiles: PageStoreInfo
    ranks: PageStoreInfo | None
    weights: PageStoreInfo | None


@dataclass(frozen=True, slots=True)
class PassTables:
    """The arrays of one pass, and where things lie in the arena (bytes)."""

    g: Words
    w: Words
    s: Words
    factors: NDArray[np.float32]
    chunks: Ints  # chunk of each position
    lanes: Ints  # lanes of this pass
    input_at: int
    out_at: int
    state_at: int
    pinned_at: int
    log_slots_at: int


class _ArenaMap:
    def __init__(self) -> None:
        self.size = 0

    def take(self, nbytes: int) -> int:
        at = self.size
        self.size += round_up(max(nbytes, 0), 4096)
        return at


class VertexFloats:
    """What a stage keeps per vertex, float32: factors, and attention scores of destinations.

    data holds in one array what the kernels read, from the places given (-1: nothing).
    """

    def __init__(self, factors: Factors, vertices: int, heads: int) -> None:
        """Copy *factors*; `scores` [vertices, heads] is still to be filled."""
        self.source = factors.source
        wanted = (factors.destination, factors.loop)
        count = sum(part is not None for part in wanted) + heads
        self.data = np.zeros(max(count * vertices, 1), np.float32)
        self.destination_at, self.loop_at = -1, -1
        at = 0
        if factors.destination is not None:
            self.destination_at, at = at, at + vertices
            self.data[:at] = factors.destination
        if factors.loop is not None:
            self.loop_at, at = at, at + vertices
            self.data[self.loop_at : at] = factors.loop
        self.scores_at = at if heads else -1
        self.scores = self.data[at : at + heads * vertices].reshape(vertices, heads)


@dataclass(frozen=True, slots=True)
class PassInputs:
    """All that the tables of a pass are made of."""

    candidate: Candidate
    topology: Topology
    vertices: int
    source: PageStoreInfo
    tiles: TileStores
    target: PageStoreInfo
    log: PageStoreInfo | None
    vertex_tables: VertexTables
    vertex_floats: VertexFloats
    heads: int
    head_width: int
    sample: Sample
    pass_index: int
    held: NDArray[np.bool_]  # chunks that earlier passes of this run left in memory
    todo: NDArray[np.bool_]  # lanes whose output is not there yet
    workers: int
    check: bool
    columns: ViewColumns | None = None  # of rows that come multiplied


def build_pass(inputs: PassInputs, port: Port) -> PassTables:
    """Return the tables of one pass; UsageError where the port is too small."""
    return _PassBuilder(inputs, port).build()


class _PassBuilder:
    def __init__(self, inputs: PassInputs, port: Port) -> None:
        self.inputs = inputs
        self.port = port
        self.g = np.zeros(W.G_COUNT, np.int64)
        self.w = W.WordMap(self.g)
        self.w.size = W.CONTROL
        self.s = W.WordMap(self.g)
        self.arena = _ArenaMap()
        assert inputs.candidate.sizes is not None
        assert inputs.candidate.buffers is not None
        self.sizes = inputs.candidate.sizes
        self.buffers = inputs.candidate.buffers
        low, high = inputs.candidate.groups[inputs.pass_index]
        self.lanes = np.arange(low, high)[inputs.todo[low:high]]
        pages = inputs.topology.pages_of(low, high)
        if len(self.lanes) and len(self.lanes) < high - low:
            pages = inputs.topology.pages_of(int(self.lanes[0]), int(self.lanes[-1]) + 1)
        self.pages = pages if len(self.lanes) else pages[:0]
        self.chunks, counts = np.unique(inputs.topology.page_chunk[self.pages], return_counts=True)
        self.position_tile = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)

    def build(self) -> PassTables:
        inputs, g = self.inputs, self.g
        self._constants()
        input_at, out_at, state_at, pinned_at = self._place_arena()
        self._ready_table()
        self._schedule()
        self._lanes()
        log_at = self._log()
        floats = inputs.vertex_floats
        g[W.G_DST_FACTOR], g[W.G_LOOP_FACTOR] = floats.destination_at, floats.loop_at
        g[W.G_DST_SCORE] = floats.scores_at
        self._words()
        self.port.require(self.ready_slots, self.arena.size)
        w, s = self.w.build(), self.s.build()
        w[W.C_OUT_CREDIT] = self.buffers.out_slots
        w[W.C_PAGES_LEFT] = len(self.pages)
        g[W.G_LANES_TOTAL] = self.lanes_total
        if inputs.candidate.windows is not None:
            self._first_owners(w, s)
        return PassTables(
            g, w, s, floats.data, self.chunks, self.lanes, input_at, out_at, state_at, pinned_at,
            log_at,
        )  # fmt: skip

    def _constants(self) -> None:
        inputs, g, sizes, shape = self.inputs, self.g, self.sizes, self.sizes.shape
        g[W.G_RANGE], g[W.G_VERTICES] = sizes.range_rows, inputs.vertices
        g[W.G_POSITIONS], g[W.G_TILES] = len(self.chunks), len(self.pages)
        g[W.G_PAGES_PER_CHUNK] = inputs.source.shape.pages_per_range
        g[W.G_CHUNK_SLOTS], g[W.G_TILE_SLOTS] = self.buffers.chunk_slots, self.buffers.tile_slots
        g[W.G_MESSAGE_SLOTS] = self.buffers.message_slots
        g[W.G_OUT_SLOTS] = self.buffers.out_slots
        g[W.G_INPUT_PAGE_BYTES] = inputs.source.page_bytes
        g[W.G_INPUT_DEVICE], g[W.G_INPUT_OBJECT] = inputs.source.device, inputs.source.number
        g[W.G_INPUT_CHECK] = int(inputs.check and inputs.source.crcs is not None)
        g[W.G_TILE_PAGE_BYTES] = inputs.tiles.tiles.page_bytes
        g[W.G_TILE_DEVICE] = inputs.tiles.tiles.device
        g[W.G_CHECK] = int(inputs.check)
        g[W.G_MESSAGE_STRIDE], g[W.G_SELF_STRIDE] = shape.message_stride, shape.own_stride
        g[W.G_SELF_AT] = sizes.range_rows * shape.message_stride
        g[W.G_SELF_COLUMN], g[W.G_MESSAGE_FLOATS] = shape.own_column, sizes.message // 4
        g[W.G_STATE_STRIDE], g[W.G_AGG_WIDTH] = shape.state_stride, shape.aggregate
        g[W.G_OUT_PAGES] = inputs.target.shape.pages_per_range
        g[W.G_OUT_PAGE_BYTES] = inputs.target.page_bytes
        g[W.G_OUT_DEVICE], g[W.G_OUT_OBJECT] = inputs.target.device, inputs.target.number
        g[W.G_KIND] = shape.kind
        g[W.G_WEIGHTED] = int(inputs.tiles.weights is not None)
        g[W.G_FANOUT], g[W.G_SEED] = inputs.sample.fanout, inputs.sample.seed
        g[W.G_LAYER] = inputs.sample.layer
        g[W.G_HEADS], g[W.G_HEAD_WIDTH] = inputs.heads, inputs.head_width

    def _place_arena(self) -> tuple[int, int, int, int]:
        g, sizes, buffers, arena = self.g, self.sizes, self.buffers, self.arena
        tile_bytes = buffers.tile_slots * sizes.tile_page_bytes
        input_at = arena.take(buffers.chunk_slots * sizes.input_chunk)
        g[W.G_INPUT_AT] = input_at
        g[W.G_TILE_AT] = arena.take(tile_bytes)
        g[W.G_RANK_AT] = arena.take(tile_bytes if self.inputs.tiles.ranks else 0)
        g[W.G_WEIGHT_AT] = arena.take(tile_bytes if self.inputs.tiles.weights else 0)
        g[W.G_MESSAGE_AT] = arena.take(buffers.message_slots * sizes.message) // 4
        out_at = arena.take(buffers.out_slots * sizes.output_lane)
        g[W.G_OUT_AT] = out_at
        g[W.G_SCRATCH_SHORTS] = arena.take(self.inputs.workers * W.SCRATCH_EDGES * 2) // 2
        g[W.G_SCRATCH_FLOATS] = arena.take(self.inputs.workers * W.SCRATCH_EDGES * 4) // 4
        state_at = arena.take(self.inputs.candidate.state_slots * sizes.state)
        g[W.G_STATE_AT] = state_at // 4
        g[W.G_LOG_AT] = arena.take(buffers.log_slots * LOG_PAGE)
        pinned_at = arena.take(self.inputs.candidate.pinned * sizes.input_chunk)
        return input_at, out_at, state_at, pinned_at

    def _ready_table(self) -> None:
        g, buffers = self.g, self.buffers
        at = 0
        for name, slots in (
            (W.G_READY_INPUT, buffers.chunk_slots * int(g[W.G_PAGES_PER_CHUNK])),
            (W.G_READY_TILE, buffers.tile_slots),
            (W.G_READY_RANK, buffers.tile_slots),
            (W.G_READY_WEIGHT, buffers.tile_slots),
            (W.G_READY_OUT, buffers.out_slots * int(g[W.G_OUT_PAGES])),
            (W.G_READY_LOG, buffers.log_slots),
        ):
            g[name] = at
            at += slots
        self.ready_slots = at
        self.port.ready[:at] = 0

    def _schedule(self) -> None:
        inputs, s = self.inputs, self.s
        pages_per_chunk = inputs.source.shape.pages_per_range
        pages = self.chunks[:, None] * pages_per_chunk + np.arange(pages_per_chunk)
        exists = pages < inputs.source.shape.pages
        bounded = np.minimum(pages, max(inputs.source.shape.pages - 1, 0))
        lbas = np.where(exists, inputs.source.lbas[bounded], -1)  # -1: nothing to read
        lbas[inputs.held[self.chunks]] = -1
        crcs, sizes = inputs.source.crcs, inputs.source.nbytes
        full = np.full_like(lbas, inputs.source.page_bytes)
        s.table(W.G_S_INPUT_BYTES, (full if sizes is None else sizes[bounded]).reshape(-1))
        s.table(W.G_S_POSITION_TILE, self.position_tile)
        s.table(W.G_S_INPUT_LBA, lbas.reshape(-1))
        s.table(W.G_S_INPUT_CRC, (bounded * 0 if crcs is None else crcs[bounded]).reshape(-1))
        s.table(
            W.G_S_TILE_POSITION, np.repeat(np.arange(len(self.chunks)), np.diff(self.position_tile))
        )
        s.table(W.G_S_TILE_PAGE, self.pages)
        for lba_name, crc_name, store in (
            (W.G_S_TILE_LBA, W.G_S_TILE_CRC, inputs.tiles.tiles),
            (W.G_S_RANK_LBA, W.G_S_RANK_CRC, inputs.tiles.ranks),
            (W.G_S_WEIGHT_LBA, W.G_S_WEIGHT_CRC, inputs.tiles.weights),
        ):
            if store is not None:
                s.table(lba_name, store.lbas[self.pages])
                s.table(crc_name, self.pages * 0 if store.crcs is None else store.crcs[self.pages])

    def _lanes(self) -> None:
        inputs, s = self.inputs, self.s
        lanes = inputs.topology.chunks
        windows = inputs.candidate.windows
        slot = np.full(lanes, -1, np.int64)
        if windows is None:
            low, _ = inputs.candidate.groups[inputs.pass_index]
            slot[self.lanes] = self.lanes - low
            s.table(W.G_S_LANE_FIRST, np.zeros(lanes, np.int64))
            self.lanes_total = len(self.lanes)
        else:
            slot[self.lanes] = windows.slots[self.lanes]
            s.table(W.G_S_LANE_FIRST, windows.opens)
            s.table(W.G_S_LANE_CLOSE, windows.closes)
            self.lanes_total = int(np.count_nonzero(windows.whole[self.lanes]))
        s.table(W.G_S_LANE_SLOT, slot)
        target = inputs.target
        out = np.full(lanes * target.shape.pages_per_range, -1, np.int64)
        out[: target.shape.pages] = target.lbas[: target.shape.pages]
        s.table(W.G_S_OUT_LBA, out)
        s.table(W.G_S_LANE_LAST, inputs.topology.lane_pieces - 1)
        originals = inputs.vertex_tables.originals
        if inputs.sample.fanout > 0:
            tables = inputs.vertex_tables
            s.table(W.G_S_DEGREE, tables.in_degrees, tables.loops)
        if inputs.sample.fanout > 0 and len(originals):
            s.table(W.G_S_ORIGINAL, originals)
        else:
            self.g[W.G_S_ORIGINAL] = -1

    def _log(self) -> int:
        g, inputs, windows = self.g, self.inputs, self.inputs.candidate.windows
        if windows is None:
            return 0
        lanes = inputs.topology.chunks
        groups = -(-lanes // inputs.candidate.state_slots)
        per_group = -(-lanes // groups)
        g[W.G_LOGGING], g[W.G_LOG_PAGE_BYTES] = 1, LOG_PAGE
        g[W.G_LOG_ROWS], g[W.G_LOG_SLOTS] = self.sizes.log_rows, self.buffers.log_slots
        g[W.G_LOG_PAGES], g[W.G_LOG_GROUPS] = inputs.candidate.log_pages, groups
        lbas = np.zeros(0, np.int64)
        if inputs.log is not None:  # None where every lane is whole: slots still change hands
            g[W.G_LOG_DEVICE], g[W.G_LOG_OBJECT] = inputs.log.device, inputs.log.number
            lbas = inputs.log.lbas
        g[W.G_LOG_GROUP_WORDS] = round_up(RESERVE + self.buffers.log_reserve + 1, W.LINE)
        pages = max(inputs.candidate.log_pages, 1)
        self.w.region(W.G_W_LOG_STATE, self.buffers.log_slots)
        self.w.region(W.G_W_LOG_GROUP, groups * int(g[W.G_LOG_GROUP_WORDS]))
        self.w.region(W.G_W_LOG_PAGE_ROWS, pages)
        self.w.region(W.G_W_LOG_PAGE_GROUP, pages)
        self.w.region(W.G_W_LOG_PAGE_CRC, pages)
        self.w.region(W.G_W_SLOT_OWNER, inputs.candidate.state_slots)
        self.s.table(W.G_S_LANE_GROUP, np.arange(lanes) // per_group)
        self.s.table(W.G_S_LOG_LBA, lbas)
        self.s.table(W.G_S_SLOT_NEXT, self._chains())
        return int(g[W.G_LOG_AT])

    def _chains(self) -> Ints:
        """Return each lane's successor in its slot, leaving out lanes that are done."""
        windows = self.inputs.candidate.windows
        assert windows is not None
        follows = np.zeros(len(windows.follows), np.int64)
        self.owners = np.zeros(windows.slot_count, np.int64)
        for slot, first in enumerate(windows.first_owner):
            before, lane = -1, int(first)
            while lane >= 0:
                if self.inputs.todo[lane]:
                    if before < 0:
                        self.owners[slot] = lane + 1
                    else:
                        follows[before] = lane + 1
                    before = lane
                lane = int(windows.follows[lane]) - 1
        return follows

    def _first_owners(self, w: Words, _s: Words) -> None:
        at = int(self.g[W.G_W_SLOT_OWNER])
        w[at : at + len(self.owners)] = self.owners

    def _words(self) -> None:
        w, buffers, inputs = self.w, self.buffers, self.inputs
        lanes = inputs.topology.chunks
        for name, count in (
            (W.G_W_INPUT_DONE, buffers.chunk_slots),
            (W.G_W_MESSAGE_READY, buffers.message_slots),
            (W.G_W_MESSAGE_LEFT, buffers.message_slots),
            (W.G_W_MESSAGE_DONE, buffers.message_slots),
            (W.G_W_TILE_CLAIM, buffers.tile_slots),
            (W.G_W_TILE_DONE, buffers.tile_slots),
            (W.G_W_TILE_COUNT, buffers.tile_slots),
            (W.G_W_LANE_NEXT, lanes),
            (W.G_W_FIN_QUEUE, lanes + 1),
            (W.G_W_OUT_STATE, buffers.out_slots),
            (W.G_W_DURABLE, lanes),
            (W.G_W_OUT_CRC, lanes * int(self.g[W.G_OUT_PAGES])),
            (W.G_W_PARKED, inputs.workers * W.PARKED_MAX),
            (W.G_W_STATS, inputs.workers * W.STATS_WORDS),
        ):
            w.region(name, count)
