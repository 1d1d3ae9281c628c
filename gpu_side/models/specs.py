"""Row operations from names in a model file and tensors in a state dict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hyades.common.errors import UsageError
from hyades.gpu_side.models.checkpoint import Weights
from hyades.gpu_side.models.ir import (
    Activation,
    GraphLayerNorm,
    LayerNorm,
    Linear,
    Normalize,
    RowOp,
)
from hyades.gpu_side.models.rowops import activation, activation_named, batch_norm
from hyades.gpu_side.models.schema import OpSpec

_NORM_KWARGS = {
    "batch": {"eps", "momentum", "affine", "track_running_stats", "allow_single_element"},
    "layer": {"eps", "affine", "mode", "elementwise_affine", "bias"},
}
_NORM_NAMES = {
    "batchnorm": ("batch", True),
    "batch": ("batch", True),
    "layernorm": ("layer", True),
    "layer": ("layer", True),
    "torch.nn.batchnorm1d": ("batch", False),
    "torch.nn.layernorm": ("layer", False),
}


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm without its tensors.

    ``pyg`` tells PyG's class from torch's: its BatchNorm keeps the tensors one level down
    (`module.`) and its LayerNorm has the mode 'graph' by default.
    """

    kind: str  # batch, layer
    pyg: bool
    eps: float
    mode: str
    affine: bool | None  # None: as the keys say

    def ops(self, weights: Weights, prefix: str, width: int | None) -> tuple[RowOp, ...]:
        """Take the norm's tensors under ``prefix`` ("norms.0")."""
        key = f"{prefix}.module" if self.kind == "batch" and self.pyg else prefix
        weight = weights.maybe(f"{key}.weight", (width,), self.affine)
        bias = weights.maybe(f"{key}.bias", (width,), self.affine)
        if self.kind == "batch":
            mean = weights.take(f"{key}.running_mean", (width,))
            var = weights.take(f"{key}.running_var", (width,))
            weights.ignore(f"{key}.num_batches_tracked")
            return (batch_norm(weight, bias, mean, var, self.eps, key),)
        if self.mode == "graph":
            return (GraphLayerNorm(weight, bias, self.eps),)
        return (LayerNorm(weight, bias, self.eps),)


def norm_spec(name: str, kwargs: dict[str, Any], where: str) -> NormSpec:
    """Return the norm that PyG resolves ``name`` to; UsageError names what is not supported."""
    plain = name.lower().replace("_", "").replace("-", "").replace(" ", "")
    plain = plain.removeprefix("torchgeometric.nn.norm.").removeprefix("torchgeometric.nn.")
    if plain not in _NORM_NAMES:
        raise UsageError(
            f"{where}: norm {name!r} is not supported (supported: batch_norm, layer_norm, "
            "torch.nn.BatchNorm1d, torch.nn.LayerNorm)"
        )
    kind, pyg = _NORM_NAMES[plain]
    unknown = sorted(set(kwargs) - _NORM_KWARGS[kind])
    if unknown:
        raise UsageError(f"{where}: norm {name!r} takes no {', '.join(unknown)}")
    if not kwargs.get("track_running_stats", True):
        raise UsageError(f"{where}: BatchNorm with track_running_stats=False is not supported")
    mode = kwargs.get("mode", "graph" if pyg else "node")
    if mode not in ("graph", "node"):
        raise UsageError(f"{where}: LayerNorm mode {mode!r} is not supported (graph or node)")
    affine = kwargs.get("affine", kwargs.get("elementwise_affine"))
    return NormSpec(kind, pyg, float(kwargs.get("eps", 1e-5)), mode, affine)


def act_ops(
    act: nn.Module | None, weights: Weights, keys: tuple[str, ...], where: str
) -> tuple[RowOp, ...]:
    """Return the activation, with PReLU's slope from the first of ``keys`` that is there."""
    if not isinstance(act, nn.PReLU):
        return activation(act, where)
    present = [key for key in keys if weights.has(key)] or list(keys[:1])
    slopes = [weights.take(key, (act.num_parameters,)) for key in present]
    if any(not torch.equal(slope, slopes[0]) for slope in slopes):
        raise UsageError(f"{weights.origin}: {' and '.join(present)} differ; PyG shares them")
    return (Activation("prelu", {}, slopes[0]),)


def spec_ops(
    spec: OpSpec, weights: Weights, base: str, default_key: str, where: str
) -> tuple[RowOp, ...]:
    """Return the row operations of one entry of a model file.

    Keys are taken relative to ``base`` ("convs.0.nn." or ""); an entry without a key uses
    ``default_key``.
    """
    table = {"op": spec} if isinstance(spec, str) else dict(spec)
    op = table.pop("op", None)
    if not isinstance(op, str):
        raise UsageError(f"{where}: a row operation needs op = NAME, this one is {spec}")
    key = (base + str(table.pop("key", default_key))).rstrip(".")
    plain = op.lower().replace("_", "").replace("-", "")
    if plain in ("dropout", "identity", "none"):
        return ()
    if plain == "linear":
        _nothing_else(table, where, op)
        weight = weights.take(f"{key}.weight", (None, None))
        bias = weights.maybe(f"{key}.bias", (int(weight.shape[0]),))
        return (Linear(weight, bias),)
    if plain == "normalize":
        eps = float(table.pop("eps", 1e-12))
        _nothing_else(table, where, op)
        return (Normalize(eps),)
    if "norm" in plain:
        nested = weights.under(f"{key}.module.")
        names = {"batchnorm": "batch_norm" if nested else "torch.nn.BatchNorm1d"}
        if plain == "layernorm":
            table.setdefault("mode", "node")
        return norm_spec(names.get(plain, op), table, where).ops(weights, key, None)
    act = activation_named(op, _prelu(table, plain, weights, key), where)
    return act_ops(act, weights, (f"{key}.weight",), where)


def _prelu(table: dict[str, Any], plain: str, weights: Weights, key: str) -> dict[str, Any]:
    if plain == "prelu" and weights.has(f"{key}.weight"):
        return {"num_parameters": weights.tensors[f"{key}.weight"].numel(), **table}
    return table


def _nothing_else(table: dict[str, Any], where: str, op: str) -> None:
    if table:
        raise UsageError(f"{where}: {op} takes no {', '.join(sorted(table))}")


def sequence_ops(
    specs: Sequence[OpSpec], weights: Weights, base: str, where: str
) -> tuple[RowOp, ...]:
    """Return the row operations of a list; an entry without a key uses its number in it."""
    ops: list[RowOp] = []
    for i, spec in enumerate(specs):
        ops += spec_ops(spec, weights, base, str(i), f"{where}[{i}]")
    return tuple(ops)
