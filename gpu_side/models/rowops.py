"""Row operations from torch modules and from names: activations, norms, linear maps, sequences.

Only exact types are taken: a subclass, a hook or a parametrisation may compute anything, so it is
refused by name rather than guessed at.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from hyades.common.errors import DataError, UsageError
from hyades.gpu_side.models.ir import (
    Activation,
    Affine,
    GraphLayerNorm,
    LayerNorm,
    Linear,
    MeanHeads,
    RowOp,
)

# torch.nn class -> (name in torch.nn.functional, attributes that are its keyword arguments)
_ELEMENTWISE: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Threshold: ("threshold", ("threshold", "value")),
    nn.ReLU: ("relu", ()),
    nn.Hardtanh: ("hardtanh", ("min_val", "max_val")),
    nn.ReLU6: ("relu6", ()),
    nn.Sigmoid: ("sigmoid", ()),
    nn.Hardsigmoid: ("hardsigmoid", ()),
    nn.Tanh: ("tanh", ()),
    nn.SiLU: ("silu", ()),
    nn.Mish: ("mish", ()),
    nn.Hardswish: ("hardswish", ()),
    nn.ELU: ("elu", ("alpha",)),
    nn.CELU: ("celu", ("alpha",)),
    nn.SELU: ("selu", ()),
    nn.GELU: ("gelu", ("approximate",)),
    nn.Hardshrink: ("hardshrink", ("lambd",)),
    nn.LeakyReLU: ("leaky_relu", ("negative_slope",)),
    nn.LogSigmoid: ("logsigmoid", ()),
    nn.Softplus: ("softplus", ("beta", "threshold")),
    nn.Softshrink: ("softshrink", ("lambd",)),
    nn.Softsign: ("softsign", ()),
    nn.Tanhshrink: ("tanhshrink", ()),
}
_NOTHING_IN_EVAL = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_FUNCTIONS: dict[Callable[..., Any], str] = {
    getattr(space, name): name
    for name, _attributes in _ELEMENTWISE.values()
    for space in (functional, torch)
    if hasattr(space, name) and name != "threshold"
}


ROUNDED = "weights of float64 are rounded to float32"


def checked(value: Tensor, name: str) -> Tensor:
    """Return a float32 CPU copy of a weight.

    UsageError for what cannot be a weight (lazy, quantised, complex, sparse, integer); DataError
    for NaN and infinity.  float64 is rounded to float32; every narrower float is exact.
    """
    if isinstance(value, UninitializedParameter | UninitializedBuffer):
        raise UsageError(
            f"{name} is not initialised; run the model once on a small graph, then pass it again"
        )
    kind = _unusable(value)
    if kind:
        raise UsageError(f"{name} is {kind}; a weight must be a dense floating-point tensor")
    result = value.detach().to(device="cpu", dtype=torch.float32, copy=True).contiguous()
    bad = int((~torch.isfinite(result)).sum())
    if bad:
        raise DataError(
            f"{name}: {bad:,} of {result.numel():,} values are NaN or infinite; "
            "retrain or repair the checkpoint"
        )
    return result


def _unusable(value: Tensor) -> str:
    if value.is_quantized:
        return "quantised"
    if value.is_meta:
        return "on the meta device, without values"
    if value.layout != torch.strided:
        return f"stored as {value.layout}"
    if value.is_complex():
        return f"complex ({value.dtype})"
    return "" if value.is_floating_point() else f"of type {value.dtype}"


def optional(value: Tensor | None, name: str) -> Tensor | None:
    """`checked`, or None for None."""
    return None if value is None else checked(value, name)


def class_name(module: object) -> str:
    """Return the full dotted name of an object's class."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def refuse_hooks(module: nn.Module, name: str) -> None:
    """Raise UsageError where hooks or a replaced forward may change what ``module`` computes.

    A lazy module, which waits for its first input in a hook, is named as such.
    """
    for key, parameter in module._parameters.items():
        if isinstance(parameter, UninitializedParameter):
            checked(parameter, f"{name}.{key}")
    if "forward" in vars(module):
        raise UsageError(
            f"{name} ({type(module).__name__}): its forward was replaced; not supported"
        )
    for attribute, hooks in vars(module).items():
        if "forward" in attribute and attribute.endswith("hooks") and hooks:
            raise UsageError(
                f"{name} ({type(module).__name__}) has {attribute.strip('_').replace('_', ' ')}; "
                "remove them (for weight_norm: torch.nn.utils.remove_weight_norm)"
            )


