"""Creating, filling, reading, renaming and committing objects of a volume."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyades.common.blocks import FileBlocks, MemoryBlocks
from hyades.common.catalog import GraphInfo, ObjectInfo, RunInfo
from hyades.common.describe import describe_volume
from hyades.common.errors import DataError, UsageError
from hyades.common.layout import BLOCK, DIRECTORY
from hyades.common.units import KIB
from hyades.common.volume import Volume


def write_rows(volume: Volume, info: ObjectInfo, rows: np.ndarray) -> None:
    shape = info.shape()
    for page in range(info.pages):
        start, stop = shape.page_rows(page)
        volume.write_page(info, page, rows[start:stop], stop - start)


def matrix(rows: int, width: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(rows + width).normal(size=(rows, width)).astype(dtype)


class CountingBlocks(MemoryBlocks):
    """Counts the blocks read at each address."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[int] = Counter()

    def read(self, lba: int, count: int) -> bytearray:
        self.reads[lba] += count
        return super().read(lba, count)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (4096, 3), (9001, 17), (300, 602)])
def test_rows_come_back_from_a_file(tmp_path: Path, dtype: str, rows: int, width: int) -> None:
    path, wanted = tmp_path / "g.vol", matrix(rows, width, dtype)
    with Volume.create(FileBlocks(path, create=True), 64 * KIB) as volume:
        info = volume.allocate_rows("features", dtype, rows, width, 4096, scale=2.5, note="x")
        write_rows(volume, info, wanted)
        volume.commit()
        uuid = volume.uuid
    with Volume.open(FileBlocks(path, writable=False)) as volume:
        assert (volume.generation, volume.uuid, volume.name) == (2, uuid, str(path))
        assert volume.object("features").attributes == {"scale": 2.5, "note": "x"}
        assert np.array_equal(volume.read_rows("features"), wanted)
        blocks = list(volume.iter_rows("features"))
        assert [start for start, _ in blocks] == [
            info.shape().page_rows(page)[0] for page in range(info.pages)
        ]
        assert np.array_equal(np.concatenate([part for _, part in blocks]), wanted)
        assert list(volume.verify()) == []


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_slice_of_rows_reads_only_its_pages(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 5000))
    width = data.draw(st.integers(1, 40))
    ranges = 1 << data.draw(st.integers(6, 12))
    blocks = CountingBlocks()
    volume = Volume.create(blocks, 64 * KIB)
    info = volume.allocate_rows("x", "float64", rows, width, ranges)
    wanted = matrix(rows, width, "float64")
    write_rows(volume, info, wanted)
    start = data.draw(st.integers(0, rows))
    stop = data.draw(st.integers(start, rows))
    blocks.reads.clear()
    assert np.array_equal(volume.read_rows("x", start, stop), wanted[start:stop])
    shape = info.shape()
    needed = {
        info.lba(page): info.page_blocks
        for page in range(info.pages)
        if shape.page_rows(page)[0] < stop and shape.page_rows(page)[1] > start
    }
    assert blocks.reads == (needed if stop > start else {})


def test_tables_of_scalars_and_records(tmp_path: Path) -> None:
    degrees = np.arange(100_000, dtype=">u4")
    records = np.zeros(5000, DIRECTORY)
    records["edges"] = np.arange(5000)
    with Volume.create(FileBlocks(tmp_path / "g", create=True), 64 * KIB) as volume:
        volume.write_table("in_degrees", degrees, largest=np.int64(7))
        volume.write_table("directory", records)
        volume.write_table("nothing", np.zeros(0, np.int64))
        volume.write_table("every second", degrees[::2])
        volume.commit()
    with Volume.open(FileBlocks(tmp_path / "g", writable=False)) as volume:
        assert np.array_equal(volume.read_table("in_degrees"), degrees)
        assert volume.read_table("in_degrees").dtype == np.dtype("<u4")
        assert np.array_equal(volume.read_table("directory"), records)
        assert np.array_equal(volume.read_table("every second"), degrees[::2])
        assert volume.read_table("nothing").shape == (0,)
        assert volume.object("in_degrees").pages == 7
        assert volume.object("in_degrees").attributes == {"largest": 7}
        assert np.array_equal(volume.read_rows("in_degrees", 16_383, 16_386), [16383, 16384, 16385])


