"""Row operations on float32 blocks in torch; products are torch's (MKL, cuBLAS)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hyades.gpu_side.models.ir import (
    Activation,
    Affine,
    GraphLayerNorm,
    LayerNorm,
    Linear,
    MeanHeads,
    Normalize,
    RowOp,
)


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and biased standard deviation over all rows and columns of an object."""

    mean: float
    deviation: float


def apply_row_ops(ops: tuple[RowOp, ...], x: Tensor, moments: Moments | None = None) -> Tensor:
    """Return *ops* applied to x [n, d] float32; *moments* serve a leading GraphLayerNorm."""
    for op in ops:
        x = apply_row_op(op, x, moments)
    return x


def apply_row_op(op: RowOp, x: Tensor, moments: Moments | None = None) -> Tensor:
    """Return one operation applied to x [n, d] float32."""
    match op:
        case Linear(weight, bias):
            return functional.linear(x, weight, bias)
        case Affine(scale, shift):
            if scale is not None and shift is not None:
                return torch.addcmul(shift, x, scale)
            return x * scale if scale is not None else x if shift is None else x + shift
        case LayerNorm(weight, bias, eps):
            return functional.layer_norm(x, (x.shape[1],), weight, bias, eps)
        case GraphLayerNorm(weight, bias, eps):
            assert moments is not None, "moments are collected by the stage before"
            x = (x - moments.mean) / (moments.deviation + eps)
            x = x if weight is None else x * weight
            return x if bias is None else x + bias
        case Activation("prelu", _, weight) if weight is not None:
            return functional.prelu(x, weight)
        case Activation(name, kwargs, _):
            result: Tensor = getattr(functional, name)(x, **kwargs)
            return result
        case Normalize(eps):
            return functional.normalize(x, dim=1, eps=eps)
        case MeanHeads(heads):
            return x.view(len(x), heads, -1).mean(dim=1)
