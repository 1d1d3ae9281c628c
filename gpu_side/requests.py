"""Posting requests and reading ready words: what scheduler, log and merge share."""

from typing import Any

import numpy as np

from hyades.common import layout, ring
from hyades.common.atomics import atomic_cas, ld_acquire_sys, ld_relaxed, st_relaxed, st_release
from hyades.common.jit import jit
from hyades.gpu_side import words as W

READ, WRITE = int(layout.Op.READ), int(layout.Op.WRITE)
CHECK, MAKE = int(layout.RequestFlag.CHECK_CRC), int(layout.RequestFlag.MAKE_CRC)


@jit
def post(
    ring_words: Any, control: Any, op: Any, flags: Any, device: Any, slot: Any, generation: Any,
    lba: Any, offset: Any, nbytes: Any, crc: Any, thing: Any, page: Any,
) -> Any:  # fmt: skip
    """Push one request (layout.REQUEST word by word); return 0 where the ring is full."""
    position = ring.claim(ring_words, control)
    if position < 0:
        return 0
    base = (position & ((ring_words.shape[0] >> 3) - 1)) << 3
    ring_words[base + layout.RQ_LBA] = lba
    ring_words[base + layout.RQ_OFFSET] = offset
    ring_words[base + layout.RQ_LEN_SLOT] = nbytes | (slot << 32)
    ring_words[base + layout.RQ_OP] = op | (flags << 8) | (device << 16) | (crc << 32)
    ring_words[base + layout.RQ_GEN_OBJ] = (generation & 0xFFFFFFFF) | (thing << 32)
    ring_words[base + layout.RQ_PAGE] = page
    ring_words[base + layout.RQ_COOKIE] = slot
    ring.publish(ring_words, position)
    return 1


@jit
def bump(w: Any, index: Any, count: Any) -> None:
    """Add to a word that only this worker writes."""
    st_relaxed(w, index, ld_relaxed(w, index) + np.int64(count))


@jit
def fail(w: Any, slot: Any, status: Any) -> None:
    """Record the first error of a scan; every loop leaves when it sees it."""
    if atomic_cas(w, W.C_ERROR, np.int64(0), np.int64(status)) == 0:
        st_release(w, W.C_ERROR_SLOT, np.int64(slot))


@jit
def has_landed(w: Any, ready: Any, slot: Any, generation: Any) -> Any:
    """Return 1 when *slot* holds *generation*, 0 when not yet; record an error."""
    word = ld_acquire_sys(ready, slot)
    if word == generation:
        return 1
    if word < 0:
        fail(w, slot, word)
    return 0