def test_opaque_pages_take_any_row_count() -> None:
    volume = Volume.create(MemoryBlocks())
    info = volume.allocate_pages("tiles", 3, 64 * KIB)
    for page in range(3):
        volume.write_page(info, page, bytes([page + 1]) * 100, rows=7 + page)
    assert [int(rows) for rows in volume.page_table("tiles")["rows"]] == [7, 8, 9]
    data = volume.read_page(info, 2)
    assert bytes(data[:101]) == b"\3" * 100 + b"\0"
    assert len(data) == 64 * KIB
    with pytest.raises(UsageError, match="opaque pages"):
        volume.read_rows("tiles")
    with pytest.raises(UsageError, match="opaque pages"):
        next(volume.iter_rows("tiles"))


def test_only_a_commit_changes_what_is_opened() -> None:
    blocks = MemoryBlocks()
    volume = Volume.create(blocks)
    volume.write_table("kept", np.arange(5))
    volume.catalog.graph = GraphInfo(5, 4, 0, 4096, 1, span_before=np.int64(3))  # type: ignore[arg-type]
    volume.catalog.runs["r"] = RunInfo("r", fingerprint="f", notes={"layer": "1"})
    volume.commit()
    volume.write_table("lost", np.arange(5))
    volume.catalog.runs["r"].state = "done"
    volume.catalog.graph.edges = 99
    again = Volume.open(blocks)
    assert set(again.catalog.objects) == {"kept"}
    assert again.catalog.runs["r"] == RunInfo("r", "running", "f", {"layer": "1"})
    assert again.catalog.graph is not None
    assert (again.catalog.graph.edges, again.catalog.graph.span_before) == (4, 3)
    volume.rollback()
    assert volume.catalog == again.catalog
    with pytest.raises(UsageError, match=r"no object 'lost' in mem:; it has: kept"):
        volume.object("lost")


def test_entries_set_from_outside_are_stored_by_commit() -> None:
    """A proxy writes pages to their addresses; the owner of the volume sets their entries."""
    blocks = MemoryBlocks()
    volume = Volume.create(blocks)
    info = volume.allocate_rows("x", "float32", 8192, 1, 4096)
    volume.commit()
    assert not volume.page_table("x")["rows"].any()
    other = Volume.create(MemoryBlocks())
    like = other.allocate_rows("x", "float32", 8192, 1, 4096)
    write_rows(other, like, matrix(8192, 1))
    for page in range(2):
        blocks.write(info.lba(page), other.read_page(like, page))
        volume.page_table("x")[page] = other.page_table("x")[page]
    volume.commit()
    assert np.array_equal(Volume.open(blocks).read_rows("x"), matrix(8192, 1))


def test_a_stored_table_keeps_the_committed_one() -> None:
    blocks = MemoryBlocks()
    volume = Volume.create(blocks)
    info = volume.allocate_pages("p", 2, BLOCK)
    volume.write_page(info, 0, b"first", 1)
    volume.commit()
    before = volume.object("p")
    volume.write_page(info, 1, b"second", 1)
    first = volume.store_page_table("p")
    assert first.table != before.table
    assert volume.store_page_table("p").table == first.table
    assert [int(n) for n in Volume.open(blocks).page_table("p")["rows"]] == [1, 0]
    volume.commit()
    assert [int(n) for n in Volume.open(blocks).page_table("p")["rows"]] == [1, 1]


