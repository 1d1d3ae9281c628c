"""scipy.sparse.save_npz: row is the source of an edge, column its target."""

import numpy as np

from hyades.common.errors import DataError, UsageError
from hyades.deploy.ingest.readers.edges import CompressedEdges, VectorEdges
from hyades.deploy.ingest.readers.npz import Archive
from hyades.deploy.ingest.readers.storage import StoredArray
from hyades.deploy.ingest.sources import EdgeSource

_BLOCK = 1 << 18


def is_sparse(archive: Archive) -> bool:
    """Return whether *archive* was written by scipy.sparse.save_npz."""
    return "format" in archive and "shape" in archive


def sparse_edges(archive: Archive) -> tuple[EdgeSource, tuple[str, ...]]:
    """Return the stored entries as edges, and notes; values that are not all 1 are weights."""
    path = archive.path
    kind = archive.array("format").elements(0, 1)[0]
    form = kind.decode() if isinstance(kind, bytes) else str(kind)
    shape = [int(n) for n in archive.array("shape").elements(0, 2)]
    if shape[0] != shape[1]:
        raise UsageError(f"{path}: a {shape[0]} x {shape[1]} matrix is no graph: not square")
    if form not in ("csr", "csc", "coo"):
        raise UsageError(f"{path}: a {form} matrix: convert it with .tocsr() before save_npz")
    data = archive.array("data")
    weighted = not _all_ones(data)
    values = data if weighted else None
    notes = (f"{path}: its values are taken as edge weights",) if weighted else ()
    if form == "coo":
        pair = (archive.array("row"), archive.array("col"))
        return VectorEdges(*pair, values, vertices=shape[0]), notes
    edges = CompressedEdges(
        archive.array("indptr"), archive.array("indices"), values, outgoing=form == "csr"
    )
    if edges.vertices != shape[0]:
        raise DataError(f"{path}: indptr is for {edges.vertices} rows, shape says {shape[0]}")
    return edges, notes


def _all_ones(data: StoredArray) -> bool:
    if data.dtype.kind not in "fiub":
        raise UsageError(f"{data.name}: values of dtype {data.dtype} are no edge weights")
    count = data.shape[0]
    return all(
        np.all(data.elements(start, min(_BLOCK, count - start)) == 1)
        for start in range(0, count, _BLOCK)
    )
