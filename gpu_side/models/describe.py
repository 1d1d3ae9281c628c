"""`describe`: what a checkpoint's keys tell, what they do not, and a model file to start from."""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from hyades.common.errors import UsageError
from hyades.gpu_side.models import infer, pyg_state
from hyades.gpu_side.models.checkpoint import Weights, read_tensors, shown
from hyades.gpu_side.models.dgl import sage_aggregator
from hyades.gpu_side.models.infer import Layer, Unknown
from hyades.gpu_side.models.loader import refuse_unsupported
from hyades.gpu_side.models.stack import DEFAULTS


@dataclass(slots=True)
class Description:
    """What is known of a checkpoint.

    ``known`` and ``unknown`` are constructor arguments; ``problems`` is why it cannot be loaded as
    it is; ``toml`` is a model file to edit.
    """

    path: Path
    framework: str = ""
    cls: str = ""  # GCN, ... for PyG's zoo, else the layers' class
    layers: list[tuple[str, str, int | None, int | None]] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)
    unknown: list[Unknown] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    tensors: int = 0
    parameters: int = 0
    toml: str = ""

    def text(self) -> str:
        """Return the description for a terminal."""
        source = {"pyg": "PyG", "dgl": "DGL"}.get(self.framework, "unknown framework")
        lines = [f"{self.path}: {self.cls or 'not recognised'} ({source}), {self.tensors} tensors, "
                 f"{self.parameters:,} values", *self.notes]  # fmt: skip
        lines += [f"  {prefix or '(top)'}: {cls}, {_width(a)} -> {_width(b)}"
                  for prefix, cls, a, b in self.layers]  # fmt: skip
        if self.known:
            lines += ["the keys tell:"]
            lines += [f"  {name} = {_shown(value)}" for name, value in self.known.items()]
        if self.unknown:
            lines += ["the keys do not tell (the default is assumed where there is one):"]
            lines += [f"  {u.name} = {_default(u)}" for u in self.unknown]
        lines += [f"problem: {problem}" for problem in self.problems]
        if self.toml:
            lines += ["", "a model file to start from:", "", self.toml.rstrip()]
        return "\n".join(lines)


def _width(width: int | None) -> str:
    return "?" if width is None else str(width)


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def _default(unknown: Unknown) -> str:
    must = unknown.name in MUST
    text = "(must be given)" if must else _shown(unknown.default)
    return f"{text}  # {unknown.note}" if unknown.note else text


MUST = ("jk", "out_channels", "between", "nn", "apply_func", "concat")


def describe(checkpoint: Path | str) -> Description:
    """Return what the keys and shapes of a .pt or .safetensors file tell about its model.

    Unsupported layers and norms stand in `problems`.  UsageError where the file is absent,
    DataError where it is damaged or holds anything but tensors.
    """
    path = Path(checkpoint)
    tensors, notes = read_tensors(path)
    result = Description(path, notes=notes, tensors=len(tensors))
    result.parameters = sum(tensor.numel() for tensor in tensors.values())
    try:
        tensors, more = pyg_state.one_lin(tensors, path.name)
        result.notes += more
        layers = infer.find_layers(tensors)
        if not layers:
            result.problems.append(f"no graph convolution is recognised in {shown(tensors)}")
            return result
        result.framework, result.cls = layers[0].framework, layers[0].cls
        result.layers = [
            (layer.prefix, layer.cls, *infer.layer_widths(tensors, layer)) for layer in layers
        ]
        refuse_unsupported(layers, path.name)
        if infer.is_zoo(tensors, layers):
            _zoo(result, tensors)
        else:
            _stack(result, tensors, layers)
    except UsageError as error:
        result.problems.append(str(error))
    return result


def _zoo(result: Description, tensors: dict[str, Tensor]) -> None:
    result.cls = infer.ZOO_OF[result.cls]
    facts = infer.zoo_facts(tensors, result.cls, result.path.name)
    result.known, result.unknown = facts.known, facts.unknown
    result.layers = [
        (prefix, cls, facts.widths[i], facts.widths[i + 1])
        for i, (prefix, cls, _, _) in enumerate(result.layers)
    ]
    lines = _top(result)
    lines += ["", "[kwargs]"]
    lines += [
        f"{name} = {_shown(value) if value is not None else _quoted('none')}"
        for name, value in facts.known.items()
    ]
    lines += ["# No key tells the rest; these are PyG's defaults."]
    tables: dict[str, list[str]] = {}
    for unknown in facts.unknown:
        note = f"  # {unknown.note}" if unknown.note else ""
        table, _, name = unknown.name.rpartition(".")
        if unknown.name in MUST:
            lines.append(f"# {name} =    # must be given: {unknown.note}")
        elif table:
            tables.setdefault(table, []).append(f"{name} = {_shown(unknown.default)}{note}")
        elif unknown.default is None and name == "add_self_loops":
            lines.append(f"# {name} = true{note}")
        elif unknown.default is None:
            lines.append(f"{name} = {_quoted('none')}{note}")
        else:
            lines.append(f"{name} = {_shown(unknown.default)}{note}")
    for table, entries in tables.items():
        lines += ["", f"[kwargs.{table}]", *entries]
    result.toml = "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text)


