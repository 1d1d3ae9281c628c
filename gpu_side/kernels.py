"""Tile kernels: one piece of a tile joins its lane's state.  One source for CPU threads and CUDA.

A piece is a list of segments, each the in-edges of one destination from one chunk. Segments are
taken in order and their sources in order, so a lane that takes its pieces in sequence has the same
bits for any number of workers. Positions are element indices into the arena's float32 and uint16
views.

State row of a destination (float32, every part padded to 16):
  sum, max:    [aggregate]                       [own row]
  attention:   [aggregate = sum p * h'] [running max, H] [sum p, H] [own row]
Attention keeps (max, sum, acc); joining two such triples rescales by exp(max - joint max), which is
associative (online softmax, Milakov and Gimelshein, arXiv:1805.02867).
"""

import math
from typing import Any

import numpy as np

from hyades.common.atomics import lane, lanes, sync_lanes
from hyades.common.jit import jit
from hyades.common.sampling import keeps, sample_key
from hyades.gpu_side.vector import max_row, prefetch_row, sum_row, weighted_row
from hyades.gpu_side.words import (
    G_AGG_WIDTH,
    G_DST_FACTOR,
    G_DST_SCORE,
    G_FANOUT,
    G_HEAD_WIDTH,
    G_HEADS,
    G_KIND,
    G_LAYER,
    G_LOOP_FACTOR,
    G_MESSAGE_STRIDE,
    G_RANGE,
    G_S_DEGREE,
    G_S_ORIGINAL,
    G_SCRATCH_FLOATS,
    G_SCRATCH_SHORTS,
    G_SEED,
    G_SELF_COLUMN,
    G_SELF_STRIDE,
    G_STATE_STRIDE,
    G_VERTICES,
    G_WEIGHTED,
    KIND_ATTENTION,
    KIND_MAX,
    KIND_SUM,
    SCRATCH_EDGES,
)

_AHEAD = 12  # segments whose state rows are on their way to the cache
_NEGATIVE_INFINITY = np.float32(-np.inf)


@jit
def clear_state(g: Any, floats: Any, at: Any, rows: Any) -> None:
    """Write the neutral element into *rows* state rows starting at element *at*."""
    stride, width, kind = g[G_STATE_STRIDE], g[G_AGG_WIDTH], g[G_KIND]
    me, step = lane(), lanes()
    neutral = _NEGATIVE_INFINITY if kind == KIND_MAX else np.float32(0.0)
    for row in range(rows):
        base = at + row * stride
        for column in range(me, width, step):
            floats[base + column] = neutral
        for column in range(width + me, stride, step):
            floats[base + column] = np.float32(0.0)
        if kind == KIND_ATTENTION:
            for head in range(me, g[G_HEADS], step):
                floats[base + width + head] = _NEGATIVE_INFINITY
    sync_lanes()


@jit
def _score(g: Any, floats: Any, row: Any, head: Any, target: Any, slope: Any) -> Any:
    value = floats[row + g[G_AGG_WIDTH] + head] + target
    return value if value > 0 else value * slope


@jit
def join_attention(
    g: Any, floats: Any, shorts: Any, scores: Any, first: Any, last: Any, base: Any, out: Any,
    vertex: Any, slope: Any, times: Any,
) -> None:  # fmt: skip
    """Join sources [first, last) to a destination's (acc, max, sum); *times* counts each edge."""
    heads, width, stride = g[G_HEADS], g[G_HEAD_WIDTH], g[G_MESSAGE_STRIDE]
    agg = g[G_AGG_WIDTH]
    me, step = lane(), lanes()
    for head in range(heads):
        target = scores[g[G_DST_SCORE] + vertex * heads + head]
        before = floats[out + agg + head]
        top = before
        for edge in range(first, last):
            row = base + np.int64(shorts[edge]) * stride
            top = max(top, _score(g, floats, row, head, target, slope))
        at = out + head * width
        total = floats[out + agg + heads + head]
        if top > before:
            scale = math.exp(before - top) if before > _NEGATIVE_INFINITY else np.float32(0.0)
            for column in range(me, width, step):
                floats[at + column] *= scale
            total *= scale
        for edge in range(first, last):
            row = base + np.int64(shorts[edge]) * stride
            part = math.exp(_score(g, floats, row, head, target, slope) - top) * times
            total += part
            for column in range(me, width, step):
                floats[at + column] += part * floats[row + head * width + column]
        sync_lanes()
        if me == 0:
            floats[out + agg + head] = top
            floats[out + agg + heads + head] = total
        sync_lanes()


