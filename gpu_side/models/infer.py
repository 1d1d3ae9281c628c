"""What the keys and shapes of a state dict tell about the model, and what they cannot."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hyades.common.errors import UsageError
from hyades.gpu_side.models.checkpoint import shown

# How a layer is recognised: (framework, class, a key every such layer has), the telling ones first.
_MARKERS = (
    ("pyg", "GATv2Conv", "att"),
    ("pyg", "GATConv", "att_src"),
    ("dgl", "GATConv", "attn_l"),
    ("dgl", "GATv2Conv", "attn"),
    ("dgl", "SAGEConv", "fc_neigh.weight"),
    ("pyg", "SAGEConv", "lin_l.weight"),
    ("pyg", "GCNConv", "lin.weight"),
)
ZOO_OF = {"GCNConv": "GCN", "SAGEConv": "GraphSAGE", "GINConv": "GIN", "GATConv": "GAT"}
_ZOO_REST = re.compile(r"convs\.\d+\.|norms\.\d+\.|lin\.(weight|bias)$|act\.weight$|jk\.")


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer found in the keys."""

    framework: str
    cls: str
    prefix: str  # "convs.0", or "" where the layer is the whole state dict


@dataclass(frozen=True, slots=True)
class Unknown:
    """An argument that the keys do not tell: its default, or None where it must be given."""

    name: str
    default: Any
    note: str = ""


@dataclass(slots=True)
class Facts:
    """What the keys of a zoo model tell (by constructor argument), and what they do not."""

    cls: str
    known: dict[str, Any] = field(default_factory=dict)
    unknown: list[Unknown] = field(default_factory=list)
    widths: list[int] = field(default_factory=list)  # input of layer 0, then every layer's output
    concat: list[bool | None] = field(default_factory=list)  # GAT, per layer


def find_layers(tensors: dict[str, Tensor]) -> list[Layer]:
    """Return the graph convolutions in a state dict, in the order of the numbers in their keys."""
    found: dict[str, Layer] = {}
    for framework, cls, marker in _MARKERS:
        for prefix in _prefixes(tensors, marker):
            found.setdefault(prefix, Layer(framework, cls, prefix))
    for framework, part in (("dgl", "apply_func"), ("pyg", "nn")):
        for prefix in _gin_prefixes(tensors, part):
            found.setdefault(prefix, Layer(framework, "GINConv", prefix))
    # The projection of a SAGEConv is called `lin`, as a GCNConv's weight is.
    for prefix in list(found):
        if found[prefix].cls == "GCNConv" and _join(prefix, "lin_l.weight") in tensors:
            found[prefix] = Layer("pyg", "SAGEConv", prefix)
    if len(found) > 1 and "" in found:
        del found[""]  # a `lin` at the top is the head of a model with jumping knowledge
    if not found:
        found = {prefix: Layer("dgl", "GraphConv", prefix) for prefix in _graph_convs(tensors)}
    return sorted(found.values(), key=lambda layer: natural(layer.prefix))


def natural(text: str) -> list[tuple[int, str]]:
    """Sort key under which convs.2 comes before convs.10."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", text)]


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def _prefixes(tensors: Iterable[str], marker: str) -> list[str]:
    """Return the prefixes p for which p.marker is a key."""
    result = []
    for key in tensors:
        if key == marker or key.endswith("." + marker):
            result.append(key[: -len(marker)].rstrip("."))
    return result


def _gin_prefixes(tensors: Iterable[str], part: str) -> list[str]:
    prefixes: dict[str, None] = {}
    for key in tensors:
        head, found, _ = f".{key}".partition(f".{part}.")
        if found:
            prefixes[head.removeprefix(".")] = None
    return list(prefixes)


def _graph_convs(tensors: dict[str, Tensor]) -> list[str]:
    """Return prefixes of DGL's GraphConv: nothing but weight [in, out] and bias [out]."""
    prefixes = _prefixes(tensors, "weight")
    for prefix in prefixes:
        weight, bias = tensors[_join(prefix, "weight")], tensors.get(_join(prefix, "bias"))
        if weight.dim() != 2 or (bias is not None and bias.shape != weight.shape[1:]):
            return []
    return prefixes


def is_zoo(tensors: dict[str, Tensor], layers: list[Layer]) -> bool:
    """Say whether the keys are those of one of PyG's zoo models."""
    names = [f"convs.{i}" for i in range(len(layers))]
    return (
        bool(layers)
        and [layer.prefix for layer in layers] == names
        and len({(layer.framework, layer.cls) for layer in layers}) == 1
        and layers[0].framework == "pyg"
        and all(_ZOO_REST.match(key) for key in tensors)
        and (layers[0].cls != "GINConv" or "convs.0.nn.lins.1.weight" in tensors)
    )


