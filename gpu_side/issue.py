"""Posting reads ahead of the workers: one worker at a time, in order, into rings of slots.

Must stay in sync: scheduler.py states the rules of slots, DONE words and ready words.
"""

from typing import Any

import numpy as np

from hyades.common.atomics import (
    atomic_cas,
    ld_acquire,
    ld_relaxed,
    st_relaxed,
    st_release,
)
from hyades.common.jit import jit
from hyades.gpu_side import log
from hyades.gpu_side import words as W
from hyades.gpu_side.outputs import reap_outputs
from hyades.gpu_side.requests import CHECK, READ, post


@jit
def _post_inputs(g: Any, w: Any, s: Any, ready: Any, ring_words: Any, control: Any) -> Any:
    posted = 0
    position = ld_relaxed(w, W.C_NEXT_INPUT)
    slots, pages = g[W.G_CHUNK_SLOTS], g[W.G_PAGES_PER_CHUNK]
    place = g[W.G_INPUT_PAGE_BYTES]
    flags = CHECK if g[W.G_INPUT_CHECK] != 0 else 0
    while position < g[W.G_POSITIONS]:
        slot = position % slots
        done = ld_acquire(w, g[W.G_W_INPUT_DONE] + slot)
        if position >= slots and done != position - slots + 1:
            break
        for index in range(pages):
            lba = s[g[W.G_S_INPUT_LBA] + position * pages + index]
            word = g[W.G_READY_INPUT] + slot * pages + index
            if lba < 0:
                st_relaxed(ready, word, position + 1)
                continue
            st_relaxed(ready, word, np.int64(0))
            crc = s[g[W.G_S_INPUT_CRC] + position * pages + index]
            offset = g[W.G_INPUT_AT] + (slot * pages + index) * place
            nbytes = s[g[W.G_S_INPUT_BYTES] + position * pages + index]
            post(
                ring_words, control, READ, flags, g[W.G_INPUT_DEVICE], word, position + 1, lba,
                offset, nbytes, crc, g[W.G_INPUT_OBJECT], position * pages + index,
            )  # fmt: skip
            posted += 1
        position += 1
        st_release(w, W.C_NEXT_INPUT, position)
    return posted


@jit
def _post_tile_page(
    g: Any, s: Any, ready: Any, ring_words: Any, control: Any, tile: Any, slot: Any, word: Any,
    at: Any, lba_table: Any, crc_table: Any, thing: Any,
) -> None:  # fmt: skip
    st_relaxed(ready, word + slot, np.int64(0))
    nbytes = g[W.G_TILE_PAGE_BYTES]
    flags = CHECK if g[W.G_CHECK] != 0 else 0
    post(
        ring_words, control, READ, flags, g[W.G_TILE_DEVICE], word + slot, tile + 1,
        s[lba_table + tile], at + slot * nbytes, nbytes, s[crc_table + tile], thing,
        s[g[W.G_S_TILE_PAGE] + tile],
    )  # fmt: skip


@jit
def _post_tiles(g: Any, w: Any, s: Any, ready: Any, ring_words: Any, control: Any) -> Any:
    posted = 0
    tile = ld_relaxed(w, W.C_NEXT_TILE)
    slots = g[W.G_TILE_SLOTS]
    while tile < g[W.G_TILES]:
        slot = tile % slots
        done = ld_acquire(w, g[W.G_W_TILE_DONE] + slot)
        if tile >= slots and done != tile - slots + 1:
            break
        st_relaxed(w, g[W.G_W_TILE_COUNT] + slot, np.int64(0))
        st_relaxed(w, g[W.G_W_TILE_CLAIM] + slot, tile << 20)
        _post_tile_page(
            g, s, ready, ring_words, control, tile, slot, g[W.G_READY_TILE], g[W.G_TILE_AT],
            g[W.G_S_TILE_LBA], g[W.G_S_TILE_CRC], 1,
        )  # fmt: skip
        posted += 1
        if g[W.G_FANOUT] > 0:
            _post_tile_page(
                g, s, ready, ring_words, control, tile, slot, g[W.G_READY_RANK], g[W.G_RANK_AT],
                g[W.G_S_RANK_LBA], g[W.G_S_RANK_CRC], 2,
            )  # fmt: skip
            posted += 1
        if g[W.G_WEIGHTED] != 0:
            _post_tile_page(
                g, s, ready, ring_words, control, tile, slot, g[W.G_READY_WEIGHT],
                g[W.G_WEIGHT_AT], g[W.G_S_WEIGHT_LBA], g[W.G_S_WEIGHT_CRC], 3,
            )  # fmt: skip
            posted += 1
        tile += 1
        st_release(w, W.C_NEXT_TILE, tile)
    return posted


@jit
def issue(g: Any, w: Any, s: Any, ready: Any, crcs: Any, ring_words: Any, control: Any) -> Any:
    """Post every read that has a slot and reap what was written; return how many were posted."""
    if ld_relaxed(w, W.C_LOCK) != 0 or atomic_cas(w, W.C_LOCK, np.int64(0), np.int64(1)) != 0:
        return 0
    posted = _post_tiles(g, w, s, ready, ring_words, control)
    posted += _post_inputs(g, w, s, ready, ring_words, control)
    reap_outputs(g, w, ready, crcs)
    if g[W.G_LOGGING] != 0:
        log.reap(g, w, ready, crcs)
    st_release(w, W.C_LOCK, np.int64(0))
    return posted
