"""The objects that a stage reads and writes, as pages on a device of the port."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hyades.common.catalog import ObjectInfo
from hyades.common.layout import BLOCK
from hyades.common.pages import PageShape

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PageStoreInfo:
    """Pages of one object: where each lies, and what checksum to expect.

    lbas int64 [pages]; crcs int64 [pages], or None where pages are not checked.
    """

    name: str
    number: int  # for failures: which object
    device: int
    dtype: np.dtype[np.generic]
    width: int
    shape: PageShape
    lbas: Ints
    crcs: Ints | None
    kept: int = 0  # the first ranges, whose pages stay in the arena: never moved, never checked
    arena_at: int = 0  # where those pages lie in the arena

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
