"""What a stage keeps per vertex: columns of messages and lane state, and the order of its products.

`project_first` lands rows already multiplied by the neighbour weights (they commute with sum and
mean), so state, cache and log shrink by d_in/d_out; `aggregate_first` multiplies once a lane.
Attention always projects first, max never does.  All parts are padded to 16 floats.
"""

from dataclasses import dataclass

from hyades.common.units import round_up
from hyades.gpu_side.models.ir import Conv
from hyades.gpu_side.program import Stage, aggregate_width, width_after
from hyades.gpu_side.vector import WIDTH
from hyades.gpu_side.words import KIND_ATTENTION, KIND_MAX, KIND_SUM


@dataclass(frozen=True, slots=True)
class ConvShape:
    """Columns, in floats; see kernels.py for the state row."""

    kind: int
    project_first: bool
    row_width: int  # columns of a message that mean something
    aggregate: int  # the same, padded: columns that the kernel sums
    message_stride: int
    own_width: int  # columns of the vertex's own row (root term), 0 where there is none
    own_column: int  # where it is added in the state
    own_stride: int
    state_stride: int


def pad(columns: int) -> int:
    """Return *columns* rounded up to whole vectors."""
    return round_up(columns, WIDTH)


def has_own_rows(conv: Conv) -> bool:
    """Say whether the vertex's own row is added apart from its loop term."""
    return conv.root is not None or (conv.aggregate == "max" and conv.self_scale != 0)


def shape_conv(stage: Stage, project_first: bool) -> ConvShape:
    """Return the columns of *stage* for one order of its products."""
    conv = stage.conv
    assert conv is not None
    landed = width_after(conv.source, width_after(stage.inputs[0].before, stage.inputs[0].width))
    own = aggregate_width(conv) if has_own_rows(conv) else 0
    projected = landed if conv.neighbour is None else int(conv.neighbour.weight.shape[0])
    if conv.attention is not None:
        aggregate, heads = pad(projected), pad(conv.attention.heads)
        column = aggregate + pad(2 * conv.attention.heads)
        return ConvShape(
            KIND_ATTENTION, True, projected, aggregate, aggregate + heads, own, column, pad(own),
            column + pad(own),
        )  # fmt: skip
    kind = KIND_MAX if conv.aggregate == "max" else KIND_SUM
    row = projected if project_first else landed
    aggregate = pad(row)
    # Already in the output's columns, so the own row can join the same sum.
    joins = kind == KIND_SUM and (project_first or conv.neighbour is None)
    column = 0 if joins else aggregate
    state = aggregate if joins else aggregate + pad(own)
    return ConvShape(kind, project_first, row, aggregate, aggregate, own, column, pad(own), state)


def product_orders(stage: Stage) -> tuple[bool, ...]:
    """Return the values of `project_first` that make sense for *stage*."""
    conv = stage.conv
    assert conv is not None
    if conv.attention is not None or conv.neighbour is None:
        return (True,)
    if conv.aggregate == "max":
        return (False,)
    return (True, False)
