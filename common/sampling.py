"""Which in-edges a destination keeps under a fanout: a rule, not a stored mask.

Edge rank r (0-based, in the destination's in-list) is kept iff P(r) < k, where P is a pseudo-random
permutation of [0, degree) keyed by (seed, layer, original destination index). P is a six-round
Feistel network over the next even power of two, cycle-walked into [0, degree) (Black and Rogaway,
"Ciphers with Arbitrary Finite Domains", CT-RSA 2002). So exactly min(k, degree) edges are kept,
each equally likely, and any host that knows the rank gives the same answer without talking.
"""

from typing import Any

import numpy as np

from hyades.common.jit import jit

ROUNDS = 6
_C1, _C2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_U30, _U27, _U31, _U1 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(1)


@jit
def mix(value: Any) -> Any:
    """Return SplitMix64's finaliser of a uint64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value ^ (value >> _U30)) * _C1
    value = (value ^ (value >> _U27)) * _C2
    return value ^ (value >> _U31)


@jit
def sample_key(seed: Any, layer: Any, destination: Any) -> Any:
    """Return the uint64 key of one destination's choice in one layer."""
    key = mix(np.uint64(seed) + _GOLDEN)
    key = mix(key ^ (np.uint64(layer) + _GOLDEN))
    return mix(key ^ (np.uint64(destination) + _GOLDEN))


@jit
def permute(key: Any, rank: Any, degree: Any) -> Any:
    """Return the place of *rank* in the keyed permutation of [0, degree)."""
    half = np.uint64(1)
    while (np.uint64(1) << (half + half)) < np.uint64(degree):
        half += _U1
    mask = (_U1 << half) - _U1
    value = np.uint64(rank)
    while True:
        left, right = value >> half, value & mask
        for index in range(ROUNDS):
            word = mix(key + np.uint64(index + 1) * _GOLDEN + right)
            left, right = right, left ^ (word & mask)
        value = (left << half) | right
        if value < np.uint64(degree):
            return np.int64(value)


@jit
def keeps(key: Any, rank: Any, degree: Any, fanout: Any) -> Any:
    """Say whether the edge of *rank* among *degree* in-edges is one of the *fanout* kept."""
    if degree <= fanout:
        return True
    return permute(key, rank, degree) < fanout


@jit
def count_kept_loops(
    seed: Any, layer: Any, originals: Any, degrees: Any, loops: Any, fanout: Any, out: Any
) -> None:
    """Fill uint32 *out* [V] with how many of each vertex's self loops are kept.

    A vertex's loops come after its *degrees* other in-edges in rank order. *originals* is int64
    [V], or empty where a vertex's own index is its original one.
    """
    for vertex in range(out.shape[0]):
        count = np.int64(loops[vertex])
        if count == 0:
            out[vertex] = 0
            continue
        others = np.int64(degrees[vertex])
        name = originals[vertex] if originals.shape[0] > 0 else vertex
        key = sample_key(seed, layer, name)
        kept = 0
        for index in range(count):
            if keeps(key, others + index, others + count, fanout):
                kept += 1
        out[vertex] = kept
