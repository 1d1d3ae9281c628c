"""The log: partial state rows of lanes that are not resident, appended in pages, merged at the end.

Rules:
1. Every lane belongs to a group; a group has a lock, one open page and a list of reserved slots.
   Locks are tried once: where one is taken, or slots are short, the item is parked (nothing spins).
2. `admit` reserves all that the item will append and leaves the group locked; `leave` or
   `close_window` unlocks it.  So an admitted item never waits.
3. Records of a lane are appended in the lane's sequence, and pages of a group are numbered in
   order: merging a group's pages in number order joins every destination's parts in sequence.
4. A page is `rows` uint32 vertex ids, then (64-byte aligned) as many float32 state rows.
5. A lane's window is [OPEN, CLOSE] in its sequence.  Its state slot is handed on when the window
   closes: at once if the state went to the log, after finalising if the lane was never logged.
Must stay in sync: plan.py predicts the number of rows and pages; merge.py reads the pages.
"""

from typing import Any

import numpy as np

from hyades.common import layout
from hyades.common.atomics import (
    atomic_add,
    atomic_cas,
    lane,
    lanes,
    ld_acquire,
    ld_relaxed,
    st_relaxed,
    st_release,
    sync_lanes,
)
from hyades.common.jit import jit
from hyades.gpu_side import words as W
from hyades.gpu_side.kernels import clear_state
from hyades.gpu_side.requests import MAKE, WRITE, bump, fail, has_landed, post

# words of a group
LOCK, OPEN_SLOT, USED, OPEN_PAGE, RESERVED, RESERVE = 0, 1, 2, 3, 4, 5
_NO_SPACE = int(layout.Status.NO_SPACE)
POSTED = W.OUT_POSTED


@jit
def _group(g: Any, s: Any, lane_index: Any) -> Any:
    number = s[g[W.G_S_LANE_GROUP] + lane_index]
    return g[W.G_W_LOG_GROUP] + number * g[W.G_LOG_GROUP_WORDS], number


@jit
def lane_rows(g: Any, lane_index: Any) -> Any:
    """Return how many vertices a lane holds."""
    return min(g[W.G_RANGE], g[W.G_VERTICES] - lane_index * g[W.G_RANGE])


@jit
def is_whole(g: Any, s: Any, lane_index: Any) -> Any:
    """Say whether all pieces of the lane fall in its window, so that nothing of it is logged."""
    opens, closes = s[g[W.G_S_LANE_FIRST] + lane_index], s[g[W.G_S_LANE_CLOSE] + lane_index]
    return opens == 0 and closes == s[g[W.G_S_LANE_LAST] + lane_index]


