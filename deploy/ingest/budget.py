"""How the tile builder divides its memory."""

from dataclasses import dataclass

from hyades.common.errors import UsageError
from hyades.common.units import MIB, format_size

# Bytes an edge costs: in a block (ids as read and as int64, records twice, bucket, loop), and in a
# load (records twice and the scratch of the sort, should one chunk hold them all).
_BLOCK_EDGE = 88
_SORT_EDGE = 24
_MIN_BLOCK, _MAX_BLOCK = 1 << 12, 1 << 18
_MIN_LOAD = 1 << 14
# The volume's page buffers, Python objects of the readers.
_SLACK = 8 * MIB


@dataclass(frozen=True)
class Budget:
    """What fits: edges of one block, edges of one load, and whether spilling can be skipped."""

    block_edges: int
    load_edges: int
    in_memory: bool


def vertex_bytes(vertices: int, *, weighted: bool, reordered: bool) -> int:
    """Return the bytes of the per-vertex arrays (degrees, loops; weights' sums; new indices)."""
    return vertices * (12 + (12 if weighted else 0) + (4 if reordered else 0))


def plan_memory(
    memory: int, vertices: int, edges: int, *, weighted: bool, reordered: bool
) -> Budget:
    """Divide *memory* bytes; UsageError names the bytes that are needed at least."""
    load_edge = 2 * (16 if weighted else 12) + _SORT_EDGE
    fixed = vertex_bytes(vertices, weighted=weighted, reordered=reordered) + _SLACK
    left = memory - fixed
    block = min(max(left // (8 * _BLOCK_EDGE), _MIN_BLOCK), _MAX_BLOCK)
    load = (left - block * _BLOCK_EDGE) // load_edge
    if load < _MIN_LOAD:
        least = fixed + _MIN_BLOCK * _BLOCK_EDGE * 2 + _MIN_LOAD * load_edge
        raise UsageError(
            f"{vertices:,} vertices need at least {format_size(least)} of memory for ingest, "
            f"the budget is {format_size(memory)}: raise --memory"
        )
    return Budget(block, load, edges <= load)
