"""What a model is to the engine: graph convolutions and per-row operations, free of any framework.

A `Model` is a list of `Conv` layers.  Semantics of one layer, for vertex v with input rows x:

    m_u   = source(x_u)                                   row operations on the sender
    agg_v = AGG over in-edges (u -> v) of  w(u, v) * m_u   then `neighbour` (sum, mean commute)
    y_v   = agg_v + self_scale * neighbour(x_v) + root(x_v)
    h_v   = post(y_v)

`norm` and `loops` say which weights w and which self loops.  tests/reference interprets this IR in
plain torch; gpu_side.program lowers it to scans.  Weights are float32 tensors on the CPU.
"""

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

Aggregate = Literal["sum", "mean", "max", "attention"]
Norm = Literal[
    "none",  # w = edge weight or 1
    "gcn",  # d_j^-1/2 e_ij d_i^-1/2, d = weighted in-degree with the loop (PyG gcn_norm)
    "both",  # DGL: out-degree^-1/2 of the source, in-degree^-1/2 of the destination, clamped to 1
    "right",  # DGL: 1 / in-degree of the destination, clamped to 1
    "left",  # DGL: 1 / out-degree of the source, clamped to 1
    "closed",  # DGL SAGE 'gcn': (sum + self) / (in-degree + 1)
]


@dataclass(frozen=True, slots=True)
class Linear:
    """x @ weight.T + bias; weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Affine:
    """x * scale + shift, each [d] or None: a bias, or BatchNorm in eval mode."""

    scale: Tensor | None
    shift: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Per-row LayerNorm (PyG mode 'node'): (x - mean) / sqrt(var + eps) * weight + bias."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class GraphLayerNorm:
    """PyG LayerNorm mode 'graph': (x - mean of all) / (biased std of all + eps) * weight + bias."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function by its torch.nn.functional name, with keyword arguments.

    PReLU carries its slope tensor [1] or [d] in `weight`.
    """

    name: str
    kwargs: dict[str, float | bool | str] = field(default_factory=dict)
    weight: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Normalize:
    """x / max(||x||_2, eps) per row."""

    eps: float = 1e-12


@dataclass(frozen=True, slots=True)
class MeanHeads:
    """[n, heads * c] -> [n, c]: the mean over heads."""

    heads: int


RowOp = Linear | Affine | LayerNorm | GraphLayerNorm | Activation | Normalize | MeanHeads


@dataclass(frozen=True, slots=True)
class Attention:
    """GAT scores leaky_relu(att_src . (W x_j) + att_dst . (W x_i)); att_* are [heads, c]."""

    heads: int
    att_src: Tensor
    att_dst: Tensor
    negative_slope: float


@dataclass(frozen=True, slots=True)
class Conv:
    """One message-passing layer; see the module's text for the semantics."""

    name: str  # for messages: "convs.0 (GCNConv)"
    in_channels: int
    out_channels: int  # width of h, after post
    aggregate: Aggregate
    source: tuple[RowOp, ...] = ()
    neighbour: Linear | None = None  # never has a bias: biases live in post
    root: Linear | None = (
        None  # likewise without bias; added after MeanHeads where heads are averaged
    )
    self_scale: float = 0.0  # GIN: 1 + eps
    norm: Norm = "none"
    loops: Literal["keep", "one", "drop"] = "keep"
    # With loops == "one": GCN 1, improved 2; an existing loop keeps its own weight.  Only where
    # edge weights are used: on an unweighted graph PyG 2.8 adds loops of 1 even when improved.
    loop_weight: float = 1.0
    edge_weight: bool = False  # uses the volume's edge weights where it has any
    attention: Attention | None = None
    mean_heads: bool = False  # attention with concat=False
    post: tuple[RowOp, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """A stack of layers; `jump` combines the outputs of all layers, then `head` runs."""

    layers: tuple[Conv, ...]
    jump: Literal["cat", "max"] | None = None
    head: tuple[RowOp, ...] = ()
    description: str = ""

    @property
    def in_channels(self) -> int:
        """Width of the features it expects."""
        return self.layers[0].in_channels

    @property
    def out_channels(self) -> int:
        """Width of the rows it produces."""
        for op in reversed(self.head):
            if isinstance(op, Linear):
                return int(op.weight.shape[0])
        widths = [layer.out_channels for layer in self.layers]
        return sum(widths) if self.jump == "cat" else widths[-1]
