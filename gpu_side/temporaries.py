"""How much intermediate results take, in bytes: the workers' scratch, and what comes beside it.

Counted along rowops.py, scan.py, lanestream.py and rowstage.py: every block taken while one
chunk lands or one lane is finished.
Must stay in sync with them; tests measure the whole process against the budget.
"""

from hyades.common.units import KIB, MIB
from hyades.gpu_side.models.ir import RowOp
from hyades.gpu_side.program import FEATURES, Stage, aggregate_width, width_after
from hyades.gpu_side.rowops import keeps_block
from hyades.gpu_side.shapes import ConvShape, product_orders, shape_conv

# A worker's stack, its malloc arena, and what the BLAS library packs operands into.
WORKER_BYTES = MIB + 512 * KIB
# The ring with its ready words and checksums (76 bytes a slot), and the proxy's tables.
FIXED_BYTES = 3 * MIB


def _through(ops: tuple[RowOp, ...], width: int, owned: bool) -> tuple[int, int]:
    """Return the floats a row of the blocks that *ops* take, and their result's width."""
    taken = 0
    for op in ops:
        width = width_after((op,), width)
        if not (owned and keeps_block(op)):
            taken += width
        owned = True
    return taken, width


def _landing(stage: Stage, shape: ConvShape, decoded: int) -> int:
    """Return the floats a row while a chunk lands, or its scores are found in a stream of lanes."""
    conv, source = stage.conv, stage.inputs[0]
    assert conv is not None
    raw = max(decoded, source.width if conv.attention is not None else 0)
    before, width = _through(source.before, source.width, False)
    making, _ = _through(conv.source, width, False)
    scores = shape.row_width if conv.attention is not None else 0
    own = shape.own_width if conv.aggregate == "max" and conv.neighbour is not None else 0
    return raw + before + making + max(scores, own)


def _finalising(stage: Stage, shape: ConvShape) -> int:
    """Return the floats a row while a lane is finalised: its state's own memory is used, too."""
    conv = stage.conv
    assert conv is not None
    width = aggregate_width(conv)
    projected = conv.neighbour is not None and not shape.project_first
    after, _ = _through(stage.after, width, True)
    return (width if projected or conv.mean_heads else 0) + after


def _combining(stage: Stage) -> int:
    """Return the floats a row in a stage without edges."""
    taken, widths = 0, []
    for source in stage.inputs:
        before, width = _through(source.before, source.width, False)
        taken += source.width + before
        widths.append(width)
    width = sum(widths) if stage.combine == "cat" else widths[0]
    if stage.combine is not None:
        taken += width
    after, _ = _through(stage.after, width, True)
    return taken + after


def _stage_floats(stage: Stage, decoded: int) -> int:
    read_again = stage.width if stage.moments else 0  # lanes that are counted on resume
    if stage.conv is None:
        return max(read_again, _combining(stage))
    decoded = decoded if stage.inputs[0].stage == FEATURES else 0
    shapes = [shape_conv(stage, order) for order in product_orders(stage)]
    works = [max(_landing(stage, s, decoded), _finalising(stage, s)) for s in shapes]
    return max(read_again, *works)


def scratch_bytes(stages: tuple[Stage, ...], range_rows: int, decoded: int) -> int:
    """Return the bytes of scratch that one worker needs in any of *stages*, under any plan.

    *decoded*: columns of the features where they are converted as they land, else 0.
    """
    return 4 * range_rows * max(_stage_floats(s, decoded) for s in stages) + 64 * KIB


def working_bytes(stages: tuple[Stage, ...], range_rows: int, workers: int, decoded: int) -> int:
    """Return the bytes beside arena and tables that a run of *stages* holds at its worst."""
    scratch = scratch_bytes(stages, range_rows, decoded)
    return FIXED_BYTES + workers * (WORKER_BYTES + scratch)