def test_committed_pages_cannot_be_written_again() -> None:
    blocks = MemoryBlocks()
    volume = Volume.create(blocks)
    info = volume.allocate_pages("p", 2, BLOCK)
    volume.write_page(info, 0, b"a", 1)
    volume.write_page(info, 0, b"b", 1)
    volume.commit()
    with pytest.raises(UsageError, match=r"'p' page 0 is committed; write a new object"):
        volume.write_page(info, 0, b"c", 1)
    volume.write_page(info, 1, b"c", 1)
    assert bytes(volume.read_page(info, 0)[:1]) == b"b"
    again = Volume.open(blocks, writable=True)
    with pytest.raises(UsageError, match="page 0 is committed"):
        again.write_page(info, 0, b"c", 1)
    again.write_page(info, 1, b"d", 1)


def test_remove_and_rename() -> None:
    blocks = MemoryBlocks()
    volume = Volume.create(blocks)
    volume.write_table("a", np.arange(3))
    volume.write_table("b", np.arange(4))
    volume.commit()
    stale = volume.object("a")
    with pytest.raises(UsageError, match="already has an object 'b'"):
        volume.rename("a", "b")
    volume.remove("b")
    volume.rename("a", "b")
    with pytest.raises(UsageError, match="removed or replaced"):
        volume.read_page(stale, 0)
    assert np.array_equal(volume.read_table("b"), np.arange(3))
    volume.commit()
    again = Volume.open(blocks, writable=True)
    assert np.array_equal(again.read_table("b"), np.arange(3))
    again.remove("b")
    again.write_table("b", np.arange(9))
    again.commit()
    assert np.array_equal(Volume.open(blocks).read_table("b"), np.arange(9))


def test_a_stale_record_cannot_write_into_freed_space() -> None:
    volume = Volume.create(MemoryBlocks())
    volume.allocate_pages("other", 1, BLOCK)
    stale = volume.allocate_pages("p", 1, BLOCK)
    volume.remove("p")
    volume.remove("other")
    volume.allocate_pages("p", 1, BLOCK)
    with pytest.raises(UsageError, match="removed or replaced"):
        volume.write_page(stale, 0, b"x", 1)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda v: v.allocate_rows("x", "float32", -1, 1, 4096), "-1 x 1"),
        (lambda v: v.allocate_rows("x", "float32", 10, 0, 4096), "10 x 0"),
        (lambda v: v.allocate_rows("x", "float32", 10, 2 << 20, 4096), "does not fit in a page"),
        (lambda v: v.allocate_rows("x", "complex64", 10, 1, 4096), "cannot hold complex64"),
        (lambda v: v.allocate_rows("t", "float32", 10, 1, 4096), "already has an object 't'"),
        (lambda v: v.allocate_rows("", "float32", 10, 1, 4096), "cannot be the name"),
        (lambda v: v.allocate_rows("a\nb", "float32", 10, 1, 4096), "cannot be the name"),
        (lambda v: v.allocate_table("x", "int64", -1), "-1 rows"),
        (lambda v: v.allocate_table("x", "int64", 1, a=float("nan")), "attribute 'a'"),
        (lambda v: v.allocate_table("x", "int64", 1, a=[1]), "attribute 'a' of 'x' is a list"),
        (lambda v: v.allocate_pages("x", 1, 5000), "pages of 5000 bytes"),
        (lambda v: v.write_table("x", np.zeros((2, 2))), "2 dimensions"),
        (lambda v: v.write_page(v.object("t"), 0, bytes(9999), 3), "9999 bytes do not fit"),
        (lambda v: v.write_page(v.object("t"), 0, bytes(9), 2), "page 0 holds 3 rows, not 2"),
        (lambda v: v.write_page(v.object("t"), 1, bytes(9), 2), "no page 1: it has 1 pages"),
        (lambda v: v.read_page(v.object("t"), -1), "no page -1: it has 1 pages"),
        (lambda v: v.read_rows("t", 2, 9), "has 3 rows, not rows 2 to 9"),
        (lambda v: v.read_table("m"), "is no table"),
        (lambda v: v.rename("t", "a\nb"), "cannot be the name"),
        (lambda v: v.remove("none"), "no object 'none'"),
        (lambda v: list(v.verify(["none"])), "no committed object 'none'"),
    ],
)
def test_misuse_is_named(call: object, text: str) -> None:
    volume = Volume.create(MemoryBlocks())
    volume.write_table("t", np.arange(3, dtype=np.int64))
    volume.allocate_rows("m", "float32", 3, 2, 4096)
    before = volume.catalog.extents()
    with pytest.raises(UsageError, match=text):
        volume.remove("t") if call is None else call(volume)  # type: ignore[operator]
    assert volume.catalog.extents() == before


