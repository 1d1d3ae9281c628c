"""Damage of any byte is found and named: superblock, catalog, page table, page, padding."""

from dataclasses import replace

import numpy as np
import pytest

from hyades.common import superblock
from hyades.common.blocks import MemoryBlocks
from hyades.common.catalog import Extent, RunInfo
from hyades.common.checksum import crc32c
from hyades.common.errors import DataError, DeviceLost
from hyades.common.layout import BLOCK, PAGE_ENTRY
from hyades.common.volume import Volume


def small_volume() -> MemoryBlocks:
    """A volume in which no block is free: a matrix of three pages, a table, opaque pages."""
    blocks = MemoryBlocks()
    volume = Volume.create(blocks, 64 << 10)
    info = volume.allocate_rows("features", "float32", 250, 7, 100, seed=1)
    rows = np.arange(250 * 7, dtype=np.float32).reshape(250, 7)
    for page in range(info.pages):
        start, stop = info.shape().page_rows(page)
        volume.write_page(info, page, rows[start:stop], stop - start)
    volume.write_table("order", np.arange(10))
    tiles = volume.allocate_pages("tiles", 1, 2 * BLOCK)
    volume.write_page(tiles, 0, b"tile", 3)
    volume.commit()
    volume.commit()
    assert volume.generation == 3
    return blocks


def owners(volume: Volume) -> dict[int, tuple[str, int | None, int]]:
    """Return for each block its owner: (object, page, first LBA of it)."""
    found: dict[int, tuple[str, int | None, int]] = {}
    head = volume.head.catalog
    found |= dict.fromkeys(range(head.lba, head.end), ("catalog", None, head.lba))
    for info in volume.catalog.objects.values():
        for page in range(info.pages):
            first = info.lba(page)
            found |= {first + k: (info.name, page, first) for k in range(info.page_blocks)}
        for extent in info.table:
            found |= dict.fromkeys(range(extent.lba, extent.end), (info.name, None, extent.lba))
    return found


def read_everything(volume: Volume) -> None:
    for info in volume.catalog.objects.values():
        for page in range(info.pages):
            volume.read_page(info, page)