@jit
def _reserve(g: Any, w: Any, group: Any, rows: Any) -> Any:
    """Reserve slots for *rows* more rows of a locked group; return 0 where slots are short."""
    room = (
        g[W.G_LOG_ROWS] - ld_relaxed(w, group + USED) if ld_relaxed(w, group + OPEN_SLOT) > 0 else 0
    )
    pages = max(0, -(-(rows - room) // g[W.G_LOG_ROWS]))
    if pages == 0:
        return 1
    if atomic_cas(w, W.C_LOG_LOCK, np.int64(0), np.int64(1)) != 0:
        return 0
    free = np.int64(0)
    for place in range(g[W.G_LOG_SLOTS]):
        if ld_acquire(w, g[W.G_W_LOG_STATE] + place) == W.OUT_FREE:
            free += 1
    if free >= pages:
        taken = np.int64(0)
        slot = np.int64(0)
        while taken < pages:
            if ld_acquire(w, g[W.G_W_LOG_STATE] + slot) == W.OUT_FREE:
                st_release(w, g[W.G_W_LOG_STATE] + slot, np.int64(W.OUT_HELD))
                st_relaxed(w, group + RESERVE + taken, slot)
                taken += 1
            slot += 1
        st_relaxed(w, group + RESERVED, taken)
    st_release(w, W.C_LOG_LOCK, np.int64(0))
    return 1 if free >= pages else 0


@jit
def admit(g: Any, w: Any, s: Any, lane_index: Any, sequence: Any, home: Any, segments: Any) -> Any:
    """Return 0 to add to the state, 1 to append to the log, -1 to park."""
    opens, closes = s[g[W.G_S_LANE_FIRST] + lane_index], s[g[W.G_S_LANE_CLOSE] + lane_index]
    inside = opens <= sequence <= closes
    if inside and ld_acquire(w, g[W.G_W_SLOT_OWNER] + home) != lane_index + 1:
        return -1
    rows = np.int64(0)
    if not inside:
        rows = segments
    elif sequence == closes and not is_whole(g, s, lane_index):
        rows = lane_rows(g, lane_index)
    if rows > 0:
        group, _ = _group(g, s, lane_index)
        if atomic_cas(w, group + LOCK, np.int64(0), np.int64(1)) != 0:
            return -1
        if _reserve(g, w, group, rows) == 0:
            st_release(w, group + LOCK, np.int64(0))
            return -1
    return 0 if inside else 1


@jit
def _send_page(
    g: Any, w: Any, s: Any, ready: Any, ring_words: Any, control: Any, group: Any
) -> None:
    """Post the group's open page for writing."""
    slot = ld_relaxed(w, group + OPEN_SLOT) - 1
    page = ld_relaxed(w, group + OPEN_PAGE)
    st_relaxed(w, g[W.G_W_LOG_PAGE_ROWS] + page, ld_relaxed(w, group + USED))
    st_relaxed(w, group + OPEN_SLOT, np.int64(0))
    st_relaxed(w, group + USED, np.int64(0))
    st_relaxed(ready, g[W.G_READY_LOG] + slot, np.int64(0))
    post(
        ring_words, control, WRITE, MAKE, g[W.G_LOG_DEVICE], g[W.G_READY_LOG] + slot, page + 1,
        s[g[W.G_S_LOG_LBA] + page], g[W.G_LOG_AT] + slot * g[W.G_LOG_PAGE_BYTES],
        g[W.G_LOG_PAGE_BYTES], np.int64(0), g[W.G_LOG_OBJECT], page,
    )  # fmt: skip
    st_release(w, g[W.G_W_LOG_STATE] + slot, page + POSTED)


@jit
def _room(
    g: Any, w: Any, s: Any, ready: Any, ring_words: Any, control: Any, group: Any, number: Any
) -> Any:
    """Return how many rows the open page still takes, after opening a new one where it is full."""
    if ld_relaxed(w, group + OPEN_SLOT) > 0 and ld_relaxed(w, group + USED) == g[W.G_LOG_ROWS]:
        _send_page(g, w, s, ready, ring_words, control, group)
    if ld_relaxed(w, group + OPEN_SLOT) == 0:
        left = ld_relaxed(w, group + RESERVED) - 1
        page = atomic_add(w, W.C_LOG_NEXT, np.int64(1))
        if left < 0 or page >= g[W.G_LOG_PAGES]:
            fail(w, np.int64(-1), np.int64(_NO_SPACE))
            return np.int64(0)
        st_relaxed(w, group + RESERVED, left)
        st_relaxed(w, group + OPEN_SLOT, ld_relaxed(w, group + RESERVE + left) + 1)
        st_relaxed(w, group + OPEN_PAGE, page)
        st_relaxed(w, g[W.G_W_LOG_PAGE_GROUP] + page, number)
    return g[W.G_LOG_ROWS] - ld_relaxed(w, group + USED)


@jit
def _places(g: Any, w: Any, group: Any) -> Any:
    """Return the int32 element of the next free id and the float32 element of its row."""
    slot, used = ld_relaxed(w, group + OPEN_SLOT) - 1, ld_relaxed(w, group + USED)
    page = (g[W.G_LOG_AT] + slot * g[W.G_LOG_PAGE_BYTES]) >> 2
    rows = page + -(-g[W.G_LOG_ROWS] // 16) * 16
    return page + used, rows + used * g[W.G_STATE_STRIDE]


@jit
def open_part(
    g: Any, w: Any, s: Any, floats: Any, shorts: Any, words: Any, ring_words: Any, control: Any,
    ready: Any, lane_index: Any, segments: Any, dst_at: Any,
) -> Any:  # fmt: skip
    """Make neutral rows in the open page for an admitted piece's next segments.

    Return how many of *segments* it takes, and the float32 element of the first row; 0 on failure.
    """
    group, number = _group(g, s, lane_index)
    count = min(_room(g, w, s, ready, ring_words, control, group, number), segments)
    if count == 0:
        return np.int64(0), np.int64(0)
    ids, rows = _places(g, w, group)
    clear_state(g, floats, rows, count)
    first_vertex = lane_index * g[W.G_RANGE]
    for index in range(lane(), count, lanes()):
        words[ids + index] = np.int32(first_vertex + np.int64(shorts[dst_at + index]))
    return count, rows


@jit
def close_part(g: Any, w: Any, s: Any, lane_index: Any, count: Any) -> None:
    """Count *count* rows of the open page as filled in."""
    group, _ = _group(g, s, lane_index)
    st_relaxed(w, group + USED, ld_relaxed(w, group + USED) + count)


@jit
def leave(g: Any, w: Any, s: Any, worker: Any, lane_index: Any, rows: Any) -> None:
    """Unlock the group after the last of *rows* rows."""
    group, _ = _group(g, s, lane_index)
    bump(w, g[W.G_W_STATS] + worker * W.STATS_WORDS + W.ST_LOGGED_ROWS, rows)
    st_release(w, group + LOCK, np.int64(0))


@jit
def _flush_state(
    g: Any, w: Any, s: Any, floats: Any, words: Any, ring_words: Any, control: Any, ready: Any,
    worker: Any, lane_index: Any, home: Any,
) -> None:  # fmt: skip
    group, number = _group(g, s, lane_index)
    stride, rows = g[W.G_STATE_STRIDE], lane_rows(g, lane_index)
    state = g[W.G_STATE_AT] + home * g[W.G_RANGE] * stride
    done = np.int64(0)
    while done < rows:
        room = _room(g, w, s, ready, ring_words, control, group, number)
        if room == 0:
            break
        count = min(room, rows - done)
        ids, target = _places(g, w, group)
        source = state + done * stride
        for index in range(lane(), count, lanes()):
            words[ids + index] = np.int32(lane_index * g[W.G_RANGE] + done + index)
        for index in range(lane(), count * stride, lanes()):
            floats[target + index] = floats[source + index]
        sync_lanes()
        st_relaxed(w, group + USED, ld_relaxed(w, group + USED) + count)
        done += count
    bump(w, g[W.G_W_STATS] + worker * W.STATS_WORDS + W.ST_LOGGED_ROWS, rows)
    st_release(w, group + LOCK, np.int64(0))


@jit
def hand_on(g: Any, w: Any, s: Any, lane_index: Any) -> None:
    """Give the lane's state slot to the next lane of its chain."""
    home = s[g[W.G_S_LANE_SLOT] + lane_index]
    st_release(w, g[W.G_W_SLOT_OWNER] + home, s[g[W.G_S_SLOT_NEXT] + lane_index])


@jit
def close_window(
    g: Any, w: Any, s: Any, floats: Any, words: Any, ring_words: Any, control: Any, ready: Any,
    worker: Any, lane_index: Any, sequence: Any,
) -> None:  # fmt: skip
    """After the window's last piece: log the state, hand its slot on, unless the lane is whole."""
    if sequence != s[g[W.G_S_LANE_CLOSE] + lane_index] or is_whole(g, s, lane_index):
        return
    home = s[g[W.G_S_LANE_SLOT] + lane_index]
    _flush_state(g, w, s, floats, words, ring_words, control, ready, worker, lane_index, home)
    hand_on(g, w, s, lane_index)


@jit
def reap(g: Any, w: Any, ready: Any, crcs: Any) -> Any:
    """Free the slots of log pages that are written and keep their checksums."""
    count = 0
    for slot in range(g[W.G_LOG_SLOTS]):
        state = ld_acquire(w, g[W.G_W_LOG_STATE] + slot)
        if state < POSTED:
            continue
        page = state - POSTED
        word = g[W.G_READY_LOG] + slot
        if has_landed(w, ready, word, page + 1) == 1:
            st_relaxed(w, g[W.G_W_LOG_PAGE_CRC] + page, np.int64(crcs[word]))
            st_release(w, g[W.G_W_LOG_STATE] + slot, np.int64(W.OUT_FREE))
            count += 1
    return count


@jit
def finish(g: Any, w: Any, s: Any, ready: Any, ring_words: Any, control: Any) -> None:
    """Post every page that is still open; called by one thread after all items are done."""
    for number in range(g[W.G_LOG_GROUPS]):
        group = g[W.G_W_LOG_GROUP] + number * g[W.G_LOG_GROUP_WORDS]
        if ld_relaxed(w, group + OPEN_SLOT) > 0:
            _send_page(g, w, s, ready, ring_words, control, group)