def test_pages_never_written_are_not_zeros() -> None:
    volume = Volume.create(MemoryBlocks())
    info = volume.allocate_rows("x", "float32", 10, 1, 4096)
    with pytest.raises(DataError, match=rf"object 'x' page 0 \(LBA {info.lba(0)}\) was never"):
        volume.read_rows("x")


def test_reading_only() -> None:
    blocks = MemoryBlocks()
    Volume.create(blocks).write_table("t", np.arange(3))
    volume = Volume.open(blocks)
    for call in (volume.commit, lambda: volume.write_table("u", np.arange(3))):
        with pytest.raises(UsageError, match="open for reading only"):
            call()


def test_a_catalog_that_cannot_be_stored_changes_nothing() -> None:
    blocks = MemoryBlocks()
    volume = Volume.create(blocks)
    volume.catalog.graph = GraphInfo(10, 4, 0, 4096, chunks=7)
    with pytest.raises(UsageError, match=r"cannot commit: graph: 10 vertices .* 7 chunks"):
        volume.commit()
    volume.catalog.graph = GraphInfo(10, -4, 0, 4096, 1)
    with pytest.raises(UsageError, match="cannot commit: not a catalog"):
        volume.commit()
    volume.catalog.graph = GraphInfo(10, b"4", 0, 4096, 1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot commit"):
        volume.commit()
    volume.catalog.graph = GraphInfo(10, 4j, 0, 4096, 1)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="cannot be stored"):
        volume.commit()
    assert Volume.open(blocks).generation == 1
    volume.rollback()
    volume.commit()
    assert Volume.open(blocks).generation == 2


def test_create_keeps_what_is_there() -> None:
    blocks = MemoryBlocks(40)
    blocks.write(31, b"\1" * BLOCK)  # a signature of something else
    with pytest.raises(UsageError, match="already holds data"):
        Volume.create(blocks)
    old = Volume.create(blocks, overwrite=True)
    old.commit()
    new = Volume.create(blocks, overwrite=True)
    assert Volume.open(blocks).uuid == new.uuid != old.uuid
    with pytest.raises(UsageError, match="page size 1000 is no power of two"):
        Volume.create(MemoryBlocks(), 1000)


def test_describe() -> None:
    volume = Volume.create(MemoryBlocks(), 64 * KIB)
    volume.allocate_rows("m", "float16", 5000, 20, 4096, seed=3)
    volume.write_table("t", np.arange(3, dtype=np.int64))
    volume.allocate_pages("p", 4, 64 * KIB)
    m, p, t = describe_volume(volume)
    assert (m.name, m.kind, m.dtype, m.shape, m.pages) == ("m", "rows", "float16", (5000, 20), 4)
    assert (m.page_bytes, m.nbytes, m.pieces) == (57344, 4 * 57344 + BLOCK, 1)
    assert m.attributes == {"seed": 3}
    assert (p.shape, p.nbytes) == ((4, 64 * KIB), 256 * KIB + BLOCK)
    assert (t.shape, t.dtype, t.nbytes) == ((3,), "int64", 2 * BLOCK)
