"""Which rows of a chunk a sampled layer needs: the sources of kept edges into the asked lanes.

The rule is `sampling`'s, over tile pages and their ranks: target and compute host mark the same
rows.  A page is checked as it is read, since its words are used as indices.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common import layout
from hyades.common.errors import DataError
from hyades.common.jit import jit
from hyades.common.sampling import keeps, sample_key

_SOUND, _MAGIC, _ARRAYS, _PIECE, _SEGMENT, _SOURCE, _RANK = 0, -1, -2, -3, -4, -5, -6
_PROBLEMS = {
    _MAGIC: "no tile page of this chunk",
    _ARRAYS: "its arrays do not fit in the page",
    _PIECE: "a piece lies outside its arrays or the graph",
    _SEGMENT: "a segment's end or destination is out of order",
    _SOURCE: "a source is outside the chunk",
    _RANK: "the rank of an edge is not below its destination's in-degree",
}
_TILE_MAGIC = np.int64(layout.TILE_MAGIC)


@jit
def check_tile_page(page: Any, chunk: Any, range_rows: Any, vertices: Any) -> Any:
    """Return 0 where all indices in a tile page (uint32 words) stay inside, else what is wrong."""
    size = np.int64(page.shape[0]) * 4
    if np.int64(page[0]) != _TILE_MAGIC or np.int64(page[2]) != chunk:
        return _MAGIC
    tiles, segments, edges = np.int64(page[4]), np.int64(page[5]), np.int64(page[6])
    dst_at, ends_at, src_at = np.int64(page[7]), np.int64(page[8]), np.int64(page[9])
    if (
        64 + tiles * 24 > dst_at
        or dst_at + 2 * segments > ends_at
        or ends_at + 2 * segments > src_at
        or src_at + 2 * edges > size
        or (dst_at | ends_at | src_at) & 1
        or edges > page.shape[0]
    ):
        return _ARRAYS
    shorts = page.view(np.uint16)
    rows = min(range_rows, vertices - chunk * range_rows)
    for entry in range(tiles):
        at = layout.TH_WORDS + entry * layout.TE_WORDS
        lane = np.int64(page[at + layout.TE_LANE])
        first_segment, first_edge = np.int64(page[at + 2]), np.int64(page[at + 3])
        count, length = np.int64(page[at + 4]) & 0xFFFF, np.int64(page[at + 5])
        if (
            first_segment + count > segments
            or first_edge + length > edges
            or lane * range_rows >= vertices
        ):
            return _PIECE
        end = np.int64(0)
        for segment in range(first_segment, first_segment + count):
            next_end = np.int64(shorts[(ends_at >> 1) + segment])
            local = np.int64(shorts[(dst_at >> 1) + segment])
            if next_end < end or local >= range_rows or lane * range_rows + local >= vertices:
                return _SEGMENT
            end = next_end
        if end != length:
            return _SEGMENT
        for edge in range(first_edge, first_edge + length):
            if np.int64(shorts[(src_at >> 1) + edge]) >= rows:
                return _SOURCE
    return _SOUND


@jit
def _mark(
    page: Any, ranks: Any, range_rows: Any, asked: Any, originals: Any, degrees: Any, loops: Any,
    fanout: Any, seed: Any, layer: Any, needed: Any,
) -> Any:  # fmt: skip
    """Mark; return 0, or _RANK where a rank lies outside the permutation, which would not end."""
    shorts = page.view(np.uint16)
    for entry in range(np.int64(page[layout.TH_TILES])):
        at = layout.TH_WORDS + entry * layout.TE_WORDS
        lane = np.int64(page[at + layout.TE_LANE])
        if not asked[lane]:
            continue
        first_segment = np.int64(page[at + layout.TE_SEG0])
        first_edge = np.int64(page[at + layout.TE_EDGE0])
        dst = (np.int64(page[layout.TH_DST]) >> 1) + first_segment
        ends = (np.int64(page[layout.TH_ENDS]) >> 1) + first_segment
        sources = (np.int64(page[layout.TH_SRC]) >> 1) + first_edge
        start = np.int64(0)
        for segment in range(np.int64(page[at + layout.TE_SEGS_FLAGS]) & 0xFFFF):
            end = np.int64(shorts[ends + segment])
            vertex = lane * range_rows + np.int64(shorts[dst + segment])
            name = originals[vertex] if originals.shape[0] > 0 else vertex
            degree = np.int64(degrees[vertex]) + np.int64(loops[vertex])
            key = sample_key(seed, layer, name)
            for edge in range(start, end):
                source = np.int64(shorts[sources + edge])
                rank = np.int64(ranks[first_edge + edge])
                if rank >= degree:
                    return _RANK
                if not needed[source] and keeps(key, rank, degree, fanout):
                    needed[source] = True
            start = end
    return _SOUND


def mark_sampled(
    page: NDArray[np.uint32],
    ranks: NDArray[np.uint32],
    chunk: int,
    range_rows: int,
    asked: NDArray[np.bool_],
    tables: tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.uint32]],
    rule: tuple[int, int, int],
    needed: NDArray[np.bool_],
) -> None:
    """Set *needed* [range_rows] of every source of a kept edge in one tile page; DataError.

    *ranks* has a word for each edge of the page. *asked* [lanes]. *tables*: original indices [V] or
    empty where the same, in-degrees [V] without self loops, self loops [V]. *rule*: fanout, seed,
    layer.
    """
    originals, degrees, loops = tables
    found = check_tile_page(page, chunk, range_rows, len(degrees))
    if found == _SOUND and (len(ranks) < int(page[6]) or len(asked) * range_rows < len(degrees)):
        found = _ARRAYS
    if found == _SOUND:
        found = _mark(page, ranks, range_rows, asked, originals, degrees, loops, *rule, needed)
    if found != _SOUND:
        raise DataError(f"tile page of chunk {chunk}: {_PROBLEMS[found]}")
