"""The tile kernels against numpy: rows of every width, attention, sampling, and the log."""

from itertools import pairwise
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from hyades.common import sampling
from hyades.gpu_side import kernels, vector
from hyades.gpu_side import words as W

WIDTHS = [*range(16, 289, 16), 608, 1024]
Floats = NDArray[np.float32]


@numba.njit
def call_sum(floats: Any, shorts: Any, n: Any, stride: Any, out: Any, width: Any, f: Any) -> None:
    vector.sum_row(floats, shorts, 0, n, 0, stride, out, width, f, 0)


@numba.njit
def call_weighted(
    floats: Any, shorts: Any, n: Any, stride: Any, out: Any, width: Any, f: Any, weights: Any
) -> None:
    vector.weighted_row(floats, shorts, 0, n, 0, stride, out, width, f, weights)


@numba.njit
def call_max(floats: Any, shorts: Any, n: Any, stride: Any, out: Any, width: Any) -> None:
    vector.max_row(floats, shorts, 0, n, 0, stride, out, width, np.float32(1), 0)


class Rows:
    """Twenty source rows, a state row with guards around it, and weights, in one array."""

    def __init__(self, width: int, edges: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.width, self.edges = width, edges
        self.stride = width + 16
        self.out = 20 * self.stride + 16
        self.weights = self.out + width + 16
        self.floats = rng.standard_normal(self.weights + edges).astype(np.float32)
        self.ids = rng.integers(0, 20, edges).astype(np.uint16)
        self.before = self.floats.copy()

    def sources(self) -> Floats:
        rows = self.before[: 20 * self.stride].reshape(20, self.stride)[:, : self.width]
        return rows[self.ids]

    def state(self) -> Floats:
        return self.before[self.out : self.out + self.width]

    def edge_weights(self) -> Floats:
        return self.before[self.weights :]

    def check(self, expected: Floats) -> None:
        """Assert the state's bits, and that nothing else changed."""
        after = self.floats[self.out : self.out + self.width].copy()
        assert np.array_equal(after, expected, equal_nan=True)
        self.floats[self.out : self.out + self.width] = self.state()
        assert np.array_equal(self.floats, self.before, equal_nan=True)


def in_order(rows: Floats) -> Floats:
    """Return the float32 sum of *rows*, one after the other."""
    total = np.zeros(rows.shape[1], np.float32)
    for row in rows:
        total += row
    return total


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("edges", [0, 1, 7])
def test_sums(width: int, edges: int) -> None:
    rows = Rows(width, edges)
    factor = np.float32(0.3)
    call_sum(rows.floats, rows.ids, edges, rows.stride, rows.out, width, factor)
    rows.check(rows.state() + factor * in_order(rows.sources()))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("edges", [0, 1, 7])
def test_weighted_sums(width: int, edges: int) -> None:
    rows = Rows(width, edges)
    factor = np.float32(-1.7)
    call_weighted(rows.floats, rows.ids, edges, rows.stride, rows.out, width, factor, rows.weights)
    weighted = rows.sources() * rows.edge_weights()[:, None]
    rows.check(rows.state() + factor * in_order(weighted))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("edges", [0, 1, 7])
@pytest.mark.parametrize("nan", ["none", "state", "first", "last"])
def test_maxima_keep_nan(width: int, edges: int, nan: str) -> None:
    rows = Rows(width, edges)
    rows.ids[:] = np.arange(edges)
    at = {"state": rows.out, "first": 0, "last": (edges - 1) * rows.stride}.get(nan)
    if at is not None and (edges or nan == "state"):
        rows.floats[at : at + width : 3] = np.nan
        rows.before = rows.floats.copy()
    call_max(rows.floats, rows.ids, edges, rows.stride, rows.out, width)
    rows.check(np.maximum.reduce([rows.state(), *rows.sources()]))


def test_the_highest_source_of_a_chunk() -> None:
    floats = np.zeros(65_536 * 16 + 16, np.float32)
    floats[65_535 * 16 : 65_536 * 16] = 2
    shorts = np.array([65_535, 0, 65_535], np.uint16)
    call_sum(floats, shorts, 3, 16, 65_536 * 16, 16, np.float32(1))
    assert np.all(floats[-16:] == 4)


def geometry(kind: int, width: int, **more: int) -> NDArray[np.int64]:
    """Return a scan's constants for states of one row width, with no factors and no sampling."""
    g = np.zeros(W.G_COUNT, np.int64)
    g[[W.G_DST_FACTOR, W.G_LOOP_FACTOR, W.G_S_ORIGINAL]] = -1
    g[W.G_KIND], g[W.G_AGG_WIDTH] = kind, width
    g[W.G_STATE_STRIDE] = g[W.G_MESSAGE_STRIDE] = width
    g[W.G_RANGE], g[W.G_VERTICES] = 64, 1000
    for name, value in more.items():
        g[getattr(W, name)] = value
    return g


HEADS, HEAD_WIDTH = 3, 11  # 33 columns, padded to 48; then 16 of scores or 16 of (max, sum)
AGGREGATE, STRIDE = 48, 64


class Attention:
    """Messages [20, STRIDE], states [n, STRIDE], and the scores of one destination."""

    def __init__(self, edges: int, seed: int, spread: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        self.g = geometry(
            W.KIND_ATTENTION, AGGREGATE, G_HEADS=HEADS, G_HEAD_WIDTH=HEAD_WIDTH, G_DST_SCORE=0
        )
        self.g[[W.G_STATE_STRIDE, W.G_MESSAGE_STRIDE]] = STRIDE
        self.floats = np.zeros(40 * STRIDE, np.float32)
        messages = self.floats[: 20 * STRIDE].reshape(20, STRIDE)
        messages[:, : HEADS * HEAD_WIDTH] = rng.standard_normal((20, HEADS * HEAD_WIDTH))
        messages[:, AGGREGATE : AGGREGATE + HEADS] = rng.standard_normal((20, HEADS)) * spread
        self.messages = messages
        self.target = rng.standard_normal(HEADS).astype(np.float32)
        self.ids = rng.integers(0, 20, edges).astype(np.uint16)

    def state(self, number: int) -> Any:
        """Return the element of state *number*."""
        return np.int64((20 + number) * STRIDE)

    def clear(self, number: int) -> None:
        kernels.clear_state(self.g, self.floats, self.state(number), 1)

    def join(self, number: int, first: int, last: int, times: float = 1.0) -> None:
        kernels.join_attention(
            self.g, self.floats, self.ids, self.target, first, last, np.int64(0),
            self.state(number), np.int64(0), np.float32(0.2), np.float32(times),
        )  # fmt: skip

    def result(self, number: int) -> NDArray[np.float64]:
        """Return the weighted mean [HEADS, HEAD_WIDTH] that a state stands for."""
        row = self.floats[self.state(number) :][:STRIDE].astype(np.float64)
        total = row[AGGREGATE + HEADS : AGGREGATE + 2 * HEADS, None]
        part: NDArray[np.float64] = row[: HEADS * HEAD_WIDTH].reshape(HEADS, HEAD_WIDTH) / total
        return part

    def expected(self) -> NDArray[np.float64]:
        """Return the softmax over all edges, in float64."""
        rows = self.messages[self.ids].astype(np.float64)
        scores = rows[:, AGGREGATE : AGGREGATE + HEADS] + self.target
        scores = np.where(scores > 0, scores, 0.2 * scores)
        share = np.exp(scores - scores.max(axis=0))
        share /= share.sum(axis=0)
        values = rows[:, : HEADS * HEAD_WIDTH].reshape(-1, HEADS, HEAD_WIDTH)
        mean: NDArray[np.float64] = (values * share[:, :, None]).sum(axis=0)
        return mean


@settings(max_examples=60, deadline=None)
@given(
    edges=st.integers(1, 40), seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    spread=st.sampled_from([1.0, 30.0, 80.0]), backwards=st.booleans(),
)  # fmt: skip
def test_attention_may_be_cut_and_merged_anywhere(
    edges: int, seed: int, cuts: list[int], spread: float, backwards: bool
) -> None:
    """In pieces that join one state, or in states of their own that are merged, in any order."""
    a = Attention(edges, seed, spread)
    bounds = [0, *sorted(min(c, edges) for c in cuts), edges]
    pieces = list(pairwise(bounds))
    a.clear(0)
    for first, last in pieces:
        if first < last:
            a.join(0, first, last)
    a.clear(1)
    for number, (first, last) in enumerate(reversed(pieces) if backwards else pieces):
        a.clear(2 + number)  # stays neutral where the piece is empty
        if first < last:
            a.join(2 + number, first, last)
        kernels.merge_row(a.g, a.floats, a.state(2 + number), a.state(1))
    expected = a.expected()
    for number in (0, 1):
        assert np.abs(a.result(number) - expected).max() <= 2e-6 * max(1.0, np.abs(expected).max())


def test_attention_counts_a_loop_as_often_as_it_is_there() -> None:
    a = Attention(7, 3)
    a.ids[3:] = a.ids[3]  # the same source four times
    a.clear(0)
    a.join(0, 0, 3)
    a.join(0, 3, 4, times=4.0)
    assert np.abs(a.result(0) - a.expected()).max() <= 2e-6


def test_an_empty_attention_state_is_finite() -> None:
    a = Attention(1, 0)
    a.clear(0)
    a.clear(1)
    kernels.merge_row(a.g, a.floats, a.state(1), a.state(0))
    row = a.floats[a.state(0) :][:STRIDE]
    assert np.all(row[:AGGREGATE] == 0)
    assert np.all(row[AGGREGATE + HEADS : AGGREGATE + 2 * HEADS] == 0)


@pytest.mark.parametrize("kind", [W.KIND_SUM, W.KIND_MAX])
def test_cleared_rows_are_neutral(kind: int) -> None:
    """Merging a row into a cleared one gives the row; own columns add up."""
    g = geometry(kind, 32, G_SELF_STRIDE=16, G_SELF_COLUMN=32)
    g[W.G_STATE_STRIDE] = 48
    rng = np.random.default_rng(0)
    floats = rng.standard_normal(4 * 48).astype(np.float32)
    before = floats.copy()
    kernels.clear_state(g, floats, np.int64(48), 2)
    assert np.array_equal(floats[:48], before[:48])
    assert np.array_equal(floats[144:], before[144:])
    assert np.all(floats[48:80] == (-np.inf if kind == W.KIND_MAX else 0))
    assert np.all(floats[80:96] == 0)
    kernels.merge_row(g, floats, np.int64(0), np.int64(48))
    kernels.merge_row(g, floats, np.int64(144), np.int64(48))
    join = np.maximum if kind == W.KIND_MAX else np.add
    assert np.array_equal(floats[48:80], join(before[:32], before[144:176]))
    assert np.array_equal(floats[80:96], before[32:48] + before[176:192])


@pytest.mark.parametrize("where", ["state", "row"])
def test_merged_maxima_keep_nan(where: str) -> None:
    g = geometry(W.KIND_MAX, 16)
    floats = np.arange(32, dtype=np.float32)
    floats[(0 if where == "state" else 16) + 5] = np.nan
    kernels.merge_row(g, floats, np.int64(16), np.int64(0))
    assert np.isnan(floats[5])
    assert np.array_equal(np.delete(floats[:16], 5), np.delete(np.arange(16, 32), 5))


@settings(max_examples=40, deadline=None)
@given(
    kind=st.sampled_from([W.KIND_SUM, W.KIND_MAX]), seed=st.integers(0, 99),
    weighted=st.booleans(), fanout=st.sampled_from([0, 1, 3, 99]), record=st.booleans(),
)  # fmt: skip
def test_a_piece(kind: int, seed: int, weighted: bool, fanout: int, record: bool) -> None:
    """Several destinations with their edges, factors, weights and a fanout, against numpy."""
    rng = np.random.default_rng(seed)
    weighted = weighted and kind == W.KIND_SUM
    vertices, width, edges, lane = 64, 16, 40, 2
    destinations = np.sort(rng.choice(vertices, 6, replace=False))
    owner = np.sort(rng.choice(destinations, edges))
    destinations, starts = np.unique(owner, return_index=True)
    ends = np.append(starts[1:], edges)
    sources = rng.integers(0, 20, edges)
    # shorts: destinations, ends, sources, scratch; floats: messages, states, log rows, weights
    shorts = np.concatenate([destinations, ends, sources, np.zeros(edges)]).astype(np.uint16)
    states, rows = 20 * width, (20 + vertices) * width
    weights_at = rows + vertices * width
    floats = rng.standard_normal(weights_at + 2 * edges).astype(np.float32)
    if record:
        floats[rows:weights_at] = -np.inf if kind == W.KIND_MAX else 0
    factors = rng.random(1000).astype(np.float32)
    ranks = rng.permutation(edges).astype(np.int32)
    degrees = np.full(1000, 50)
    g = geometry(
        kind, width, G_WEIGHTED=int(weighted), G_FANOUT=fanout, G_SEED=seed, G_LAYER=1,
        G_DST_FACTOR=0 if kind == W.KIND_SUM else -1, G_S_DEGREE=0,
        G_SCRATCH_SHORTS=2 * len(destinations) + edges, G_SCRATCH_FLOATS=weights_at + edges,
    )  # fmt: skip
    before = floats.copy()
    taken = kernels.run_piece(
        g, degrees, floats, shorts, ranks, factors, np.int64(0), np.int64(lane), np.int64(states),
        np.int64(0), np.int64(len(destinations)), np.int64(0), np.int64(len(destinations)),
        np.int64(2 * len(destinations)), np.int64(0), np.int64(weights_at), np.float32(0),
        np.int64(rows if record else -1), np.int64(0),
    )  # fmt: skip
    kept = np.ones(edges, bool)
    expected = before.copy()
    for place, vertex in enumerate(destinations):
        own = np.flatnonzero(owner == vertex)
        if fanout:
            key = np.uint64(sampling.sample_key(seed, 1, 64 * lane + vertex))
            kept[own] = [sampling.keeps(key, int(ranks[e]), 50, fanout) for e in own]
        own = own[kept[own]]
        at = rows + place * width if record else states + vertex * width
        messages = before[: 20 * width].reshape(20, width)[sources[own]]
        if weighted:
            messages = messages * before[weights_at + own][:, None]
        if kind == W.KIND_MAX:
            expected[at : at + width] = np.maximum.reduce([before[at : at + width], *messages])
        elif len(own):
            expected[at : at + width] += factors[64 * lane + vertex] * in_order(messages)
    assert taken == kept.sum()
    assert np.array_equal(floats[:weights_at], expected[:weights_at])


@pytest.mark.parametrize("kind", [W.KIND_SUM, W.KIND_MAX])
def test_own_rows(kind: int) -> None:
    """The short last lane: root terms in their columns, loops with their factors where not zero."""
    width, own_width, vertices, lane = 32, 16, 150, 2
    g = geometry(
        kind, width, G_SELF_STRIDE=own_width, G_SELF_COLUMN=width, G_LOOP_FACTOR=0,
        G_STATE_STRIDE=width + own_width, G_VERTICES=vertices,
    )  # fmt: skip
    rows = vertices - 64 * lane
    rng = np.random.default_rng(1)
    states = 64 * (width + own_width)
    floats = rng.standard_normal(2 * states).astype(np.float32)
    own_at = states + 64 * width
    factors = rng.random(vertices).astype(np.float32)
    factors[::3] = 0
    before = floats.copy()
    kernels.add_own_rows(
        g, floats, factors, np.int64(0), np.zeros(4, np.uint16), np.int64(lane), np.int64(0),
        np.int64(states), np.int64(own_at), np.float32(0),
    )  # fmt: skip
    state = before[:states].reshape(64, -1)
    message = before[states:own_at].reshape(64, width)
    own = before[own_at : own_at + 64 * own_width].reshape(64, own_width)
    factor = factors[64 * lane :, None]
    state[:rows, width:] += own[:rows]
    if kind == W.KIND_SUM:
        state[:rows, :width] += factor * message[:rows]
    else:
        loop = factor[:, 0] != 0
        state[:rows][loop, :width] = np.maximum(state[:rows][loop, :width], message[:rows][loop])
    assert np.array_equal(floats, before)


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 5, 16, 17, 100, 1000, 4097])
def test_ranks_are_permuted(degree: int) -> None:
    for seed in range(3):
        key = np.uint64(sampling.sample_key(seed, 0, 12))
        places = sorted(int(sampling.permute(key, rank, degree)) for rank in range(degree))
        assert places == list(range(degree))


