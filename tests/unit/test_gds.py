"""The gds transport: what it refuses and why, how failures become statuses, its settings."""

import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.contracts.transport import finish, request, sweep
from tests.reference import kvikio

from hyades.common.errors import BackendMissing, UsageError
from hyades.common.layout import BLOCK, Op, Status
from hyades.deploy.volumes import local_files
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport
from hyades.proxy.transports import gds
from hyades.proxy.transports.gds import GdsTransport

POSIX = "KvikIO failure at: posix_io.hpp:89: POSIX error: Operation not permitted"


@pytest.fixture
def standin(monkeypatch):
    state = kvikio.install(monkeypatch)
    yield state
    state.close()


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(gds, "_has_library", lambda name: True)
    monkeypatch.setattr(gds, "_has_gpu", lambda folder: True)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "device"
    path.write_bytes(np.arange(8, dtype=np.uint8).repeat(BLOCK).tobytes())
    return path


@pytest.fixture
def device(standin, path):
    transport = GdsTransport(path)
    yield transport
    standin.gate.set()
    transport.close()


def test_without_kvikio(monkeypatch, path):
    for name in ("kvikio", "kvikio.defaults", "kvikio.cufile_driver"):
        monkeypatch.setitem(sys.modules, name, None)
    for url in (f"gds://{path}", f"gds://{path}?compat=1"):
        with pytest.raises(BackendMissing, match=r"pip install -c constraints.txt -e '\.\[gpu\]'"):
            open_transport(url)


def test_what_is_missing_is_named_in_turn(monkeypatch, standin, path):
    libraries = set()
    monkeypatch.setattr(gds, "_has_library", libraries.__contains__)
    assert gds.probe() == "kvikio needs libcuda.so.1: install the NVIDIA driver"
    libraries.add("libcuda.so.1")
    monkeypatch.setattr(gds, "_has_gpu", lambda folder: False)
    assert "no NVIDIA GPU: " in gds.probe()
    with pytest.raises(BackendMissing, match=r"no NVIDIA GPU: .*compat=1"):
        open_transport(f"gds://{path}")
    open_transport(f"gds://{path}?compat=1").close()
    monkeypatch.setattr(gds, "_has_gpu", lambda folder: True)
    standin.gds = False
    assert "nvidia-fs driver: apt-get install nvidia-gds" in gds.probe()
    standin.gds = True
    assert gds.probe() is None
    assert gds.detail() == "kvikio 26.10-standin, cuFile 1.14"


def test_the_folder_of_gpus(tmp_path):
    assert not gds._has_gpu(tmp_path / "none")
    assert not gds._has_gpu(tmp_path)
    (tmp_path / "0000:01:00.0").mkdir()
    assert gds._has_gpu(tmp_path)
    assert gds._has_library("libc.so.6")
    assert not gds._has_library("libno-such-library.so")


def test_a_file_that_cufile_refuses(standin, gpu, path):
    standin.refused = "file system not supported"
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(BackendMissing, match=r"file system not supported.*ext4 or XFS.*compat=1"):
        open_transport(f"gds://{path}")
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors
    open_transport(f"gds://{path}?compat=1").close()
    assert standin.modes == [kvikio.CompatMode.OFF, kvikio.CompatMode.ON]
    assert standin.settings["compat_mode"] is kvikio.CompatMode.AUTO