def test_one_damaged_superblock_byte_is_survived_and_reported() -> None:
    blocks = small_volume()
    catalog = Volume.open(blocks).catalog
    for at in range(2 * BLOCK):
        blocks.data[at] ^= 1 + at % 255
        volume = Volume.open(blocks)
        assert (volume.generation, volume.catalog) == (3, catalog)
        if at % 64 < 2 or at % BLOCK < 80:
            (finding,) = volume.verify([])
            assert (finding.object, finding.page, finding.lba) == ("superblock", None, at // BLOCK)
            assert f"superblock copy {at // BLOCK} (LBA {at // BLOCK})" in finding.text
        blocks.data[at] ^= 1 + at % 255
    assert list(Volume.open(blocks).verify()) == []


def test_two_damaged_superblocks_are_a_data_error() -> None:
    blocks = small_volume()
    for at in range(BLOCK):
        blocks.data[[at, BLOCK + (at * 7) % BLOCK]] ^= 0x40
        with pytest.raises(DataError, match=r"copy 0 \(LBA 0\) .*; superblock copy 1 \(LBA 1\) "):
            Volume.open(blocks)
        blocks.data[[at, BLOCK + (at * 7) % BLOCK]] ^= 0x40


def test_every_damaged_byte_of_the_catalog_is_named() -> None:
    blocks = small_volume()
    volume = Volume.open(blocks)
    extent = volume.head.catalog
    assert volume.head.catalog_bytes < extent.nblocks * BLOCK, "padding must be covered too"
    text = (
        rf"catalog of generation 3 \(LBA {extent.lba}\): CRC32C is 0x\w+, expected 0x\w+; "
        r"superblock copy 1 has generation 3; nothing older is opened"
    )
    for at in range(extent.lba * BLOCK, extent.end * BLOCK):
        blocks.data[at] ^= 1 + at % 255
        with pytest.raises(DataError, match=text):
            Volume.open(blocks)
        blocks.data[at] ^= 1 + at % 255
    blocks.data[extent.lba * BLOCK] ^= 1
    (finding,) = volume.verify([])
    assert (finding.object, finding.lba) == ("catalog", extent.lba)


def test_every_damaged_byte_of_pages_and_page_tables_is_named() -> None:
    blocks = small_volume()
    whole = Volume.open(blocks)
    place = owners(whole)
    assert set(place) == set(range(2, whole.head.next_lba)) - set(free_blocks(whole))
    for lba, (name, page, first) in place.items():
        if name == "catalog":
            continue
        where = f"object {name!r} page {page} (LBA {first})"
        if page is None:
            where = f"object {name!r} page table (LBA {first})"
        for at in range(lba * BLOCK, (lba + 1) * BLOCK):
            blocks.data[at] ^= 1 + at % 255
            volume = Volume.open(blocks)
            with pytest.raises(DataError) as caught:
                read_everything(volume)
            assert where in str(caught.value)
            assert "CRC32C is 0x" in str(caught.value)
            if at % 97 == 0:
                (finding,) = volume.verify()
                assert (finding.object, finding.page, finding.lba) == (name, page, first)
            blocks.data[at] ^= 1 + at % 255
    assert list(whole.verify()) == []


def free_blocks(volume: Volume) -> list[int]:
    used = {lba for e in volume.catalog.extents() for lba in range(e.lba, e.end)}
    used |= set(range(volume.head.catalog.lba, volume.head.catalog.end))
    return [lba for lba in range(2, volume.head.next_lba) if lba not in used]


def test_verify_goes_on_after_a_finding_and_reports_progress() -> None:
    blocks = small_volume()
    volume = Volume.open(blocks)
    features, tiles = volume.object("features"), volume.object("tiles")
    for lba in (1, features.lba(0), features.lba(2), volume.object("order").table[0].lba):
        blocks.data[lba * BLOCK + 5] ^= 1
    checked: list[int] = []
    findings = list(volume.verify(progress=checked.append))
    assert [(found.object, found.page) for found in findings] == [
        ("superblock", None),
        ("features", 0),
        ("features", 2),
        ("order", None),
    ]
    assert sum(checked) == features.nbytes + tiles.nbytes
    assert [found.page for found in volume.verify(["features"])] == [None, 0, 2]


class WornBlocks(MemoryBlocks):
    """Fails to read some blocks, or returns one wrong byte the first *wrong* times."""

    lost: int | None = None
    wrong: tuple[int, int] | None = None  # block, times left

    def read(self, lba: int, count: int) -> bytearray:
        if self.lost is not None and lba <= self.lost < lba + count:
            raise DeviceLost(f"{self.name}: read at LBA {lba} failed: Input/output error")
        data = super().read(lba, count)
        if self.wrong is not None and lba <= self.wrong[0] < lba + count and self.wrong[1]:
            self.wrong = (self.wrong[0], self.wrong[1] - 1)
            data[7] ^= 1
        return data


def test_one_wrong_read_is_repeated() -> None:
    blocks = WornBlocks()
    blocks.data = small_volume().data
    volume = Volume.open(blocks)
    for name, lba in (("features", volume.object("features").lba(1)), ("catalog", 0)):
        lba = lba or volume.head.catalog.lba
        blocks.wrong = (lba, 1)
        again = Volume.open(blocks)
        read_everything(again)
        assert blocks.wrong == (lba, 0), f"{name} was not read"
        blocks.wrong = (lba, 2)
        with pytest.raises(DataError, match=name):
            read_everything(Volume.open(blocks))


def test_a_superblock_that_cannot_be_read_is_survived() -> None:
    blocks = WornBlocks()
    blocks.data = small_volume().data
    blocks.lost = 0
    volume = Volume.open(blocks)
    assert volume.generation == 3
    (finding,) = volume.verify()
    assert (finding.object, finding.lba) == ("superblock", 0)
    assert "copy 0 (LBA 0) cannot be read: mem:: read at LBA 0 failed" in finding.text


def test_a_device_that_is_gone_is_not_called_damaged(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = WornBlocks()
    blocks.data = small_volume().data

    def lost(lba: int, count: int) -> bytearray:
        raise DeviceLost(f"no path to LBA {lba}")

    monkeypatch.setattr(blocks, "read", lost)
    with pytest.raises(DeviceLost, match="no path to LBA 0"):
        Volume.open(blocks)


def test_verify_reports_a_page_that_cannot_be_read() -> None:
    blocks = WornBlocks()
    blocks.data = small_volume().data
    volume = Volume.open(blocks)
    blocks.lost = volume.object("features").lba(1)
    (finding,) = volume.verify()
    assert (finding.object, finding.page, finding.lba) == ("features", 1, blocks.lost)


def test_missing_pages_are_a_finding_unless_their_run_goes_on() -> None:
    volume = Volume.create(MemoryBlocks())
    volume.allocate_rows("hidden/first/1", "float32", 10, 1, 4096)
    volume.commit()
    assert ["never written" in found.text for found in volume.verify()] == [True]
    volume.catalog.runs["first"] = RunInfo("first")
    volume.commit()
    assert list(volume.verify()) == []
    volume.catalog.runs["first"].state = "done"
    volume.commit()
    assert ["never written" in found.text for found in volume.verify()] == [True]


def put_heads(blocks: MemoryBlocks, **changes: object) -> None:
    """Write both superblock copies with *changes* and a right CRC."""
    _, head = superblock.newest(blocks)
    packed = replace(head, **changes).pack()  # type: ignore[arg-type]
    blocks.write(0, packed)
    blocks.write(1, packed)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"version": 2}, "format version 2, this Hyades reads version 1: upgrade Hyades"),
        ({"block": 512}, "blocks of 512 bytes, this Hyades reads blocks of 4096"),
        ({"generation": 0}, "generation 0 is impossible"),
        ({"generation": 2**64 - 1}, "generation 18446744073709551615 is impossible"),
        ({"next_lba": 1000}, r"needs 4096000 bytes, the device has \d+: it is truncated"),
        ({"next_lba": 2**64 - 1}, "it is truncated"),
        ({"next_lba": 4}, "outside the volume"),
        ({"catalog_bytes": 0}, "a catalog of 0 bytes is impossible"),
        ({"catalog_bytes": 2**63}, "a catalog of 9223372036854775808 bytes is impossible"),
        ({"catalog": Extent(0, 1)}, r"the catalog at LBA 0 \(1 blocks\) is outside the volume"),
        ({"catalog": Extent(2**60, 1)}, "outside the volume"),
        ({"catalog_crc": 1}, "catalog of generation 3 .* expected 0x00000001"),
    ],
)
def test_superblocks_with_a_right_crc_and_absurd_values(
    changes: dict[str, object], text: str
) -> None:
    blocks = small_volume()
    put_heads(blocks, **changes)
    with pytest.raises(DataError, match=text):
        Volume.open(blocks)


