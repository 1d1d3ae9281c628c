"""Export: every format, any order, small memory, a full disk, and reading rows by id."""

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from hyades.common.blocks import FileBlocks, MemoryBlocks
from hyades.common.catalog import RunInfo
from hyades.common.errors import DataError, UsageError
from hyades.common.volume import Volume
from hyades.deploy import export as export_module
from hyades.deploy.export import export, export_bytes
from hyades.deploy.original import find_rows, read_original, vertex_ids

ROWS, WIDTH = 1000, 7


def add_rows(volume: Volume, name: str, data: NDArray[Any], range_rows: int = 64) -> None:
    info = volume.allocate_rows(name, data.dtype, len(data), data.shape[1], range_rows)
    for page in range(info.pages):
        start, stop = info.shape().page_rows(page)
        volume.write_page(info, page, np.ascontiguousarray(data[start:stop]), stop - start)


def make_volume(
    original: NDArray[Any], order: NDArray[np.int64] | None, ids: NDArray[np.int64] | None
) -> Volume:
    """Return a volume whose output `emb` holds row i of *original* for original vertex i."""
    volume = Volume.create(MemoryBlocks(0))
    add_rows(volume, "output/emb", original if order is None else original[order])
    if order is not None:
        volume.write_table("order", order)
    if ids is not None:
        volume.write_table("original_ids", ids)
    volume.catalog.runs["emb"] = RunInfo("emb", "done")
    volume.commit()
    return volume


@pytest.fixture
def rows(rng: np.random.Generator) -> NDArray[np.float32]:
    return rng.standard_normal((ROWS, WIDTH)).astype(np.float32)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def load_npy(path: Path) -> tuple[NDArray[np.int64] | None, NDArray[Any]]:
    ids_path = path.with_suffix(".ids.npy")
    return (np.load(ids_path) if ids_path.exists() else None), np.load(path)


def load_parquet(path: Path) -> tuple[NDArray[np.int64] | None, NDArray[Any]]:
    table = pq.read_table(path)
    column = table["embedding"].combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    return table["id"].to_numpy(), flat.reshape(len(table), column.type.list_size)


def load_safetensors(path: Path) -> tuple[NDArray[np.int64] | None, NDArray[Any]]:
    tensors = load_file(path)
    return tensors.get("ids"), tensors["embeddings"]


LOADERS: dict[str, Callable[[Path], tuple[NDArray[np.int64] | None, NDArray[Any]]]] = {
    ".npy": load_npy,
    ".parquet": load_parquet,
    ".safetensors": load_safetensors,
}


@pytest.mark.parametrize("suffix", list(LOADERS))
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("memory", [1 << 28, 4096], ids=["in memory", "in buckets"])
@pytest.mark.parametrize("reordered", [False, True], ids=["as it stands", "reordered"])
@pytest.mark.parametrize("relabelled", [False, True], ids=["plain ids", "user ids"])
def test_every_format_gives_rows_in_original_order(
    suffix: str, dtype: type, memory: int, reordered: bool, relabelled: bool,
    rows: NDArray[np.float32], rng: np.random.Generator, tmp_path: Path,
) -> None:  # fmt: skip
    rows = rows.astype(dtype)
    order = rng.permutation(ROWS) if reordered else None
    ids = np.sort(rng.choice(10**12, ROWS, replace=False)) if relabelled else None
    volume = make_volume(rows, order, ids)
    moved: list[int] = []
    path = tmp_path / f"out{suffix}"
    done = export(volume, "emb", path, memory=memory, advance=moved.append)
    found_ids, found = LOADERS[suffix](path)
    assert found.dtype == dtype
    assert np.array_equal(found, rows)
    if relabelled:
        assert found_ids is not None
        assert np.array_equal(found_ids, ids)
    elif suffix == ".parquet":
        assert np.array_equal(found_ids, np.arange(ROWS))
    else:
        assert found_ids is None
    assert sum(moved) == export_bytes(volume, "emb", memory)
    assert (done.rows, done.width, done.nbytes) == (ROWS, WIDTH, path.stat().st_size)
    expected = {path.name} | ({"out.ids.npy"} if relabelled and suffix == ".npy" else set())
    assert {p.name for p in tmp_path.iterdir()} == expected


@pytest.mark.parametrize("suffix", list(LOADERS))
@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_and_a_single_row_output(suffix: str, count: int, tmp_path: Path) -> None:
    rows = np.full((count, 3), 2.5, np.float32)
    path = tmp_path / f"out{suffix}"
    export(make_volume(rows, np.arange(count), None), "emb", path)
    assert np.array_equal(LOADERS[suffix](path)[1], rows)


def test_row_groups_are_bounded(
    rows: NDArray[np.float32], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "_ROW_GROUP", 100 * rows[0].nbytes)
    path = tmp_path / "out.parquet"
    export(make_volume(rows, None, None), "emb", path)
    metadata = pq.read_metadata(path)
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert sum(sizes) == ROWS
    assert max(sizes) <= 100
    assert metadata.schema.to_arrow_schema().field("embedding").type.list_size == WIDTH


def test_nothing_is_replaced_without_force(rows: NDArray[np.float32], tmp_path: Path) -> None:
    volume = make_volume(rows, None, np.arange(ROWS))
    path = tmp_path / "out.npy"
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists: add --force"):
        export(volume, "emb", path)
    assert path.read_text() == "precious"
    export(volume, "emb", path, force=True)
    assert np.array_equal(np.load(path), rows)
    other = tmp_path / "new.npy"
    (tmp_path / "new.ids.npy").write_text("precious")
    with pytest.raises(UsageError, match=r"new\.ids\.npy exists"):
        export(volume, "emb", other)
    assert not other.exists()


