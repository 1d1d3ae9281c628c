"""The scheduler of one scan: posts what is missing, parks what waits, resumes what can run.

One source: CPU threads call `advance` and do the host's work it hands out (landing, finalising) in
between; a resident CUDA kernel calls the same function and hands that work to its host by mailbox.

Rules:
1. A scan is a list of positions (chunks to read, ascending) and a list of tiles (tile pages,
   ascending); every tile belongs to one position.  One worker at a time (C_LOCK) posts reads, in
   order, into the slots of three rings: input (position % slots), tile (tile % slots), message
   (position % slots).
2. A slot is reused only when its DONE word holds the previous user's number + 1.  A ready word
   holds 0, the generation (number + 1) that landed, or a negative Status.
3. An item is one entry of a tile page.  Items are claimed in order by compare-and-swap on the
   tile's claim word (tile << 20 | next entry), so a stale reader of a reused slot cannot claim.
4. An item runs only when it is its lane's next piece (LANE_NEXT): same bits for any worker count.
   Otherwise it is parked, at most PARKED_MAX a worker, and retried before new items are claimed.
   The lane's earlier piece was claimed earlier, so some parked or running item can always go on.
5. The piece that completes a lane appends the lane to the finalise queue; a worker takes a lane
   only with an output slot's credit in hand; the poster returns credits when writes are durable.
6. Every loop leaves when STOP, FAILED or C_ERROR is set.  Nothing waits for a single event.
"""

from typing import Any

import numpy as np

from hyades.common import layout
from hyades.common.atomics import (
    atomic_add,
    atomic_cas,
    broadcast,
    ld_acquire,
    ld_relaxed,
    st_relaxed,
    st_release,
    ticks,
)
from hyades.common.jit import jit
from hyades.gpu_side import log
from hyades.gpu_side import words as W
from hyades.gpu_side.issue import issue
from hyades.gpu_side.kernels import add_own_rows, clear_state, run_piece
from hyades.gpu_side.outputs import take_credit
from hyades.gpu_side.requests import bump, has_landed
from hyades.gpu_side.waiting import back_off, stopped

_SELF = int(layout.TileFlag.SELF)


@jit
def _finish_item(g: Any, w: Any, s: Any, tile: Any, entries: Any) -> None:
    """Count an item of *tile* as done; free the tile, and then the message slot, after the last."""
    slot = tile % g[W.G_TILE_SLOTS]
    if atomic_add(w, g[W.G_W_TILE_COUNT] + slot, np.int64(1)) + 1 < entries:
        return
    position = s[g[W.G_S_TILE_POSITION] + tile]
    message = position % g[W.G_MESSAGE_SLOTS]
    st_release(w, g[W.G_W_TILE_DONE] + slot, tile + 1)
    if atomic_add(w, g[W.G_W_MESSAGE_LEFT] + message, np.int64(-1)) == 1:
        st_release(w, g[W.G_W_MESSAGE_DONE] + message, position + 1)
    atomic_add(w, W.C_PAGES_LEFT, np.int64(-1))


@jit
def _queue_lane(g: Any, w: Any, lane_index: Any) -> None:
    place = atomic_add(w, W.C_FIN_TAIL, np.int64(1))
    st_release(w, g[W.G_W_FIN_QUEUE] + place, lane_index + 1)


