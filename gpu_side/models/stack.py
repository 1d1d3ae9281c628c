"""A stack of single layers from a state dict, PyG's or DGL's, as a model file lays it out."""

from typing import Any

from msgspec import UNSET
from torch import Tensor

from hyades.common.errors import UsageError
from hyades.gpu_side.models import dgl, parts, pyg_state
from hyades.gpu_side.models.checkpoint import Weights, shown
from hyades.gpu_side.models.infer import Layer, find_layers, layer_widths
from hyades.gpu_side.models.ir import Conv, Model, RowOp
from hyades.gpu_side.models.schema import DglKwargs, ModelFile, OpSpec, PygKwargs, convert, given
from hyades.gpu_side.models.specs import spec_ops

CLASSES = {"pyg": tuple(pyg_state.CONV_OPTIONS), "dgl": tuple(dgl.DGL_OPTIONS)}
# What DGL's and PyG's constructors take where nothing is said, of what keys cannot tell.
DEFAULTS: dict[tuple[str, str], dict[str, Any]] = {
    ("dgl", "GraphConv"): {"norm": "both", "activation": "none"},
    ("dgl", "SAGEConv"): {"activation": "none", "norm": "none"},
    ("dgl", "GINConv"): {"aggregator_type": "sum", "activation": "none"},
    ("dgl", "GATConv"): {"negative_slope": 0.2, "activation": "none"},
    ("pyg", "GCNConv"): {"improved": False, "add_self_loops": "as normalize", "normalize": True},
    ("pyg", "SAGEConv"): {"aggr": "mean", "normalize": False},
    ("pyg", "GINConv"): {"aggr": "add"},
    ("pyg", "GATConv"): {"negative_slope": 0.2, "add_self_loops": True},
}


def stack_model(
    file: ModelFile, cls: str, framework: str, tensors: dict[str, Tensor], origin: str, where: str
) -> tuple[Model, list[str]]:
    """Return the model and what was assumed; UsageError names what does not fit or must be said."""
    layers = _layers(file, cls, framework, tensors, origin, where)
    if file.layer and len(file.layer) != len(layers):
        raise UsageError(f"{where}: {len(file.layer)} [[layer]] tables for {len(layers)} layers")
    if len(layers) > 1 and file.between is UNSET:
        raise UsageError(
            f"{where}: the keys do not tell what lies between the {len(layers)} layers; say so, as "
            'between = ["relu"] or between = []'
        )
    weights = Weights(tensors, origin)
    convs: list[Conv] = []
    options_of = []
    for i, layer in enumerate(layers):
        kind = PygKwargs if framework == "pyg" else DglKwargs
        own = {**file.kwargs, **(file.layer[i] if file.layer else {})}
        options = given(convert(kind, own, f"{where}: layer {i}"))
        options_of.append(options)
        conv = _conv(weights, layer, options, _following(layers, tensors, i), where)
        last = i == len(layers) - 1
        between = [] if file.between is UNSET else file.between
        convs.append(parts.then(conv, _ops(file.last if last else between, weights, i, where)))
    weights.finish()
    parts.check_chain(convs)
    return Model(tuple(convs)), _assumed(framework, cls, options_of)


def _layers(
    file: ModelFile, cls: str, framework: str, tensors: dict[str, Tensor], origin: str, where: str
) -> list[Layer]:
    if file.layers:
        return [Layer(framework, cls, prefix.rstrip(".")) for prefix in file.layers]
    found = find_layers(tensors)
    wrong = [layer for layer in found if (layer.framework, layer.cls) != (framework, cls)]
    if not found or wrong:
        seen = shown(f"{layer.prefix or 'the file'} ({layer.cls})" for layer in wrong)
        raise UsageError(
            f"{where}: class = {cls!r} ({framework}), but {origin} has "
            f"{seen or 'no graph convolution that is recognised'}; list the layers' prefixes, as "
            'layers = ["conv1", "conv2"]'
        )
    return found


def _following(layers: list[Layer], tensors: dict[str, Tensor], i: int) -> int | None:
    """Return the input width of the next layer, where the keys tell."""
    return layer_widths(tensors, layers[i + 1])[0] if i + 1 < len(layers) else None


def _conv(
    weights: Weights, layer: Layer, options: dict[str, Any], following: int | None, where: str
) -> Conv:
    prefix = f"{layer.prefix}." if layer.prefix else ""
    if layer.cls == "GATConv" and "concat" not in options:
        concat = _concat(weights, layer, prefix, following)
        if concat is None:
            raise UsageError(
                f"{where}: the keys do not tell whether {layer.prefix or 'the layer'} puts its "
                "heads side by side or averages them; give concat in a [[layer]] table"
            )
        options = {**options, "concat": concat}
    if layer.framework == "dgl":
        return dgl.conv(weights, layer.cls, prefix, options)
    if isinstance(options.get("out_channels"), str):
        raise UsageError(f"{where}: out_channels = {options['out_channels']!r} is not a number")
    return pyg_state.conv(weights, layer.cls, prefix, options)


def _concat(weights: Weights, layer: Layer, prefix: str, following: int | None) -> bool | None:
    """Whether a GAT layer's heads stay side by side, where keys or the next layer's width tell."""
    key = f"{prefix}{'attn_l' if layer.framework == 'dgl' else 'att_src'}"
    if not weights.has(key) or weights.tensors[key].dim() != 3:
        return True  # taking the key reports it
    _, heads, channels = weights.tensors[key].shape
    if heads == 1:
        return True
    if layer.framework == "pyg" and weights.has(f"{prefix}bias"):
        return len(weights.tensors[f"{prefix}bias"]) == heads * channels
    if following == heads * channels:
        return True
    return False if following == channels else None


def _ops(specs: list[OpSpec], weights: Weights, i: int, where: str) -> tuple[RowOp, ...]:
    """Return the operations after layer ``i``; a key's {i} is its number."""
    ops: list[RowOp] = []
    for spec in specs:
        if isinstance(spec, dict) and isinstance(spec.get("key"), str):
            spec = {**spec, "key": spec["key"].replace("{i}", str(i))}
        ops += spec_ops(spec, weights, "", f"(no key given for {spec})", where)
    return tuple(ops)


def _assumed(framework: str, cls: str, options_of: list[dict[str, Any]]) -> list[str]:
    lines = []
    for name, value in DEFAULTS[framework, cls].items():
        if any(name not in options for options in options_of):
            lines.append(f"{name} = {str(value).lower()}")
    if cls == "GATConv" and framework == "dgl" and any("residual" not in o for o in options_of):
        lines.append("residual = as the keys say (a residual without weights leaves none)")
    return lines