def test_wrong_names_say_what_there_is(rows: NDArray[np.float32], tmp_path: Path) -> None:
    volume = make_volume(rows, np.arange(ROWS), None)
    with pytest.raises(UsageError, match=r"use \.npy, \.parquet, \.safetensors"):
        export(volume, "emb", tmp_path / "out.csv")
    with pytest.raises(UsageError, match="no output 'em' in mem:; it has: emb"):
        find_rows(volume, "em")
    with pytest.raises(UsageError, match="'order' is a table object, no output in mem:; it"):
        find_rows(volume, "order")
    volume.catalog.runs["half"] = RunInfo("half", "running")
    with pytest.raises(UsageError, match="refresh --resume --out half"):
        find_rows(volume, "half")
    with pytest.raises(UsageError, match=r"cannot write .*nowhere"):
        export(volume, "emb", tmp_path / "nowhere" / "out.npy")


def test_an_order_that_is_no_permutation_is_found(
    rows: NDArray[np.float32], tmp_path: Path
) -> None:
    for wrong in (np.zeros(ROWS, np.int64), np.arange(1, ROWS + 1)):
        volume = make_volume(rows, None, None)
        volume.write_table("order", wrong)
        for memory in (1 << 28, 4096):
            with pytest.raises(DataError, match="order"):
                export(volume, "emb", tmp_path / "out.npy", memory=memory)
        with pytest.raises(DataError, match="order"):
            read_original(volume, "emb", [0, 5])
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "hyades-test", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("a small file system needs root and mount")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("suffix", list(LOADERS))
@pytest.mark.parametrize("memory", [1 << 28, 65536], ids=["in memory", "in buckets"])
def test_a_full_disk_leaves_nothing_behind(
    suffix: str, memory: int, small_disk: Path, rng: np.random.Generator
) -> None:
    rows = rng.standard_normal((5000, 64)).astype(np.float32)
    volume = make_volume(rows, rng.permutation(5000), np.arange(5000))
    keep = small_disk / f"out{suffix}"
    keep.write_text("precious")
    with pytest.raises(UsageError, match=r"disk full .* nothing was left behind") as caught:
        export(volume, "emb", keep, force=True, memory=memory)
    assert "\n" not in str(caught.value)
    assert keep.read_text() == "precious"
    assert [p.name for p in small_disk.iterdir()] == [keep.name]


@pytest.mark.parametrize("reordered", [False, True])
@pytest.mark.parametrize("relabelled", [False, True])
def test_rows_are_read_by_the_users_ids(
    reordered: bool, relabelled: bool, rows: NDArray[np.float32], rng: np.random.Generator
) -> None:
    order = rng.permutation(ROWS) if reordered else None
    ids = rng.choice(10**12, ROWS, replace=False) if relabelled else np.arange(ROWS)
    volume = make_volume(rows, order, ids if relabelled else None)
    assert np.array_equal(read_original(volume, "emb"), rows)
    assert np.array_equal(read_original(volume, "emb", slice(None)), rows)
    assert np.array_equal(read_original(volume, "emb", slice(990, 3, -7)), rows[990:3:-7])
    wanted = rng.integers(0, ROWS, 300)
    assert np.array_equal(read_original(volume, "emb", ids[wanted]), rows[wanted])
    assert read_original(volume, "emb", []).shape == (0, WIDTH)
    assert np.array_equal(vertex_ids(volume, 3, 9), ids[3:9])
    with pytest.raises(UsageError, match=r"1 of the 2 vertex ids are not in mem: .*: -3"):
        read_original(volume, "emb", [int(ids[0]), -3])
    with pytest.raises(UsageError, match="vertex ids, not float64"):
        read_original(volume, "emb", [0.5])
    with pytest.raises(UsageError, match="vertex ids, not bool"):
        read_original(volume, "emb", np.ones(ROWS, bool))
    with pytest.raises(UsageError, match=r"vertex ids, not int64 \(1, 1\)"):
        read_original(volume, "emb", [[1]])


@pytest.mark.parametrize("suffix", [".npy", ".parquet"])
def test_memory_stays_bounded(suffix: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """256 MiB in random order through 32 MiB: anonymous memory grows by less than 128 MiB."""
    count, width = 1 << 18, 256
    with Volume.create(FileBlocks(tmp_path / "g.vol", create=True)) as volume:
        info = volume.allocate_rows("output/emb", np.float32, count, width, 4096)
        for page in range(info.pages):
            start, stop = info.shape().page_rows(page)
            block = np.repeat(np.arange(start, stop, dtype=np.float32)[:, None], width, axis=1)
            volume.write_page(info, page, block, stop - start)
        volume.write_table("order", rng.permutation(count))
        volume.commit()
    script = """
        import sys
        from pathlib import Path
        from hyades.common.blocks import FileBlocks
        from hyades.common.volume import Volume
        from hyades.deploy.export import export

        def anonymous():
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(l.split()[1]) for l in lines if l.startswith("RssAnon"))

        volume = Volume.open(FileBlocks(sys.argv[1], writable=False))
        before, peak = anonymous(), 0
        def watch(_):
            global peak
            peak = max(peak, anonymous())
        export(volume, "emb", Path(sys.argv[2]), memory=32 << 20, advance=watch)
        print(peak - before)
    """
    path = tmp_path / f"out{suffix}"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "g.vol", path],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert 8 << 10 < int(done.stdout) < 128 << 10
    with Volume.open(FileBlocks(tmp_path / "g.vol", writable=False)) as volume:
        order = volume.read_table("order")
    if suffix == ".npy":
        found = np.load(path, mmap_mode="r")
        assert np.array_equal(found[order, 0], np.arange(count))
        assert np.array_equal(found[order, -1], np.arange(count))
