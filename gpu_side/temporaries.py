"""How much intermediate results take, in bytes: the workers' scratch, and what comes beside it.

Counted along rowops.py, scan.py, lanestream.py and rowstage.py: every block taken while one
chunk lands or one lane is finished.
Must stay in sync with them; tests measure the whole process against the budget.
"""

from dataclasses import dataclass

from hyades.common.units import KIB, MIB
from hyades.gpu_side.models.ir import LayerNorm, RowOp
from hyades.gpu_side.program import FEATURES, Stage, aggregate_width, width_after
from hyades.gpu_side.rowops import keeps_block, uses_malloc
from hyades.gpu_side.shapes import ConvShape, product_orders, shape_conv

# A worker's stack, its malloc arena, and what the BLAS library packs operands into.
WORKER_BYTES = MIB + 512 * KIB
# The ring with its ready words and checksums (76 bytes a slot), and the proxy's tables.
FIXED_BYTES = 3 * MIB
_MALLOC = 3  # what malloc holds for each byte that is alive, as measured


@dataclass(frozen=True, slots=True)
class Blocks:
    """Floats a row: in scratch, and by malloc."""

    scratch: int = 0
    malloc: int = 0

    def __add__(self, other: "Blocks") -> "Blocks":
        return Blocks(self.scratch + other.scratch, self.malloc + other.malloc)


def _through(ops: tuple[RowOp, ...], width: int, owned: bool) -> tuple[Blocks, int]:
    """Return the blocks that *ops* take, and their result's width."""
    taken = Blocks()
    for op in ops:
        out = width_after((op,), width)
        if uses_malloc(op):  # a slice of the state is made contiguous first
            taken += Blocks(malloc=out + (width if isinstance(op, LayerNorm) else 0))
        elif not (owned and keeps_block(op)):
            taken += Blocks(out)
        width, owned = out, True
    return taken, width


def _landing(stage: Stage, shape: ConvShape, converted: bool) -> Blocks:
    """Return the blocks while a chunk lands, or its scores are computed in a stream of lanes."""
    conv, source = stage.conv, stage.inputs[0]
    assert conv is not None
    raw = source.width if converted or conv.attention is not None else 0
    before, width = _through(source.before, source.width, False)
    making, _ = _through(conv.source, width, False)
    scores = shape.row_width if conv.attention is not None else 0
    own = shape.own_width if conv.aggregate == "max" and conv.neighbour is not None else 0
    return Blocks(raw + scores + own) + before + making


def _finalising(stage: Stage, shape: ConvShape) -> Blocks:
    """Return the blocks while a lane is finalised: its state's own memory is used, too."""
    conv = stage.conv
    assert conv is not None
    width = aggregate_width(conv)
    projected = conv.neighbour is not None and not shape.project_first
    after, _ = _through(stage.after, width, True)
    return Blocks(width if projected or conv.mean_heads else 0) + after


def _combining(stage: Stage) -> Blocks:
    """Return the blocks in a stage without edges."""
    taken, widths = Blocks(), []
    for source in stage.inputs:
        before, width = _through(source.before, source.width, False)
        taken += Blocks(source.width) + before
        widths.append(width)
    width = sum(widths) if stage.combine == "cat" else widths[0]
    if stage.combine is not None:
        taken += Blocks(width)
    after, _ = _through(stage.after, width, True)
    return taken + after


def _stage_blocks(stage: Stage, feature_itemsize: int) -> list[Blocks]:
    found = [Blocks(stage.width)] if stage.moments else []  # read again, to be counted
    if stage.conv is None:
        return [*found, _combining(stage)]
    converted = feature_itemsize != 4 and stage.inputs[0].stage == FEATURES
    for order in product_orders(stage):
        shape = shape_conv(stage, order)
        found += [_landing(stage, shape, converted), _finalising(stage, shape)]
    return found


def scratch_bytes(stages: tuple[Stage, ...], range_rows: int, feature_itemsize: int) -> int:
    """Return the bytes of scratch that one worker needs in any of *stages*, under any plan."""
    blocks = [b for stage in stages for b in _stage_blocks(stage, feature_itemsize)]
    return 4 * range_rows * max(b.scratch for b in blocks) + 64 * KIB


def working_bytes(
    stages: tuple[Stage, ...], range_rows: int, workers: int, feature_itemsize: int
) -> int:
    """Return the bytes beside arena and tables that a run of *stages* holds at its worst."""
    blocks = [b for stage in stages for b in _stage_blocks(stage, feature_itemsize)]
    malloc = _MALLOC * 4 * range_rows * max(b.malloc for b in blocks)
    scratch = scratch_bytes(stages, range_rows, feature_itemsize)
    return FIXED_BYTES + workers * (WORKER_BYTES + scratch + malloc)
