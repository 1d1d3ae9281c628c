"""From what the user names to an edge source: by suffix, by content, by folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyades.common.errors import DataError, UsageError
from hyades.deploy.ingest.readers.edges import CompressedEdges, Layout, WithWeights, index_edges
from hyades.deploy.ingest.readers.features import conf_shape, read_conf
from hyades.deploy.ingest.readers.npy import MAGIC, open_npy
from hyades.deploy.ingest.readers.storage import StoredArray, check_file, raw_array
from hyades.deploy.ingest.sources import EdgeSource, FeatureSource


@dataclass(frozen=True)
class EdgeChoice:
    """What the user said about the edges."""

    layout: Layout | None = None
    columns: tuple[str, str] | None = None
    weights: str | None = None


@dataclass(frozen=True)
class EdgeInput:
    """Edges, the features that came with them, and what the user should know."""

    edges: EdgeSource
    features: FeatureSource | Path | None = None
    notes: tuple[str, ...] = ()


def open_edges(path: Path, choice: EdgeChoice, scratch: Path) -> EdgeInput:
    """Return the edges in the file or dataset folder *path*."""
    if path.is_dir():
        return _open_folder(path, choice)
    kind = _kind(check_file(path))
    if kind == "npy":
        return _weighted(EdgeInput(index_edges(open_npy(path), choice.layout)), choice)
    raise UsageError(f"{path}: edges in this format are not read")


def _kind(path: Path) -> str:
    with path.open("rb") as file:
        head = file.read(8)
    if head.startswith(MAGIC):
        return "npy"
    if path.suffix == ".npy":
        raise DataError(
            f"{path}: no .npy header (it does not begin with \\x93NUMPY): raw ids are read only "
            "from a folder with indptr, indices and a conf.json that gives shape and dtype"
        )
    return "text"


def _weighted(found: EdgeInput, choice: EdgeChoice) -> EdgeInput:
    if choice.weights is None:
        return found
    weights = Path(choice.weights)
    return EdgeInput(WithWeights(found.edges, open_npy(weights)), found.features, found.notes)


def open_compressed(paths: Sequence[Path], choice: EdgeChoice) -> EdgeInput:
    """Return the edges of a pair (indptr, indices), by destination."""
    if len(paths) != 2:
        raise UsageError(f"{len(paths)} edge files: give one, or the pair indptr and indices")
    indptr, indices = (_vector(path) for path in paths)
    return _weighted(EdgeInput(CompressedEdges(indptr, indices)), choice)


def _vector(path: Path) -> StoredArray:
    check_file(path)
    with path.open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            return open_npy(path)
    conf = read_conf(path.parent)
    if conf is None:
        raise UsageError(
            f"{path}: no .npy header and no conf.json beside it that gives {path.stem}_shape and "
            f"{path.stem}_dtype"
        )
    found = conf_shape(conf, path.stem, path)
    if found is None:
        raise UsageError(f"{path.parent / 'conf.json'} lacks {path.stem}_shape or _dtype")
    return raw_array(path, *found)


def _open_folder(folder: Path, choice: EdgeChoice) -> EdgeInput:
    indptr = _named(folder, "indptr")
    indices = _named(folder, "indices")
    if indptr is not None and indices is not None:
        found = open_compressed((indptr, indices), choice)
        return EdgeInput(found.edges, _named(folder, "features"), found.notes)
    raise UsageError(
        f"{folder} is a directory, not a file, and holds no dataset that is known: raw/data.npz "
        "(OGB), metadata.yaml (GraphBolt), or indptr.* and indices.* (DiskGNN, Ginex)"
    )


def _named(folder: Path, stem: str) -> Path | None:
    found = [path for end in (".npy", ".dat", ".bin") if (path := folder / (stem + end)).is_file()]
    return found[0] if found else None
