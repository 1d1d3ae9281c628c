"""Free space: nothing that is in use is given out, and removed space returns after a commit."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hyades.common.allocator import Space
from hyades.common.blocks import MemoryBlocks
from hyades.common.catalog import FIRST_LBA, Extent
from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import KIB
from hyades.common.volume import Volume


def blocks_of(extents: list[Extent]) -> list[int]:
    return [lba for extent in extents for lba in range(extent.lba, extent.end)]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 9)), max_size=12),
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([1, 2, 16])), max_size=8),
    st.booleans(),
)
def test_space_is_taken_once(
    layout: list[tuple[int, int]], wants: list[tuple[int, int]], fixed: bool
) -> None:
    used, at = [], FIRST_LBA
    for gap, size in layout:
        used.append(Extent(at + gap, size))
        at += gap + size
    space = Space(used, at + 10, fixed=fixed)
    free = at + 10 - FIRST_LBA - sum(extent.nblocks for extent in used)
    assert space.free == free
    taken: list[Extent] = []
    for count, unit in wants:
        try:
            got = space.take(count * unit, unit)
        except UsageError:
            assert fixed
            continue
        assert sum(extent.nblocks for extent in got) == count * unit
        assert all(extent.nblocks % unit == 0 and extent.nblocks for extent in got)
        taken += got
    everything = [*blocks_of(used + taken), 0, 1]
    assert len(everything) == len(set(everything))
    assert max(everything) < space.end
    assert (space.end == at + 10) or not fixed


def test_the_best_hole_is_taken_and_then_the_end() -> None:
    used = [Extent(2, 1), Extent(13, 1), Extent(18, 1), Extent(25, 1)]
    space = Space(used, 28)  # holes: 3-12, 14-17, 19-24, 26-27
    assert space.take(5) == (Extent(19, 5),)
    assert space.take(4) == (Extent(14, 4),)
    assert space.take(12, 4) == (Extent(26, 12),)
    assert space.end == 38
    assert space.take(11) == (Extent(3, 10), Extent(24, 1))


def test_overlapping_extents_count_once() -> None:
    assert Space([Extent(2, 10), Extent(4, 2), Extent(2, 10)], 20).take(8) == (Extent(12, 8),)


def test_removed_space_is_used_only_after_the_commit_that_removed_it() -> None:
    volume = Volume.create(MemoryBlocks())
    old = volume.allocate_pages("old", 50, BLOCK).extents[0]
    volume.allocate_pages("after", 1, BLOCK)
    volume.commit()
    volume.remove("old")
    early = volume.allocate_pages("early", 50, BLOCK)
    assert set(blocks_of([*early.extents])).isdisjoint(blocks_of([old]))
    volume.commit()
    late = volume.allocate_pages("late", 50, BLOCK)
    assert late.extents == (old,)


def test_a_volume_in_steady_use_does_not_grow() -> None:
    blocks = MemoryBlocks()
    volume = Volume.create(blocks)
    sizes = []
    for step in range(30):
        volume.allocate_rows(f"hidden/{step}", "float32", 4000, 16, 4096)
        volume.commit()
        if step:
            volume.remove(f"hidden/{step - 1}")
            volume.commit()
        sizes.append(blocks.nblocks)
    assert sizes[-1] == sizes[3]


class Transactions(RuleBasedStateMachine):
    """Random transactions: what is committed never changes on the device until the next commit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = MemoryBlocks()
        self.volume = Volume.create(self.blocks, 64 * KIB)
        self.count = 0
        self.working: dict[str, int] = {}
        self.committed: dict[str, int] = {}

    @rule(rows=st.integers(0, 20_000))
    def write(self, rows: int) -> None:
        self.count += 1
        name = f"t{self.count}"
        self.volume.write_table(name, np.full(rows, self.count, np.uint16))
        self.working[name] = self.count

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.working)))
        self.volume.remove(name)
        del self.working[name]

    @precondition(lambda self: self.working)
    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.working)))
        self.count += 1
        self.volume.rename(name, f"t{self.count}")
        self.working[f"t{self.count}"] = self.working.pop(name)

    @rule()
    def commit(self) -> None:
        self.volume.commit()
        self.committed = dict(self.working)

    @rule()
    def rollback(self) -> None:
        self.volume.rollback()
        self.working = dict(self.committed)

    @rule()
    def reopen(self) -> None:
        self.volume.close()
        self.volume = Volume.open(self.blocks, writable=True)
        self.working = dict(self.committed)

    @invariant()
    def committed_state_is_whole(self) -> None:
        volume = Volume.open(self.blocks)
        assert set(volume.catalog.objects) == set(self.committed)
        for name, value in self.committed.items():
            assert (volume.read_table(name) == value).all()
        assert list(volume.verify()) == []

    @invariant()
    def nothing_overlaps(self) -> None:
        live = {*self.volume.catalog.extents(), *self.volume.committed.extents()}
        live.add(self.volume.head.catalog)
        ordered = sorted(live, key=lambda extent: extent.lba)
        assert all(a.end <= b.lba for a, b in pairwise(ordered))
        assert not ordered or ordered[0].lba >= FIRST_LBA


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_a_fixed_space_says_what_is_free() -> None:
    with pytest.raises(UsageError, match="no space for 9 blocks: 8 are free"):
        Space([], 10, fixed=True).take(9)
