"""From options to the sources that the builder reads: opening, relabelling, reversing."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.deploy.ingest.build import count_vertices
from hyades.deploy.ingest.dedup import UniqueEdges
from hyades.deploy.ingest.features import conversion_note
from hyades.deploy.ingest.options import IngestOptions
from hyades.deploy.ingest.readers.context import Context
from hyades.deploy.ingest.readers.dispatch import (
    EdgeChoice,
    open_compressed,
    open_edges,
    with_weight_file,
)
from hyades.deploy.ingest.readers.edges import ArrayValues, WithWeights, to_ids
from hyades.deploy.ingest.readers.features import FeatureChoice, open_features, parse_shape
from hyades.deploy.ingest.readers.memory import EdgeInput, array_edges, as_array, data_edges
from hyades.deploy.ingest.readers.text import open_ids
from hyades.deploy.ingest.relabel import Relabelling, relabel, relabel_by
from hyades.deploy.ingest.sources import ArrayFeatures, EdgeSource, FeatureSource, Undirected


@dataclass(frozen=True)
class Inputs:
    """What goes into the builder.

    original_ids: [V] int64, the user's id of each vertex, or None where ids are 0 to V-1.
    held: bytes of memory that translating ids takes while edges are read.
    """

    edges: EdgeSource
    features: FeatureSource | None
    vertices: int
    original_ids: NDArray[np.int64] | None
    held: int
    notes: tuple[str, ...]


def open_inputs(options: IngestOptions, context: Context) -> Inputs:
    """Open everything that *options* name; UsageError or DataError for what cannot be."""
    found = _edges(options, context)
    edges = found.edges
    if options.weights is not None and not isinstance(options.weights, str | os.PathLike):
        edges = WithWeights(edges, ArrayValues(as_array(options.weights, "weights"), "weights"))
    features = _features(options, found, context)
    notes = list(found.notes)
    if features is None:
        notes.append("no features: topology only")
    elif (note := conversion_note(features)) is not None:
        notes.append(note)
    stated = found.vertices if options.vertices is None else options.vertices
    original_ids, held = None, 0
    if options.relabel or options.ids is not None:
        edges, original_ids, held = _relabel(edges, options, context)
        _check_ids(edges, len(original_ids), features, options)
    vertices = count_vertices(edges, features, stated, context.progress)
    if options.undirected:
        edges = Undirected(edges)
    if options.dedup:
        before = edges.edges
        edges = UniqueEdges(
            edges, vertices, context.memory - held, context.scratch, context.progress
        )
        notes.append(f"{before - edges.edges:,} duplicates left out, {edges.edges:,} edges remain")
    return Inputs(edges, features, vertices, original_ids, held, tuple(notes))


def _relabel(edges: EdgeSource, options: IngestOptions, context: Context) -> Relabelling:
    given = options.ids
    if given is None:
        return relabel(edges, context.memory, context.progress)
    name = str(given) if isinstance(given, str | os.PathLike) else "ids"
    if isinstance(given, str | os.PathLike):
        array = open_ids(Path(given), context)
        ids = array.elements(0, array.shape[0])
    else:
        ids = as_array(given, name).reshape(-1)
    if ids.dtype.kind not in "iu":
        raise UsageError(f"{name}: ids of dtype {ids.dtype} are not integers")
    return relabel_by(edges, to_ids(ids, name, 0), name, context.memory)


def _check_ids(
    edges: EdgeSource, count: int, features: FeatureSource | None, options: IngestOptions
) -> None:
    if features is None or features.rows == count:
        return
    if options.ids is not None:
        raise UsageError(f"{features.name} has {features.rows:,} rows, --ids has {count:,} ids")
    raise UsageError(
        f"{edges.name} has {count:,} different ids, {features.name} has {features.rows:,} rows: "
        "pass --ids FILE with the id of each row"
    )


def _edges(options: IngestOptions, context: Context) -> EdgeInput:
    given = options.edges
    if options.edge_layout not in (None, "source-target", "pairs"):
        raise UsageError(f"--edge-layout {options.edge_layout}: choose source-target or pairs")
    weights = options.weights
    choice = EdgeChoice(
        layout=options.edge_layout,  # type: ignore[arg-type]
        columns=options.edge_columns,
        weights=os.fspath(weights) if isinstance(weights, str | os.PathLike) else None,
        feature_key=options.feature_key,
    )
    if isinstance(given, str | os.PathLike):
        return open_edges(Path(given), choice, context)
    if isinstance(given, Sequence) and all(isinstance(p, str | os.PathLike) for p in given):
        return open_compressed([Path(path) for path in given], choice, context)
    if hasattr(given, "edge_index"):
        return with_weight_file(data_edges(given), choice, context)
    return with_weight_file(EdgeInput(array_edges(given, choice.layout)), choice, context)


def _features(options: IngestOptions, found: EdgeInput, context: Context) -> FeatureSource | None:
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
    claims = (options.vertices, found.vertices, found.edges.vertices)
    vertices = next((count for count in claims if count is not None), None)
    return open_features(Path(given), choice, context, vertices)
