"""The compiled loops of the tile builder: scan, scatter, sort and pack.

A record is a row of uint32: source, destination, rank and, in a weighted graph, the weight's bits.
Ranges are powers of two: a chunk is source >> shift.  Everything is int64 inside, for numba turns a
mix of uint64 and int64 into floats.
"""

import numpy as np
from numpy.typing import NDArray

from hyades.common.jit import jit
from hyades.common.layout import (
    FORMAT_VERSION,
    MAX_PIECE_EDGES,
    TILE_MAGIC,
    TileFlag,
)

SOURCE, DESTINATION, RANK, WEIGHT = 0, 1, 2, 3
# What `scan_block` counts, by index of its `totals`.
BAD, LOOPS, KEPT, NONFINITE, FIRST_NONFINITE, TOTALS = 0, 1, 2, 3, 4, 5
# Below this a segment is never split over two pages: one more touch of the state costs more than
# the bytes left empty.
_SPLIT_FROM = 1024
_RADIX_BITS = 11
_SELF = int(TileFlag.SELF)


@jit
def scan_block(
    source: NDArray[np.int64],
    destination: NDArray[np.int64],
    weight: NDArray[np.float32],  # empty in an unweighted graph
    new_index: NDArray[np.uint32],  # by old index; empty when the order is kept
    degrees: NDArray[np.uint32],  # [3, V]: in, out, self loops
    weighted_in: NDArray[np.float64],  # empty in an unweighted graph
    bucket_of_chunk: NDArray[np.int32],
    shift: int,
    records: NDArray[np.uint32],
    loops: NDArray[np.uint32],  # [n, 2]: vertex, bits of the weight
    buckets: NDArray[np.int32],
    counts: NDArray[np.int64],
    totals: NDArray[np.int64],
    span: NDArray[np.int64],  # [2]: sum of |source - destination| before and after, added to
) -> None:
    """Check a block of edges, count degrees and ranks, and turn the edges into records."""
    vertices = degrees.shape[1]
    weighted = weight.size > 0
    bits = weight.view(np.uint32)
    totals[:] = 0
    counts[:] = 0
    kept = 0
    loop = 0
    for i in range(source.size):
        s = source[i]
        d = destination[i]
        if s < 0 or d < 0 or s >= vertices or d >= vertices:
            totals[BAD] += 1
            continue
        if weighted and not np.isfinite(weight[i]):
            if totals[NONFINITE] == 0:
                totals[FIRST_NONFINITE] = i
            totals[NONFINITE] += 1
        span[0] += abs(s - d)
        if new_index.size > 0:
            s = np.int64(new_index[s])
            d = np.int64(new_index[d])
        span[1] += abs(s - d)
        if s == d:
            degrees[2, s] += np.uint32(1)
            if weighted:
                loops[loop, 0] = s
                loops[loop, 1] = bits[i]
            loop += 1
            continue
        records[kept, SOURCE] = s
        records[kept, DESTINATION] = d
        records[kept, RANK] = degrees[0, d]
        degrees[0, d] += np.uint32(1)
        degrees[1, s] += np.uint32(1)
        if weighted:
            records[kept, WEIGHT] = bits[i]
            weighted_in[d] += weight[i]
        bucket = bucket_of_chunk[s >> shift]
        buckets[kept] = bucket
        counts[bucket] += 1
        kept += 1
    totals[LOOPS] = loop
    totals[KEPT] = kept