def activation(act: object, name: str) -> tuple[RowOp, ...]:
    """Return the elementwise operation that a module or function is; () for None.

    UsageError names what has no exact elementwise form here (lambdas, Softmax, GLU, ...).
    """
    if act is None:
        return ()
    if isinstance(act, nn.Module):
        refuse_hooks(act, name)
        if type(act) in _NOTHING_IN_EVAL:
            return ()
        if type(act) is nn.PReLU:
            return (Activation("prelu", {}, checked(act.weight, f"{name}.weight")),)
        if type(act) is nn.RReLU:  # in eval mode the slope is the middle of its range
            return (Activation("leaky_relu", {"negative_slope": (act.lower + act.upper) / 2}),)
        if type(act) in _ELEMENTWISE:
            function, attributes = _ELEMENTWISE[type(act)]
            return (Activation(function, {a: getattr(act, a) for a in attributes}),)
    elif callable(act):
        if getattr(act, "__name__", "") == "swish" and str(act.__module__).startswith(
            "torch_geometric."
        ):
            return (Activation("silu"),)
        if act in _FUNCTIONS:
            return (Activation(_FUNCTIONS[act]),)
    shown = getattr(act, "__name__", None) or class_name(act)
    raise UsageError(
        f"{name}: activation {shown} is not supported; use an elementwise class of torch.nn, such "
        "as torch.nn.ReLU()"
    )


def activation_named(query: str | None, kwargs: dict[str, Any], name: str) -> nn.Module | None:
    """Return torch.nn's activation for PyG's spelling of its name ("relu", "leaky-relu", "PReLU").

    None and "none" give None.  UsageError for a name or arguments that torch.nn does not know.
    """
    if query is None or _plain(query) in ("none", "identity"):
        return None
    if _plain(query) == "swish":
        return nn.SiLU()
    wanted = _plain(query.rsplit(".", 1)[-1])
    for cls in (*_ELEMENTWISE, nn.PReLU, nn.RReLU):
        if _plain(cls.__name__) == wanted:
            try:
                act: nn.Module = cls(**kwargs)
                return act
            except TypeError as error:
                raise UsageError(
                    f"{name}: {cls.__name__} does not take {kwargs}: {error}"
                ) from error
    raise UsageError(
        f"{name}: activation {query!r} is not supported; known: "
        f"{', '.join(sorted(c.__name__ for c in (*_ELEMENTWISE, nn.PReLU, nn.RReLU)))}"
    )


def _plain(text: str) -> str:
    """PyG's resolver compares names like this."""
    return text.lower().replace("-", "").replace("_", "").replace(" ", "")


def batch_norm(
    weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float, name: str
) -> RowOp:
    """BatchNorm in eval mode as a scale and a shift, folded in float64."""
    std = (var.double() + eps).sqrt()
    if not bool(torch.isfinite(std).all()) or bool((std == 0).any()):
        raise DataError(f"{name}.running_var holds values below -eps; the checkpoint is damaged")
    scale = 1.0 / std if weight is None else weight.double() / std
    shift = -mean.double() * scale
    if bias is not None:
        shift = shift + bias.double()
    return Affine(scale.float(), shift.float())


def _batch_norm_module(module: nn.BatchNorm1d, name: str) -> RowOp:
    refuse_hooks(module, name)
    if module.running_mean is None or module.running_var is None:
        raise UsageError(
            f"{name}: BatchNorm with track_running_stats=False is not supported: it keeps no "
            "statistics"
        )
    return batch_norm(
        optional(module.weight, f"{name}.weight"),
        optional(module.bias, f"{name}.bias"),
        checked(module.running_mean, f"{name}.running_mean"),
        checked(module.running_var, f"{name}.running_var"),
        module.eps,
        name,
    )


def _layer_norm_module(module: Any, name: str) -> RowOp:
    weight = optional(module.weight, f"{name}.weight")
    bias = optional(module.bias, f"{name}.bias")
    if isinstance(module, nn.LayerNorm):
        if len(module.normalized_shape) != 1:
            raise UsageError(
                f"{name}: LayerNorm over {list(module.normalized_shape)} is not supported"
            )
        return LayerNorm(weight, bias, module.eps)
    if module.mode == "graph":
        # PyG applies the two only together in this mode.
        both = weight is not None and bias is not None
        return GraphLayerNorm(weight if both else None, bias if both else None, module.eps)
    if module.mode == "node":
        return LayerNorm(weight, bias, module.eps)
    raise UsageError(f"{name}: LayerNorm mode {module.mode!r} is not supported")


