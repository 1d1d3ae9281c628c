"""Rows of a view's pages as float32, one range at a time."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hyades.common.quantize import decode_rows
from hyades.common.views import SparseShape, join_sparse
from hyades.gpu_side.scratch import scratch
from hyades.gpu_side.stores import PageStoreInfo, block_rows


def decode_range(store: PageStoreInfo, index: int, raw: NDArray[np.uint8]) -> Tensor:
    """Return the rows [n, width] of range *index* from its pages *raw*; rows not sent are zeros.

    DataError where a page of a sampled view contradicts itself.
    """
    assert store.view is not None
    spec, shape = store.view.spec, store.shape
    count = min(spec.range_rows, spec.rows - index * spec.range_rows)
    rows = scratch().take(count, spec.width)
    into, pages = rows.numpy(), raw.reshape(-1, shape.page_bytes)
    if isinstance(shape, SparseShape):
        rows.zero_()
        used = shape.used_pages(int(store.view.counts[index]))
        for page in join_sparse(shape, index, list(pages[:used]), store.salt):
            into[page.ids] = decode_rows(np.ascontiguousarray(page.rows), spec.encoding, spec.width)
        return rows
    per_page = shape.rows_per_page
    for first in range(0, count, per_page):
        part = into[first : first + per_page]
        stored = pages[first // per_page, : len(part) * shape.row_bytes]
        decode_rows(stored.reshape(len(part), shape.row_bytes), spec.encoding, spec.width, part)
    return rows


def landing_blocks(store: PageStoreInfo, rows: Tensor) -> list[Tensor]:
    """Cut the rows of a range into the blocks in which landing multiplies them."""
    return list(torch.split(rows, block_rows(store)))
