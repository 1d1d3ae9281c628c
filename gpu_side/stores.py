"""The objects that a stage reads and writes, as pages on a device of the port."""

from dataclasses import dataclass

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
    arena_at: int = -1  # rows kept in memory: where their pages lie in the arena

    @property
    def in_memory(self) -> bool:
        """Say whether the pages stay in the arena: nothing moves, nothing is checked."""
        return self.arena_at >= 0

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


def memory_store(name: str, width: int, shape: PageShape, arena_at: int) -> PageStoreInfo:
    """Describe float32 rows kept in the arena from byte *arena_at* on."""
    absent = np.full(shape.pages, -1, np.int64)
    return PageStoreInfo(name, 0, 0, np.dtype(np.float32), width, shape, absent, None, arena_at)
