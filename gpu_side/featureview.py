"""What of the features travels: a view that a target computes, in place of the stored rows.

A `ViewChoice` is what was asked for. `resolve_view` says what that means for the one stage that
reads the features, or why it cannot be.  Rules:
1. With float32 (or the rows' own type) a view changes no bit: rows are multiplied in the blocks in
   which landing would have multiplied them, by the same product (`viewspec.landing_rows`).
2. project: the columns of a row are what landing would have made of it, side by side: the message,
   then the vertex's own row, then the destination's attention scores.  So nothing may come before
   the product, and the product must come before the aggregation.
3. sample: of each chunk the rows that have a kept edge into the lanes of a pass, and of those lanes
   the own rows that are added apart. Attention scores need every row: it is never sampled.
Must stay in sync: scan.py and refresh.py use the columns, price.py prices the pages.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hyades.common.catalog import ObjectInfo
from hyades.common.encodings import Encoding, encoded_row_bytes
from hyades.common.errors import UsageError
from hyades.common.pages import PageShape
from hyades.common.views import SparseShape, dense_shape, sparse_shape
from hyades.common.viewspec import Own, landing_rows
from hyades.gpu_side.models.ir import Conv
from hyades.gpu_side.program import Stage
from hyades.gpu_side.scores import score_weights
from hyades.gpu_side.shapes import has_own_rows


@dataclass(frozen=True, slots=True)
class ViewChoice:
    """Which operators run beside the data; encoding None keeps the rows' own type."""

    sample: bool = False
    project: bool = False
    encoding: Encoding | None = None


@dataclass(frozen=True, slots=True)
class ViewColumns:
    """Where landing finds what in a projected row: [message | own | scores]."""

    message: int
    own: int
    scores: int

    @property
    def width(self) -> int:
        """Columns in all."""
        return self.message + self.own + self.scores


@dataclass(frozen=True, slots=True)
class FeatureView:
    """A view that one stage reads instead of the features; see the module."""

    source: str
    encoding: Encoding
    rows: int
    range_rows: int
    block_rows: int  # rows that landing multiplies at once
    page_size: int
    width: int
    weights: tuple[Tensor, ...] = ()  # [out, in], in the order of the columns
    columns: ViewColumns | None = None  # of projected rows
    fanout: int = 0  # 0: every row
    layer: int = 0
    own: Own = "all"
    rounds: bool = False  # the values are not those of the stored rows, or of float32 products

    @property
    def sampled(self) -> bool:
        """Say whether rows drop out."""
        return self.fanout > 0

    @property
    def row_bytes(self) -> int:
        """Bytes of a row as it travels."""
        return encoded_row_bytes(self.encoding, self.width)

    def shape(self) -> PageShape | SparseShape:
        """Return how its rows lie in pages."""
        make = sparse_shape if self.sampled else dense_shape
        return make(self.rows, self.row_bytes, self.range_rows, self.page_size)


def own_rows(conv: Conv) -> Own:
    """Return which of a pass's own rows join its lanes apart from edges."""
    if has_own_rows(conv) or conv.self_scale != 0 or conv.norm == "closed" or conv.loops == "one":
        return "all"
    return "none" if conv.loops == "drop" else "loops"


def resolve_view(
    choice: ViewChoice, stage: Stage, features: ObjectInfo, fanout: int, page_size: int
) -> FeatureView:
    """Return the view that *stage*, the one that reads *features*, asks for; UsageError."""
    conv = stage.conv
    assert conv is not None, "the features are read by a convolution"
    weights, columns = _projection(conv, stage) if choice.project else ((), None)
    if choice.sample:
        _check_sample(conv, fanout)
    stored = cast("Encoding", features.dtype)
    encoding = choice.encoding or ("float32" if weights else stored)
    view = FeatureView(
        features.name, encoding, features.rows, features.range_rows, landing_rows(features.shape()),
        page_size, columns.width if columns else features.width, weights, columns,
        fanout if choice.sample else 0, stage.layer, own_rows(conv),
        encoding not in ({"float32"} if weights else {"float32", stored}),
    )  # fmt: skip
    view.shape()
    return view


def why_not_projected(conv: Conv, stage: Stage) -> str:
    """Return why the rows of *stage* cannot be multiplied beside the data, or ""."""
    if conv.neighbour is None:
        return "it has no product on single rows"
    if conv.aggregate == "max":
        return "max does not commute with the product"
    if stage.inputs[0].before or conv.source:
        return "other operations come before the product"
    return ""


def why_not_sampled(conv: Conv, fanout: int) -> str:
    """Return why no row of the layer can drop out, or ""."""
    if fanout <= 0:
        return "its layer has no fanout, so every edge counts: give --fanout"
    if conv.attention is not None:
        return "attention needs every row for the destinations' scores"
    return ""


def _projection(conv: Conv, stage: Stage) -> tuple[tuple[Tensor, ...], ViewColumns]:
    if reason := why_not_projected(conv, stage):
        raise UsageError(f"--stage project: {conv.name}: {reason}; leave project out")
    assert conv.neighbour is not None
    weights = [conv.neighbour.weight]
    own = scores = 0
    if conv.root is not None:
        weights.append(conv.root.weight)
        own = int(conv.root.weight.shape[0])
    if conv.attention is not None:
        weights.append(score_weights(conv).t())
        scores = conv.attention.heads
    columns = ViewColumns(int(conv.neighbour.weight.shape[0]), own, scores)
    return tuple(weights), columns


def _check_sample(conv: Conv, fanout: int) -> None:
    if reason := why_not_sampled(conv, fanout):
        raise UsageError(f"--stage sample: {conv.name}: {reason}; else leave sample out")


def expected_rows(
    view: FeatureView, rows: NDArray[np.int64], edges: NDArray[np.float64], own: NDArray[np.bool_],
    kept: float,
) -> NDArray[np.int64]:  # fmt: skip
    """Return about how many of each chunk's *rows* a pass needs, int64 [chunks].

    *edges* of each chunk lead into the pass, of which the share *kept* is kept; *own* chunks are
    lanes of the pass. Edges fall on rows at random here; the target tells the true counts.
    """
    needed = rows * -np.expm1(-kept * edges / np.maximum(rows, 1))
    if view.own == "all":
        needed = np.where(own, rows, needed)
    return np.ceil(needed).astype(np.int64)
