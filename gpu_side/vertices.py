"""Per-vertex tables of a volume, and factors that need a look at the edges."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hyades.common import layout
from hyades.common.jit import jit
from hyades.common.sampling import keeps, sample_key
from hyades.common.volume import Volume
from hyades.gpu_side.factors import Sample, VertexTables
from hyades.gpu_side.models.ir import Conv


def load_vertices(volume: Volume) -> VertexTables:
    """Read the per-vertex tables of *volume*."""

    def optional(name: str, dtype: Any) -> NDArray[Any] | None:
        if name not in volume.catalog.objects:
            return None
        return volume.read_table(name).astype(dtype, copy=False)

    order = optional("order", np.int64)
    return VertexTables(
        volume.read_table("in_degrees").astype(np.uint32, copy=False),
        volume.read_table("out_degrees").astype(np.uint32, copy=False),
        volume.read_table("self_loops").astype(np.uint32, copy=False),
        optional("weighted_in", np.float32),
        optional("loop_weights", np.float32),
        np.zeros(0, np.int64) if order is None else order,
    )


@jit
def _sum_kept(
    page: Any, ranks: Any, weights: Any, range_rows: Any, originals: Any, degrees: Any, fanout: Any,
    seed: Any, layer: Any, sums: Any,
) -> None:  # fmt: skip
    """Add the kept edges' weights of one tile page (int32 words) to float64 *sums* [V]."""
    shorts = page.view(np.uint16)
    for entry in range(page[layout.TH_TILES]):
        at = layout.TH_WORDS + entry * layout.TE_WORDS
        first_vertex = np.int64(page[at + layout.TE_LANE]) * range_rows
        segments = np.int64(page[at + layout.TE_SEGS_FLAGS]) & 0xFFFF
        first_segment = np.int64(page[at + layout.TE_SEG0])
        first_edge = np.int64(page[at + layout.TE_EDGE0])
        dst = (page[layout.TH_DST] >> 1) + first_segment
        ends = (page[layout.TH_ENDS] >> 1) + first_segment
        start = np.int64(0)
        for segment in range(segments):
            vertex = first_vertex + shorts[dst + segment]
            name = originals[vertex] if originals.shape[0] > 0 else vertex
            key = sample_key(seed, layer, name)
            end = np.int64(shorts[ends + segment])
            for edge in range(start, end):
                if keeps(key, np.int64(ranks[first_edge + edge]), degrees[vertex], fanout):
                    sums[vertex] += weights[first_edge + edge]
            start = end


def needs_kept_weights(conv: Conv, sample: Sample, weighted: bool) -> bool:
    """Say whether the factors of *conv* follow from which weighted edges are kept."""
    return conv.norm == "gcn" and conv.edge_weight and weighted and sample.fanout > 0


class KeptWeights:
    """Sums the weights of the kept in-edges of every vertex, from all tile pages in order."""

    def __init__(self, tables: VertexTables, sample: Sample, range_rows: int) -> None:
        self.sums = np.zeros(len(tables.loops))  # float64 [V]
        self._degrees = np.add(tables.in_degrees, tables.loops, dtype=np.int64)
        self._originals = tables.originals
        self._sample = sample
        self._range_rows = range_rows

    def add(self, _page: int, blocks: list[Tensor]) -> None:
        """Add one page: its tiles, ranks and weights as bytes."""
        tiles, ranks, weights = (block.numpy().reshape(-1) for block in blocks)
        sample = self._sample
        _sum_kept(
            tiles.view(np.int32), ranks.view(np.uint32), weights.view(np.float32),
            self._range_rows, self._originals, self._degrees, sample.fanout, sample.seed,
            sample.layer, self.sums,
        )  # fmt: skip