@jit
def _run_item(
    g: Any, w: Any, s: Any, floats: Any, shorts: Any, words: Any, factors: Any,
    ring_words: Any, control: Any, ready: Any, worker: Any, tile: Any, entry: Any, slope: Any,
) -> Any:  # fmt: skip
    """Run one item; return 0 where it must be parked."""
    slot = tile % g[W.G_TILE_SLOTS]
    page_bytes = g[W.G_TILE_PAGE_BYTES]
    page = (g[W.G_TILE_AT] + slot * page_bytes) >> 2
    entries = np.int64(words[page + layout.TH_TILES])
    at = page + layout.TH_WORDS + entry * layout.TE_WORDS
    lane_index = np.int64(words[at + layout.TE_LANE])
    home = s[g[W.G_S_LANE_SLOT] + lane_index]
    if home < 0:  # not a lane of this pass
        _finish_item(g, w, s, tile, entries)
        return 1
    sequence = np.int64(words[at + layout.TE_SEQ])
    if ld_acquire(w, g[W.G_W_LANE_NEXT] + lane_index) != sequence:
        return 0
    packed = np.int64(words[at + layout.TE_SEGS_FLAGS])
    segments, flags = packed & 0xFFFF, (packed >> 16) & 0xFFFF
    logged = 0
    if g[W.G_LOGGING] != 0:
        logged = log.admit(g, w, s, lane_index, sequence, home, segments)
        if logged < 0:
            return 0
    state = g[W.G_STATE_AT] + home * g[W.G_RANGE] * g[W.G_STATE_STRIDE]
    if sequence == s[g[W.G_S_LANE_FIRST] + lane_index]:
        clear_state(
            g, floats, state, min(g[W.G_RANGE], g[W.G_VERTICES] - lane_index * g[W.G_RANGE])
        )
    message_slot = s[g[W.G_S_TILE_POSITION] + tile] % g[W.G_MESSAGE_SLOTS]
    message = g[W.G_MESSAGE_AT] + message_slot * g[W.G_MESSAGE_FLOATS]
    if flags & _SELF:
        own = message + g[W.G_SELF_AT]
        scratch = g[W.G_SCRATCH_SHORTS] + worker * W.SCRATCH_EDGES
        add_own_rows(g, floats, factors, scratch, shorts, lane_index, state, message, own, slope)
    first_segment = np.int64(words[at + layout.TE_SEG0])
    first_edge = np.int64(words[at + layout.TE_EDGE0])
    half = page << 1
    dst_at = half + (np.int64(words[page + layout.TH_DST]) >> 1) + first_segment
    ends_at = half + (np.int64(words[page + layout.TH_ENDS]) >> 1) + first_segment
    src_at = half + (np.int64(words[page + layout.TH_SRC]) >> 1) + first_edge
    ranks = ((g[W.G_RANK_AT] + slot * page_bytes) >> 2) + first_edge
    weights = ((g[W.G_WEIGHT_AT] + slot * page_bytes) >> 2) + first_edge
    done, edges, start = np.int64(0), np.int64(0), np.int64(0)
    count, record = segments, np.int64(-1)
    while done < segments:
        if logged == 1:
            count, record = log.open_part(
                g, w, s, floats, shorts, words, ring_words, control, ready, lane_index,
                segments - done, dst_at + done,
            )  # fmt: skip
            if count == 0:
                break
        edges += run_piece(
            g, s, floats, shorts, words, factors, worker, lane_index, state, message, count,
            dst_at + done, ends_at + done, src_at, ranks, weights, slope, record, start,
        )  # fmt: skip
        done += count
        start = np.int64(shorts[ends_at + done - 1])
        if logged == 1:
            log.close_part(g, w, s, lane_index, count)
    if logged == 1:
        log.leave(g, w, s, worker, lane_index, done)
    stats = g[W.G_W_STATS] + worker * W.STATS_WORDS
    bump(w, stats + W.ST_ITEMS, 1)
    bump(w, stats + W.ST_EDGES, edges)
    bump(w, stats + W.ST_SEGMENTS, segments)
    _complete_piece(
        g, w, s, floats, words, ring_words, control, ready, worker, lane_index, sequence
    )
    _finish_item(g, w, s, tile, entries)
    return 1


@jit
def _complete_piece(
    g: Any, w: Any, s: Any, floats: Any, words: Any, ring_words: Any, control: Any, ready: Any,
    worker: Any, lane_index: Any, sequence: Any,
) -> None:  # fmt: skip
    """Let the lane's next piece run; close its window or queue it for finalising where due."""
    last = s[g[W.G_S_LANE_LAST] + lane_index]
    if g[W.G_LOGGING] != 0:
        log.close_window(
            g, w, s, floats, words, ring_words, control, ready, worker, lane_index, sequence
        )
        whole = log.is_whole(g, s, lane_index)
    else:
        whole = True
    st_release(w, g[W.G_W_LANE_NEXT] + lane_index, sequence + 1)
    if sequence == last and whole:
        _queue_lane(g, w, lane_index)


@jit
def _claim_item(g: Any, w: Any, words: Any, tile: Any) -> Any:
    """Return the next entry of *tile*, or -1 when all are claimed (or the slot moved on)."""
    slot = tile % g[W.G_TILE_SLOTS]
    at = g[W.G_W_TILE_CLAIM] + slot
    word = ld_acquire(w, at)
    while True:
        if word >> 20 != tile:
            return np.int64(-1)
        page = (g[W.G_TILE_AT] + slot * g[W.G_TILE_PAGE_BYTES]) >> 2
        # The slot may be reused meanwhile: all lanes of a warp must see the same count.
        if word & 0xFFFFF >= broadcast(np.int64(words[page + layout.TH_TILES])):
            return np.int64(-1)
        found = atomic_cas(w, at, word, word + 1)
        if found == word:
            return word & 0xFFFFF
        word = found