def test_a_newer_format_is_not_passed_over_for_an_older_copy() -> None:
    blocks = small_volume()
    _, head = superblock.newest(blocks)
    blocks.write(1, replace(head, generation=4, version=2).pack())
    with pytest.raises(DataError, match=r"copy 1 \(LBA 1\): format version 2"):
        Volume.open(blocks)


def test_a_damaged_newest_catalog_never_opens_an_older_generation() -> None:
    blocks = small_volume()
    old = blocks.read(0, 1)
    volume = Volume.open(blocks, writable=True)
    volume.write_table("more", np.arange(3))
    volume.commit()
    blocks.write(1 - volume._slot, old)  # a crash before the copy was mirrored
    assert Volume.open(blocks).generation == 4
    blocks.data[volume.head.catalog.lba * BLOCK] ^= 1
    with pytest.raises(
        DataError, match=r"catalog of generation 4 .* has generation 3; nothing old"
    ):
        Volume.open(blocks)


def test_a_page_table_that_contradicts_the_shape() -> None:
    blocks = small_volume()
    volume = Volume.open(blocks, writable=True)
    volume.page_table("features")[1] = (99, 0)
    with pytest.raises(
        DataError, match=r"'features' page 1 .*: the page table says 99 rows, not 1"
    ):
        volume.read_rows("features")


def test_the_checksum_is_crc32c() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(b"56789", crc32c(b"1234")) == 0xE3069283
    assert crc32c(np.zeros(4, PAGE_ENTRY)) == crc32c(bytes(32)) == 0x8A9136AA
