"""Dataset folders: OGB (binary and csv) and DGL GraphBolt."""

from pathlib import Path
from typing import Any

import yaml

from hyades.common.errors import DataError, UsageError
from hyades.deploy.ingest.readers.context import Context
from hyades.deploy.ingest.readers.edges import index_edges
from hyades.deploy.ingest.readers.features import StoredFeatures, stored_features
from hyades.deploy.ingest.readers.npz import Archive
from hyades.deploy.ingest.readers.storage import StoredArray
from hyades.deploy.ingest.readers.text import text_edges, text_matrix
from hyades.deploy.ingest.sources import EdgeSource, FeatureSource

Found = tuple[EdgeSource, FeatureSource | Path | None, tuple[str, ...]]


def ogb_edges(archive: Archive) -> Found:
    """Return edges, features and notes of OGB's data.npz."""
    counts = archive.array("num_nodes_list") if "num_nodes_list" in archive else None
    edges = index_edges(archive.array("edge_index"), "source-target", _one(counts))
    features = None
    if "node_feat" in archive:
        features = stored_features(archive.array("node_feat"))
    notes: tuple[str, ...] = ()
    if "edge_feat" in archive:
        notes = (f"{archive.path}: edge_feat is ignored: no supported model takes edge features",)
    return edges, features, notes


def _one(counts: StoredArray | None) -> int | None:
    """Return the number of vertices of the only graph; UsageError for several."""
    if counts is None:
        return None
    values = counts.rows(0, counts.shape[0]).reshape(-1)
    if len(values) != 1:
        raise UsageError(f"{counts.name}: {len(values)} graphs; ingest takes one")
    return int(values[0])


def ogb_csv_edges(folder: Path, context: Context) -> Found:
    """Return edges, features and notes of OGB's raw csv files."""
    edges, notes = text_edges(folder / "edge.csv.gz", None, None, context)
    counts = folder / "num-node-list.csv.gz"
    if counts.is_file():
        vertices = _one(text_matrix(counts, context))
        edges = type(edges)(edges.source, edges.destination, edges.weight, vertices)
    features = folder / "node-feat.csv.gz"
    found: StoredFeatures | None = None
    if features.is_file():
        found = stored_features(text_matrix(features, context))
    return edges, found, notes


class Metadata:
    """A GraphBolt metadata.yaml of a homogeneous graph."""

    def __init__(self, path: Path) -> None:
        """Parse *path*; DataError when it is no metadata, UsageError for what is not supported."""
        self.path = path
        try:
            content = yaml.safe_load(path.read_text())
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: no YAML: {str(error).splitlines()[0]}") from error
        if not isinstance(content, dict) or not isinstance(content.get("graph"), dict):
            raise DataError(f"{path}: no GraphBolt metadata: it has no graph")
        self._content = content
        graph = content["graph"]
        self._edges = self._list(graph, "edges")
        self._nodes = self._list(graph, "nodes")
        if len(self._edges) != 1 or len(self._nodes) > 1:
            raise UsageError(
                f"{path}: {len(self._nodes)} types of vertices and {len(self._edges)} of edges: "
                "only graphs with one of each are supported"
            )

    def _list(self, where: dict[str, Any], key: str) -> list[dict[str, Any]]:
        found = where.get(key) or []
        if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
            raise DataError(f"{self.path}: {key} is no list of entries")
        return found

    @property
    def vertices(self) -> int | None:
        """Number of vertices."""
        return int(self._nodes[0]["num"]) if self._nodes and "num" in self._nodes[0] else None

    @property
    def edges(self) -> tuple[str, Path]:
        """Format and path of the edges."""
        return self._file(self._edges[0], ("csv", "numpy"))

    def features(self, name: str | None) -> tuple[str, Path] | None:
        """Return format and path of the vertex features *name*, or of the only or usual ones."""
        items = self._list(self._content, "feature_data")
        nodes = [item for item in items if item.get("domain") == "node"]
        if name is not None:
            chosen = [item for item in nodes if item.get("name") == name]
        else:
            chosen = [item for item in nodes if item.get("name") == "feat"] or nodes
        if len(chosen) == 1:
            return self._file(chosen[0], ("numpy", "torch"))
        if not nodes and name is None:
            return None
        names = ", ".join(str(item.get("name")) for item in nodes)
        raise UsageError(f"{self.path}: pass --feature-key with one of the vertex features {names}")

    def _file(self, item: dict[str, Any], known: tuple[str, ...]) -> tuple[str, Path]:
        form, path = item.get("format"), item.get("path")
        if form not in known or not isinstance(path, str):
            raise UsageError(
                f"{self.path}: format {form!r} of {path!r} is not one of {', '.join(known)}"
            )
        return str(form), self.path.parent / path
