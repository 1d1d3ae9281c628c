"""Block devices: locks, growth without space, and files that are not volumes."""

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hyades.common.blocks import BlockDevice, FileBlocks, MemoryBlocks
from hyades.common.errors import DataError, DeviceLost, UsageError
from hyades.common.layout import BLOCK
from hyades.common.volume import Volume


@pytest.fixture(params=["file", "memory"])
def blocks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BlockDevice]:
    if request.param == "memory":
        yield MemoryBlocks()
        return
    device = FileBlocks(tmp_path / "d", create=True)
    yield device
    device.close()


def test_blocks_keep_what_is_written(blocks: BlockDevice) -> None:
    blocks.grow(8)
    blocks.grow(4)
    assert blocks.nblocks == 8
    words = np.arange(2 * BLOCK // 4, dtype=np.uint32)
    blocks.write(5, words)
    blocks.write(3, b"\1" * BLOCK)
    blocks.flush()
    assert blocks.read(5, 2) == words.tobytes()
    assert blocks.read(3, 2) == b"\1" * BLOCK + bytes(BLOCK)


def test_blocks_refuse_what_lies_outside(blocks: BlockDevice) -> None:
    blocks.grow(4)
    with pytest.raises(UsageError, match="100 bytes are not a whole number"):
        blocks.write(0, bytes(100))
    with pytest.raises(UsageError, match=r"LBA 3 \+ 2 blocks is outside"):
        blocks.write(3, bytes(2 * BLOCK))
    with pytest.raises(UsageError, match="outside"):
        blocks.write(-1, bytes(BLOCK))
    with pytest.raises(DataError, match=r"ends at byte 16384, but 2 blocks .* LBA 3: truncated"):
        blocks.read(3, 2)


def test_a_writer_excludes_everybody(tmp_path: Path) -> None:
    path = tmp_path / "g"
    writer = Volume.create(FileBlocks(path, create=True))
    holder = rf"process {os.getpid()} \("
    with pytest.raises(UsageError, match=rf"g is being used by {holder}"):
        FileBlocks(path)
    with pytest.raises(UsageError, match=rf"g is being written by {holder}"):
        FileBlocks(path, writable=False)
    writer.close()
    readers = [Volume.open(FileBlocks(path, writable=False)) for _ in range(2)]
    with pytest.raises(UsageError, match="is being used by process"):
        FileBlocks(path)
    for reader in readers:
        reader.close()
    Volume.open(FileBlocks(path), writable=True).close()


def test_the_lock_ends_with_the_process(tmp_path: Path) -> None:
    path = tmp_path / "g"
    Volume.create(FileBlocks(path, create=True)).close()
    code = (
        "import sys; from hyades.common.blocks import FileBlocks\n"
        f"device = FileBlocks({str(path)!r}); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=f"process {child.pid} "):
            FileBlocks(path)
        child.kill()
    FileBlocks(path).close()


def test_a_failed_open_releases_the_file(tmp_path: Path) -> None:
    path = tmp_path / "g"
    path.write_bytes(bytes(10 * BLOCK))
    with pytest.raises(DataError):
        Volume.open(FileBlocks(path))
    with pytest.raises(DataError):
        Volume.open(FileBlocks(path))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "it has 0 blocks of 4096 bytes"),
        (b"short", "it has 0 blocks"),
        (bytes(3 * BLOCK), r"copy 0 \(LBA 0\) is empty; superblock copy 1 \(LBA 1\) is empty"),
        (b"\x93NUMPY" * 4 * BLOCK, r"copy 0 \(LBA 0\) starts with b'\\x93NUMPY\\x93N', not b'HYAD"),
    ],
)
def test_files_that_are_no_volume(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "g.vol"
    path.write_bytes(content)
    with pytest.raises(DataError, match=text):
        Volume.open(FileBlocks(path, writable=False))
    assert path.read_bytes() == content


def test_paths_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a directory, not a volume"):
        FileBlocks(tmp_path)
    with pytest.raises(UsageError, match="is a directory"):
        FileBlocks(tmp_path, create=True)
    with pytest.raises(UsageError, match=r"no volume .*/none"):
        FileBlocks(tmp_path / "none")
    with pytest.raises(UsageError, match=r"no folder .*/none for the volume"):
        FileBlocks(tmp_path / "none" / "g", create=True)
    (tmp_path / "there").touch()
    with pytest.raises(UsageError, match="there exists; remove it"):
        FileBlocks(tmp_path / "there", create=True)
    with pytest.raises(UsageError, match=r"cannot open .*: Not a directory"):
        FileBlocks(tmp_path / "there" / "g", create=True)
    with pytest.raises(UsageError, match="neither a file nor a block device"):
        FileBlocks("/dev/null")


def test_a_file_open_for_reading_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "g"
    Volume.create(FileBlocks(path, create=True)).close()
    device = FileBlocks(path, writable=False)
    with pytest.raises(UsageError, match="open for reading only"):
        device.write(0, bytes(BLOCK))
    device.flush()
    device.close()


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "g"
    with Volume.create(FileBlocks(path, create=True)) as volume:
        volume.write_table("t", np.arange(3000))
        volume.commit()
    size = path.stat().st_size
    os.truncate(path, size - 1)
    with pytest.raises(DataError, match=rf"needs {size} bytes, the device has {size - BLOCK}: it"):
        Volume.open(FileBlocks(path))


def fill(path: Path) -> bytes:
    """Make a volume with something in it, and return the file."""
    with Volume.create(FileBlocks(path, create=True)) as volume:
        volume.write_table("t", np.arange(100))
        volume.commit()
    return path.read_bytes()


def test_a_file_size_limit_leaves_the_volume_untouched(tmp_path: Path) -> None:
    path = tmp_path / "g"
    before = fill(path)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, old[1]))
    try:
        with Volume.open(FileBlocks(path), writable=True) as volume:
            with pytest.raises(UsageError, match=r"no space for .* \(see ulimit -f\)"):
                volume.allocate_pages("big", 100, 1 << 20)
            assert set(volume.catalog.objects) == {"t"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before


def test_a_full_file_system_leaves_the_volume_untouched(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(mount)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting a 2 MiB tmpfs needs root with CAP_SYS_ADMIN")
    try:
        before = fill(mount / "g")
        with Volume.open(FileBlocks(mount / "g"), writable=True) as volume:
            with pytest.raises(UsageError, match=r"no space for 4.0 MiB more: \d{7} bytes are mis"):
                volume.allocate_pages("big", 4, 1 << 20)
            volume.allocate_pages("small", 1, 1 << 20)
        assert (mount / "g").read_bytes() == before
        with Volume.open(FileBlocks(mount / "g"), writable=True) as volume:
            volume.write_table("more", np.arange(100_000))
            volume.commit()
            assert np.array_equal(volume.read_table("more"), np.arange(100_000))
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_device_of_fixed_size_uses_its_holes_and_then_is_full() -> None:
    blocks = MemoryBlocks(40, maximum=40)
    volume = Volume.create(blocks)
    for index in range(4):
        volume.allocate_pages(f"p{index}", 4, BLOCK)
    volume.commit()
    volume.remove("p0")
    volume.remove("p2")
    volume.commit()
    before, data = volume.catalog.extents(), blocks.data.copy()
    with pytest.raises(UsageError, match=r"mem:: no space for \d+ bytes: \d+ bytes are missing"):
        volume.allocate_pages("too much", volume.free_blocks + 1, BLOCK)
    assert volume.catalog.extents() == before
    assert np.array_equal(blocks.data, data)
    scattered = volume.allocate_pages("fits", volume.free_blocks - 4, BLOCK)
    assert len(scattered.extents) > 1
    for page in range(scattered.pages):
        volume.write_page(scattered, page, bytes([page]), 1)
    volume.commit()
    again = Volume.open(blocks)
    assert [again.read_page(scattered, page)[0] for page in range(scattered.pages)] == list(
        range(scattered.pages)
    )
    assert list(again.verify(["fits"])) == []


def test_a_block_device_holds_a_volume(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(bytes(4 << 20))
    losetup = shutil.which("losetup") or "/sbin/losetup"
    if not Path(losetup).exists() or os.geteuid() != 0:
        pytest.skip("a loop device needs root and losetup (apt-get install util-linux)")
    command = [losetup, "--find", "--show", str(image)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no loop device here: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        with Volume.create(FileBlocks(device, create=True)) as volume:
            volume.write_table("t", np.arange(100_000))
            with pytest.raises(UsageError, match=r"the device is full: .* bytes are missing; rem"):
                volume.allocate_pages("big", 4, 1 << 20)
            volume.commit()
        with Volume.open(FileBlocks(device, writable=False)) as volume:
            assert np.array_equal(volume.read_table("t"), np.arange(100_000))
            assert list(volume.verify()) == []
        with pytest.raises(UsageError, match="already holds data"):
            Volume.create(FileBlocks(device, create=True))
    finally:
        subprocess.run([losetup, "--detach", device], check=True)


def test_a_full_device_uses_the_smallest_holes() -> None:
    volume = Volume.create(MemoryBlocks(200, maximum=200))
    for index in range(60):
        volume.allocate_pages(f"p{index}", 1, BLOCK)
    volume.commit()
    for index in range(0, 60, 2):
        volume.remove(f"p{index}")
    volume.commit()
    rest = volume.free_blocks
    info = volume.allocate_pages("scattered", rest - 3, BLOCK)
    assert sum(extent.nblocks == 2 for extent in info.extents) > 20
    volume.commit()
    with pytest.raises(UsageError, match="no space for"):
        volume.allocate_pages("one more", 3, BLOCK)


def test_a_growth_that_fails_midway_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = fill(tmp_path / "g")

    def half(fd: int, offset: int, length: int) -> None:
        os.ftruncate(fd, offset + length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", half)
    device = FileBlocks(tmp_path / "g")
    with pytest.raises(UsageError, match="bytes are missing on the file system"):
        device.grow(1000)
    assert (tmp_path / "g").read_bytes() == before
    assert device.nblocks == len(before) // BLOCK
    device.close()


def test_what_a_failed_commit_may_have_reached_is_not_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superblock lies on the device, but its flush failed: the file must keep its length."""
    path = tmp_path / "g"
    fill(path)
    volume = Volume.open(FileBlocks(path), writable=True)
    volume.write_table("new", np.arange(90_000))
    flush, calls = os.fdatasync, []

    def fail_second(fd: int) -> None:
        calls.append(fd)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(fd)

    monkeypatch.setattr(os, "fdatasync", fail_second)
    with pytest.raises(DeviceLost, match="flush failed"):
        volume.commit()
    volume.rollback()
    volume.close()
    with Volume.open(FileBlocks(path, writable=False)) as volume:
        assert volume.generation == 3
        assert np.array_equal(volume.read_table("new"), np.arange(90_000))


def test_space_goes_back_to_the_file_system(tmp_path: Path) -> None:
    path = tmp_path / "g"
    before = fill(path)
    with Volume.open(FileBlocks(path), writable=True) as volume:
        volume.allocate_pages("big", 100, 64 << 10)
        assert path.stat().st_size > 100 * (64 << 10)
        volume.rollback()
        assert path.read_bytes() == before
        volume.allocate_pages("big", 100, 64 << 10)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("call", "use"),
    [
        ("preadv", lambda device: device.read(1, 1)),
        ("pwrite", lambda device: device.write(1, bytes(BLOCK))),
        ("fdatasync", lambda device: device.flush()),
    ],
)
def test_an_error_of_the_device_is_device_lost(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    use: Callable[[FileBlocks], object],
) -> None:
    fill(tmp_path / "g")
    device = FileBlocks(tmp_path / "g")

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(DeviceLost, match=r"g: .*failed: Input/output error"):
        use(device)
    device.close()


def test_short_transfers_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = FileBlocks(tmp_path / "g", create=True)
    device.grow(3)
    words = np.arange(2 * BLOCK // 4, dtype=np.uint32)
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:1000], at))
    monkeypatch.setattr(os, "preadv", lambda fd, data, at: read(fd, [data[0][:1000]], at))
    device.write(1, words)
    assert device.read(1, 2) == words.tobytes()
    device.close()