@jit
def add_own_rows(
    g: Any, floats: Any, factors: Any, scratch: Any, shorts: Any, lane_index: Any, state: Any,
    message: Any, own: Any, slope: Any,
) -> None:  # fmt: skip
    """Join the lane's own vertices: the root term and the self loops, before any edge of the piece.

    *scratch* is an element of `shorts` that this worker may write.
    """
    kind, agg = g[G_KIND], g[G_AGG_WIDTH]
    stride, mstride = g[G_STATE_STRIDE], g[G_MESSAGE_STRIDE]
    me, step = lane(), lanes()
    first = lane_index * g[G_RANGE]
    rows = min(g[G_RANGE], g[G_VERTICES] - first)
    for row in range(rows):
        out = state + row * stride
        if g[G_SELF_STRIDE] > 0:
            source, target = own + row * g[G_SELF_STRIDE], out + g[G_SELF_COLUMN]
            for column in range(me, g[G_SELF_STRIDE], step):
                floats[target + column] += floats[source + column]
        if g[G_LOOP_FACTOR] < 0:
            continue
        factor = factors[g[G_LOOP_FACTOR] + first + row]
        if factor == 0:
            continue
        source = message + row * mstride
        if kind == KIND_SUM:
            for column in range(me, agg, step):
                floats[out + column] += factor * floats[source + column]
        else:
            sync_lanes()  # another lane may still read what the row before put there
            shorts[scratch] = np.uint16(row)
            sync_lanes()
            if kind == KIND_MAX:
                one = np.float32(1.0)
                max_row(floats, shorts, scratch, scratch + 1, message, mstride, out, agg, one, 0)
            else:
                join_attention(
                    g, floats, shorts, factors, scratch, scratch + 1, message, out, first + row,
                    slope, factor,
                )  # fmt: skip
    sync_lanes()


@jit
def join_segment(
    g: Any, floats: Any, shorts: Any, factors: Any, first: Any, last: Any, message: Any, out: Any,
    vertex: Any, weights: Any, slope: Any,
) -> None:  # fmt: skip
    """Join one destination's sources [first, last) to the state row at *out*."""
    kind, stride, width = g[G_KIND], g[G_MESSAGE_STRIDE], g[G_AGG_WIDTH]
    factor = np.float32(1.0)
    if kind == KIND_SUM:
        if g[G_DST_FACTOR] >= 0:
            factor = factors[g[G_DST_FACTOR] + vertex]
        if g[G_WEIGHTED] != 0:
            weighted_row(floats, shorts, first, last, message, stride, out, width, factor, weights)
        else:
            sum_row(floats, shorts, first, last, message, stride, out, width, factor, 0)
    elif kind == KIND_MAX:
        max_row(floats, shorts, first, last, message, stride, out, width, factor, 0)
    else:
        join_attention(
            g, floats, shorts, factors, first, last, message, out, vertex, slope, np.float32(1.0)
        )


@jit
def keep_sampled(
    g: Any, s: Any, floats: Any, shorts: Any, words: Any, first: Any, last: Any, ranks: Any,
    vertex: Any, weights: Any, scratch: Any, scratch_weights: Any,
) -> Any:  # fmt: skip
    """Copy the kept sources (and weights) of a segment to scratch; return how many."""
    original = vertex
    if g[G_S_ORIGINAL] >= 0:
        original = s[g[G_S_ORIGINAL] + vertex]
    key = sample_key(g[G_SEED], g[G_LAYER], original)
    degree = s[g[G_S_DEGREE] + vertex]
    fanout = g[G_FANOUT]
    kept = np.int64(0)
    sync_lanes()  # another lane may still read what the segment before put there
    for edge in range(first, last):
        rank = np.int64(words[ranks + edge - first])
        if keeps(key, rank, degree, fanout):
            shorts[scratch + kept] = shorts[edge]
            if g[G_WEIGHTED] != 0:
                floats[scratch_weights + kept] = floats[weights + edge - first]
            kept += 1
    sync_lanes()
    return kept


@jit
def _sum_piece(
    g: Any, floats: Any, shorts: Any, factors: Any, lane_index: Any, state: Any, message: Any,
    segments: Any, dst_at: Any, ends_at: Any, src_at: Any, weights: Any, record: Any, start: Any,
) -> Any:  # fmt: skip
    """run_piece for sums without sampling.

    One flat loop: a call a segment costs more than a segment's edges, since numba passes every
    array as seven words.
    """
    stride, width = g[G_STATE_STRIDE], g[G_AGG_WIDTH]
    mstride, factor_at = g[G_MESSAGE_STRIDE], g[G_DST_FACTOR]
    weighted = g[G_WEIGHTED] != 0
    vertex = lane_index * g[G_RANGE]
    begun = start
    ahead = min(_AHEAD, segments) if record < 0 else 0
    for segment in range(ahead):
        prefetch_row(floats, state + np.int64(shorts[dst_at + segment]) * stride, width)
    for segment in range(segments):
        if ahead > 0 and segment + ahead < segments:
            # States are touched far apart: without this every segment waits for memory.
            later = np.int64(shorts[dst_at + segment + ahead])
            prefetch_row(floats, state + later * stride, width)
        end = np.int64(shorts[ends_at + segment])
        local = np.int64(shorts[dst_at + segment])
        out = state + local * stride if record < 0 else record + segment * stride
        factor = factors[factor_at + vertex + local] if factor_at >= 0 else np.float32(1.0)
        first, last = src_at + start, src_at + end
        if weighted:
            weight = weights + start
            weighted_row(floats, shorts, first, last, message, mstride, out, width, factor, weight)
        else:
            sum_row(floats, shorts, first, last, message, mstride, out, width, factor, 0)
        start = end
    sync_lanes()
    return start - begun


