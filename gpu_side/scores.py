"""Weights that give the destinations' attention scores straight from the input rows."""

from torch import Tensor

from hyades.gpu_side.models.ir import Conv


def score_weights(conv: Conv) -> Tensor:
    """Return [d_in, heads] with x @ weights == (W x per head) . att_dst.

    (W x) . a = x . (W^T a), so one narrow product stands for the projection.
    """
    assert conv.attention is not None
    attention = conv.attention
    if conv.neighbour is None:
        raise AssertionError("attention always has a projection")
    weight = conv.neighbour.weight.view(attention.heads, -1, conv.neighbour.weight.shape[1])
    return (weight.double() * attention.att_dst.double()[:, :, None]).sum(dim=1).t().float()
