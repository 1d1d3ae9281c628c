"""Per-vertex factors: block by block they are what they are in one go, loops included."""

from typing import Any

import numpy as np
import pytest

from hyades.common import sampling
from hyades.gpu_side import factors
from hyades.gpu_side.factors import Sample, VertexTables, conv_factors, weigh_loops
from hyades.gpu_side.models.ir import Conv

VERTICES = 50
CONVS: dict[str, dict[str, Any]] = {
    "gcn": {"norm": "gcn", "loops": "one", "loop_weight": 2.0, "edge_weight": True},
    "gcn, loops kept": {"norm": "gcn", "edge_weight": True},
    "weights alone": {"edge_weight": True},
    "mean": {"aggregate": "mean"},
    "gin": {"self_scale": 1.3},
    "max": {"aggregate": "max"},
    "attention": {"aggregate": "attention", "loops": "one"},
    "both": {"norm": "both"},
    "left": {"norm": "left"},
    "right": {"norm": "right"},
    "closed": {"norm": "closed"},
    "loops dropped": {"aggregate": "mean", "loops": "drop"},
}


def tables(reordered: bool, seed: int = 0) -> VertexTables:
    rng = np.random.default_rng(seed)
    loops = np.where(rng.random(VERTICES) < 0.4, rng.integers(1, 4, VERTICES), 0)
    return VertexTables(
        rng.integers(0, 6, VERTICES).astype(np.uint32),
        rng.integers(0, 6, VERTICES).astype(np.uint32),
        loops.astype(np.uint32),
        rng.random(VERTICES).astype(np.float32),
        rng.random(int(loops.sum())).astype(np.float32),
        rng.permutation(VERTICES) if reordered else np.zeros(0, np.int64),
    )


def conv(kind: str) -> Conv:
    return Conv("layer", 3, 3, **{"aggregate": "sum", **CONVS[kind]})


@pytest.mark.parametrize("kind", CONVS)
@pytest.mark.parametrize("fanout", [0, 2])
@pytest.mark.parametrize("reordered", [False, True])
def test_blocks(kind: str, fanout: int, reordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = Sample(fanout, 5, 1)
    whole = conv_factors(conv(kind), tables(reordered), sample)
    monkeypatch.setattr(factors, "_BLOCK", 7)
    pieces = conv_factors(conv(kind), tables(reordered), sample)
    for name in ("source", "destination", "loop"):
        one, other = getattr(whole, name), getattr(pieces, name)
        assert (one is None) == (other is None)
        assert one is None or one.tobytes() == other.tobytes()


def test_a_block_without_loops_beside_one_that_has_some(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factors, "_BLOCK", 25)
    some = tables(False)
    some.loops[:25] = 0
    found = conv_factors(conv("mean"), some, Sample(0, 0, 0))
    assert found.loop is not None
    assert not found.loop[:25].any()
    received = np.maximum(some.in_degrees.astype(int) + some.loops, 1)
    assert np.allclose(found.loop, some.loops / received)


@pytest.mark.parametrize("fanout", [0, 1, 3])
@pytest.mark.parametrize("reordered", [False, True])
def test_weights_of_loops(fanout: int, reordered: bool) -> None:
    some = tables(reordered)
    assert some.loop_weights is not None
    sums, last = weigh_loops(some, Sample(fanout, 9, 2), -1.0)
    place = 0
    for vertex in range(VERTICES):
        others, count = int(some.in_degrees[vertex]), int(some.loops[vertex])
        own = some.loop_weights[place : place + count].astype(np.float64)
        place += count
        if fanout:
            name = int(some.originals[vertex]) if reordered else vertex
            key = np.uint64(sampling.sample_key(9, 2, name))
            total = others + count
            own = own[[bool(sampling.keeps(key, others + i, total, fanout)) for i in range(count)]]
        assert sums[vertex] == pytest.approx(own.sum(), abs=1e-12)
        assert last[vertex] == (own[-1] if len(own) else -1.0)
