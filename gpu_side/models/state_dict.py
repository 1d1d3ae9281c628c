"""A model of PyG's zoo (GCN, GraphSAGE, GIN, GAT) from a state dict and constructor arguments.

The layout is BasicGNN's: conv, [act if act_first], norm, [act]; nothing after the last conv unless
there is jumping knowledge, which adds a final linear map.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hyades.common.errors import UsageError
from hyades.gpu_side.models import parts, pyg_state
from hyades.gpu_side.models.checkpoint import Weights
from hyades.gpu_side.models.infer import Facts, zoo_facts
from hyades.gpu_side.models.ir import Conv, Linear, Model, RowOp
from hyades.gpu_side.models.rowops import activation_named
from hyades.gpu_side.models.schema import PygKwargs, given
from hyades.gpu_side.models.specs import NormSpec, act_ops, norm_spec

CONV_OF = {"GCN": "GCNConv", "GraphSAGE": "SAGEConv", "GIN": "GINConv", "GAT": "GATConv"}
_ZOO_OPTIONS = {
    "in_channels",
    "hidden_channels",
    "num_layers",
    "out_channels",
    "dropout",
    "act",
    "act_first",
    "act_kwargs",
    "norm",
    "norm_kwargs",
    "jk",
}


def zoo_model(
    cls: str, tensors: dict[str, Tensor], origin: str, kwargs: PygKwargs, where: str
) -> tuple[Model, list[str]]:
    """Return the model and what was assumed, one line an argument.

    ``origin`` names the checkpoint and ``where`` the model file.  UsageError for arguments that are
    not supported, that contradict the keys, or that must be given and are not.
    """
    options = given(kwargs)
    allowed = _ZOO_OPTIONS | pyg_state.CONV_OPTIONS[CONV_OF[cls]] | pyg_state.MESSAGE_PASSING
    extra = sorted(set(options) - allowed - {"v2"})
    if extra:
        raise UsageError(f"{where}: {cls} takes no {', '.join(extra)}")
    pyg_state.refuse(options, where)
    if options.get("jk") not in (None, "last", "cat", "max", "none"):
        raise UsageError(
            f"{where}: jk = {options['jk']!r} is not supported (supported: last, cat, max)"
        )
    facts = zoo_facts(tensors, cls, origin)
    settings, assumed = _settle(facts, options, origin, where)
    weights = Weights(tensors, origin)
    model = _Builder(cls, weights, settings, facts, where).model()
    weights.finish()
    parts.check_chain(model.layers)
    return model, assumed


def _settle(
    facts: Facts, options: dict[str, Any], origin: str, where: str
) -> tuple[dict[str, Any], list[str]]:
    """Merge what the keys tell with what is given; list what neither tells."""
    none = {key: None if value == "none" else value for key, value in options.items()}
    settings = {**none}
    for name, value in facts.known.items():
        if name in none and not _agrees(name, none[name], value, facts):
            raise UsageError(
                f"{where}: {name} = {options[name]}, but the keys of {origin} say {value}"
            )
        settings.setdefault(name, value)
    settings["jk"] = facts.known["jk"] if "jk" in facts.known else none.get("jk")
    assumed = []
    for unknown in facts.unknown:
        table, _, entry = unknown.name.rpartition(".")
        if entry in ((none.get(table) or {}) if table else none):
            continue
        note = f" ({unknown.note})" if unknown.note else ""
        if unknown.name in ("jk", "out_channels"):
            raise UsageError(
                f"{origin}: the keys do not tell {unknown.name}{note}; give it in a model file, "
                f"see `hyades model describe {origin}`"
            )
        assumed.append(f"{unknown.name} = {_text(unknown.default)}{note}")
        if not table:
            settings.setdefault(entry, unknown.default)
    return settings, assumed


def _text(value: Any) -> str:
    return {True: "true", False: "false", None: "none"}.get(value, str(value))


def _agrees(name: str, given_value: Any, known: Any, facts: Facts) -> bool:
    if name == "norm":
        if given_value is None:
            return False
        return _norm_class(given_value) == _norm_class(known)
    if name == "act":
        return isinstance(given_value, str) and given_value.lower().endswith("prelu")
    if name == "jk":
        jumping = known is not None
        return jumping == (given_value is not None) and (
            given_value == known or facts.known["num_layers"] == 1
        )
    if name == "out_channels" and given_value is None:
        return True
    return bool(given_value == known)


def _norm_class(name: str) -> tuple[str, bool]:
    spec = norm_spec(name, {}, "norm")
    return spec.kind, spec.pyg


@dataclass(slots=True)
class _Builder:
    """Builds the layers in order, taking each one's tensors."""

    cls: str
    weights: Weights
    settings: dict[str, Any]
    facts: Facts
    where: str

    def model(self) -> Model:
        count = int(self.settings["num_layers"])
        act = self._act()
        norm = self._norm()
        jk = self.settings["jk"]
        layers = []
        for i in range(count):
            conv = self._conv(i, act, norm)
            if i < count - 1 or jk is not None:
                ops = self._norm_ops(norm, f"norms.{i}", conv.out_channels)
                between = self._act_ops(act, ())
                conv = parts.then(conv, self._ordered(ops, between))
            layers.append(conv)
        self.weights.ignore("act.weight")
        head: tuple[RowOp, ...] = ()
        if jk is not None:
            width = sum(c.out_channels for c in layers) if jk == "cat" else layers[-1].out_channels
            out = self.settings["out_channels"]
            weight = self.weights.take("lin.weight", (out, width))
            head = (Linear(weight, self.weights.take("lin.bias", (out,))),)
        return Model(tuple(layers), None if jk == "last" else jk, head)

    def _conv(self, i: int, act: nn.Module | None, norm: NormSpec | None) -> Conv:
        prefix = f"convs.{i}."
        hidden = self.settings.get("hidden_channels", self.facts.widths[1])
        width = self.settings["in_channels"] if i == 0 else hidden
        last = i == self.settings["num_layers"] - 1 and self.settings["jk"] is None
        out = self.settings["out_channels"] if last else hidden
        out = hidden if out is None else out
        if self.cls == "GIN":
            ops = self._mlp(prefix, (width, out), act, norm)
            return pyg_state.gin(self.weights, prefix, self.settings, ops)
        if self.cls == "GAT":
            options = {**self.settings, "concat": self._concat(i)}
            heads = self.settings["heads"]
            if options["concat"] and out % heads:
                raise UsageError(f"{self.where}: {out} channels do not split into {heads} heads")
            per_head = out // heads if options["concat"] else out
            return pyg_state.gat(self.weights, prefix, options, (width, per_head))
        builder = pyg_state.gcn if self.cls == "GCN" else pyg_state.sage
        return builder(self.weights, prefix, self.settings, (width, out))

    def _concat(self, i: int) -> bool:
        """Whether GAT layer ``i`` puts its heads side by side, by its keys or by out_channels."""
        known = self.facts.concat[i]
        to_out = i == self.settings["num_layers"] - 1 and self.settings["jk"] is None
        wanted = self.settings.get("concat")
        if known is not None:
            if wanted not in (None, known) and not to_out and self.settings["heads"] > 1:
                raise UsageError(
                    f"{self.where}: concat = {str(wanted).lower()}, but the keys of convs.{i} say "
                    f"{str(known).lower()}"
                )
            return known
        if to_out and self.settings["out_channels"] is not None:
            return False
        return True if wanted is None else bool(wanted)

    def _mlp(
        self, prefix: str, widths: tuple[int, int], act: nn.Module | None, norm: NormSpec | None
    ) -> tuple[RowOp, ...]:
        """GIN's MLP: PyG's, with one hidden layer as wide as its output."""
        width, out = widths
        inner = norm if norm is not None and self._inner_norm() else None
        ops: list[RowOp] = []
        for k, columns in enumerate((width, out)):
            weight = self.weights.take(f"{prefix}nn.lins.{k}.weight", (out, columns))
            ops.append(Linear(weight, self.weights.take(f"{prefix}nn.lins.{k}.bias", (out,))))
            if k == 0:
                ops += self._ordered(
                    self._norm_ops(inner, f"{prefix}nn.norms.0", out),
                    self._act_ops(act, (f"{prefix}nn.act.weight",)),
                )
        return tuple(ops)

    def _inner_norm(self) -> bool:
        """PyG gives the MLP its norm only where it was given by name, not as a module."""
        norm = str(self.settings.get("norm"))
        return not norm.startswith("torch.nn.") and (
            self.weights.under("convs.0.nn.norms.") or not self.weights.under("norms.")
        )

    def _ordered(self, norm: tuple[RowOp, ...], act: tuple[RowOp, ...]) -> tuple[RowOp, ...]:
        return (*act, *norm) if self.settings.get("act_first", False) else (*norm, *act)

    def _act(self) -> nn.Module | None:
        kwargs = dict(self.settings.get("act_kwargs") or {})
        name = self.settings.get("act", "relu")
        if str(name).lower().endswith("prelu") and self.weights.has("act.weight"):
            kwargs.setdefault("num_parameters", self.weights.tensors["act.weight"].numel())
        return activation_named(name, kwargs, f"{self.where}: act")

    def _act_ops(self, act: nn.Module | None, keys: tuple[str, ...]) -> tuple[RowOp, ...]:
        return act_ops(act, self.weights, (*keys, "act.weight"), f"{self.where}: act")

    def _norm(self) -> NormSpec | None:
        name = self.settings.get("norm")
        if name is None:
            return None
        return norm_spec(name, dict(self.settings.get("norm_kwargs") or {}), self.where)

    def _norm_ops(self, norm: NormSpec | None, prefix: str, width: int) -> tuple[RowOp, ...]:
        return () if norm is None else norm.ops(self.weights, prefix, width)