@jit
def _tile_ready(g: Any, w: Any, s: Any, ready: Any, tile: Any) -> Any:
    """Say whether *tile* and its chunk's message rows are there."""
    slot = tile % g[W.G_TILE_SLOTS]
    if ld_acquire(w, g[W.G_W_TILE_CLAIM] + slot) >> 20 != tile:
        return 2  # finished and reused by others meanwhile
    if has_landed(w, ready, g[W.G_READY_TILE] + slot, tile + 1) == 0:
        return 0
    if g[W.G_FANOUT] > 0 and has_landed(w, ready, g[W.G_READY_RANK] + slot, tile + 1) == 0:
        return 0
    if g[W.G_WEIGHTED] != 0 and has_landed(w, ready, g[W.G_READY_WEIGHT] + slot, tile + 1) == 0:
        return 0
    position = s[g[W.G_S_TILE_POSITION] + tile]
    at = g[W.G_W_MESSAGE_READY] + position % g[W.G_MESSAGE_SLOTS]
    return 1 if ld_acquire(w, at) == position + 1 else 0


@jit
def _claim_next(g: Any, w: Any, s: Any, words: Any, ready: Any, stats: Any) -> Any:
    """Claim the next item in order; return tile << 20 | entry, or -1 where none can run yet."""
    head = ld_acquire(w, W.C_TILE_HEAD)
    tile = head
    posted = ld_acquire(w, W.C_NEXT_TILE)
    while tile < posted:
        state = _tile_ready(g, w, s, ready, tile)
        if state == 0:
            if ld_relaxed(w, stats + W.ST_MISSED_TILE) != tile + 1:  # once, however long it waits
                st_relaxed(w, stats + W.ST_MISSED_TILE, tile + 1)
                bump(w, stats + W.ST_MISSES, 1)
            break
        entry = _claim_item(g, w, words, tile) if state == 1 else np.int64(-1)
        if entry >= 0:
            return (tile << 20) | entry
        if tile == head:
            atomic_cas(w, W.C_TILE_HEAD, head, head + 1)
            head += 1
        tile += 1
    return np.int64(-1)


@jit
def _run_items(
    g: Any, w: Any, s: Any, floats: Any, shorts: Any, words: Any, factors: Any,
    ring_words: Any, control: Any, ready: Any, worker: Any, slope: Any, most: Any,
) -> Any:  # fmt: skip
    """Retry what is parked, then claim and run up to *most* items; return how many moved.

    A claimed item takes the place after the parked ones, and leaves it when it has run.  There is
    one call of _run_item, so that a GPU holds one copy of the kernels.
    """
    stats = g[W.G_W_STATS] + worker * W.STATS_WORDS
    list_at = g[W.G_W_PARKED] + worker * W.PARKED_MAX
    count = ld_relaxed(w, stats + W.ST_PARKED_NOW)
    index, claimed, resumed = np.int64(0), np.int64(0), np.int64(0)
    while True:
        fresh = index == count
        if fresh:
            if claimed == most or count == W.PARKED_MAX:
                break
            item = _claim_next(g, w, s, words, ready, stats)
            if item < 0:
                break
            claimed += 1
        else:
            item = ld_relaxed(w, list_at + index)
        done = _run_item(
            g, w, s, floats, shorts, words, factors, ring_words, control, ready, worker,
            item >> 20, item & 0xFFFFF, slope,
        )  # fmt: skip
        if done == 0:
            if fresh:
                st_relaxed(w, list_at + index, item)
                bump(w, stats + W.ST_PARKS, 1)
                count += 1
            index += 1
        elif not fresh:
            for place in range(index, count - 1):  # keeps the order of the others
                st_relaxed(w, list_at + place, ld_relaxed(w, list_at + place + 1))
            count -= 1
            resumed += 1
    bump(w, stats + W.ST_RESUMES, resumed)
    st_relaxed(w, stats + W.ST_PARKED_NOW, count)
    return claimed + resumed


@jit
def _take_landing(g: Any, w: Any, ready: Any) -> Any:
    """Claim the next position whose pages are all there and whose message slot is free, or -1."""
    position = ld_acquire(w, W.C_NEXT_LAND)
    if position >= g[W.G_POSITIONS]:
        return np.int64(-1)
    if position >= ld_acquire(w, W.C_NEXT_INPUT):
        return np.int64(-1)
    slots, pages = g[W.G_MESSAGE_SLOTS], g[W.G_PAGES_PER_CHUNK]
    done = ld_acquire(w, g[W.G_W_MESSAGE_DONE] + position % slots)
    if position >= slots and done != position - slots + 1:
        return np.int64(-1)
    base = g[W.G_READY_INPUT] + (position % g[W.G_CHUNK_SLOTS]) * pages
    for index in range(pages):
        if has_landed(w, ready, base + index, position + 1) == 0:
            return np.int64(-1)
    if atomic_cas(w, W.C_NEXT_LAND, position, position + 1) != position:
        return np.int64(-1)
    return position


