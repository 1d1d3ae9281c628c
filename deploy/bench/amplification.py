"""What a system that gathers neighbours reads from storage, against one scan that broadcasts.

The model of the gather.  Destinations are taken in id order in batches of `batch_rows`.  A batch
needs the rows of its own vertices and of all their in-neighbours (duplicates once), and reads each
page that holds a part of such a row once.  A cache of `cache_pages` pages with least-recently-used
replacement survives between batches; with 0, the default, every batch starts cold, as it does where
the page cache is smaller than what one batch touches.  Within a batch pages come in file order.
Rows lie one after another without padding.

The broadcast reads every page of the same file once.  Topology and outputs are left out on both
sides.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.jit import jit

_NONE = -1


@dataclass(frozen=True, slots=True)
class GatherCost:
    """Bytes for one layer over all vertices."""

    gather_bytes: int  # pages read by all batches
    needed_bytes: int  # the rows in them that a batch asked for, each once a batch
    per_edge_bytes: int  # a page read for every edge: no batch, no cache
    broadcast_bytes: int  # all pages once

    @property
    def amplification(self) -> float:
        """How many times as much the gather reads as the broadcast."""
        return self.gather_bytes / self.broadcast_bytes

    @property
    def waste(self) -> float:
        """Bytes read by the gather for each byte that a batch needed."""
        return self.gather_bytes / self.needed_bytes


def gather_amplification(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    row_bytes: int,
    page_bytes: int = 4096,
    *,
    batch_rows: int = 4096,
    cache_pages: int = 0,
) -> GatherCost:
    """Count the bytes of the module's model on a CSC graph; raise UsageError for sizes below 1."""
    if min(row_bytes, page_bytes, batch_rows) < 1 or cache_pages < 0:
        raise UsageError(
            f"row of {row_bytes}, page of {page_bytes} bytes, batch of {batch_rows} rows and cache "
            f"of {cache_pages} pages: the first three must be at least 1, the last at least 0"
        )
    vertices = indptr.size - 1
    if vertices < 1:
        raise UsageError("a graph without vertices has nothing to read")
    pages = -(-vertices * row_bytes // page_bytes)
    cache_pages = min(cache_pages, pages)  # int64 for the kernel
    read, rows, edge_pages = _count(
        indptr, indices, row_bytes, page_bytes, batch_rows, cache_pages, pages
    )
    return GatherCost(
        int(read) * page_bytes,
        int(rows) * row_bytes,
        int(edge_pages) * page_bytes,
        pages * page_bytes,
    )


@jit
def _count(
    indptr: Any, indices: Any, row_bytes: int, page_bytes: int, batch: int, cache: int, pages: int
) -> Any:
    """Return pages read, distinct rows needed summed over batches, and pages of all edges."""
    vertices = indptr.size - 1
    row_seen = np.full(vertices, _NONE, np.int32)
    page_seen = np.full(pages, _NONE, np.int32)
    # The pages that a batch touches, and the cache as a doubly linked list, newest at `ends[0]`.
    touched = np.empty(pages, np.int64)
    newer = np.full(pages, _NONE, np.int64)
    older = np.full(pages, _NONE, np.int64)
    cached = np.zeros(pages, np.bool_)
    ends = np.full(2, _NONE, np.int64)
    read, rows, edge_pages, held = 0, 0, 0, 0
    for number in range((vertices + batch - 1) // batch):
        count = 0
        for v in range(number * batch, min(vertices, (number + 1) * batch)):
            for place in range(indptr[v] - 1, indptr[v + 1]):
                row: Any = np.int64(v if place < indptr[v] else indices[place])
                first = row * row_bytes // page_bytes
                last = ((row + 1) * row_bytes - 1) // page_bytes
                if place >= indptr[v]:
                    edge_pages += last - first + 1
                if row_seen[row] == number:
                    continue
                row_seen[row] = number
                rows += 1
                for page in range(first, last + 1):
                    if page_seen[page] != number:
                        page_seen[page] = number
                        touched[count] = page
                        count += 1
        if cache == 0:
            read += count
            continue
        ordered = touched[:count]
        ordered.sort()
        for page in ordered:
            if cached[page]:
                _unlink(page, newer, older, ends)
            else:
                read += 1
                if held == cache:
                    victim = ends[1]
                    _unlink(victim, newer, older, ends)
                    cached[victim] = False
                else:
                    held += 1
                cached[page] = True
            _push(page, newer, older, ends)
    return read, rows, edge_pages


@jit
def _unlink(page: Any, newer: Any, older: Any, ends: Any) -> None:
    above, below = newer[page], older[page]
    if above == _NONE:
        ends[0] = below
    else:
        older[above] = below
    if below == _NONE:
        ends[1] = above
    else:
        newer[below] = above


@jit
def _push(page: Any, newer: Any, older: Any, ends: Any) -> None:
    newer[page], older[page] = _NONE, ends[0]
    if ends[0] == _NONE:
        ends[1] = page
    else:
        newer[ends[0]] = page
    ends[0] = page
