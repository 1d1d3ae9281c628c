"""From options to the sources that the builder reads: opening, relabelling, reversing."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyades.common.errors import UsageError
from hyades.deploy.ingest.options import IngestOptions
from hyades.deploy.ingest.readers.dispatch import (
    EdgeChoice,
    EdgeInput,
    open_compressed,
    open_edges,
)
from hyades.deploy.ingest.readers.edges import ArrayValues, WithWeights
from hyades.deploy.ingest.readers.features import FeatureChoice, open_features, parse_shape
from hyades.deploy.ingest.readers.memory import array_edges, as_array, data_edges
from hyades.deploy.ingest.sources import ArrayFeatures, EdgeSource, FeatureSource, Undirected


@dataclass(frozen=True)
class Inputs:
    """What goes into the builder."""

    edges: EdgeSource
    features: FeatureSource | None
    notes: tuple[str, ...]


def open_inputs(options: IngestOptions, scratch: Path) -> Inputs:
    """Open everything that *options* name; UsageError or DataError for what cannot be."""
    found = _edges(options, scratch)
    edges = found.edges
    if options.weights is not None and not isinstance(options.weights, str | os.PathLike):
        edges = WithWeights(edges, ArrayValues(as_array(options.weights, "weights"), "weights"))
    features = _features(options, found, scratch)
    if options.undirected:
        edges = Undirected(edges)
    return Inputs(edges, features, found.notes)


def _edges(options: IngestOptions, scratch: Path) -> EdgeInput:
    given = options.edges
    if options.edge_layout not in (None, "source-target", "pairs"):
        raise UsageError(f"--edge-layout {options.edge_layout}: choose source-target or pairs")
    weights = options.weights
    choice = EdgeChoice(
        layout=options.edge_layout,  # type: ignore[arg-type]
        columns=options.edge_columns,
        weights=os.fspath(weights) if isinstance(weights, str | os.PathLike) else None,
    )
    if isinstance(given, str | os.PathLike):
        return open_edges(Path(given), choice, scratch)
    if isinstance(given, Sequence) and all(isinstance(p, str | os.PathLike) for p in given):
        return open_compressed([Path(path) for path in given], choice)
    if hasattr(given, "edge_index"):
        return data_edges(given)
    return EdgeInput(array_edges(given, choice.layout))


def _features(options: IngestOptions, found: EdgeInput, scratch: Path) -> FeatureSource | None:
    given = options.features
    if given is None and not isinstance(found.features, Path):
        return found.features
    given = found.features if given is None else given
    if not isinstance(given, str | os.PathLike):
        return ArrayFeatures(as_array(given, "features"))
    shape = options.feature_shape
    try:
        dtype = None if options.feature_dtype is None else np.dtype(options.feature_dtype)
    except TypeError as error:
        raise UsageError(f"--feature-dtype {options.feature_dtype}: unknown dtype") from error
    choice = FeatureChoice(
        options.feature_key, parse_shape(shape) if isinstance(shape, str) else shape, dtype
    )
    vertices = options.vertices if options.vertices is not None else found.edges.vertices
    return open_features(Path(given), choice, scratch, vertices)
