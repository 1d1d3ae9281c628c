"""A stage on rows alone: JumpingKnowledge, and what follows a global norm."""

import torch
from torch import Tensor

from hyades.gpu_side.program import Stage
from hyades.gpu_side.rowops import Moments, apply_row_ops
from hyades.gpu_side.scratch import scratch


def combine_rows(stage: Stage, blocks: list[Tensor], moments: dict[int, Moments]) -> Tensor:
    """Return the stage's rows for the blocks [n, d_i] of its inputs."""
    parts = [
        apply_row_ops(source.before, block, moments.get(source.stage))
        for source, block in zip(stage.inputs, blocks, strict=True)
    ]
    if stage.combine == "cat":
        width = sum(part.shape[1] for part in parts)
        joined = torch.cat(parts, dim=1, out=scratch().take(len(blocks[0]), width))
    elif stage.combine == "max":
        joined = scratch().take(*parts[0].shape).copy_(parts[0])
        for part in parts[1:]:
            torch.maximum(joined, part, out=joined)
    else:
        (joined,) = parts
    return apply_row_ops(stage.after, joined, owned=joined is not blocks[0])
