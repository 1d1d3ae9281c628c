"""What a user asks of an ingest, and what comes back."""

import os
from dataclasses import dataclass, field
from typing import Any

from hyades.common.catalog import GraphInfo
from hyades.common.pages import DEFAULT_PAGE

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class IngestOptions:
    """All options of an ingest; only `edges` must be given.

    edges: a file, or a folder of OGB, GraphBolt, DiskGNN or Ginex; a pair (indptr, indices) of
        files, by destination; a PyG Data object; or an array [2, E] (also a torch tensor).
    features: a file, an array [V, F], or None: what the edges' dataset brings, else none.
    weights: edge weights: a file [E], a column of the edge list (name or number), or an array.
    vertices: number of vertices where neither edges nor features state it.
    edge_layout: "source-target" for [2, E] or "pairs" for [E, 2] where the shape fits both.
    edge_columns: names or numbers of the source and target columns of a table.
    feature_key: array of an .npz, or column of a parquet file (several: comma-separated).
    feature_shape, feature_dtype: of a headerless raw file.
    undirected: add the reverse of every edge; self loops are not doubled.
    dedup: keep the first of equal edges (after adding reverses), with its weight.
    relabel: ids are any integers; vertex i is the i-th smallest id, or row i of `ids`.
    ids: file or array with the id of each feature row; implies relabel.
    reorder: "none", "rcm" or "hyades".
    range_rows: vertices of a chunk, a power of two up to 65,536; None lets Hyades choose.
    page_size: largest page in bytes, a power of two from 64 KiB to 4 MiB.
    allow_nonfinite: let NaN and inf in features and weights pass.
    memory: budget in bytes or as "1GiB".
    force: replace an existing volume.
    scratch: folder for temporary files; None takes the volume's, or /var/tmp for a device or URL.
    """

    edges: Any
    features: Any = None
    weights: Any = None
    vertices: int | None = None
    edge_layout: str | None = None
    edge_columns: tuple[str, str] | None = None
    feature_key: str | None = None
    feature_shape: str | tuple[int, int] | None = None
    feature_dtype: str | None = None
    undirected: bool = False
    dedup: bool = False
    relabel: bool = False
    ids: Any = None
    reorder: str = "none"
    range_rows: int | None = None
    page_size: int | str = DEFAULT_PAGE
    allow_nonfinite: bool = False
    memory: int | str = "1GiB"
    force: bool = False
    scratch: PathLike | None = None


@dataclass(frozen=True)
class IngestReport:
    """What an ingest made: the volume, the graph's facts, and what the user should know."""

    path: PathLike
    graph: GraphInfo
    feature_width: int | None
    feature_dtype: str | None
    nbytes: int
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)  # seconds by phase
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report as text, one fact a line."""
        graph = self.graph
        features = "no features"
        if self.feature_width is not None:
            features = f"features [{graph.vertices:,}, {self.feature_width}] {self.feature_dtype}"
        text = [
            f"{self.path}: {graph.vertices:,} vertices, {graph.edges:,} edges, "
            f"{graph.loops:,} self loops, {features}",
            f"{graph.chunks:,} ranges of {graph.range_rows:,} vertices, {self.nbytes:,} bytes, "
            f"{self.seconds:.1f} s",
        ]
        if graph.reorder != "none":
            change = graph.span_after / max(graph.span_before, 1) - 1
            text.append(
                f"reorder {graph.reorder}: total span {graph.span_before:,} before, "
                f"{graph.span_after:,} after ({change:+.1%})"
            )
        return text + [f"note: {note}" for note in self.notes]
