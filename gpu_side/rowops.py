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
_ROW_FLOATS = 1 << 14  # a block that malloc serves from what it has


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
            shape = (x.shape[1],)
            norm = partial(functional.layer_norm, normalized_shape=shape, weight=weight, bias=bias)
            return _by_rows(partial(norm, eps=eps), x, x if owned else _like(x))
        case GraphLayerNorm(weight, bias, eps):
            assert moments is not None, "moments are collected by the stage before"
            y = torch.sub(x, moments.mean, out=x if owned else _like(x))
            return _scale(y.div_(moments.deviation + eps), y, weight, None, bias)
        case Activation(name, kwargs, weight):
            out = x if owned else _like(x)
            if name in _ELEMENTWISE:
                return _ELEMENTWISE[name](out if owned else out.copy_(x), **kwargs)
            if name == "prelu" and weight is not None:
                return _by_rows(partial(functional.prelu, weight=weight), x, out)
            return _by_rows(partial(getattr(functional, name), **kwargs), x, out)
        case Normalize(eps):
            return functional.normalize(x, dim=1, eps=eps, out=x if owned else _like(x))
        case MeanHeads(heads):
            parts = x.view(len(x), heads, -1)
            return torch.mean(parts, dim=1, out=scratch().take(len(x), parts.shape[2]))


def _by_rows(function: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> Tensor:
    """Put *function* of x, which has no form with `out=`, into *out* some rows at a time."""
    step = max(1, _ROW_FLOATS // max(1, x.shape[1]))
    for first in range(0, len(x), step):
        out[first : first + step] = function(x[first : first + step])
    return out


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
    return not isinstance(op, Linear | MeanHeads)
