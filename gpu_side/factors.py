"""Per-vertex factors of a convolution: what a source's row, a destination's sum and a loop weigh.

With message m_u = source_factor[u] * row_u the sum at v is
    destination_factor[v] * sum over in-edges of e_uv * m_u  +  loop_factor[v] * m_v.
All arrays are float32 [V] in volume order; None means 1 (loop_factor: None means 0).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.jit import jit
from hyades.common.sampling import count_kept_loops, keeps, sample_key
from hyades.gpu_side.models.ir import Conv

Floats = NDArray[np.float32]
_BLOCK = 1 << 14  # vertices


@dataclass(frozen=True, slots=True)
class VertexTables:
    """Tables of the volume, in memory: 4 bytes a vertex and table."""

    in_degrees: NDArray[np.uint32]  # without self loops
    out_degrees: NDArray[np.uint32]
    loops: NDArray[np.uint32]
    weighted_in: Floats | None  # sum of in-edge weights, without loops
    loop_weights: Floats | None  # of all loops, vertex order then input order
    originals: NDArray[np.int64]  # original index of each vertex, or empty where the same


@dataclass(frozen=True, slots=True)
class Factors:
    """See the module."""

    source: Floats | None = None
    destination: Floats | None = None
    loop: Floats | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """Fanout of one layer; 0 keeps every edge."""

    fanout: int
    seed: int
    layer: int


@dataclass(frozen=True, slots=True)
class _Counts:
    """What is left of the degrees after sampling; `weight` is the kept in-edges' weight sum."""

    others: Any
    loops: Any
    sent: Any
    weight: Any


def _kept_counts(tables: VertexTables, sample: Sample, sums: Any) -> _Counts:
    others, loops = tables.in_degrees, tables.loops
    if sample.fanout > 0:
        kept_loops = np.zeros_like(loops)
        count_kept_loops(
            sample.seed, sample.layer, tables.originals, others, loops, sample.fanout, kept_loops
        )
        total = np.minimum(others.astype(np.int64) + loops, sample.fanout)
        others, loops = total - kept_loops, kept_loops
    weight = others.astype(np.float64) if sums is None else sums
    return _Counts(others, loops, tables.out_degrees, weight)


@jit
def _weigh_loops(
    seed: Any, layer: Any, originals: Any, degrees: Any, loops: Any, fanout: Any, weights: Any,
    sums: Any, last: Any,
) -> None:  # fmt: skip
    """Sum the weights of each vertex's kept loops, and note that of the last one."""
    place = np.int64(0)
    for vertex in range(loops.shape[0]):
        others, count = np.int64(degrees[vertex]), np.int64(loops[vertex])
        if count == 0:
            continue
        name = originals[vertex] if originals.shape[0] > 0 else vertex
        key = sample_key(seed, layer, name)
        for index in range(count):
            if fanout == 0 or keeps(key, others + index, others + count, fanout):
                sums[vertex] += weights[place + index]
                last[vertex] = weights[place + index]
        place += count


def weigh_loops(tables: VertexTables, sample: Sample, fill: float) -> tuple[Any, Any]:
    """Return float64 [V] twice: the summed weight of each vertex's kept loops, and the last one's.

    PyG keeps the last of several loops as the one; *fill* stands where there is none.
    """
    sums, last = np.zeros(len(tables.loops)), np.full(len(tables.loops), fill)
    if tables.loop_weights is not None:
        _weigh_loops(
            sample.seed, sample.layer, tables.originals, tables.in_degrees, tables.loops,
            sample.fanout, tables.loop_weights, sums, last,
        )  # fmt: skip
    return sums, last


def _inverse_root(values: Any) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        result = np.asarray(values, np.float64) ** -0.5
    result[np.isinf(result)] = 0.0
    return result


def _float32(values: Any) -> Floats:
    return np.ascontiguousarray(values, np.float32)


