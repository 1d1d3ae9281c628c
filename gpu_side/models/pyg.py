"""From a live module of PyG's zoo to the IR.

Takes the BasicGNN models GCN, GraphSAGE, GIN and GAT, the single layers GCNConv, SAGEConv, GINConv
and GATConv, and torch_geometric.nn.Sequential of such layers and row operations in one chain.
Classes are recognised by name, so torch_geometric is never imported here.  The result is what the
module computes after ``.eval()``.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hyades.common.errors import UsageError
from hyades.gpu_side.models import parts
from hyades.gpu_side.models.ir import Activation, Conv, Model, Normalize, RowOp
from hyades.gpu_side.models.rowops import (
    ROUNDED,
    activation,
    checked,
    class_name,
    linear,
    optional,
    refuse_hooks,
    row_ops,
)

ZOO = ("GCN", "GraphSAGE", "GIN", "GAT")
CONVS = ("GCNConv", "SAGEConv", "GINConv", "GATConv")
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
}


def from_module(module: nn.Module) -> Model:
    """Return the IR of a live PyG module.

    UsageError names the class, layer or option that is not supported; DataError the tensor that
    holds NaN or infinity.
    """
    full = class_name(module)
    if full in _WRAPPERS:
        return from_module(getattr(module, _WRAPPERS[full]))
    short = type(module).__name__
    notes = ["in eval mode, as after .eval()"] if module.training else []
    if any(p.dtype == torch.float64 for p in module.parameters()):
        notes.append(ROUNDED)
    if full.startswith("torch_geometric.nn.models.basic_gnn."):
        model = _zoo(module, short)
    elif full == "torch_geometric.nn.sequential.Sequential":
        model = _sequential(module)
    elif full.startswith("torch_geometric.nn.conv."):
        layer = conv(module, "module")
        model = Model((layer,))
    else:
        raise UsageError(
            f"{full} is not a model of PyG's zoo; pass torch_geometric.nn.models "
            f"{', '.join(ZOO)}, one of {', '.join(CONVS)}, torch_geometric.nn.Sequential of these, "
            "or save its state_dict and describe its layers in a model file (docs/models.md)"
        )
    parts.check_chain(model.layers)
    text = f"{short}: {model.in_channels} -> {model.out_channels}, {len(model.layers)} layers"
    return Model(model.layers, model.jump, model.head, "\n".join([text, *notes]))


def _zoo(gnn: Any, short: str) -> Model:
    if short not in ZOO:
        raise UsageError(f"the model {short} is not supported (supported: {', '.join(ZOO)})")
    refuse_hooks(gnn, short)
    if gnn.jk_mode not in (None, "last", "cat", "max"):
        raise UsageError(
            f"{short}: jk={gnn.jk_mode!r} is not supported (supported: last, cat, max)"
        )
    act = activation(gnn.act, "act")
    norms = gnn.norms if gnn.norms is not None else [None] * len(gnn.convs)
    if not len(gnn.convs) == len(norms) == gnn.num_layers:
        raise UsageError(
            f"{short}: {len(gnn.convs)} layers and {len(norms)} norms, but num_layers = "
            f"{gnn.num_layers}; the module was changed after it was made"
        )
    layers = []
    for i, (module, norm) in enumerate(zip(gnn.convs, norms, strict=True)):
        layer = conv(module, f"convs.{i}")
        if i < gnn.num_layers - 1 or gnn.jk_mode is not None:
            ops = row_ops(norm, f"norms.{i}")
            layer = parts.then(layer, (*act, *ops) if gnn.act_first else (*ops, *act))
        layers.append(layer)
    head: tuple[RowOp, ...] = (linear(gnn.lin, "lin"),) if hasattr(gnn, "lin") else ()
    return Model(tuple(layers), None if gnn.jk_mode == "last" else gnn.jk_mode, head)


def conv(module: Any, path: str) -> Conv:
    """Return one convolution; ``path`` is where it sits, for messages."""
    short = type(module).__name__
    name = f"{path} ({short})"
    full = class_name(module)
    if not full.startswith("torch_geometric.nn.conv.") or short not in CONVS:
        raise UsageError(
            f"{path}: the layer {short} is not supported (supported: {', '.join(CONVS)})"
        )
    refuse_hooks(module, path)
    if module.flow != "source_to_target":
        raise UsageError(
            f"{name}: flow={module.flow!r} is not supported; reverse the edges instead"
        )
    if isinstance(getattr(module, "in_channels", 1), tuple | list):
        raise UsageError(
            f"{name}: in_channels={tuple(module.in_channels)}; bipartite layers are not supported"
        )
    builders = {"GCNConv": _gcn, "SAGEConv": _sage, "GINConv": _gin, "GATConv": _gat}
    return builders[short](module, path, name)


def _gcn(module: Any, path: str, name: str) -> Conv:
    parts.aggregate(name, module.aggr, ("sum", "add"))
    return parts.gcn(
        name,
        linear(module.lin, f"{path}.lin").weight,
        optional(module.bias, f"{path}.bias"),
        improved=module.improved,
        add_self_loops=module.add_self_loops,
        normalize=module.normalize,
    )


def _sage(module: Any, path: str, name: str) -> Conv:
    aggr = parts.aggregate(name, module.aggr)
    source: tuple[RowOp, ...] = ()
    if module.project:
        source = (linear(module.lin, f"{path}.lin"), Activation("relu"))
    root = linear(module.lin_r, f"{path}.lin_r").weight if module.root_weight else None
    lin_l = linear(module.lin_l, f"{path}.lin_l")
    layer = parts.sage(name, lin_l.weight, lin_l.bias, root, aggr=aggr, source=source)
    return parts.then(layer, (Normalize(),)) if module.normalize else layer


def _gin(module: Any, path: str, name: str) -> Conv:
    aggr = parts.aggregate(name, module.aggr)
    eps = float(checked(module.eps, f"{path}.eps"))
    return parts.gin(name, row_ops(module.nn, f"{path}.nn"), eps, aggr)


def _gat(module: Any, path: str, name: str) -> Conv:
    parts.aggregate(name, module.aggr, ("sum", "add"))
    if module.edge_dim is not None:
        raise UsageError(f"{name}: edge_dim={module.edge_dim} (edge features) is not supported")
    return parts.gat(
        name,
        parts.Gat(
            linear(module.lin, f"{path}.lin").weight,
            checked(module.att_src, f"{path}.att_src")[0],
            checked(module.att_dst, f"{path}.att_dst")[0],
            optional(module.bias, f"{path}.bias"),
            None if module.res is None else linear(module.res, f"{path}.res").weight,
            concat=module.concat,
            negative_slope=module.negative_slope,
            add_self_loops=module.add_self_loops,
        ),
    )


def _sequential(module: Any) -> Model:
    """PyG's Sequential, where every step takes the result of the one before.

    A GCNConv uses edge weights where its header passes a third argument.
    """
    inputs = list(module.signature.param_dict)
    layers: list[Conv] = []
    current = inputs[0]
    for child in module._children:
        step = getattr(module, child.name)
        graph = [p for p in child.param_names[1:] if p not in inputs[1:]]
        if child.param_names[0] != current or graph or len(child.return_names) != 1:
            header = f"{', '.join(child.param_names)} -> {', '.join(child.return_names)}"
            raise UsageError(
                f"{child.name}: '{header}' is not the next step of one chain; skip connections "
                "are not supported"
            )
        current = child.return_names[0]
        if class_name(step).startswith("torch_geometric.nn.conv."):
            layer = conv(step, child.name)
            layers.append(replace(layer, edge_weight=_weighted(child, step) and layer.edge_weight))
            continue
        ops = row_ops(step, child.name)
        if ops and not layers:
            raise UsageError(
                f"{child.name} ({type(step).__name__}) comes before the first convolution; apply "
                "it to the features before ingest"
            )
        if ops:
            layers[-1] = parts.then(layers[-1], ops)
    if not layers:
        raise UsageError("this Sequential has no convolution")
    return Model(tuple(layers))


def _weighted(child: Any, step: Any) -> bool:
    """Whether a step of a Sequential passes edge weights; UsageError for other arguments."""
    extra = child.param_names[2:]
    if len(extra) > 1 or (extra and type(step).__name__ not in ("GCNConv", "GATConv")):
        raise UsageError(
            f"{child.name} ({type(step).__name__}): the arguments {', '.join(extra)} are not "
            "supported"
        )
    return bool(extra)
