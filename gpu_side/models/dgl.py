"""DGL's layers from a state dict: GraphConv, SAGEConv, GINConv, GATConv (DGL 0.7 to 2.x).

DGL adds no self loops: the graph has those it has.  A vertex without in-edges gets zero from its
neighbours, as with allow_zero_in_degree=True.  Edge weights, which DGL takes as an argument of each
call, are not used.
"""

from typing import Any

import torch

from hyades.common.errors import UsageError
from hyades.gpu_side.models import parts
from hyades.gpu_side.models.checkpoint import Weights
from hyades.gpu_side.models.ir import (
    Activation,
    Affine,
    Conv,
    Linear,
    MeanHeads,
    Norm,
    RowOp,
)
from hyades.gpu_side.models.pyg_state import layer_name
from hyades.gpu_side.models.schema import OpSpec
from hyades.gpu_side.models.specs import sequence_ops, spec_ops

DGL_OPTIONS = {
    "GraphConv": {"in_feats", "out_feats", "norm", "weight", "bias", "activation",
                  "allow_zero_in_degree"},
    "SAGEConv": {"in_feats", "out_feats", "aggregator_type", "feat_drop", "bias", "norm",
                 "activation"},
    "GINConv": {"apply_func", "aggregator_type", "init_eps", "learn_eps", "activation"},
    "GATConv": {"in_feats", "out_feats", "num_heads", "feat_drop", "attn_drop", "negative_slope",
                "residual", "activation", "allow_zero_in_degree", "bias", "concat"},
}  # fmt: skip
_NORMS: tuple[Norm, ...] = ("both", "right", "left", "none")


def conv(w: Weights, cls: str, prefix: str, options: dict[str, Any]) -> Conv:
    """Return the layer of class ``cls`` whose keys start with ``prefix`` ("layers.0." or "")."""
    name = layer_name(prefix, cls)
    extra = sorted(set(options) - DGL_OPTIONS[cls])
    if extra:
        raise UsageError(f"{name}: DGL's {cls} takes no {', '.join(extra)}")
    if isinstance(options.get("in_feats"), list):
        raise UsageError(
            f"{name}: in_feats = {options['in_feats']}; bipartite layers are not supported"
        )
    builders = {"GraphConv": _graph, "SAGEConv": _sage, "GINConv": _gin, "GATConv": _gat}
    return builders[cls](w, prefix, name, options)


def _ops(
    w: Weights, prefix: str, name: str, options: dict[str, Any], entry: str
) -> tuple[RowOp, ...]:
    spec = options.get(entry)
    if spec is None or spec == "none":
        return ()
    return spec_ops(spec, w, prefix, entry, f"{name}: {entry}")


def _graph(w: Weights, prefix: str, name: str, options: dict[str, Any]) -> Conv:
    """D_in^-1/2 A D_out^-1/2 x W + b for norm 'both'; 'right': 1/D_in, 'left': 1/D_out, 'none'."""
    norm = options.get("norm", "both")
    if norm not in _NORMS:
        raise UsageError(f"{name}: norm = {norm!r} is not one of {', '.join(_NORMS)}")
    width, out = options.get("in_feats"), options.get("out_feats")
    weight = None
    if options.get("weight", True):
        weight = w.take(f"{prefix}weight", (width, out)).T.contiguous()
        out, width = (int(n) for n in weight.shape)
    elif width is None:
        raise UsageError(f"{name}: weight = false leaves no key that tells in_feats; give it")
    else:
        out = width
    bias = w.maybe(f"{prefix}bias", (out,), options.get("bias"))
    layer = Conv(
        name,
        int(width),
        int(out),
        "sum",
        neighbour=None if weight is None else Linear(weight),
        norm=norm,
        post=() if bias is None else (Affine(None, bias),),
    )
    return parts.then(layer, _ops(w, prefix, name, options, "activation"))


def sage_aggregator(w: Weights, prefix: str) -> str:
    """Return the aggregator that a SAGEConv's keys tell; the four differ in their weights."""
    if w.under(f"{prefix}lstm."):
        return "lstm"
    if w.has(f"{prefix}fc_pool.weight"):
        return "pool"
    return "mean" if w.has(f"{prefix}fc_self.weight") else "gcn"