@jit
def assign_buckets(
    records: NDArray[np.uint32],
    shift: int,
    vertices: int,
    low: int,
    step: int,
    buckets: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> None:
    """Give every record the part of its key interval; the key is chunk * vertices + destination."""
    counts[:] = 0
    for i in range(records.shape[0]):
        chunk = np.int64(records[i, SOURCE]) >> shift
        bucket = (chunk * vertices + np.int64(records[i, DESTINATION]) - low) // step
        buckets[i] = bucket
        counts[bucket] += 1


@jit
def scatter(
    records: NDArray[np.uint32],
    buckets: NDArray[np.int32] | NDArray[np.int64],
    place: NDArray[np.int64],
    out: NDArray[np.uint32],
) -> None:
    """Copy records grouped by bucket, stable; *place* holds each bucket's start and is advanced."""
    width = records.shape[1]
    for i in range(records.shape[0]):
        to = place[buckets[i]]
        place[buckets[i]] = to + 1
        for j in range(width):
            out[to, j] = records[i, j]


@jit
def count_chunks(
    records: NDArray[np.uint32], shift: int, first_chunk: int, counts: NDArray[np.int64]
) -> None:
    """Count the records of every chunk from *first_chunk* on."""
    counts[:] = 0
    for i in range(records.shape[0]):
        counts[(np.int64(records[i, SOURCE]) >> shift) - first_chunk] += 1


@jit
def scatter_chunks(
    records: NDArray[np.uint32],
    shift: int,
    first_chunk: int,
    place: NDArray[np.int64],
    out: NDArray[np.uint32],
) -> None:
    """Copy records grouped by chunk, stable; *place* is advanced."""
    width = records.shape[1]
    for i in range(records.shape[0]):
        chunk = (np.int64(records[i, SOURCE]) >> shift) - first_chunk
        to = place[chunk]
        place[chunk] = to + 1
        for j in range(width):
            out[to, j] = records[i, j]


@jit
def sort_chunk(
    records: NDArray[np.uint32],
    shift: int,
    vertices: int,
    keys: NDArray[np.int64],  # [2, >= n] scratch
    order: NDArray[np.uint32],  # [2, >= n] scratch
    out: NDArray[np.uint32],
) -> None:
    """Sort a chunk's records by destination then source, stable, into *out* (radix sort)."""
    n = records.shape[0]
    mask = (1 << shift) - 1
    for i in range(n):
        local = np.int64(records[i, SOURCE]) & mask
        keys[0, i] = (np.int64(records[i, DESTINATION]) << shift) | local
        order[0, i] = i
    total = shift
    while (np.int64(1) << (total - shift)) < vertices:
        total += 1
    digit_bits = _RADIX_BITS if n > 512 else 6  # a small chunk must not pay for a large histogram
    size = 1 << digit_bits
    place = np.empty(size + 1, np.int64)
    a = 0
    for low in range(0, total, digit_bits):
        b = 1 - a
        place[:] = 0
        for i in range(n):
            place[((keys[a, i] >> low) & (size - 1)) + 1] += 1
        largest = 0
        for j in range(size):
            largest = max(largest, place[j + 1])
            place[j + 1] += place[j]
        if largest == n:
            continue
        for i in range(n):
            digit = (keys[a, i] >> low) & (size - 1)
            to = place[digit]
            place[digit] = to + 1
            keys[b, to] = keys[a, i]
            order[b, to] = order[a, i]
        a = b
    for i in range(n):
        for j in range(records.shape[1]):
            out[i, j] = records[order[a, i], j]


@jit
def _align(value: int) -> int:
    return (value + 63) & ~63


@jit
def _room(page_bytes: int, entries: int, segments: int) -> int:
    """Return how many edges fit beside *entries* and *segments*; negative: not even those."""
    used = _align(64 + 24 * entries) + 2 * _align(2 * segments)
    return min((page_bytes - used) // 2, page_bytes // 4)


@jit
def _open_piece(
    entries: NDArray[np.int64], tiles: int, lane: int, segments: int, edges: int, flags: int
) -> int:
    entries[tiles, 0] = lane
    entries[tiles, 1] = segments
    entries[tiles, 2] = edges
    entries[tiles, 3] = flags
    return tiles + 1


@jit
def pack_page(
    records: NDArray[np.uint32],  # sorted, of one chunk
    start: int,
    final: bool,  # the chunk has no more edges than these
    chunk: int,
    diagonal_done: bool,
    shift: int,
    page_number: int,
    sequences: NDArray[np.uint32],  # by lane, advanced when the page is closed
    scratch: NDArray[np.uint16],  # [3, >= page_bytes / 4]: destinations, ends, sources
    entries: NDArray[np.int64],  # [>= page_bytes / 24, 4]: lane, first segment, first edge, flags
    page: NDArray[np.uint32],
    ranks: NDArray[np.uint32],
    weights: NDArray[np.uint32],  # empty in an unweighted graph
    directory: NDArray[np.uint32],  # [>= page_bytes / 24, 4]
) -> tuple[int, bool, int, bool]:
    """Fill one tile page from *start*; return (next start, diagonal done, entries, page closed).

    A page that is not closed (more edges of the chunk may follow in a later load) leaves no trace.
    """
    page_bytes = page.size * 4
    mask = (1 << shift) - 1
    n = records.shape[0]
    i = start
    lane = -1
    tiles = 0
    segments = 0
    edges = 0
    full = False
    done = diagonal_done
    while i < n:
        destination = np.int64(records[i, DESTINATION])
        to_lane = int(destination >> shift)
        length = 1
        limit = min(n - i, MAX_PIECE_EDGES)
        while length < limit and records[i + length, DESTINATION] == records[i, DESTINATION]:
            length += 1
        if not done and to_lane > chunk:
            if _room(page_bytes, tiles + 1, segments) < edges:
                full = True
                break
            tiles = _open_piece(entries, tiles, chunk, segments, edges, _SELF)
            lane = chunk
            done = True
        begins = lane != to_lane
        in_piece = 0 if begins else edges - entries[tiles - 1, 2]
        if not begins and in_piece + length > MAX_PIECE_EDGES:
            begins = True
            in_piece = 0
        room = _room(page_bytes, tiles + (1 if begins else 0), segments + 1) - edges
        take = min(length, MAX_PIECE_EDGES - in_piece)
        if take > room:
            if room <= 0 or (take < _SPLIT_FROM and edges > 0):
                full = True
                break
            take = room
        if begins:
            flags = _SELF if to_lane == chunk and not done else 0
            tiles = _open_piece(entries, tiles, to_lane, segments, edges, flags)
            done = done or to_lane == chunk
            lane = to_lane
        scratch[0, segments] = destination & mask
        for j in range(take):
            scratch[2, edges + j] = np.int64(records[i + j, SOURCE]) & mask
        edges += take
        scratch[1, segments] = edges - entries[tiles - 1, 2]
        segments += 1
        i += take
    if not full:
        if not final:
            return start, diagonal_done, 0, False
        if not done and _room(page_bytes, tiles + 1, segments) >= edges:
            tiles = _open_piece(entries, tiles, chunk, segments, edges, _SELF)
            done = True
    _write_page(
        records, start, chunk, page_number, tiles, segments, edges, sequences, scratch, entries,
        page, ranks, weights, directory,
    )  # fmt: skip
    return i, done, tiles, True


@jit
def _write_page(
    records: NDArray[np.uint32],
    start: int,
    chunk: int,
    page_number: int,
    tiles: int,
    segments: int,
    edges: int,
    sequences: NDArray[np.uint32],
    scratch: NDArray[np.uint16],
    entries: NDArray[np.int64],
    page: NDArray[np.uint32],
    ranks: NDArray[np.uint32],
    weights: NDArray[np.uint32],
    directory: NDArray[np.uint32],
) -> None:
    """Lay out a page whose pieces and local ids `pack_page` has gathered."""
    page[:] = 0
    destinations_at = _align(64 + 24 * tiles)
    ends_at = destinations_at + _align(2 * segments)
    sources_at = ends_at + _align(2 * segments)
    page[0] = TILE_MAGIC
    page[1] = FORMAT_VERSION
    page[2] = chunk
    page[3] = page_number
    page[4] = tiles
    page[5] = segments
    page[6] = edges
    page[7] = destinations_at
    page[8] = ends_at
    page[9] = sources_at
    for t in range(tiles):
        lane = entries[t, 0]
        last = t + 1 == tiles
        segment_count = (segments if last else entries[t + 1, 1]) - entries[t, 1]
        edge_count = (edges if last else entries[t + 1, 2]) - entries[t, 2]
        word = 16 + 6 * t
        page[word] = lane
        page[word + 1] = sequences[lane]
        page[word + 2] = entries[t, 1]
        page[word + 3] = entries[t, 2]
        page[word + 4] = segment_count | (entries[t, 3] << 16)
        page[word + 5] = edge_count
        sequences[lane] += np.uint32(1)
        directory[t, 0] = chunk
        directory[t, 1] = lane
        directory[t, 2] = segment_count
        directory[t, 3] = edge_count
    local = page.view(np.uint16)
    for j in range(segments):
        local[destinations_at // 2 + j] = scratch[0, j]
        local[ends_at // 2 + j] = scratch[1, j]
    for j in range(edges):
        local[sources_at // 2 + j] = scratch[2, j]
    ranks[:] = 0
    weights[:] = 0
    for j in range(edges):
        ranks[j] = records[start + j, RANK]
        if weights.size > 0:
            weights[j] = records[start + j, WEIGHT]
