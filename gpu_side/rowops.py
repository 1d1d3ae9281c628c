"""Row operations on float32 blocks in torch; products are torch's (MKL, cuBLAS)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

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
from hyades.gpu_side.scratch import scratch


@dataclass(frozen=True, slots=True)
class Moments:
    """Mean and biased standard deviation over all rows and columns of an object."""

    mean: float
    deviation: float


# Elementwise functions by the form that overwrites their input: same bits, no new block.
_ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "relu": functional.relu_, "elu": functional.elu_, "celu": functional.celu_,
    "selu": functional.selu_, "leaky_relu": functional.leaky_relu_, "tanh": torch.tanh_,
    "sigmoid": torch.sigmoid_, "silu": partial(functional.silu, inplace=True),
    "gelu": torch.ops.aten.gelu_,
}  # fmt: skip


def apply_row_ops(
    ops: tuple[RowOp, ...], x: Tensor, moments: Moments | None = None, *, owned: bool = False
) -> Tensor:
    """Return *ops* applied to x [n, d] float32; *moments* serve a leading GraphLayerNorm.

    x itself is overwritten only where it is *owned*: a result that nobody else looks at.
    """
    for op in ops:
        y = apply_row_op(op, x, moments, owned=owned)
        owned = owned or y is not x
        x = y
    return x


def apply_row_op(
    op: RowOp, x: Tensor, moments: Moments | None = None, *, owned: bool = False
) -> Tensor:
    """Return one operation applied to x [n, d] float32: in x where it is *owned*, or in scratch."""
    match op:
        case Linear(weight, bias):
            out = scratch().take(len(x), len(weight))
            if bias is None:
                return torch.mm(x, weight.t(), out=out)
            return torch.addmm(bias, x, weight.t(), out=out)
        case Affine(scale, shift):
            return _scale(x, x if owned else None, scale, shift)
        case LayerNorm(weight, bias, eps):
            return functional.layer_norm(x, (x.shape[1],), weight, bias, eps)
        case GraphLayerNorm(weight, bias, eps):
            assert moments is not None, "moments are collected by the stage before"
            y = torch.sub(x, moments.mean, out=x if owned else _like(x))
            return _scale(y.div_(moments.deviation + eps), y, weight, None, bias)
        case Activation(name, kwargs, weight):
            if name == "prelu" and weight is not None:
                return functional.prelu(x, weight)
            if name not in _ELEMENTWISE:
                result: Tensor = getattr(functional, name)(x, **kwargs)
                return result
            return _ELEMENTWISE[name](x if owned else _like(x).copy_(x), **kwargs)
        case Normalize(eps):
            return functional.normalize(x, dim=1, eps=eps, out=x if owned else _like(x))
        case MeanHeads(heads):
            parts = x.view(len(x), heads, -1)
            return torch.mean(parts, dim=1, out=scratch().take(len(x), parts.shape[2]))


def _like(x: Tensor) -> Tensor:
    return scratch().take(*x.shape)


def _scale(
    x: Tensor, out: Tensor | None, scale: Tensor | None, shift: Tensor | None,
    then: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return x * scale + shift (fused), then + *then*, in *out* or in scratch."""
    if scale is not None or shift is not None:
        out = _like(x) if out is None else out
        if scale is not None and shift is not None:
            torch.addcmul(shift, x, scale, out=out)
        elif scale is not None:
            torch.mul(x, scale, out=out)
        elif shift is not None:
            torch.add(x, shift, out=out)
        x = out
    return x if then is None else x.add_(then)


def keeps_block(op: RowOp) -> bool:
    """Say whether *op* on an owned block needs no other."""
    if isinstance(op, Activation):
        return op.name in _ELEMENTWISE
    return isinstance(op, Affine | GraphLayerNorm | Normalize)


def uses_malloc(op: RowOp) -> bool:
    """Say whether the result of *op* cannot lie in scratch."""
    if isinstance(op, Activation):
        return op.name not in _ELEMENTWISE
    return isinstance(op, LayerNorm)
