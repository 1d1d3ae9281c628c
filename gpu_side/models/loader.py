"""`load_model`: a live module, a model file, or a bare checkpoint, to the IR."""

from dataclasses import replace
from pathlib import Path

from msgspec import UNSET
from torch import nn

from hyades.common.errors import UsageError
from hyades.gpu_side.models import infer, pyg_state
from hyades.gpu_side.models.checkpoint import read_tensors
from hyades.gpu_side.models.ir import Model
from hyades.gpu_side.models.pyg import from_module
from hyades.gpu_side.models.schema import ModelFile, PygKwargs, convert, read_model_file
from hyades.gpu_side.models.stack import CLASSES, stack_model
from hyades.gpu_side.models.state_dict import CONV_OF, zoo_model

MODEL_FILES = (".toml", ".json")
# A layer's class by what the model is called.
_DGL_MODELS = {"GCN": "GraphConv", "GraphSAGE": "SAGEConv", "GIN": "GINConv", "GAT": "GATConv"}


def load_model(source: nn.Module | Path | str, config: Path | str | None = None) -> Model:
    """Return the model that ``source`` is, as weights on the CPU and operations.

    ``source`` is a live PyG module, a model file (.toml, .json; schema.py has its entries), or a
    checkpoint (.pt, .safetensors) with ``config`` as its model file or, where the keys tell enough,
    with none: then PyG's defaults stand for the rest and `Model.description` lists them.

    UsageError for what is not supported or must be said; DataError for files that are damaged, hold
    anything but tensors, or hold NaN.
    """
    if isinstance(source, nn.Module):
        if config is not None:
            raise UsageError("a live module needs no model file")
        return from_module(source)
    if not isinstance(source, str | Path):
        raise UsageError(
            f"a model is a live module, a model file or a checkpoint, not a {type(source).__name__}"
        )
    path = Path(source)
    if path.suffix in MODEL_FILES:
        if config is not None:
            raise UsageError(f"{path} is a model file already; {config} cannot be another")
        file = read_model_file(path)
        if not file.weights:
            raise UsageError(f"{path}: needs weights = CHECKPOINT, relative to this file")
        return _load(path.parent / file.weights, file, str(path))
    if config is not None:
        return _load(path, read_model_file(Path(config)), str(config))
    return _bare(path)


def _bare(path: Path) -> Model:
    tensors, notes = read_tensors(path)
    tensors, more = pyg_state.one_lin(tensors, str(path))
    layers = infer.find_layers(tensors)
    if not layers:
        raise UsageError(
            f"{path}: no graph convolution is recognised in its keys; describe its layers in a "
            "model file (docs/models.md)"
        )
    refuse_unsupported(layers, str(path))
    cls, framework = layers[0].cls, layers[0].framework
    where = f"{path} alone"
    if infer.is_zoo(tensors, layers):
        cls = infer.ZOO_OF[cls]
        model, assumed = zoo_model(cls, tensors, str(path), PygKwargs(), where)
        assumed.insert(0, f"{cls} of PyG's zoo (a module of your own may have the same keys)")
    else:
        model, assumed = stack_model(ModelFile(cls=cls), cls, framework, tensors, str(path), where)
        assumed.insert(0, f"{cls} alone")
    return _described(model, cls, path, notes + more, assumed)


def refuse_unsupported(layers: list[infer.Layer], origin: str) -> None:
    """Raise UsageError where the keys show a layer, by name, that is not supported."""
    for layer in layers:
        if layer.cls not in CLASSES[layer.framework]:
            raise UsageError(
                f"{origin}: {layer.prefix or 'the layer'} is a {layer.cls}, which is not supported "
                f"(supported: {', '.join(CLASSES[layer.framework])})"
            )


def _load(path: Path, file: ModelFile, where: str) -> Model:
    framework, cls = class_of(file, where)
    tensors, notes = read_tensors(path, file.prefix)
    if framework == "pyg":
        tensors, more = pyg_state.one_lin(tensors, str(path))
        notes += more
    refuse_unsupported(infer.find_layers(tensors), str(path))
    if cls in CONV_OF:
        _refuse_stack_entries(file, cls, where)
        kwargs = convert(PygKwargs, file.kwargs, f"{where}: kwargs")
        model, assumed = zoo_model(cls, tensors, str(path), kwargs, where)
    else:
        model, assumed = stack_model(file, cls, framework, tensors, str(path), where)
    return _described(_edge_weight(model, file, where), cls, path, notes, assumed)


def class_of(file: ModelFile, where: str) -> tuple[str, str]:
    """Return (framework, class) of a model file; UsageError names a class that is not supported."""
    package = file.cls.split(".", maxsplit=1)[0] if "." in file.cls else ""
    named = {"torch_geometric": "pyg", "dgl": "dgl", "": ""}.get(package)
    if named is None or (named and file.framework and named != file.framework):
        raise UsageError(
            f"{where}: class = {file.cls!r} is not one of {file.framework or 'PyG or DGL'}'s"
        )
    framework = named or file.framework or "pyg"
    cls = file.cls.rsplit(".", 1)[-1]
    if framework == "dgl":
        cls = _DGL_MODELS.get(cls, cls)
    supported = (*CONV_OF, *CLASSES["pyg"]) if framework == "pyg" else CLASSES["dgl"]
    if cls not in supported:
        raise UsageError(
            f"{where}: class = {file.cls!r} is not supported (supported for {framework}: "
            f"{', '.join(supported)})"
        )
    return framework, cls


def _refuse_stack_entries(file: ModelFile, cls: str, where: str) -> None:
    for entry, value in (
        ("layers", file.layers),
        ("between", file.between is not UNSET),
        ("last", file.last),
        ("layer", file.layer),
    ):
        if value:
            raise UsageError(
                f"{where}: {entry} belongs to a stack of single layers; {cls} of PyG's zoo says in "
                "[kwargs] what lies between its layers (act, norm)"
            )


def _edge_weight(model: Model, file: ModelFile, where: str) -> Model:
    if file.edge_weight is UNSET:
        return model
    able = [layer.edge_weight for layer in model.layers]
    if file.edge_weight and not all(able):
        refused = model.layers[able.index(False)].name
        raise UsageError(
            f"{where}: edge_weight = true, but {refused} takes no edge weights here (PyG's GCNConv "
            "does)"
        )
    if file.edge_weight:
        return model
    return replace(model, layers=tuple(replace(c, edge_weight=False) for c in model.layers))


def _described(model: Model, cls: str, path: Path, notes: list[str], assumed: list[str]) -> Model:
    widths = [model.layers[0].in_channels, *(layer.out_channels for layer in model.layers)]
    if model.head:
        widths.append(model.out_channels)
    lines = [f"{cls} from {path}: {' -> '.join(map(str, widths))}", *notes]
    if assumed:
        lines.append(f"assumed, as no key tells: {'; '.join(assumed)}")
    return replace(model, description="\n".join(lines))
