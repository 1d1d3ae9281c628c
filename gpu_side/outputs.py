"""Output slots: credits, posting a lane's pages, and what becomes of them once they are written.

Rules:
1. A slot is FREE, HELD by a worker that fills it, or POSTED + lane while its pages are written.
2. A worker takes a credit before it takes a lane, so a free slot is there when it looks for one.
3. A lane is durable when every page's ready word holds lane + 1; then its checksums are kept, the
   slot is free and the credit returned.  Rows that stay in the arena are done at once.
"""

from typing import Any

import numpy as np

from hyades.common.atomics import (
    atomic_add,
    atomic_cas,
    ld_acquire,
    st_relaxed,
    st_release,
)
from hyades.common.jit import jit
from hyades.gpu_side import log
from hyades.gpu_side import words as W
from hyades.gpu_side.requests import MAKE, WRITE, has_landed, post


@jit
def take_credit(w: Any) -> Any:
    """Take the right to one output slot; False where all are in use."""
    if atomic_add(w, W.C_OUT_CREDIT, np.int64(-1)) > 0:
        return True
    atomic_add(w, W.C_OUT_CREDIT, np.int64(1))
    return False


@jit
def reap_outputs(g: Any, w: Any, ready: Any, crcs: Any) -> Any:
    """Return the credits of output slots whose pages are all written; mark their lanes durable."""
    reaped = 0
    pages = g[W.G_OUT_PAGES]
    for slot in range(g[W.G_OUT_SLOTS]):
        state = ld_acquire(w, g[W.G_W_OUT_STATE] + slot)
        if state < W.OUT_POSTED:
            continue
        lane_index = state - W.OUT_POSTED
        whole = 1
        for index in range(pages):
            word = g[W.G_READY_OUT] + slot * pages + index
            if has_landed(w, ready, word, lane_index + 1) == 0:
                whole = 0
                break
        if whole == 1:
            for index in range(pages):
                crc = np.int64(crcs[g[W.G_READY_OUT] + slot * pages + index])
                st_relaxed(w, g[W.G_W_OUT_CRC] + lane_index * pages + index, crc)
            st_release(w, g[W.G_W_DURABLE] + lane_index, np.int64(1))
            st_release(w, g[W.G_W_OUT_STATE] + slot, np.int64(W.OUT_FREE))
            atomic_add(w, W.C_OUT_CREDIT, np.int64(1))
            atomic_add(w, W.C_DURABLE, np.int64(1))
            reaped += 1
    return reaped


@jit
def hold_output(g: Any, w: Any) -> Any:
    """Return an output slot for a lane that was taken with a credit."""
    while True:
        for slot in range(g[W.G_OUT_SLOTS]):
            at = g[W.G_W_OUT_STATE] + slot
            if ld_acquire(w, at) == W.OUT_FREE:
                free, held = np.int64(W.OUT_FREE), np.int64(W.OUT_HELD)
                if atomic_cas(w, at, free, held) == free:
                    return slot


@jit
def _keep_output(g: Any, w: Any, slot: Any, lane_index: Any) -> None:
    """Count a lane whose rows stay in the arena as done; its output slot is free again."""
    st_release(w, g[W.G_W_DURABLE] + lane_index, np.int64(1))
    st_release(w, g[W.G_W_OUT_STATE] + slot, np.int64(W.OUT_FREE))
    atomic_add(w, W.C_OUT_CREDIT, np.int64(1))
    atomic_add(w, W.C_DURABLE, np.int64(1))


@jit
def post_output(
    g: Any, w: Any, s: Any, ready: Any, ring_words: Any, control: Any, slot: Any, lane_index: Any
) -> None:
    """Post the pages of a lane whose rows are in place in output slot *slot*."""
    pages, nbytes = g[W.G_OUT_PAGES], g[W.G_OUT_PAGE_BYTES]
    lbas = g[W.G_S_OUT_LBA] + lane_index * pages
    if s[lbas] < 0:
        _keep_output(g, w, slot, lane_index)
        return
    for index in range(pages):
        word = g[W.G_READY_OUT] + slot * pages + index
        if s[lbas + index] < 0:  # the last lane may have fewer pages
            st_relaxed(ready, word, lane_index + 1)
            continue
        st_relaxed(ready, word, np.int64(0))
        post(
            ring_words, control, WRITE, MAKE, g[W.G_OUT_DEVICE], word, lane_index + 1,
            s[lbas + index], g[W.G_OUT_AT] + (slot * pages + index) * nbytes, nbytes, np.int64(0),
            g[W.G_OUT_OBJECT], lane_index * pages + index,
        )  # fmt: skip
    st_release(w, g[W.G_W_OUT_STATE] + slot, lane_index + W.OUT_POSTED)


@jit
def finalised(
    g: Any, w: Any, s: Any, ready: Any, ring_words: Any, control: Any, slot: Any, lane_index: Any
) -> None:
    """After a lane's state became rows in output slot *slot*: free the state, post the pages."""
    if g[W.G_LOGGING] != 0:
        log.hand_on(g, w, s, lane_index)
    post_output(g, w, s, ready, ring_words, control, slot, lane_index)
