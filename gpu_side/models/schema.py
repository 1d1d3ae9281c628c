"""The model file: a TOML or JSON text that says what a checkpoint's keys cannot.

A model of PyG's zoo, with PyG's own constructor arguments:

    class = "GCN"                  # GraphSAGE, GIN, GAT; or torch_geometric.nn.models.GCN
    weights = "gcn.pt"             # relative to this file; .pt or .safetensors
    [kwargs]
    hidden_channels = 64           # what the keys tell may be left out; what is given must agree
    act = "relu"

A stack of single layers, PyG's or DGL's, with whatever lies between them:

    framework = "dgl"              # or "pyg"
    class = "SAGEConv"             # GraphConv, SAGEConv, GINConv, GATConv; pyg: GCNConv, ...
    weights = "sage.pt"
    layers = ["layers.0", "layers.1"]    # key prefixes in order; left out: as found in the file
    between = ["relu"]             # row operations after each layer but the last
    last = []                      # row operations after the last layer
    [kwargs]                       # constructor arguments of every layer
    aggregator_type = "mean"
    [[layer]]                      # optional, one table a layer: arguments that differ
    [[layer]]
    activation = "none"

A row operation is a name ("relu", "leaky_relu", "normalize", "dropout") or a table:
``{op = "linear", key = "lin"}``, ``{op = "batch_norm", key = "norms.{i}", eps = 1e-5}``,
``{op = "layer_norm", key = "ln", mode = "graph"}``, ``{op = "leaky_relu", negative_slope = 0.1}``.
``{i}`` in a key stands for the layer's number.

Also at the top: ``prefix`` (keep only the keys that start with it, and strip it) and
``edge_weight`` (false: a GCN ignores the volume's edge weights).
"""

import json
import tomllib
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

from hyades.common.errors import DataError, UsageError

OpSpec = str | dict[str, Any]


class ModelFile(Struct, forbid_unknown_fields=True, kw_only=True):
    """What stands in a model file; see the module's text."""

    cls: str = field(name="class")
    weights: str = ""
    framework: Literal["pyg", "dgl", ""] = ""
    prefix: str = ""
    edge_weight: bool | UnsetType = UNSET
    kwargs: dict[str, Any] = field(default_factory=dict)
    layers: list[str] = field(default_factory=list)
    between: list[OpSpec] | UnsetType = UNSET
    last: list[OpSpec] = field(default_factory=list)
    layer: list[dict[str, Any]] = field(default_factory=list)


class PygKwargs(Struct, forbid_unknown_fields=True, kw_only=True):
    """Constructor arguments of PyG's zoo models and single layers; UNSET where not given."""

    in_channels: int | list[int] | UnsetType = UNSET
    hidden_channels: int | UnsetType = UNSET
    num_layers: int | UnsetType = UNSET
    out_channels: int | str | UnsetType | None = UNSET
    dropout: float | UnsetType = UNSET
    act: str | UnsetType | None = UNSET
    act_first: bool | UnsetType = UNSET
    act_kwargs: dict[str, Any] | UnsetType | None = UNSET
    norm: str | UnsetType | None = UNSET
    norm_kwargs: dict[str, Any] | UnsetType | None = UNSET
    jk: str | UnsetType | None = UNSET
    aggr: str | list[str] | UnsetType | None = UNSET
    aggr_kwargs: dict[str, Any] | UnsetType | None = UNSET
    flow: str | UnsetType = UNSET
    node_dim: int | UnsetType = UNSET
    decomposed_layers: int | UnsetType = UNSET
    improved: bool | UnsetType = UNSET
    cached: bool | UnsetType = UNSET
    add_self_loops: bool | UnsetType | None = UNSET
    normalize: bool | UnsetType = UNSET
    bias: bool | UnsetType = UNSET
    root_weight: bool | UnsetType = UNSET
    project: bool | UnsetType = UNSET
    eps: float | UnsetType = UNSET
    train_eps: bool | UnsetType = UNSET
    v2: bool | UnsetType = UNSET
    heads: int | UnsetType = UNSET
    concat: bool | UnsetType = UNSET
    negative_slope: float | UnsetType = UNSET
    edge_dim: int | UnsetType | None = UNSET
    fill_value: float | str | UnsetType = UNSET
    residual: bool | UnsetType = UNSET
    nn: list[OpSpec] | UnsetType = UNSET  # the MLP of a single GINConv


class DglKwargs(Struct, forbid_unknown_fields=True, kw_only=True):
    """Constructor arguments of DGL's layers; `concat`: a GATConv's heads flattened or averaged."""

    in_feats: int | list[int] | UnsetType = UNSET
    out_feats: int | UnsetType = UNSET
    norm: OpSpec | UnsetType | None = UNSET
    weight: bool | UnsetType = UNSET
    bias: bool | UnsetType = UNSET
    activation: OpSpec | UnsetType | None = UNSET
    allow_zero_in_degree: bool | UnsetType = UNSET
    aggregator_type: str | UnsetType = UNSET
    feat_drop: float | UnsetType = UNSET
    attn_drop: float | UnsetType = UNSET
    num_heads: int | UnsetType = UNSET
    negative_slope: float | UnsetType = UNSET
    residual: bool | UnsetType = UNSET
    concat: bool | UnsetType = UNSET
    apply_func: list[OpSpec] | UnsetType = UNSET
    init_eps: float | UnsetType = UNSET
    learn_eps: bool | UnsetType = UNSET


_T = TypeVar("_T")


def convert(kind: type[_T], value: Any, where: str) -> _T:
    """Return ``value`` as ``kind``; UsageError says which entry of ``where`` is wrong."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UsageError(f"{where}: {error}; docs/models.md lists the entries") from error


def given(kwargs: Struct) -> dict[str, Any]:
    """Return the arguments that were set."""
    return {
        name: value
        for name in kwargs.__struct_fields__
        if (value := getattr(kwargs, name)) is not UNSET
    }


def read_model_file(path: Path) -> ModelFile:
    """Return the model file at ``path``; UsageError for wrong entries, DataError for bad syntax."""
    if not path.is_file():
        raise UsageError(f"{path}: no such model file")
    try:
        text = path.read_text(encoding="utf-8")
        loaded = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except RecursionError as error:
        raise DataError(f"{path}: nested too deeply for a model file") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: not valid {path.suffix.lstrip('.').upper()}: {error}") from error
    return convert(ModelFile, loaded, str(path))