def zoo_facts(tensors: dict[str, Tensor], cls: str, origin: str) -> Facts:
    """Return what the keys tell of a zoo model of class ``cls``; UsageError if it is none."""
    facts = Facts(cls)
    count = len({key.split(".")[1] for key in tensors if key.startswith("convs.")})
    if not count:
        raise UsageError(
            f"{origin} does not fit the model: no key starts with 'convs.', as PyG's {cls} has "
            f"them; it has {shown(tensors)}"
        )
    facts.known["num_layers"] = count
    readers = {"GCN": _gcn, "GraphSAGE": _sage, "GIN": _gin, "GAT": _gat}
    for i in range(count):
        readers[cls](facts, _Shapes(tensors, f"convs.{i}", origin), i)
    facts.known["in_channels"] = facts.widths[0]
    if count > 1 or "lin.weight" in tensors:  # else every width is in or out
        facts.known["hidden_channels"] = facts.widths[1]
    _head(facts, _Shapes(tensors, "", origin), count)
    _norms(facts, _Shapes(tensors, "", origin), count)
    _activation(facts, tensors, count)
    if not any(unknown.name == "out_channels" for unknown in facts.unknown):
        facts.known.setdefault("out_channels", facts.widths[-1])
    facts.known = {name: facts.known[name] for name in _ORDER if name in facts.known}
    return facts


_ORDER = (
    "in_channels",
    "hidden_channels",
    "num_layers",
    "out_channels",
    "act",
    "norm",
    "jk",
    "heads",
    "residual",
    "root_weight",
    "project",
    "bias",
)


class _Shapes:
    """Shapes by key under a prefix; UsageError names a key that must be there and is not."""

    def __init__(self, tensors: dict[str, Tensor], prefix: str, origin: str) -> None:
        self.tensors, self.prefix, self.origin = tensors, prefix, origin

    def has(self, key: str) -> bool:
        return _join(self.prefix, key) in self.tensors

    def of(self, key: str, dims: int) -> tuple[int, ...]:
        full = _join(self.prefix, key)
        tensor = self.tensors.get(full)
        if tensor is None:
            raise UsageError(f"{self.origin} does not fit the model: missing {full}")
        if tensor.dim() != dims or 0 in tensor.shape:
            raise UsageError(
                f"{self.origin} does not fit the model: {full} is {list(tensor.shape)}, "
                f"not {dims}-dimensional"
            )
        return tuple(int(n) for n in tensor.shape)


def _layer(facts: Facts, width_in: int, width_out: int, i: int) -> None:
    if i == 0:
        facts.widths.append(width_in)
    facts.widths.append(width_out)


def _gcn(facts: Facts, shapes: _Shapes, i: int) -> None:
    out, width = shapes.of("lin.weight", 2)
    _layer(facts, width, out, i)
    if i == 0:
        facts.known["bias"] = shapes.has("bias")
        facts.unknown += [
            Unknown("improved", False),
            Unknown("add_self_loops", None, "as normalize"),
            Unknown("normalize", True),
        ]


def _sage(facts: Facts, shapes: _Shapes, i: int) -> None:
    out, width = shapes.of("lin_l.weight", 2)
    _layer(facts, width, out, i)
    if i == 0:
        facts.known["bias"] = shapes.has("lin_l.bias")
        facts.known["root_weight"] = shapes.has("lin_r.weight")
        facts.known["project"] = shapes.has("lin.weight")
        facts.unknown += [Unknown("aggr", "mean"), Unknown("normalize", False)]


def _gin(facts: Facts, shapes: _Shapes, i: int) -> None:
    width = shapes.of("nn.lins.0.weight", 2)[1]
    _layer(facts, width, shapes.of("nn.lins.1.weight", 2)[0], i)
    if i == 0:
        facts.unknown.append(Unknown("aggr", "add"))


def _gat(facts: Facts, shapes: _Shapes, i: int) -> None:
    count = int(facts.known["num_layers"])
    _, heads, channels = shapes.of("att_src", 3)
    lin = "lin.weight" if shapes.has("lin.weight") else "lin_src.weight"
    _layer(facts, shapes.of(lin, 2)[1], heads * channels, i)
    concat: bool | None = True if heads == 1 else None
    following = _Shapes(shapes.tensors, f"convs.{i + 1}", shapes.origin)
    width = None
    if shapes.has("bias"):
        (width,) = shapes.of("bias", 1)
    elif shapes.has("res.weight"):
        width = shapes.of("res.weight", 2)[0]
    elif i + 1 < count:
        width = following.of(lin, 2)[1]
    elif "lin.weight" in shapes.tensors:
        width = shapes.tensors["lin.weight"].shape[1] if count == 1 else facts.widths[1]
    if width is not None and heads > 1:
        concat = width == heads * channels
    if concat is False:
        facts.widths[-1] = channels
    facts.concat.append(concat)
    if i == 0:
        facts.known |= {
            "heads": heads,
            "bias": shapes.has("bias"),
            "residual": shapes.has("res.weight"),
        }
        facts.unknown += [Unknown("negative_slope", 0.2), Unknown("add_self_loops", True)]