@jit
def run_piece(
    g: Any, s: Any, floats: Any, shorts: Any, words: Any, factors: Any, worker: Any,
    lane_index: Any, state: Any, message: Any, segments: Any, dst_at: Any, ends_at: Any,
    src_at: Any, ranks: Any, weights: Any, slope: Any, record: Any, start: Any,
) -> Any:  # fmt: skip
    """Join all segments of a piece; return how many edges took part.

    *dst_at*, *ends_at*, *src_at* index `shorts` at the piece's first segment and edge; *ranks* and
    *weights* index the int32 and float32 views at its first edge. With *record* >= 0 the sums do
    not join the lane's state: segment i joins the row at element record + i * stride (a log row).
    The first segment's edges begin at *start*.
    """
    first_vertex = lane_index * g[G_RANGE]
    stride = g[G_STATE_STRIDE]
    scratch = g[G_SCRATCH_SHORTS] + worker * SCRATCH_EDGES
    scratch_weights = g[G_SCRATCH_FLOATS] + worker * SCRATCH_EDGES
    if g[G_KIND] == KIND_SUM and g[G_FANOUT] == 0:
        return _sum_piece(
            g, floats, shorts, factors, lane_index, state, message, segments, dst_at, ends_at,
            src_at, weights, record, start,
        )  # fmt: skip
    taken = np.int64(0)
    for segment in range(segments):
        end = np.int64(shorts[ends_at + segment])
        local = np.int64(shorts[dst_at + segment])
        out = state + local * stride if record < 0 else record + segment * stride
        vertex = first_vertex + local
        first, last, weight = src_at + start, src_at + end, weights + start
        if g[G_FANOUT] > 0:
            kept = keep_sampled(
                g, s, floats, shorts, words, first, last, ranks + start, vertex, weight, scratch,
                scratch_weights,
            )  # fmt: skip
            first, last, weight = scratch, scratch + kept, scratch_weights
        if last > first:
            join_segment(
                g, floats, shorts, factors, first, last, message, out, vertex, weight, slope
            )
            taken += last - first
        start = end
    sync_lanes()
    return taken


@jit
def merge_row(g: Any, floats: Any, source: Any, out: Any) -> None:
    """Join a logged state row at *source* to the state row at *out*."""
    kind, agg, stride = g[G_KIND], g[G_AGG_WIDTH], g[G_STATE_STRIDE]
    me, step = lane(), lanes()
    if kind == KIND_SUM:
        for column in range(me, stride, step):
            floats[out + column] += floats[source + column]
        return
    if kind == KIND_MAX:
        for column in range(me, agg, step):
            value = floats[source + column]
            held = floats[out + column]
            if not (held >= value) and held == held:  # lets a NaN in and keeps one
                floats[out + column] = value
        for column in range(agg + me, stride, step):
            floats[out + column] += floats[source + column]
        return
    heads, width = g[G_HEADS], g[G_HEAD_WIDTH]
    for head in range(heads):
        mine, theirs = floats[out + agg + head], floats[source + agg + head]
        top = max(mine, theirs)
        keep = math.exp(mine - top) if mine > _NEGATIVE_INFINITY else np.float32(0.0)
        take = math.exp(theirs - top) if theirs > _NEGATIVE_INFINITY else np.float32(0.0)
        for column in range(head * width + me, (head + 1) * width, step):
            floats[out + column] = floats[out + column] * keep + floats[source + column] * take
        sync_lanes()
        if me == 0:
            total = (
                floats[out + agg + heads + head] * keep + floats[source + agg + heads + head] * take
            )
            floats[out + agg + heads + head] = total
            floats[out + agg + head] = top
        sync_lanes()
    if g[G_SELF_STRIDE] > 0:
        for column in range(g[G_SELF_COLUMN] + me, g[G_SELF_COLUMN] + g[G_SELF_STRIDE], step):
            floats[out + column] += floats[source + column]
