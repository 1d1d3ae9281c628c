"""Graphs that a Python caller holds: arrays, torch tensors, a PyG Data object (duck-typed)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.deploy.ingest.readers.edges import Layout, check_id_dtype
from hyades.deploy.ingest.sources import ArrayEdges, ArrayFeatures, EdgeSource, FeatureSource


@dataclass(frozen=True)
class EdgeInput:
    """Edges and what came with them: features (open, or where), V, what the user should know."""

    edges: EdgeSource
    features: FeatureSource | Path | None = None
    notes: tuple[str, ...] = ()
    vertices: int | None = None


def as_array(value: Any, name: str) -> NDArray[Any]:
    """Return an array or a torch tensor (moved to the CPU) as a numpy array; UsageError."""
    if hasattr(value, "detach"):
        value = value.detach().cpu().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{name}: {type(value).__name__} of dtype {array.dtype} is no array")
    return array


def array_edges(
    value: Any, layout: Layout | None, vertices: int | None = None, name: str = "edges"
) -> ArrayEdges:
    """Return the edges of edge_index [2, E]; [E, 2] only with *layout* "pairs"."""
    array = as_array(value, name)
    check_id_dtype(array.dtype, name)
    if layout == "pairs":
        array = array.T
    if array.ndim != 2 or array.shape[0] != 2:
        raise UsageError(
            f"{name}: an array of shape {array.shape} is no edge_index [2, E] "
            '(edge_layout="pairs" takes [E, 2])'
        )
    return ArrayEdges(array[0], array[1], None, vertices, name)


def data_edges(data: Any) -> EdgeInput:
    """Return edges and features of a PyG Data object: edge_index, x, edge_weight, num_nodes."""
    if data.edge_index is None:
        raise UsageError("edges: the Data object has no edge_index")
    weight = getattr(data, "edge_weight", None)
    x = getattr(data, "x", None)
    nodes = getattr(data, "num_nodes", None)
    edges = array_edges(data.edge_index, None, None if nodes is None else int(nodes))
    notes = []
    if weight is not None:
        weight = as_array(weight, "edge_weight").reshape(-1)
    if getattr(data, "edge_attr", None) is not None:
        notes.append("edge_attr is ignored: no supported model takes edge features")
    found = ArrayEdges(edges.source, edges.destination, weight, edges.vertices, "edge_index")
    return EdgeInput(found, None if x is None else ArrayFeatures(as_array(x, "x")), tuple(notes))
