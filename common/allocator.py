"""Free space: the complement of every extent in use."""

from collections.abc import Iterable

from hyades.common.catalog import FIRST_LBA, Extent
from hyades.common.errors import UsageError

# A hole is used as a part of an object only where it holds at least this fraction of it, so that
# a scan stays sequential while the device can still grow.
_SMALLEST_PART = 16


class Space:
    """Takes extents from the holes between *used* extents on a device of *nblocks*.

    Unless *fixed*, space after the last block counts as free too: `end` says how far it was taken.
    """

    def __init__(self, used: Iterable[Extent], nblocks: int, *, fixed: bool = False) -> None:
        self.end = nblocks
        self._fixed = fixed
        self._holes: list[Extent] = []
        at = FIRST_LBA
        for extent in sorted(used, key=lambda extent: extent.lba):
            if extent.lba > at:
                self._holes.append(Extent(at, extent.lba - at))
            at = max(at, extent.end)
        if at < nblocks:
            self._holes.append(Extent(at, nblocks - at))
        self._nblocks = max(nblocks, at)

    @property
    def free(self) -> int:
        """Blocks free inside the device."""
        return sum(hole.nblocks for hole in self._holes)

    def take(self, nblocks: int, unit: int = 1) -> tuple[Extent, ...]:
        """Return extents of *nblocks* in all, each a multiple of *unit*; UsageError when full."""
        if nblocks == 0:
            return ()
        fitting = [hole for hole in self._holes if hole.nblocks >= nblocks]
        if fitting:
            best = min(fitting, key=lambda hole: (hole.nblocks, hole.lba))
            return (self._cut(best, nblocks),)
        least = unit if self._fixed else max(unit, nblocks // _SMALLEST_PART)
        parts = [hole for hole in self._holes if hole.nblocks >= least]
        if sum(hole.nblocks // unit * unit for hole in parts) >= nblocks:
            return self._gather(sorted(parts, key=lambda hole: -hole.nblocks), nblocks, unit)
        if self._fixed:
            raise UsageError(f"no space for {nblocks} blocks: {self.free} are free")
        return (self._extend(nblocks),)

    def _cut(self, hole: Extent, nblocks: int) -> Extent:
        self._holes.remove(hole)
        if hole.nblocks > nblocks:
            self._holes.append(Extent(hole.lba + nblocks, hole.nblocks - nblocks))
        return Extent(hole.lba, nblocks)

    def _gather(self, holes: list[Extent], nblocks: int, unit: int) -> tuple[Extent, ...]:
        taken: list[Extent] = []
        for hole in holes:
            part = min(hole.nblocks // unit * unit, nblocks)
            if part:
                taken.append(self._cut(hole, part))
                nblocks -= part
        return tuple(sorted(taken, key=lambda extent: extent.lba))

    def _extend(self, nblocks: int) -> Extent:
        """Take space after the end, together with the hole that touches it."""
        start = self._nblocks
        for hole in self._holes:
            if hole.end == self._nblocks:
                self._holes.remove(hole)
                start = hole.lba
                break
        self._nblocks = self.end = start + nblocks
        return Extent(start, nblocks)