def test_permutations_differ_by_seed_layer_and_destination() -> None:
    def places(seed: int, layer: int, vertex: int) -> tuple[int, ...]:
        key = np.uint64(sampling.sample_key(seed, layer, vertex))
        return tuple(int(sampling.permute(key, rank, 30)) for rank in range(30))

    found = {
        places(seed, layer, vertex)
        for seed in (0, 1, 2**63 - 1) for layer in range(3) for vertex in (0, 1, 2**40)
    }  # fmt: skip
    assert len(found) == 27


@pytest.mark.parametrize("fanout", [1, 2, 9, 10, 11])
def test_a_fanout_keeps_as_many_as_there_are(fanout: int) -> None:
    for vertex in range(50):
        key = np.uint64(sampling.sample_key(5, 1, vertex))
        kept = sum(bool(sampling.keeps(key, rank, 10, fanout)) for rank in range(10))
        assert kept == min(10, fanout)


def test_kept_loops_are_those_of_the_last_ranks() -> None:
    rng = np.random.default_rng(3)
    degrees, loops = (rng.integers(0, 6, 200).astype(np.uint32) for _ in range(2))
    originals = rng.permutation(200)
    out = np.zeros(200, np.uint32)
    sampling.count_kept_loops(8, 2, originals, degrees, loops, 3, out)
    for vertex in range(200):
        key = np.uint64(sampling.sample_key(8, 2, int(originals[vertex])))
        total = int(degrees[vertex] + loops[vertex])
        ranks = range(int(degrees[vertex]), total)
        assert out[vertex] == sum(bool(sampling.keeps(key, rank, total, 3)) for rank in ranks)