def _sage(w: Weights, prefix: str, name: str, options: dict[str, Any]) -> Conv:
    """fc_self(x) + fc_neigh(mean, or max of relu(fc_pool(x))); 'gcn': of the closed mean."""
    found = sage_aggregator(w, prefix)
    aggr = options.get("aggregator_type", found)
    if aggr not in ("mean", "gcn", "pool"):
        raise UsageError(f"{name}: aggregator {aggr!r} is not supported (mean, gcn, pool)")
    if aggr != found:
        raise UsageError(f"{name}: aggregator_type = {aggr!r}, but the keys say {found!r}")
    weight = w.take(f"{prefix}fc_neigh.weight", (options.get("out_feats"), options.get("in_feats")))
    out, width = (int(n) for n in weight.shape)
    if w.has(f"{prefix}fc_neigh.bias"):
        raise UsageError(f"{name}: fc_neigh has a bias, as DGL before 0.7 wrote it; not supported")
    source: tuple[RowOp, ...] = ()
    if aggr == "pool":
        pool = w.take(f"{prefix}fc_pool.weight", (width, width))
        source = (Linear(pool, w.maybe(f"{prefix}fc_pool.bias", (width,))), Activation("relu"))
    bias = None
    keys = [f"{prefix}fc_self.bias", f"{prefix}bias"]  # DGL kept it at either place
    for key in [k for k in keys if w.has(k)] or (keys[:1] if options.get("bias") else []):
        more = w.maybe(key, (out,), options.get("bias"))
        bias = more if bias is None or more is None else bias + more
    layer = parts.sage(
        name,
        weight,
        bias,
        None if aggr == "gcn" else w.take(f"{prefix}fc_self.weight", (out, width)),
        aggr={"mean": "mean", "gcn": "sum", "pool": "max"}[aggr],  # type: ignore[arg-type]
        source=source,
        closed=aggr == "gcn",
    )
    layer = parts.then(layer, _ops(w, prefix, name, options, "activation"))
    return parts.then(layer, _ops(w, prefix, name, options, "norm"))


def _gin(w: Weights, prefix: str, name: str, options: dict[str, Any]) -> Conv:
    """apply_func((1 + eps) x + sum, mean or max)."""
    aggr = parts.aggregate(name, options.get("aggregator_type", "sum"), ("sum", "mean", "max"))
    specs: list[OpSpec] | None = options.get("apply_func")
    if specs is None and w.has(f"{prefix}apply_func.weight"):
        specs = [{"op": "linear", "key": ""}]
    if specs is None:
        raise UsageError(
            f"{name}: the keys do not tell what its apply_func is; list its operations, as "
            'apply_func = ["linear", "relu", "linear"]'
        )
    ops = sequence_ops(specs, w, f"{prefix}apply_func.", f"{name}: apply_func")
    layer = parts.gin(name, ops, float(w.take(f"{prefix}eps", (1,))), aggr)
    return parts.then(layer, _ops(w, prefix, name, options, "activation"))


def _gat(w: Weights, prefix: str, name: str, options: dict[str, Any]) -> Conv:
    """PyG's GAT without added self loops; residual and bias come before the heads are combined."""
    attn = w.take(f"{prefix}attn_l", (1, options.get("num_heads"), options.get("out_feats")))
    _, heads, channels = (int(n) for n in attn.shape)
    wide = heads * channels
    weight = w.take(f"{prefix}fc.weight", (wide, options.get("in_feats")))
    width = int(weight.shape[1])
    root = w.maybe(
        f"{prefix}res_fc.weight", (wide, width), options.get("residual") and width != wide
    )
    if options.get("residual") and width == wide:
        root = torch.eye(wide)  # DGL's res_fc is then the identity, without a key
    wanted = options.get("bias")
    bias = w.maybe(f"{prefix}res_fc.bias", (wide,))  # the bias's place where res_fc is linear
    own = w.maybe(f"{prefix}bias", (wide,), wanted if bias is None else None)
    if own is not None:
        bias = own if bias is None else bias + own
    layer = parts.gat(
        name,
        parts.Gat(
            weight,
            attn[0],
            w.take(f"{prefix}attn_r", attn.shape)[0],
            bias,
            root,
            negative_slope=options.get("negative_slope", 0.2),
            add_self_loops=False,
        ),
    )
    layer = parts.then(layer, _ops(w, prefix, name, options, "activation"))
    return layer if options.get("concat", True) else parts.then(layer, (MeanHeads(heads),))
