"""PyG's single layers from a state dict: tensors under a prefix and the constructor's options."""

from typing import Any

import torch
from torch import Tensor

from hyades.common.errors import UsageError
from hyades.gpu_side.models import parts
from hyades.gpu_side.models.checkpoint import Weights
from hyades.gpu_side.models.ir import Activation, Conv, Linear, Normalize, RowOp
from hyades.gpu_side.models.specs import sequence_ops

CONV_OPTIONS = {
    "GCNConv": {"improved", "cached", "add_self_loops", "normalize", "bias"},
    "SAGEConv": {"normalize", "root_weight", "project", "bias"},
    "GINConv": {"eps", "train_eps"},
    "GATConv": {
        "heads",
        "concat",
        "negative_slope",
        "add_self_loops",
        "bias",
        "residual",
        "edge_dim",
        "fill_value",
        "dropout",
    },
}
MESSAGE_PASSING = {"aggr", "aggr_kwargs", "flow", "node_dim", "decomposed_layers"}
_Width = int | None


def refuse(options: dict[str, Any], where: str) -> None:
    """Raise UsageError, by name, for options that a layer of ours cannot have."""
    if isinstance(options.get("in_channels"), list):
        raise UsageError(
            f"{where}: in_channels = {options['in_channels']}; bipartite layers are not supported"
        )
    if options.get("v2"):
        raise UsageError(f"{where}: v2 = true (GATv2Conv) is not supported")
    if options.get("edge_dim") is not None:
        raise UsageError(
            f"{where}: edge_dim = {options['edge_dim']} (edge features) is not supported"
        )
    if options.get("flow", "source_to_target") != "source_to_target":
        raise UsageError(
            f"{where}: flow = {options['flow']!r} is not supported; reverse the edges instead"
        )


def one_lin(tensors: dict[str, Tensor], origin: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the state dict with `lin_src` of a GATConv before PyG 2.6 under its present name.

    UsageError where lin_src and lin_dst differ: that layer is bipartite.
    """
    result, notes = dict(tensors), []
    for key in tensors:
        prefix, found, _ = key.partition("lin_src.weight")
        if not found or f"{prefix}att_src" not in tensors:
            continue
        other = result.pop(f"{prefix}lin_dst.weight", None)
        if other is not None and not torch.equal(other, tensors[key]):
            raise UsageError(
                f"{origin}: {prefix}lin_src and {prefix}lin_dst differ; bipartite layers are not "
                "supported"
            )
        result[f"{prefix}lin.weight"] = result.pop(key)
        notes.append(f"read {key} as {prefix}lin.weight (written by PyG before 2.6)")
    return result, notes


def gcn(w: Weights, prefix: str, options: dict[str, Any], widths: tuple[_Width, _Width]) -> Conv:
    """GCNConv under ``prefix`` ("convs.0."); widths are (in, out) where known."""
    name = layer_name(prefix, "GCNConv")
    parts.aggregate(name, options.get("aggr", "add"), ("sum", "add"))
    weight = w.take(f"{prefix}lin.weight", widths[::-1])
    normalize = options.get("normalize", True)
    loops = options.get("add_self_loops")
    return parts.gcn(
        name,
        weight,
        w.maybe(f"{prefix}bias", weight.shape[:1], options.get("bias")),
        improved=options.get("improved", False),
        add_self_loops=normalize if loops is None else loops,
        normalize=normalize,
        edge_weight=options.get("edge_weight", True),
    )


def sage(w: Weights, prefix: str, options: dict[str, Any], widths: tuple[_Width, _Width]) -> Conv:
    """SAGEConv under ``prefix``."""
    name = layer_name(prefix, "SAGEConv")
    aggr = parts.aggregate(name, options.get("aggr", "mean"))
    weight = w.take(f"{prefix}lin_l.weight", widths[::-1])
    out, width = weight.shape
    source: tuple[RowOp, ...] = ()
    if options.get("project", w.has(f"{prefix}lin.weight")):
        project = w.take(f"{prefix}lin.weight", (width, width))
        source = (Linear(project, w.take(f"{prefix}lin.bias", (width,))), Activation("relu"))
    bias = w.maybe(f"{prefix}lin_l.bias", (out,), options.get("bias"))
    root = w.maybe(f"{prefix}lin_r.weight", (out, width), options.get("root_weight"))
    conv = parts.sage(name, weight, bias, root, aggr=aggr, source=source)
    return parts.then(conv, (Normalize(),)) if options.get("normalize", False) else conv


def gin(w: Weights, prefix: str, options: dict[str, Any], mlp: tuple[RowOp, ...]) -> Conv:
    """GINConv under ``prefix`` with the row operations of its `nn`."""
    name = layer_name(prefix, "GINConv")
    aggr = parts.aggregate(name, options.get("aggr", "add"))
    return parts.gin(name, mlp, float(w.take(f"{prefix}eps", (1,))), aggr)


def gat(w: Weights, prefix: str, options: dict[str, Any], widths: tuple[_Width, _Width]) -> Conv:
    """GATConv under ``prefix``; widths[1] is its out_channels, those of one head."""
    name = layer_name(prefix, "GATConv")
    parts.aggregate(name, options.get("aggr", "add"), ("sum", "add"))
    att_src = w.take(f"{prefix}att_src", (1, options.get("heads"), widths[1]))
    _, heads, channels = att_src.shape
    concat = options.get("concat", True)
    out = heads * channels if concat else channels
    weight = w.take(f"{prefix}lin.weight", (heads * channels, widths[0]))
    return parts.gat(
        name,
        parts.Gat(
            weight,
            att_src[0],
            w.take(f"{prefix}att_dst", att_src.shape)[0],
            w.maybe(f"{prefix}bias", (out,), options.get("bias")),
            w.maybe(f"{prefix}res.weight", (out, int(weight.shape[1])), options.get("residual")),
            concat=concat,
            negative_slope=options.get("negative_slope", 0.2),
            add_self_loops=options.get("add_self_loops", True),
        ),
    )


def conv(w: Weights, cls: str, prefix: str, options: dict[str, Any]) -> Conv:
    """Return the layer of class ``cls`` whose keys start with ``prefix`` ("conv1." or "")."""
    name = layer_name(prefix, cls)
    refuse(options, name)
    allowed = CONV_OPTIONS[cls] | MESSAGE_PASSING | {"in_channels", "out_channels", "edge_weight"}
    if cls == "GINConv":
        allowed = allowed | {"nn"}
    extra = sorted(set(options) - allowed)
    if extra:
        raise UsageError(f"{name}: {cls} takes no {', '.join(extra)}")
    widths = (options.get("in_channels"), options.get("out_channels"))
    if cls == "GINConv":
        if "nn" not in options:
            raise UsageError(
                f"{name}: the keys do not tell what its nn is; list its operations, as "
                'nn = ["linear", "relu", "linear"]'
            )
        mlp = sequence_ops(options["nn"], w, f"{prefix}nn.", f"{name}: nn")
        return gin(w, prefix, options, mlp)
    builders = {"GCNConv": gcn, "SAGEConv": sage, "GATConv": gat}
    return builders[cls](w, prefix, options, widths)


def layer_name(prefix: str, cls: str) -> str:
    """Return a layer's name for messages."""
    return f"{prefix.rstrip('.') or 'model'} ({cls})"