def test_a_file_system_without_direct_io(standin, monkeypatch, path):
    really_open = os.open

    def refuse(name, flags, *mode):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(name, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(BackendMissing, match="O_DIRECT"):
        GdsTransport(path)
    transport = GdsTransport(path, compat=True)
    assert "O_DIRECT" in transport.describe()
    transport.close()


def test_options(standin, gpu, path):
    url = f"gds://{path}?compat=1&threads=6&depth=3&max_transfer=64KiB"
    transport = open_transport(url)
    assert (transport.limits.max_inflight, transport.limits.max_transfer) == (3, 64 << 10)
    assert standin.settings["num_threads"] == 6
    transport.close()
    open_transport(f"gds://{path}?threads=2").close()
    assert standin.settings["num_threads"] == 6  # others of this process may need them
    with pytest.raises(UsageError, match="its options are: compat, threads"):
        open_transport(f"gds://{path}?engine=threads")
    with pytest.raises(UsageError, match="names no file"):
        open_transport("gds://")
    assert [str(name) for name in local_files(f"gds://{path}")] == [str(path)]  # it is locked


def test_gpu_memory_is_registered_and_given_back(standin, device):
    arena = kvikio.device_arena(2 * BLOCK)
    device.register(arena)
    assert standin.registered[0] is arena
    assert standin.settings["gds_threshold"] == 0
    assert finish(device, request(Op.READ, 3, 2)) == {0: (Status.OK, 2 * BLOCK)}
    assert (np.asarray(arena) == np.repeat([3, 4], BLOCK)).all()
    assert standin.task_sizes == {(2 * BLOCK, 2 * BLOCK)}  # one task: see gds_engine.py
    with pytest.raises(UsageError, match="arena already"):
        device.register(arena)
    device.close()
    assert standin.registered == []


def test_compat_registers_nothing(standin, path):
    transport = GdsTransport(path, compat=True)
    transport.register(kvikio.device_arena(BLOCK))
    assert standin.registered == []
    assert standin.settings["gds_threshold"] == 1 << 20
    transport.close()


def test_gpu_arenas_that_cannot_be(device):
    arena = kvikio.device_arena(8 * BLOCK)
    read_only = kvikio.device_arena(BLOCK)
    read_only.flags.writeable = False
    for wrong in (arena.view(np.int32), arena[::2], arena.reshape(2, -1), read_only):
        with pytest.raises(UsageError, match="contiguous"):
            device.register(wrong)
    with pytest.raises(UsageError, match="multiple of 4096"):
        device.register(arena[512 : 512 + BLOCK])


@pytest.mark.parametrize("at_submit", [False, True])
@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (RuntimeError(POSIX), Status.IO),
        (RuntimeError("cuFile error at: file_handle.cpp:1: internal error"), Status.IO),
        (RuntimeError(f"x: {os.strerror(errno.ENOSPC)}"), Status.NO_SPACE),
        (RuntimeError(f"x: {os.strerror(errno.EIO)}"), Status.IO),
        (RuntimeError(f"x: {os.strerror(errno.ENODEV)}"), Status.LOST),
        (OSError(errno.EDQUOT, "over"), Status.NO_SPACE),
        (RuntimeError("POSIX error on pread: EOF"), Status.SHORT),
    ],
)
def test_failures_become_statuses(standin, device, failure, status, at_submit):
    device.register(allocate_arena(2 * BLOCK))
    standin.failures, standin.at_submit = [failure], at_submit
    assert finish(device, request(Op.WRITE, cookie=5)) == {5: (status, 0)}
    assert str(failure) in device.describe()
    assert finish(device, request(Op.WRITE, cookie=6)) == {6: (Status.OK, BLOCK)}
    assert device.stats()["errors"] == 1


def test_a_full_disk_is_known_by_what_is_free(standin, device, monkeypatch):
    device.register(allocate_arena(2 * BLOCK))
    full = list(os.statvfs("/"))
    full[4] = 0  # f_bavail
    monkeypatch.setattr(os, "fstatvfs", lambda fd: os.statvfs_result(full))
    standin.failures = [RuntimeError(POSIX), RuntimeError(POSIX)]
    assert finish(device, request(Op.WRITE))[0][0] == Status.NO_SPACE
    assert finish(device, request(Op.READ))[0][0] == Status.IO


def test_short_transfers(standin, device, path):
    device.register(allocate_arena(4 * BLOCK))
    standin.short = 100
    assert finish(device, request(Op.READ, 0, 2)) == {0: (Status.SHORT, 2 * BLOCK - 100)}
    os.truncate(path, BLOCK)
    assert finish(device, request(Op.READ, 0, 2)) == {0: (Status.SHORT, 0)}


def test_close_waits_for_what_runs(standin, device):
    device.register(allocate_arena(4 * BLOCK))
    standin.gate.clear()
    assert device.submit(np.concatenate([request(Op.READ, i, cookie=i) for i in range(3)])) == 3
    device.wait(0.002)
    assert sweep(device) == []
    standin.gate.set()
    device.close()
    assert standin.opened[0].closed
    assert sorted(sweep(device)) == [(i, Status.OK) for i in range(3)]


def test_a_failed_flush(standin, device, monkeypatch):
    def fail(fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    device.register(allocate_arena(BLOCK))
    monkeypatch.setattr(os, "fdatasync", fail)
    assert finish(device, request(Op.FLUSH, cookie=1)) == {1: (Status.NO_SPACE, 0)}
