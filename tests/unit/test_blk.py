import os
import subprocess

import pytest
from tests.contracts.transport import finish, request
from tests.reference.loops import loop_device

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, Op
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport, probe_all
from hyades.proxy.transports import blk
from hyades.proxy.urls import Url


@pytest.mark.parametrize(
    ("text", "scheme", "path"),
    [
        ("blk:/dev/nvme1n1", "blk", "/dev/nvme1n1"),
        ("blk:///dev/nvme1n1", "blk", "/dev/nvme1n1"),
        ("faulty+blk:/dev/nvme1n1", "faulty+blk", "/dev/nvme1n1"),
        ("blk:nvme1n1", "blk", "nvme1n1"),
        ("./blk:/dev/nvme1n1", "file", "./blk:/dev/nvme1n1"),
        ("/dev/nvme1n1", "file", "/dev/nvme1n1"),
    ],
)
def test_urls(text, scheme, path):
    url = Url(text)
    assert (url.scheme, url.path, str(url)) == (scheme, path, text)


def test_options():
    url = Url("blk:/dev/nvme1n1?depth=7")
    assert (url.path, url.integer("depth", 1)) == ("/dev/nvme1n1", 7)


def test_only_block_devices(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK))
    for name, words in (
        (path, "use a plain path"),
        (tmp_path, "no block device"),
        ("/dev/null", "no block device"),
        (tmp_path / "none", "No such file"),
        ("", "names no device"),
    ):
        with pytest.raises(UsageError, match=words):
            open_transport(f"blk:{name}", create=True)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("form", ["blk:{}", "blk://{}"])
def test_both_forms_and_their_options(tmp_path, form):
    with loop_device(tmp_path / "a", 512, nbytes=4 * BLOCK) as device:
        transport = open_transport(form.format(device) + "?depth=3&max_transfer=64KiB")
        assert transport.nblocks == 4
        assert (transport.limits.max_inflight, transport.limits.max_transfer) == (3, 65536)
        transport.close()
        with pytest.raises(UsageError, match="no option ns"):
            open_transport(form.format(device) + "?ns=1")


def test_faulty_around_a_device(tmp_path):
    with loop_device(tmp_path / "a", 512, nbytes=4 * BLOCK) as device:
        transport = open_transport(f"faulty+blk:{device}?fault=io")
        transport.register(allocate_arena(BLOCK))
        assert finish(transport, request(Op.READ, 1, 1, 0, 5))[5][0] == -1
        transport.close()


def test_a_read_only_device(tmp_path):
    (tmp_path / "a").write_bytes(bytes(4 * BLOCK))
    with loop_device(tmp_path / "a", 512, read_only=True) as device:
        with pytest.raises(UsageError, match=f"{device} is read-only"):
            open_transport(f"blk:{device}")
        transport = open_transport(f"blk:{device}", writable=False)
        transport.register(allocate_arena(BLOCK))
        assert finish(transport, request(Op.READ, 1, 1, 0, 5)) == {5: (0, BLOCK)}
        assert finish(transport, request(Op.WRITE, 1, 1, 0, 6))[6][0] < 0
        transport.close()


def test_a_mounted_device(tmp_path):
    if subprocess.run(["which", "mkfs.ext4"], capture_output=True, check=False).returncode:
        pytest.skip("needs mkfs.ext4")
    folder = tmp_path / "mount"
    folder.mkdir()
    with loop_device(tmp_path / "a", 512, nbytes=8 << 20) as device:
        subprocess.run(["mkfs.ext4", "-q", str(device)], check=True)
        mount = ["mount", str(device), str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("cannot mount here")
        try:
            with pytest.raises(UsageError, match="is mounted or part of another device"):
                open_transport(f"blk:{device}")
            open_transport(f"blk:{device}", writable=False).close()
        finally:
            subprocess.run(["umount", str(folder)], check=True)


def test_what_does_not_lie_on_a_block(tmp_path):
    with loop_device(tmp_path / "a", 512, nbytes=4 * BLOCK) as device:
        transport = open_transport(f"blk:{device}")
        transport.register(allocate_arena(2 * BLOCK))
        assert finish(transport, request(Op.READ, 0, 1, 512, 1))[1][0] == -7
        assert finish(transport, request(Op.READ, 0, nbytes=512, cookie=2))[2][0] == -7
        transport.close()


def test_detail(tmp_path):
    assert blk.detail(tmp_path) == "no disks"
    for number, name in enumerate([*(f"nvme{n}n1" for n in range(9)), "loop0"]):
        folder = tmp_path / "sys/block" / name / "queue"
        folder.mkdir(parents=True)
        (folder / "logical_block_size").write_text("512\n" if number else "4096\n")
        (folder.parent / "size").write_text("0\n" if number == 1 else "2097152\n")
    (tmp_path / "sys/block/nvme9n1").mkdir()  # is being taken away
    text = blk.detail(tmp_path)
    assert text.startswith("/dev/nvme0n1 1.0 GiB (LBA 4096), /dev/nvme2n1 1.0 GiB (LBA 512)")
    assert text.endswith(" and 2 more")
    assert [p.problem for p in probe_all() if p.scheme == "blk"] == [None]


def test_permission(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    with loop_device(tmp_path / "a", 512, nbytes=4 * BLOCK) as device:
        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(UsageError, match="group disk"):
            blk.check_device(device, writable=True)
        monkeypatch.undo()