@jit
def landed(g: Any, w: Any, s: Any, position: Any) -> None:
    """Publish the message rows of *position* and free its input slot."""
    tiles = s[g[W.G_S_POSITION_TILE] + position + 1] - s[g[W.G_S_POSITION_TILE] + position]
    message = position % g[W.G_MESSAGE_SLOTS]
    st_release(w, g[W.G_W_INPUT_DONE] + position % g[W.G_CHUNK_SLOTS], position + 1)
    if tiles == 0:
        st_release(w, g[W.G_W_MESSAGE_DONE] + message, position + 1)
        return
    st_release(w, g[W.G_W_MESSAGE_LEFT] + message, tiles)
    st_release(w, g[W.G_W_MESSAGE_READY] + message, position + 1)


@jit
def _take_lane(g: Any, w: Any) -> Any:
    """Take a complete lane together with an output credit, or return -1."""
    head = ld_acquire(w, W.C_FIN_HEAD)
    if head >= ld_acquire(w, W.C_FIN_TAIL):
        return np.int64(-1)
    if not take_credit(w):
        return np.int64(-1)
    head = ld_acquire(w, W.C_FIN_HEAD)
    while head < ld_acquire(w, W.C_FIN_TAIL):
        entry = ld_acquire(w, g[W.G_W_FIN_QUEUE] + head)
        if entry > 0:
            found = atomic_cas(w, W.C_FIN_HEAD, head, head + 1)
            if found == head:
                atomic_add(w, W.C_FIN_TAKEN, np.int64(1))
                return entry - 1
            head = found
        else:
            break
    atomic_add(w, W.C_OUT_CREDIT, np.int64(1))
    return np.int64(-1)


@jit
def advance(
    worker: Any, g: Any, w: Any, s: Any, floats: Any, shorts: Any, words: Any, factors: Any,
    ready: Any, crcs: Any, ring_words: Any, control: Any, slope: Any,
) -> Any:  # fmt: skip
    """Work until the host must do something; return action << 32 | position or lane."""
    stats = g[W.G_W_STATS] + worker * W.STATS_WORDS
    idle = np.int64(0)
    before = ticks()
    while True:
        action = step(
            worker, g, w, s, floats, shorts, words, factors, ready, crcs, ring_words, control, slope
        )
        now = ticks()
        if action < 0:
            bump(w, stats + W.ST_BUSY_TICKS, now - before)
            idle = np.int64(0)
        elif action == 0:
            back_off(idle)
            idle += 1
            bump(w, stats + W.ST_IDLE, 1)
            bump(w, stats + W.ST_IDLE_TICKS, ticks() - before)
        else:
            bump(w, stats + W.ST_BUSY_TICKS, now - before)
            return action - 1
        before = ticks()


@jit
def step(
    worker: Any, g: Any, w: Any, s: Any, floats: Any, shorts: Any, words: Any, factors: Any,
    ready: Any, crcs: Any, ring_words: Any, control: Any, slope: Any,
) -> Any:  # fmt: skip
    """One round: return -1 after progress, 0 when idle, or an action + 1."""
    if stopped(w, control):
        return np.int64((W.A_ABORT << W.ACTION_SHIFT) + 1)
    posted = issue(g, w, s, ready, crcs, ring_words, control)
    if posted > 0:
        bump(w, g[W.G_W_STATS] + worker * W.STATS_WORDS + W.ST_POSTED, posted)
    lane_index = _take_lane(g, w)
    if lane_index >= 0:
        return np.int64((W.A_FINALISE << W.ACTION_SHIFT) + lane_index + 1)
    ran = _run_items(
        g, w, s, floats, shorts, words, factors, ring_words, control, ready, worker, slope, 32
    )
    if ran > 0:
        return np.int64(-1)
    position = _take_landing(g, w, ready)
    if position >= 0:
        return np.int64((W.A_LAND << W.ACTION_SHIFT) + position + 1)
    if ld_acquire(w, W.C_PAGES_LEFT) == 0 and ld_acquire(w, W.C_FIN_TAKEN) == g[W.G_LANES_TOTAL]:
        return np.int64((W.A_DONE << W.ACTION_SHIFT) + 1)
    return np.int64(-1) if posted > 0 else np.int64(0)