def _top(result: Description) -> list[str]:
    return [
        f"# Written by `hyades model describe {result.path.name}`; edit what differs.",
        f"class = {_quoted(result.cls)}",
        f"framework = {_quoted(result.framework)}",
        f"weights = {_quoted(result.path.name)}  # relative to this file",
    ]


def _stack(result: Description, tensors: dict[str, Tensor], layers: list[Layer]) -> None:
    classes = {layer.cls for layer in layers}
    if len(classes) > 1:
        result.problems.append(
            f"layers of several classes in one model ({', '.join(sorted(classes))}) are not "
            "supported"
        )
        return
    first = layers[0]
    lines = _top(result)
    lines.append(f"layers = {json.dumps([layer.prefix for layer in layers])}")
    rest = _rest(tensors, layers)
    if len(layers) > 1:
        result.unknown.append(Unknown("between", ["relu"], "the operations between the layers"))
        lines.append('between = ["relu"]  # a guess: what lies between the layers')
    if rest:
        result.problems.append(
            f"keys of no layer: {shown(rest)}; give them in between or last as "
            '{op = "batch_norm", key = "norms.{i}"} or {op = "linear", key = "head"}'
        )
        lines.append(f"# keys still to be placed in between or last: {', '.join(rest)}")
    lines += ["", "[kwargs]"]
    if (first.framework, first.cls) == ("dgl", "SAGEConv"):
        prefix = f"{first.prefix}." if first.prefix else ""
        aggregator = sage_aggregator(Weights(tensors, result.path.name), prefix)
        result.known["aggregator_type"] = aggregator
        lines.append(f"aggregator_type = {_quoted(aggregator)}")
    for name, value in DEFAULTS[first.framework, first.cls].items():
        result.unknown.append(Unknown(name, value))
        comment = "# " if isinstance(value, str) and " " in value else ""
        lines.append(f"{comment}{name} = {_shown(value)}")
    if first.cls == "GINConv":
        _gin_lines(result, tensors, layers, lines)
    if first.cls == "GATConv":
        _gat_lines(result, tensors, layers, lines)
    result.toml = "\n".join(lines) + "\n"


def _rest(tensors: dict[str, Tensor], layers: list[Layer]) -> list[str]:
    """Return the keys that belong to no layer."""
    if layers[0].prefix == "":
        return []
    return [key for key in tensors if not any(key.startswith(f"{n.prefix}.") for n in layers)]


def _gin_lines(
    result: Description, tensors: dict[str, Tensor], layers: list[Layer], lines: list[str]
) -> None:
    """Guess each MLP: operations by their tensors, and relu where Sequential skips a number."""
    entry = "nn" if layers[0].framework == "pyg" else "apply_func"
    result.unknown.append(Unknown(entry, None, "activations leave no keys; relu is a guess"))
    lines.append("# Activations leave no keys: every relu below is a guess.")
    for layer in layers:
        base = f"{layer.prefix}.{entry}." if layer.prefix else f"{entry}."
        ops = _mlp_guess([key.removeprefix(base) for key in tensors if key.startswith(base)],
                         tensors, base)  # fmt: skip
        lines += ["", "[[layer]]", f"{entry} = [{', '.join(ops)}]"]


def _mlp_guess(keys: list[str], tensors: dict[str, Tensor], base: str) -> list[str]:
    modules = sorted(
        {re.sub(r"\.?(module\.)?[a-z_]+$", "", key) for key in keys}, key=infer.natural
    )
    numbered = all(name.isdigit() for name in modules)
    ops: list[str] = []
    for name in modules:
        if numbered:
            ops += ['"relu"'] * (int(name) - len(ops))
        kind = _kind(tensors, f"{base}{name}".rstrip("."))
        if numbered:
            ops.append(_quoted(kind))
        else:
            ops.append(f"{{op = {_quoted(kind)}, key = {_quoted(name)}}}")
    if not numbered and len(ops) > 1:
        ops.insert(len(ops) - 1, '"relu"')
    return ops


def _kind(tensors: dict[str, Tensor], key: str) -> str:
    if f"{key}.running_mean" in tensors or f"{key}.module.running_mean" in tensors:
        return "batch_norm"
    weight = tensors.get(f"{key}.weight")
    if weight is None or weight.dim() == 2:
        return "linear"
    return "layer_norm" if f"{key}.bias" in tensors else "prelu"


def _gat_lines(
    result: Description, tensors: dict[str, Tensor], layers: list[Layer], lines: list[str]
) -> None:
    marker = "attn_l" if layers[0].framework == "dgl" else "att_src"
    for layer in layers:
        key = f"{layer.prefix}.{marker}" if layer.prefix else marker
        shape = list(tensors[key].shape)
        result.known[f"heads of {layer.prefix or 'the layer'}"] = shape[1]
        last = layer is layers[-1]
        lines += ["", "[[layer]]", f"concat = {str(not last or shape[1] == 1).lower()}  # or "
                  "false: the mean over heads"]  # fmt: skip
    result.unknown.append(Unknown("concat", None, "heads side by side, or their mean"))
