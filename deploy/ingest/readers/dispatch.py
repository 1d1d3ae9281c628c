"""From what the user names to an edge source: by content, by suffix, by folder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from hyades.common.errors import DataError, UsageError
from hyades.deploy.ingest.readers.context import Context
from hyades.deploy.ingest.readers.datasets import Metadata, ogb_csv_edges, ogb_edges
from hyades.deploy.ingest.readers.edges import (
    CompressedEdges,
    Layout,
    Values,
    WithWeights,
    index_edges,
)
from hyades.deploy.ingest.readers.features import conf_shape, read_conf
from hyades.deploy.ingest.readers.memory import EdgeInput, array_edges, data_edges
from hyades.deploy.ingest.readers.npy import MAGIC, open_npy
from hyades.deploy.ingest.readers.npz import Archive
from hyades.deploy.ingest.readers.sparse import is_sparse, sparse_edges
from hyades.deploy.ingest.readers.storage import StoredArray, check_file, raw_array
from hyades.deploy.ingest.readers.tensors import load_saved
from hyades.deploy.ingest.readers.text import text_edges, text_matrix

_PARQUET_MAGIC = b"PAR1"
_TORCH_SUFFIXES = (".pt", ".pth", ".pkl", ".pickle")


@dataclass(frozen=True)
class EdgeChoice:
    """What the user said about the edges; *weights* is a column of the edge list or a file."""

    layout: Layout | None = None
    columns: tuple[str, str] | None = None
    weights: str | None = None
    feature_key: str | None = None


def open_edges(path: Path, choice: EdgeChoice, context: Context) -> EdgeInput:
    """Return the edges in the file or dataset folder *path*."""
    if path.is_dir():
        return _open_folder(path, choice, context)
    kind = _kind(check_file(path))
    if kind in ("text", "parquet"):
        return _open_table(path, kind, choice, context)
    if kind == "npy":
        found = EdgeInput(index_edges(open_npy(path), choice.layout))
    elif kind == "npz":
        found = _open_npz(path, choice, context)
    elif kind == "yaml":
        return _open_graphbolt(path, choice, context)
    else:
        found = _open_saved(path, choice)
    return with_weight_file(found, choice, context)


def _kind(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(8)
    if head.startswith(MAGIC):
        return "npy"
    if head.startswith(_PARQUET_MAGIC) or path.suffix in (".parquet", ".pq"):
        return "parquet"
    if path.suffix in _TORCH_SUFFIXES or head.startswith(b"\x80"):
        return "torch"
    if head.startswith(b"PK") or path.suffix == ".npz":
        return "npz"
    if path.suffix in (".yaml", ".yml"):
        return "yaml"
    if path.suffix == ".npy":
        raise DataError(
            f"{path}: no .npy header (it does not begin with \\x93NUMPY): raw ids are read only "
            "from a folder with indptr, indices and a conf.json that gives shape and dtype"
        )
    return "text"


def _open_table(path: Path, kind: str, choice: EdgeChoice, context: Context) -> EdgeInput:
    # A weight file beside a table: it exists and is no column of the table.
    column = choice.weights
    separate = column is not None and Path(column).is_file()
    column = None if separate else column
    found: EdgeInput
    if kind == "parquet":
        from hyades.deploy.ingest.readers.parquet import parquet_edges  # pyarrow is large

        edges, notes = parquet_edges(path, choice.columns, column)
        found = EdgeInput(edges, None, notes)
    else:
        text, notes = text_edges(path, choice.columns, column, context)
        found = EdgeInput(text, None, notes)
    return with_weight_file(found, choice, context) if separate else found


def _open_npz(path: Path, choice: EdgeChoice, context: Context) -> EdgeInput:
    archive = Archive(path, context.scratch)
    if is_sparse(archive):
        edges, notes = sparse_edges(archive)
        return EdgeInput(edges, None, notes)
    if "num_nodes_list" in archive and "edge_index" in archive:
        return EdgeInput(*ogb_edges(archive))
    if "edge_index" in archive:
        return EdgeInput(index_edges(archive.array("edge_index"), choice.layout))
    if "indptr" in archive and "indices" in archive:
        return EdgeInput(CompressedEdges(archive.array("indptr"), archive.array("indices")))
    raise UsageError(
        f"{path}: holds {', '.join(archive.keys) or 'nothing'}: expected edge_index, indptr and "
        "indices, or a matrix saved by scipy.sparse.save_npz"
    )


def _open_saved(path: Path, choice: EdgeChoice) -> EdgeInput:
    saved = load_saved(path)
    if isinstance(saved, dict):
        if "edge_index" not in saved:
            raise UsageError(f"{path}: a dictionary without edge_index")
        return data_edges(SimpleNamespace(**{str(key): value for key, value in saved.items()}))
    return EdgeInput(array_edges(saved, choice.layout, None, str(path)))


def _open_graphbolt(path: Path, choice: EdgeChoice, context: Context) -> EdgeInput:
    metadata = Metadata(path)
    form, edges = metadata.edges
    inner = replace(choice, layout="source-target") if form == "numpy" else choice
    found = open_edges(edges, inner, context)
    features = metadata.features(choice.feature_key)
    path_of = None if features is None else features[1]
    return replace(found, features=path_of, vertices=metadata.vertices)


def with_weight_file(found: EdgeInput, choice: EdgeChoice, context: Context) -> EdgeInput:
    """Return *found* with the weights of the file that *choice* names, if it names one."""
    if choice.weights is None:
        return found
    return replace(found, edges=WithWeights(found.edges, _weight_values(choice.weights, context)))


def _weight_values(name: str, context: Context) -> Values:
    path = check_file(Path(name))
    kind = _kind(path)
    if kind == "npy":
        return open_npy(path)
    if kind == "text":
        return text_matrix(path, context)
    raise UsageError(f"{path}: edge weights are read from .npy and text files")


def open_compressed(paths: Sequence[Path], choice: EdgeChoice, context: Context) -> EdgeInput:
    """Return the edges of a pair (indptr, indices), by destination."""
    if len(paths) != 2:
        raise UsageError(f"{len(paths)} edge files: give one, or the pair indptr and indices")
    indptr, indices = (_vector(path) for path in paths)
    return with_weight_file(EdgeInput(CompressedEdges(indptr, indices)), choice, context)


def _vector(path: Path) -> StoredArray:
    check_file(path)
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return open_npy(path)
    conf = read_conf(path.parent)
    found = None if conf is None else conf_shape(conf, path.stem, path)
    if found is None:
        raise UsageError(
            f"{path}: no .npy header and no conf.json beside it that gives {path.stem}_shape and "
            f"{path.stem}_dtype"
        )
    return raw_array(path, *found)


def _open_folder(folder: Path, choice: EdgeChoice, context: Context) -> EdgeInput:
    for place in (folder, folder / "raw"):
        if (place / "data.npz").is_file():
            return open_edges(place / "data.npz", choice, context)
        if (place / "edge.csv.gz").is_file():
            return with_weight_file(EdgeInput(*ogb_csv_edges(place, context)), choice, context)
    if (folder / "metadata.yaml").is_file():
        return open_edges(folder / "metadata.yaml", choice, context)
    indptr, indices = _named(folder, "indptr"), _named(folder, "indices")
    if indptr is not None and indices is not None:
        found = open_compressed((indptr, indices), choice, context)
        return replace(found, features=_named(folder, "features"))
    raise UsageError(
        f"{folder} is a directory, not a file, and no dataset that is known: raw/data.npz or "
        "raw/edge.csv.gz (OGB), metadata.yaml (GraphBolt), indptr.* and indices.* (DiskGNN, Ginex)"
    )


def _named(folder: Path, stem: str) -> Path | None:
    found = [path for end in (".npy", ".dat", ".bin") if (path := folder / (stem + end)).is_file()]
    return found[0] if found else None