def conv_factors(conv: Conv, tables: VertexTables, sample: Sample, sums: Any = None) -> Factors:
    """Return the factors of *conv*; *sums* float64 [V] are the kept weighted in-degrees, if any.

    Computed in float64 a block of vertices at a time: what is held for all is float32.
    """
    count, loops_before = len(tables.loops), 0
    found: dict[str, Floats] = {}
    for first in range(0, count, _BLOCK):
        part = slice(first, min(first + _BLOCK, count))
        block = _slice_tables(tables, part, loops_before)
        loops_before += int(block.loops.sum(dtype=np.int64))
        factors = _block_factors(conv, block, sample, None if sums is None else sums[part])
        for name in ("source", "destination", "loop"):
            values = getattr(factors, name)
            if values is not None:
                found.setdefault(name, np.zeros(count, np.float32))[part] = values
    return Factors(found.get("source"), found.get("destination"), found.get("loop"))


def _slice_tables(tables: VertexTables, part: slice, loops_before: int) -> VertexTables:
    loops = tables.loops[part]
    weights = tables.loop_weights
    if weights is not None:
        weights = weights[loops_before : loops_before + int(loops.sum(dtype=np.int64))]
    originals = tables.originals
    named = originals[part] if len(originals) else np.arange(part.start, part.stop)
    weighted_in = None if tables.weighted_in is None else tables.weighted_in[part]
    return VertexTables(
        tables.in_degrees[part], tables.out_degrees[part], loops, weighted_in, weights, named
    )  # fmt: skip


def _block_factors(conv: Conv, tables: VertexTables, sample: Sample, sums: Any) -> Factors:
    weighted = conv.edge_weight and tables.weighted_in is not None
    if weighted and sums is None:
        sums = np.asarray(tables.weighted_in, np.float64)
    counts = _kept_counts(tables, sample, sums if weighted else None)
    if conv.norm == "gcn":
        return _gcn(conv, tables, counts, sample, weighted)
    loops = weigh_loops(tables, sample, 0)[0] if weighted else counts.loops.astype(np.float64)
    if conv.loops == "one":
        loops = np.ones(len(tables.loops))
        received = counts.others.astype(np.float64) + 1
    elif conv.loops == "drop":
        loops = np.zeros(len(tables.loops))
        received = counts.others.astype(np.float64)
    else:
        received = counts.others.astype(np.float64) + counts.loops
    return _degree_factors(conv, tables, loops, received)


def _gcn(
    conv: Conv, tables: VertexTables, counts: _Counts, sample: Sample, weighted: bool
) -> Factors:
    if conv.loops == "one":
        # PyG gives loops the weight 1 on an unweighted graph even where `improved` asks for 2.
        fill = conv.loop_weight if weighted else 1.0
        own = weigh_loops(tables, sample, fill)[1] if weighted else fill
    elif conv.loops == "keep":
        own = weigh_loops(tables, sample, 0)[0] if weighted else counts.loops.astype(np.float64)
    else:
        own = 0.0
    scale = _inverse_root(counts.weight + own)
    return Factors(_float32(scale), _float32(scale), _float32(scale * own))


def _degree_factors(conv: Conv, tables: VertexTables, loops: Any, received: Any) -> Factors:
    own = loops
    source = destination = None
    if conv.norm in ("both", "left"):  # never sampled: models.checks refuses it
        sent = np.maximum(tables.out_degrees.astype(np.float64) + tables.loops, 1)
        source = 1 / np.sqrt(sent) if conv.norm == "both" else 1 / sent
    if conv.norm == "both":
        destination = 1 / np.sqrt(np.maximum(received, 1))
    elif conv.norm == "right":
        destination = 1 / np.maximum(received, 1)
    elif conv.norm == "closed":
        destination = 1 / (received + 1)
        own = loops + 1.0
    if conv.aggregate == "mean" and conv.norm != "closed":
        destination = (1.0 if destination is None else destination) / np.maximum(received, 1)
    if conv.aggregate in ("sum", "mean") and destination is not None:
        own = own * destination
    if conv.aggregate in ("sum", "mean"):
        own = own + conv.self_scale
    return Factors(
        None if source is None else _float32(source),
        None if destination is None else _float32(destination),
        _float32(own) if np.any(own) else None,
    )
