"""Arenas that another process can map."""

import mmap
import os

import numpy as np
import pytest

from hyades.common.layout import BLOCK
from hyades.proxy.arena import allocate_arena, release_arena, shared_handle


def mapped(handle, nbytes):
    """Map what *handle* names a second time, as another process would."""
    fd, offset = handle
    return mmap.mmap(fd, nbytes, mmap.MAP_SHARED, offset=offset)


@pytest.mark.parametrize("shared", [False, True])
def test_whole_blocks_aligned_and_zero(shared):
    arena = allocate_arena(5000, shared=shared)
    assert arena.dtype == np.uint8
    assert len(arena) == 2 * BLOCK
    assert arena.ctypes.data % (2 << 20) == 0
    assert not arena.any()


def test_only_a_shared_arena_has_a_handle():
    assert shared_handle(allocate_arena(BLOCK)) is None
    assert shared_handle(np.zeros(BLOCK, np.uint8)) is None
    assert shared_handle(allocate_arena(BLOCK, shared=True)) is not None


def test_both_maps_see_the_same_bytes():
    arena = allocate_arena(3 * BLOCK, shared=True)
    other = mapped(shared_handle(arena), 3 * BLOCK)
    arena[BLOCK : 2 * BLOCK] = 7
    assert other[BLOCK : 2 * BLOCK] == bytes([7]) * BLOCK
    other[0:4] = b"back"
    assert bytes(arena[:4]) == b"back"
    part = mapped(shared_handle(arena[BLOCK:]), BLOCK)
    assert part[:] == bytes([7]) * BLOCK


def test_releasing_gives_the_pages_back_to_the_machine():
    arena = allocate_arena(64 * BLOCK, shared=True)
    fd, _ = shared_handle(arena)
    arena[:] = 1
    assert os.fstat(fd).st_blocks * 512 >= 64 * BLOCK
    release_arena(arena)
    assert os.fstat(fd).st_blocks == 0
    assert not arena.any()


def test_the_descriptor_goes_with_the_arena():
    arena = allocate_arena(BLOCK, shared=True)
    fd, _ = shared_handle(arena)
    del arena
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
