"""The meaning of the model IR in plain torch, on a graph in memory; for tests only.

Slow and obvious on purpose: every edge is a row.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from hyades.gpu_side.models.ir import (
    Activation,
    Affine,
    Conv,
    GraphLayerNorm,
    LayerNorm,
    Linear,
    MeanHeads,
    Model,
    Normalize,
    RowOp,
)


def run(
    model: Model,
    x: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Run ``model`` on x [V, F], edge_index int64 [2, E] and edge_weight [E] if there is one."""
    x = x.to(dtype)
    weight = None if edge_weight is None else edge_weight.to(dtype)
    outputs = []
    for layer in model.layers:
        x = _conv(layer, x, edge_index, weight)
        outputs.append(x)
    if model.jump == "cat":
        x = torch.cat(outputs, dim=1)
    elif model.jump == "max":
        x = torch.stack(outputs).max(dim=0).values
    return rows(model.head, x)


def rows(ops: tuple[RowOp, ...], x: Tensor) -> Tensor:
    """Apply row operations to x [V, d]."""
    for op in ops:
        x = _row_op(op, x)
    return x


def _row_op(op: RowOp, x: Tensor) -> Tensor:
    def cast(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(x.dtype)

    match op:
        case Linear(weight, bias):
            return functional.linear(x, weight.to(x.dtype), cast(bias))
        case Affine(scale, shift):
            x = x if scale is None else x * scale.to(x.dtype)
            return x if shift is None else x + shift.to(x.dtype)
        case LayerNorm(weight, bias, eps):
            return functional.layer_norm(x, (x.shape[1],), cast(weight), cast(bias), eps)
        case GraphLayerNorm(weight, bias, eps):
            x = x - x.mean()
            x = x / (x.pow(2).mean().sqrt() + eps)
            x = x if weight is None else x * weight.to(x.dtype)
            return x if bias is None else x + bias.to(x.dtype)
        case Activation("prelu", _, weight) if weight is not None:
            return functional.prelu(x, weight.to(x.dtype))
        case Activation(name, kwargs, _):
            result: Tensor = getattr(functional, name)(x, **kwargs)
            return result
        case Normalize(eps):
            return functional.normalize(x, dim=1, eps=eps)
        case MeanHeads(heads):
            return x.view(len(x), heads, -1).mean(dim=1)


def _loops(layer: Conv, count: int, edge_index: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the layer's edges and weights after its rule for self loops."""
    if layer.loops == "keep":
        return edge_index, weight
    loop = edge_index[0] == edge_index[1]
    edges, kept = edge_index[:, ~loop], weight[~loop]
    if layer.loops == "drop":
        return edges, kept
    own = torch.full((count,), layer.loop_weight, dtype=weight.dtype)
    for vertex, value in zip(edge_index[0, loop].tolist(), weight[loop].tolist(), strict=True):
        own[vertex] = value  # the last duplicate wins
    every = torch.arange(count)
    return torch.cat([edges, torch.stack([every, every])], 1), torch.cat([kept, own])


def _count(index: Tensor, weight: Tensor, count: int) -> Tensor:
    return torch.zeros(count, dtype=weight.dtype).index_add_(0, index, weight)


def _norm(layer: Conv, source: Tensor, target: Tensor, weight: Tensor, count: int) -> Tensor:
    """Return the factor of every edge."""
    ones = torch.ones_like(weight)
    if layer.norm == "gcn":
        scale = _count(target, weight, count).pow(-0.5)
        scale[scale == float("inf")] = 0.0
        return scale[source] * weight * scale[target]
    received = _count(target, ones, count).clamp(min=1)
    sent = _count(source, ones, count).clamp(min=1)
    if layer.norm == "both":
        return weight * sent[source].pow(-0.5) * received[target].pow(-0.5)
    if layer.norm == "right":
        return weight / received[target]
    if layer.norm == "left":
        return weight / sent[source]
    return weight


def _conv(layer: Conv, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None) -> Tensor:
    count = len(x)
    if layer.edge_weight and edge_weight is not None:
        weight, weighted = edge_weight, layer
    else:
        # PyG adds loops of weight 1 to an unweighted graph even where `improved` asks for 2.
        weight = torch.ones(edge_index.shape[1], dtype=x.dtype)
        weighted = replace(layer, loop_weight=1.0)
    (source, target), weight = _loops(weighted, count, edge_index, weight)
    factor = _norm(layer, source, target, weight, count)
    message = rows(layer.source, x)
    project = layer.neighbour or Linear(torch.eye(message.shape[1]))
    if layer.attention is not None:
        y = _attention(layer, _row_op(project, message), source, target)
    else:
        total = _aggregate(layer, message, source, target, factor)
        y = _row_op(project, total)
    if layer.self_scale != 0:
        y = y + layer.self_scale * _row_op(project, x)
    if layer.root is not None:
        y = y + _row_op(layer.root, x)
    return rows(layer.post, y)


def _aggregate(layer: Conv, m: Tensor, source: Tensor, target: Tensor, factor: Tensor) -> Tensor:
    messages = m[source] * factor[:, None]
    empty = torch.zeros_like(m)
    if layer.aggregate == "max":  # no in-edge: zero
        index = target[:, None].expand_as(messages)
        return empty.scatter_reduce(0, index, messages, "amax", include_self=False)
    total = empty.index_add(0, target, messages)
    degree = _count(target, torch.ones_like(factor), len(m))[:, None]
    if layer.norm == "closed":
        return (total + m) / (degree + 1)
    return total / degree.clamp(min=1) if layer.aggregate == "mean" else total


def _attention(layer: Conv, h: Tensor, source: Tensor, target: Tensor) -> Tensor:
    assert layer.attention is not None
    heads = layer.attention.heads
    h = h.view(len(h), heads, -1)
    to = (h * layer.attention.att_dst.to(h.dtype)).sum(-1)
    of = (h * layer.attention.att_src.to(h.dtype)).sum(-1)
    score = functional.leaky_relu(of[source] + to[target], layer.attention.negative_slope)
    index = target[:, None].expand_as(score)
    top = torch.zeros_like(to).scatter_reduce(0, index, score, "amax", include_self=False)
    score = (score - top[target]).exp()
    total = torch.zeros_like(to).index_add(0, target, score) + 1e-16
    messages = h[source] * (score / total[target])[:, :, None]
    y = torch.zeros_like(h).index_add(0, target, messages)
    return y.mean(1) if layer.mean_heads else y.flatten(1)
