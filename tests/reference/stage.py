"""Small volumes for tests of the stage, and what its operators must give, plainly."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tests.reference.sampled import kept_edges

from hyades.common.blocks import MemoryBlocks
from hyades.common.units import KIB, MIB
from hyades.common.views import SparseShape, join_sparse, parse_dense
from hyades.common.viewspec import SampleSpec
from hyades.common.volume import Volume
from hyades.deploy.ingest.build import BuildOptions, build_graph
from hyades.deploy.ingest.sources import ArrayEdges, ArrayFeatures
from hyades.target_side.stage.viewpages import ViewPages

Ints = NDArray[np.int64]


def random_edges(vertices: int, edges: int, seed: int = 0) -> Ints:
    """Return edges [2, E] with duplicates and, at some vertices, several self loops."""
    rng = np.random.default_rng(seed)
    body = rng.integers(0, vertices, (2, edges))
    body[:, : edges // 8] = body[:, edges // 8 : 2 * (edges // 8)]
    loops = rng.integers(0, vertices, vertices // 5)
    return np.concatenate((body, np.tile(loops, (2, 2))), axis=1)


def make_volume(
    edges: Ints, features: NDArray[Any], *, page_size: int = 64 * KIB, weights: Any = None,
    **options: Any,
) -> Volume:  # fmt: skip
    """Return a committed volume in memory."""
    volume = Volume.create(MemoryBlocks(), page_size=page_size)
    source = ArrayEdges(edges[0].copy(), edges[1].copy(), weights)
    chosen = BuildOptions(allow_nonfinite=True, **options)
    build_graph(volume, source, ArrayFeatures(features), chosen)
    volume.commit()
    return volume


VERTICES, WIDTH, RANGE = 1282, 50, 512  # the last landing block of small pages has 2 rows
EDGES = random_edges(VERTICES, 6000, seed=2)
RNG = np.random.default_rng(5)
X = (RNG.standard_normal((VERTICES, WIDTH)) * 50).astype(np.float32)
X[7, 3], X[7, 4], X[600, 1], X[1281, 49] = np.nan, np.inf, -np.inf, 6e4
W = (RNG.standard_normal((16, WIDTH)).astype(np.float32), np.eye(WIDTH, dtype=np.float32)[:3])
ASKED = SampleSpec(1, 4, 1, ((0, 1),), "none")


def awkward_volume(kind: str) -> Volume:
    """Return a volume of EDGES and X: "one page a range", "several", or "float16" features."""
    features = X.astype(np.float16) if kind == "float16" else X
    size = MIB if kind == "one page a range" else 64 * KIB
    return make_volume(EDGES, features, page_size=size, range_rows=RANGE)


def needed_rows(volume: Volume, edges: Ints, spec: SampleSpec) -> list[list[int]]:
    """Return by range the local ids of rows that *spec* needs, from the edge list alone."""
    graph = volume.catalog.graph
    assert graph is not None
    place = np.arange(graph.vertices)
    if "order" in volume.catalog.objects:
        place = np.argsort(volume.read_table("order"))
    asked = spec.asked(graph.chunks)
    kept = edges[:, kept_edges(edges, spec.fanout, spec.seed, spec.layer)]
    needed: set[int] = set()
    for source, destination in place[kept].T.tolist():
        if source == destination:
            if spec.own == "loops" and asked[source // graph.range_rows]:
                needed.add(source)
        elif asked[destination // graph.range_rows]:
            needed.add(source)
    if spec.own == "all":
        needed |= {v for v in range(graph.vertices) if asked[v // graph.range_rows]}
    rows = graph.range_rows
    return [
        sorted(v - index * rows for v in needed if v // rows == index)
        for index in range(graph.chunks)
    ]


def read_view(view: ViewPages) -> tuple[list[list[int]], NDArray[np.uint8]]:
    """Return ids by range and all rows [n, row_bytes], from the blocks as a reader has them."""
    head, salt = view.head, view.spec.salt
    shape = head.spec.shape()
    blocks = shape.page_bytes // 4096

    def page(number: int) -> bytes:
        return bytes(view.read(head.page_lba(number), blocks))

    if not isinstance(shape, SparseShape):
        rows = [parse_dense(shape, n, page(n), salt) for n in range(shape.pages)]
        sizes = [min(shape.range_rows, shape.rows - i * shape.range_rows)
                 for i in range(shape.ranges)]  # fmt: skip
        return [list(range(size)) for size in sizes], np.concatenate(rows)
    ids, parts = [], []
    for index in range(shape.ranges):
        first, used = index * shape.pages_per_range, shape.used_pages(int(head.counts[index]))
        found = join_sparse(shape, index, [page(first + i) for i in range(used)], salt)
        ids.append([int(i) for part in found for i in part.ids])
        parts += [part.rows for part in found]
    return ids, np.concatenate(parts) if parts else np.zeros((0, shape.row_bytes), np.uint8)
