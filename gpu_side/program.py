"""Lower a model to stages, each one scan over the rows of an object.

Rules:
1. A conv stage reads one object, a rows stage one or several (JumpingKnowledge). Every stage writes
   one object; the last one writes the output.
2. GraphLayerNorm needs the mean and variance over all rows and columns, which are known only when a
   stage ends.  So a stage stops before it, collects the moments, and the operations from
   GraphLayerNorm on become the `before` of whoever reads that object.
"""

from dataclasses import dataclass
from typing import Literal

from hyades.gpu_side.models.ir import Conv, GraphLayerNorm, Linear, Model, RowOp

FEATURES = -1


@dataclass(frozen=True, slots=True)
class Input:
    """An object that a stage reads, FEATURES or an earlier stage's output, and row operations."""

    stage: int
    width: int  # columns as stored
    before: tuple[RowOp, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """One scan: a convolution, or operations on rows alone."""

    index: int
    name: str
    inputs: tuple[Input, ...]
    conv: Conv | None
    combine: Literal["cat", "max"] | None  # of a rows stage with several inputs
    after: tuple[RowOp, ...]
    width: int  # columns written
    moments: bool  # collect sum and sum of squares of what is written
    layer: int  # the model's layer, for the sampling key and messages


def width_after(ops: tuple[RowOp, ...], width: int) -> int:
    """Return the columns that *ops* make of *width* columns."""
    for op in ops:
        if isinstance(op, Linear):
            width = int(op.weight.shape[0])
        elif type(op).__name__ == "MeanHeads":
            width //= op.heads  # type: ignore[union-attr]
    return width


def _split(ops: tuple[RowOp, ...]) -> tuple[tuple[RowOp, ...], tuple[RowOp, ...]]:
    for index, op in enumerate(ops):
        if isinstance(op, GraphLayerNorm):
            return ops[:index], ops[index:]
    return ops, ()


class _Builder:
    def __init__(self, model: Model) -> None:
        self.model = model
        self.stages: list[Stage] = []

    def _add(
        self, name: str, inputs: tuple[Input, ...], conv: Conv | None, ops: tuple[RowOp, ...],
        width: int, layer: int, combine: Literal["cat", "max"] | None = None,
    ) -> Input:  # fmt: skip
        """Append a stage (and rows stages while moments are due); return its output as an input."""
        now, later = _split(ops)
        index = len(self.stages)
        stored = width_after(now, width)
        self.stages.append(
            Stage(index, name, inputs, conv, combine, now, stored, bool(later), layer)
        )
        if not later:
            return Input(index, stored)
        rest, again = _split(later[1:])
        if not again:
            return Input(index, stored, later)
        # A second global norm: its moments need the first one applied to every row.
        behind = (Input(index, stored, (later[0], *rest)),)
        middle = width_after((later[0], *rest), stored)
        return self._add(f"{name} norm", behind, None, again, middle, layer)

    def build(self) -> tuple[Stage, ...]:
        """Return the stages in order."""
        model = self.model
        at = Input(FEATURES, model.in_channels)
        outputs = []
        last = len(model.layers) - 1
        for number, conv in enumerate(model.layers):
            ops = conv.post
            if number == last and model.jump is None:
                ops = (*ops, *model.head)
            at = self._add(conv.name, (at,), conv, ops, aggregate_width(conv), number)
            outputs.append(at)
        if model.jump is not None:
            widths = [width_after(o.before, o.width) for o in outputs]
            width = sum(widths) if model.jump == "cat" else widths[0]
            at = self._add("jump", tuple(outputs), None, model.head, width, last + 1, model.jump)
        if at.before:
            self._add("finish", (at,), None, (), width_after(at.before, at.width), last + 1)
        return tuple(self.stages)


def aggregate_width(conv: Conv) -> int:
    """Return the columns of y, before `post`."""
    width = conv.in_channels
    if conv.neighbour is not None:
        width = int(conv.neighbour.weight.shape[0])
    else:
        width = width_after(conv.source, width)
    if conv.attention is not None and conv.mean_heads:
        width //= conv.attention.heads
    return width


def lower_model(model: Model) -> tuple[Stage, ...]:
    """Return the stages that compute *model*, ending with the one that writes the output."""
    return _Builder(model).build()
