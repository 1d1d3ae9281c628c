"""Whether a model and a graph fit, before any work starts."""

from collections.abc import Sequence

from hyades.common.catalog import GraphInfo
from hyades.common.errors import UsageError
from hyades.gpu_side.models.ir import Conv, Model
from hyades.gpu_side.models.parts import check_chain
from hyades.gpu_side.models.rowops import chain_width


def check_graph(model: Model, graph: GraphInfo, feature_width: int) -> None:
    """Raise UsageError where ``model`` cannot run on ``graph`` with rows of ``feature_width``."""
    if not model.layers:
        raise UsageError("the model has no layers")
    if graph.vertices < 1:
        raise UsageError("the graph has no vertices")
    if model.in_channels != feature_width:
        raise UsageError(
            f"the model takes {model.in_channels} channels, but {graph.features!r} of this volume "
            f"has {feature_width}"
        )
    check_chain(model.layers)
    for layer in model.layers:
        _check_layer(layer)
    widths = [layer.out_channels for layer in model.layers]
    if model.jump == "max" and len(set(widths)) > 1:
        raise UsageError(f"jk='max' needs layers of one width, these have {widths}")
    chain_width(model.head, sum(widths) if model.jump == "cat" else widths[-1], "the final layer")


def check_fanouts(model: Model, fanouts: Sequence[int]) -> None:
    """Raise UsageError where a layer cannot be sampled; *fanouts* by layer, 0 for all edges."""
    for layer, fanout in zip(model.layers, fanouts, strict=True):
        if fanout > 0 and layer.norm in ("both", "left"):
            raise UsageError(
                f"{layer.name}: fanout with DGL norm {layer.norm!r} needs out-degrees of the"
                " sampled graph, which no single pass over it knows; use norm 'right' or drop"
                " --fanout"
            )


def _check_layer(layer: Conv) -> None:
    """Check the widths inside a layer, for models that were built by hand."""
    width = chain_width(layer.source, layer.in_channels, f"{layer.name}: source")
    if layer.neighbour is not None:
        width = chain_width((layer.neighbour,), width, f"{layer.name}: neighbour")
    if layer.attention is not None and tuple(layer.attention.att_src.shape) != (
        layer.attention.heads,
        width // layer.attention.heads,
    ):
        raise UsageError(f"{layer.name}: attention does not fit {width} projected channels")
    if layer.attention is not None and layer.mean_heads:
        width //= layer.attention.heads
    if layer.root is not None:
        root = chain_width((layer.root,), layer.in_channels, f"{layer.name}: root")
        if root != width:
            raise UsageError(f"{layer.name}: root gives {root} channels, the neighbours {width}")
    out = chain_width(layer.post, width, f"{layer.name}: post")
    if out != layer.out_channels:
        raise UsageError(f"{layer.name}: gives {out} channels, not {layer.out_channels}")
