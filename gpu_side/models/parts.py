"""The convolutions as IR, from plain tensors; shared by every producer (PyG, DGL, state dicts).

Each builder takes weights that `rowops.checked` has seen and returns one `Conv`.  The caller names
the layer ("convs.0 (GCNConv)"), so that every error says where it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch import Tensor

from hyades.common.errors import UsageError
from hyades.gpu_side.models.ir import Affine, Aggregate, Attention, Conv, Linear, RowOp
from hyades.gpu_side.models.rowops import chain_width, input_width

_AGGREGATES: dict[str, Aggregate] = {"sum": "sum", "add": "sum", "mean": "mean", "max": "max"}


def aggregate(
    name: str, aggr: object, allowed: Sequence[str] = ("sum", "add", "mean", "max")
) -> Aggregate:
    """Return the IR's name for ``aggr``; UsageError names the layer and what would do."""
    if not isinstance(aggr, str) or aggr not in allowed:
        raise UsageError(
            f"{name}: aggregation {_shown(aggr)} is not supported; supported here: "
            f"{', '.join(a for a in allowed if a != 'add')}"
        )
    return _AGGREGATES[aggr]


def _shown(aggr: object) -> str:
    return repr(aggr) if isinstance(aggr, str | list | tuple) else type(aggr).__name__


def _bias(bias: Tensor | None) -> tuple[RowOp, ...]:
    return () if bias is None else (Affine(None, bias),)


def matrix(name: str, weight: Tensor) -> tuple[int, int]:
    """Return (out, in) of a weight; UsageError where it is not a matrix or is empty."""
    if weight.dim() != 2 or 0 in weight.shape:
        raise UsageError(f"{name}: a weight must be a matrix, this one is {list(weight.shape)}")
    return int(weight.shape[0]), int(weight.shape[1])


def gcn(
    name: str,
    weight: Tensor,
    bias: Tensor | None,
    *,
    improved: bool = False,
    add_self_loops: bool = True,
    normalize: bool = True,
    edge_weight: bool = True,
) -> Conv:
    """PyG's GCNConv; weight [out, in], bias [out]."""
    if add_self_loops and not normalize:
        raise UsageError(f"{name}: add_self_loops=True needs normalize=True, as in PyG")
    rows, columns = matrix(name, weight)
    return Conv(
        name,
        columns,
        rows,
        "sum",
        neighbour=Linear(weight),
        norm="gcn" if normalize else "none",
        loops="one" if add_self_loops else "keep",
        loop_weight=2.0 if improved else 1.0,
        edge_weight=edge_weight,
        post=_bias(bias),
    )


def sage(
    name: str,
    weight: Tensor,
    bias: Tensor | None,
    root: Tensor | None,
    *,
    aggr: Aggregate = "mean",
    source: tuple[RowOp, ...] = (),
    closed: bool = False,
) -> Conv:
    """GraphSAGE; weight [out, in] for the neighbours, root [out, in] for the vertex itself.

    ``source`` projects the senders only.  ``closed`` is DGL's 'gcn' aggregator.
    """
    rows, columns = matrix(name, weight)
    if root is not None and root.shape[0] != rows:
        raise UsageError(f"{name}: the two linear maps disagree, {rows} and {root.shape[0]} rows")
    width = input_width(source) or columns
    if root is not None and int(root.shape[1]) != width:
        raise UsageError(
            f"{name}: sources have {width} channels and destinations {int(root.shape[1])}; "
            "bipartite layers are not supported"
        )
    chain_width(source, width, name)
    return Conv(
        name,
        width,
        rows,
        aggr,
        source=source,
        neighbour=Linear(weight),
        root=None if root is None else Linear(root),
        norm="closed" if closed else "none",
        post=_bias(bias),
    )


def gin(name: str, ops: tuple[RowOp, ...], eps: float, aggr: Aggregate = "sum") -> Conv:
    """GIN with the row operations ``ops`` as its MLP; a leading linear map moves before the sum."""
    width = input_width(ops)
    if width is None:
        raise UsageError(f"{name}: nothing in its MLP tells how many channels it takes")
    neighbour, post = None, ops
    if ops and isinstance(ops[0], Linear):
        neighbour = Linear(ops[0].weight)
        post = _bias(ops[0].bias) + ops[1:]
    return Conv(
        name,
        width,
        chain_width(ops, width, name),
        aggr,
        neighbour=neighbour,
        self_scale=1.0 + eps,
        post=post,
    )


@dataclass(frozen=True, slots=True)
class Gat:
    """What a GAT layer has besides its name: weight [H * C, in], att_* [H, C], root, bias."""

    weight: Tensor
    att_src: Tensor
    att_dst: Tensor
    bias: Tensor | None = None
    root: Tensor | None = None
    concat: bool = True
    negative_slope: float = 0.2
    add_self_loops: bool = True


def gat(name: str, part: Gat) -> Conv:
    """PyG's GATConv: heads side by side, or their mean and then root and bias."""
    rows, columns = matrix(name, part.weight)
    heads, channels = (int(n) for n in part.att_src.shape)
    if heads * channels != rows or part.att_dst.shape != part.att_src.shape:
        raise UsageError(
            f"{name}: {rows} projected channels do not make the attention's {heads} x {channels}"
        )
    out = rows if part.concat else channels
    for label, tensor in (("residual", part.root), ("bias", part.bias)):
        if tensor is not None and int(tensor.shape[0]) != out:
            raise UsageError(f"{name}: the {label} has {int(tensor.shape[0])} rows, not {out}")
    return Conv(
        name,
        columns,
        out,
        "attention",
        neighbour=Linear(part.weight),
        root=None if part.root is None else Linear(part.root),
        loops="one" if part.add_self_loops else "keep",
        attention=Attention(heads, part.att_src, part.att_dst, part.negative_slope),
        mean_heads=not part.concat,
        post=_bias(part.bias),
    )


def then(conv: Conv, ops: Sequence[RowOp]) -> Conv:
    """Return ``conv`` with ``ops`` after it; UsageError where their widths do not fit."""
    width = chain_width(ops, conv.out_channels, conv.name)
    return replace(conv, post=conv.post + tuple(ops), out_channels=width)


def check_chain(layers: Sequence[Conv]) -> None:
    """Raise UsageError where a layer's input is not as wide as its predecessor's output."""
    for before, after in pairwise(layers):
        if before.out_channels != after.in_channels:
            raise UsageError(
                f"{after.name} takes {after.in_channels} channels, but {before.name} gives "
                f"{before.out_channels}"
            )
