"""A stage on rows alone: JumpingKnowledge, and what follows a global norm."""

import torch
from torch import Tensor

from hyades.gpu_side.program import Stage
from hyades.gpu_side.rowops import Moments, apply_row_ops


def combine_rows(stage: Stage, blocks: list[Tensor], moments: dict[int, Moments]) -> Tensor:
    """Return the stage's rows for the blocks [n, d_i] of its inputs."""
    parts = [
        apply_row_ops(source.before, block, moments.get(source.stage))
        for source, block in zip(stage.inputs, blocks, strict=True)
    ]
    if stage.combine == "cat":
        joined = torch.cat(parts, dim=1)
    elif stage.combine == "max":
        joined = torch.stack(parts).amax(dim=0)
    else:
        (joined,) = parts
    return apply_row_ops(stage.after, joined)
