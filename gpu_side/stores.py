"""The objects that a stage reads and writes, as pages on a device of the port."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hyades.common.catalog import ObjectInfo
from hyades.common.layout import BLOCK
from hyades.common.pages import PageShape
from hyades.common.views import SparseShape, page_crc, sparse_bytes
from hyades.common.viewspec import ViewHead, landing_rows

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageStoreInfo:
    """Pages of one object: where each lies, and what checksum to expect.

    lbas int64 [pages], -1 for a page that is not read; crcs int64 [pages], or None where pages are
    not checked; nbytes int64 [pages], or None where pages are read whole.
    """

    name: str
    number: int  # for failures: which object
    device: int
    dtype: np.dtype[np.generic]
    width: int
    shape: PageShape | SparseShape
    lbas: Ints
    crcs: Ints | None
    kept: int = 0  # the first ranges, whose pages stay in the arena: never moved, never checked
    arena_at: int = 0  # where those pages lie in the arena
    nbytes: Ints | None = None
    view: ViewHead | None = None  # where the pages are those of a view: how to decode them
    salt: int = 0  # of the view's pages

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.shape.page_bytes


def lba_table(info: ObjectInfo) -> Ints:
    """Return the first block of every page of *info*, int64 [pages]."""
    blocks = info.page_bytes // BLOCK
    tables = []
    for extent in info.extents:
        tables.append(extent.lba + np.arange(extent.nblocks // blocks, dtype=np.int64) * blocks)
    return np.concatenate(tables)[: info.pages] if tables else np.zeros(0, np.int64)


def volume_store(
    info: ObjectInfo, number: int, device: int, table: NDArray[np.void] | None
) -> PageStoreInfo:
    """Describe an object of a volume; *table* is its page table where reads are checked."""
    crcs = None if table is None else table["crc"].astype(np.int64)
    return PageStoreInfo(
        info.name, number, device, info.numpy_dtype, info.width, info.shape(), lba_table(info), crcs
    )


def view_store(head: ViewHead, number: int, device: int) -> PageStoreInfo:
    """Describe the pages of a view; of a sparse one only the blocks that hold rows are read."""
    spec, shape = head.spec, head.spec.shape()
    pages = np.arange(shape.pages, dtype=np.int64)
    lbas = head.blocks + pages * (shape.page_bytes // BLOCK)
    salt = spec.salt
    crcs = np.fromiter((page_crc(page, salt) for page in range(shape.pages)), np.int64, len(pages))
    nbytes = None
    if isinstance(shape, SparseShape):
        nbytes = sparse_bytes(shape, head.counts)
        lbas[nbytes == 0] = -1
    element = np.dtype(np.uint8)
    return PageStoreInfo(
        f"a view of {spec.source}", number, device, element, spec.width, shape, lbas, crcs,
        nbytes=nbytes, view=head, salt=salt,
    )  # fmt: skip


def page_by_page(store: PageStoreInfo) -> PageStoreInfo:
    """Return *store* as raw pages: every page is a range of one row of bytes."""
    shape = PageShape(len(store.lbas), store.page_bytes, 1, 1, store.page_bytes)
    return replace(store, dtype=np.dtype(np.uint8), width=store.page_bytes, shape=shape)


def keep_ranges(store: PageStoreInfo, kept: int, arena_at: int) -> PageStoreInfo:
    """Return *store* with its first *kept* ranges in the arena from byte *arena_at* on."""
    lbas = store.lbas.copy()
    lbas[: store.shape.first_page(kept)] = -1
    return replace(store, lbas=lbas, kept=kept, arena_at=arena_at)


def memory_store(name: str, width: int, shape: PageShape, arena_at: int) -> PageStoreInfo:
    """Describe float32 rows that lie in the arena alone, from byte *arena_at* on."""
    absent = np.full(shape.pages, -1, np.int64)
    element = np.dtype(np.float32)
    return PageStoreInfo(name, 0, 0, element, width, shape, absent, None, shape.ranges, arena_at)


def block_rows(store: PageStoreInfo) -> int:
    """Return the rows that landing multiplies at once: of a view as many as of what it stands for.

    A product's bits depend on the shape of its block.
    """
    if store.view is not None:
        return store.view.spec.block_rows
    assert isinstance(store.shape, PageShape)
    return landing_rows(store.shape)