def row_ops(module: object, name: str) -> tuple[RowOp, ...]:
    """Return the operations that a torch or PyG module applies to each row, in eval mode.

    Takes Linear, BatchNorm, LayerNorm, activations, Dropout, Identity, Sequential and PyG's MLP.
    UsageError names everything else (GraphNorm, InstanceNorm, PairNorm, a lambda, ...).
    """
    if not isinstance(module, nn.Module):
        return activation(module, name)
    refuse_hooks(module, name)
    full = class_name(module)
    short = type(module).__name__
    if type(module) in _NOTHING_IN_EVAL:
        return ()
    if type(module) is nn.Sequential:
        return tuple(
            op for key, child in module.named_children() for op in row_ops(child, f"{name}.{key}")
        )
    if type(module) is nn.BatchNorm1d:
        return (_batch_norm_module(module, name),)
    if type(module) is nn.LayerNorm:
        return (_layer_norm_module(module, name),)
    if type(module) is nn.Linear or _is_pyg(full, "Linear"):
        return (linear(module, name),)
    if _is_pyg(full, "BatchNorm"):
        inner: Any = module
        return (_batch_norm_module(inner.module, f"{name}.module"),)
    if _is_pyg(full, "LayerNorm"):
        return (_layer_norm_module(module, name),)
    if _is_pyg(full, "MLP"):
        return _mlp(module, name)
    if "norm" in short.lower():
        raise UsageError(
            f"{name}: {short} is not supported (supported: BatchNorm, LayerNorm with mode "
            "'graph' or 'node')"
        )
    return activation(module, name)


def _is_pyg(full: str, cls: str) -> bool:
    return full.startswith("torch_geometric.nn.") and full.endswith(f".{cls}")


def linear(module: Any, name: str) -> Linear:
    """Return torch's or PyG's Linear; weight [out, in].  UsageError for any other module."""
    refuse_hooks(module, name)
    if type(module) is not nn.Linear and not _is_pyg(class_name(module), "Linear"):
        raise UsageError(f"{name}: {class_name(module)} is not supported in the place of a Linear")
    weight = checked(module.weight, f"{name}.weight")
    return Linear(weight, optional(module.bias, f"{name}.bias"))


def _mlp(mlp: Any, name: str) -> tuple[RowOp, ...]:
    """PyG's MLP: a hidden layer is lin, [act], norm, [act]; with plain_last a bare lin ends it."""
    act = activation(mlp.act, f"{name}.act")
    ops: list[RowOp] = []
    for i, lin in enumerate(mlp.lins):
        ops += row_ops(lin, f"{name}.lins.{i}")
        if i < len(mlp.norms):
            norm = row_ops(mlp.norms[i], f"{name}.norms.{i}")
            ops += (*act, *norm) if mlp.act_first else (*norm, *act)
    return tuple(ops)


def op_width(op: RowOp) -> tuple[int, int] | None:
    """Return the (input, output) width an operation insists on; None where any width will do."""
    if isinstance(op, Linear):
        return int(op.weight.shape[1]), int(op.weight.shape[0])
    tensors: tuple[Tensor | None, ...] = ()
    if isinstance(op, Affine):
        tensors = (op.scale, op.shift)
    elif isinstance(op, LayerNorm | GraphLayerNorm):
        tensors = (op.weight, op.bias)
    elif isinstance(op, Activation) and op.weight is not None and op.weight.numel() > 1:
        tensors = (op.weight,)
    for tensor in tensors:
        if tensor is not None:
            return int(tensor.shape[0]), int(tensor.shape[0])
    return None


def input_width(ops: Sequence[RowOp]) -> int | None:
    """Return the width that a sequence takes, or None where nothing in it tells."""
    for op in ops:
        if isinstance(op, MeanHeads):
            return None
        width = op_width(op)
        if width is not None:
            return width[0]
    return None


def chain_width(ops: Sequence[RowOp], width: int, name: str) -> int:
    """Return the width after ``ops`` on rows of ``width``; UsageError where one does not fit."""
    for op in ops:
        if isinstance(op, MeanHeads):
            if width % op.heads:
                raise UsageError(f"{name}: {width} channels do not split into {op.heads} heads")
            width //= op.heads
            continue
        wanted = op_width(op)
        if wanted is None:
            continue
        if wanted[0] != width:
            raise UsageError(
                f"{name}: {type(op).__name__} takes {wanted[0]} channels but gets {width}"
            )
        width = wanted[1]
    return width