def _head(facts: Facts, shapes: _Shapes, count: int) -> None:
    """Jumping knowledge: a top-level `lin`, as wide as one layer (last, max) or as all (cat)."""
    if any(key.startswith("jk.lstm") for key in shapes.tensors):
        raise UsageError(f"{shapes.origin}: jk='lstm' is not supported (supported: last, cat, max)")
    if not shapes.has("lin.weight"):
        facts.known["jk"] = None
        if facts.concat and facts.concat[-1] is None:
            facts.unknown.append(
                Unknown(
                    "out_channels",
                    None,
                    "given, the last layer averages its heads; 'none', it concatenates them",
                )
            )
        return
    out, width = shapes.of("lin.weight", 2)
    facts.known["out_channels"] = out
    if count > 1 and width == count * facts.widths[1]:
        facts.known["jk"] = "cat"
    elif count == 1:
        facts.known["jk"] = "last"  # with one layer all three are the same
    else:
        facts.unknown.append(Unknown("jk", None, "'last' or 'max': the keys are the same"))


def _norms(facts: Facts, shapes: _Shapes, count: int) -> None:
    """The norm's class, from the first one there is: between the layers, or in a GIN's MLP."""
    prefix = next(
        (
            prefix
            for prefix in ("norms.0", "convs.0.nn.norms.0")
            if any(key.startswith(f"{prefix}.") for key in shapes.tensors)
        ),
        None,
    )
    if prefix is None:
        if count > 1 or "lin.weight" in shapes.tensors or facts.cls == "GIN":
            note = "a norm without weights, as PairNorm, leaves no keys"
            facts.unknown.append(Unknown("norm", None, note))
        return
    if shapes.has(f"{prefix}.module.running_mean"):
        facts.known["norm"] = "BatchNorm"
    elif shapes.has(f"{prefix}.mean_scale"):
        raise UsageError(f"{shapes.origin}: norm 'GraphNorm' is not supported")
    elif shapes.has(f"{prefix}.running_mean"):
        facts.known["norm"] = "torch.nn.BatchNorm1d"
    elif shapes.has(f"{prefix}.weight"):
        facts.unknown.append(Unknown("norm", "LayerNorm", "or torch.nn.LayerNorm"))
        facts.unknown.append(Unknown("norm_kwargs.mode", "graph", "or 'node'"))
    else:
        keys = shown(key for key in shapes.tensors if key.startswith(f"{prefix}."))
        raise UsageError(f"{shapes.origin}: the norm with the keys {keys} is not supported")
    facts.unknown += [Unknown("norm_kwargs.eps", 1e-5), Unknown("act_first", False)]


def _activation(facts: Facts, tensors: dict[str, Tensor], count: int) -> None:
    if "act.weight" in tensors:
        facts.known["act"] = "PReLU"
    elif count > 1 or "lin.weight" in tensors or facts.cls == "GIN":
        facts.unknown.append(Unknown("act", "relu"))


def layer_widths(tensors: dict[str, Tensor], layer: Layer) -> tuple[int | None, int | None]:
    """Return the (input, output) width of a layer, None where its keys do not tell.

    The output of a GAT layer is that of all heads side by side.
    """
    key, flip = _WIDTH_KEYS[layer.framework, layer.cls]
    first = tensors.get(_join(layer.prefix, key))
    if layer.cls == "GINConv":
        linears = [
            tensor
            for name, tensor in tensors.items()
            if name.startswith(_join(layer.prefix, f"{key}.")) and tensor.dim() == 2
        ]
        if not linears:
            return None, None
        return int(linears[0].shape[1]), int(linears[-1].shape[0])
    if first is None or first.dim() != 2:
        return None, None
    out, width = (int(n) for n in (first.shape[::-1] if flip else first.shape))
    return width, out


_WIDTH_KEYS = {
    ("pyg", "GCNConv"): ("lin.weight", False),
    ("pyg", "SAGEConv"): ("lin_l.weight", False),
    ("pyg", "GATConv"): ("lin.weight", False),
    ("pyg", "GATv2Conv"): ("lin_l.weight", False),
    ("pyg", "GINConv"): ("nn", False),
    ("dgl", "GraphConv"): ("weight", True),
    ("dgl", "SAGEConv"): ("fc_neigh.weight", False),
    ("dgl", "GATConv"): ("fc.weight", False),
    ("dgl", "GATv2Conv"): ("fc_src.weight", False),
    ("dgl", "GINConv"): ("apply_func", False),
}
