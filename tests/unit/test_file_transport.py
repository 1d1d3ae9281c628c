"""The file transport: its two engines, its fallbacks, and what the file system may answer."""

import errno
import os
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from tests.reference.files import ENGINES, needs_uring, numbered_file, opened, records, run

from hyades.common.errors import BackendMissing, UsageError
from hyades.common.layout import BLOCK, COMPLETION, Op, Status
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport, probe_all
from hyades.proxy.transports import file as file_module
from hyades.proxy.transports import uring, uring_engine
from hyades.proxy.transports.engines import Geometry, errno_status
from hyades.proxy.transports.file import FileTransport
from hyades.proxy.transports.thread_engine import ThreadEngine
from hyades.proxy.transports.uring_engine import UringEngine


@pytest.fixture
def path(tmp_path):
    return numbered_file(tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("step", [BLOCK, 3 * BLOCK, 32 * BLOCK])
def test_long_reads_are_continued(path, engine, step):
    transport, arena = opened(path, engine=engine, step=step)
    assert run(transport, records((Op.READ, 1, 31, 0))) == [(Status.OK, 31 * BLOCK)]
    assert arena[: 31 * BLOCK].tobytes() == path.read_bytes()[BLOCK:]
    transport.close()


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("size", [10 * BLOCK, 10 * BLOCK + 512, 10 * BLOCK + 77])
def test_a_file_that_was_cut_gives_short(path, engine, direct, size):
    transport, _ = opened(path, engine=engine, direct=direct)
    os.truncate(path, size)
    requests = records((Op.READ, 8, 8, 0), (Op.READ, 20, 1, 8), (Op.READ, 0, 10, 16))
    assert run(transport, requests) == [
        (Status.SHORT, 2 * BLOCK), (Status.SHORT, 0), (Status.OK, 10 * BLOCK)
    ]  # fmt: skip
    assert transport.stats()["errors"] == 2
    transport.close()


@pytest.mark.parametrize("engine", ENGINES)
def test_read_only(path, engine):
    before = path.read_bytes()
    transport, _ = opened(path, engine=engine, writable=False)
    statuses = run(transport, records((Op.WRITE, 0, 1, 0), (Op.READ, 0, 1, 0), (Op.FLUSH, 0, 0, 0)))
    assert [s for s, _ in statuses] == [Status.INVALID, Status.OK, Status.OK]
    with pytest.raises(UsageError, match="reading only"):
        transport.grow(100)
    transport.close()
    assert path.read_bytes() == before


@pytest.mark.parametrize("engine", ENGINES)
def test_written_bytes_are_in_the_file(path, engine):
    transport, arena = opened(path, engine=engine)
    arena[: 2 * BLOCK] = 0xAB
    assert run(transport, records((Op.WRITE, 30, 2, 0)))[0][0] == Status.OK
    assert run(transport, records((Op.FLUSH, 0, 0, 0)))[0][0] == Status.OK
    transport.close()
    assert path.read_bytes()[30 * BLOCK :] == b"\xab" * 2 * BLOCK


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_refused_io_uring_falls_back_to_threads_and_says_so(path, monkeypatch, code):
    def refuse(entries, fd):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(uring_engine, "open_rings", refuse)
    monkeypatch.setattr(file_module, "open_rings", refuse)
    transport, arena = opened(path)
    line = transport.describe()
    assert "preadv on 4 threads" in line
    assert f"io_uring refused ({os.strerror(code)})" in line
    assert run(transport, records((Op.READ, 4, 4, 0)))[0][0] == Status.OK
    assert arena[: 4 * BLOCK].tobytes() == path.read_bytes()[4 * BLOCK : 8 * BLOCK]
    transport.close()
    with pytest.raises(BackendMissing, match="io_uring refused"):
        FileTransport(path, engine="io_uring")
    detail = next(p.detail for p in probe_all() if p.scheme == "file")
    assert "slower" in detail
    assert ("sysctl" if code == errno.EPERM else "Linux 5.11") in detail


def test_unexpected_ring_error_is_not_hidden(path, monkeypatch):
    def refuse(entries, fd):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(uring_engine, "open_rings", refuse)
    with pytest.raises(OSError, match="Too many"):
        FileTransport(path)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("when", ["open", "read"])
def test_refused_o_direct_uses_the_page_cache(path, monkeypatch, engine, when):
    real_open, real_preadv = os.open, os.preadv

    def open_(name, flags, *args, **kwargs):
        if when == "open" and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(name, flags, *args, **kwargs)

    def preadv(fd, buffers, offset):
        if when == "read":
            monkeypatch.setattr(os, "preadv", real_preadv)
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    transport, _ = opened(path, engine=engine)
    assert "page cache; " in transport.describe()
    assert "O_DIRECT" in transport.describe().split("page cache;")[1]
    assert run(transport, records((Op.READ, 0, 1, 0)))[0][0] == Status.OK
    transport.close()


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (errno.ENOSPC, Status.NO_SPACE), (errno.EDQUOT, Status.NO_SPACE), (errno.EIO, Status.IO),
        (errno.ENXIO, Status.LOST), (errno.ENODEV, Status.LOST), (errno.ECANCELED, -5),
        (errno.ETIMEDOUT, Status.TIMEOUT), (errno.EREMOTEIO, Status.IO), (errno.EBADF, Status.IO),
    ],
)  # fmt: skip
def test_errno_to_status(code, status):
    assert errno_status(code) == status


def test_growing_beyond_the_disk_names_the_sizes_and_changes_nothing(path):
    transport, _ = opened(path)
    size = path.stat().st_size
    with pytest.raises(UsageError, match=r"must grow by .* TiB to .*, but .* are free"):
        transport.grow(2**40 // BLOCK * 8)
    assert path.stat().st_size == size
    assert transport.nblocks == 32
    transport.grow(40)
    assert path.stat().st_size == 40 * BLOCK
    assert path.stat().st_blocks * 512 >= 40 * BLOCK  # allocated, not a hole
    transport.close()


ENGINE_TYPES = {"io_uring": UringEngine, "threads": ThreadEngine}


@pytest.fixture(params=ENGINES)
def on_descriptor(request):
    """Return a function that makes an engine, with an arena, on any file descriptor."""
    made = []

    def make(fd):
        engine = ENGINE_TYPES[request.param](Geometry(fd, 4, 1 << 20, True, 1 << 20))
        made.append(engine)
        make.arenas.append(allocate_arena(4 * BLOCK))
        engine.register(make.arenas[-1])
        return engine

    make.arenas = []
    yield make
    for engine in made:
        engine.close()


def step(engine, requests):
    words = requests.view(np.int64).reshape(-1, 8)
    assert engine.submit(words, 1 << 20) == len(requests)
    return collect(engine, len(requests))


def collect(engine, count):
    out, found = np.zeros((8, 3), np.int64), []
    deadline = time.monotonic() + 20
    while len(found) < count:
        done = out[: engine.poll(out)].copy().view(COMPLETION)[:, 0]
        found += [(int(d["status"]), int(d["nbytes"])) for d in done]
        engine.wait(0.01)
        assert time.monotonic() < deadline
    return found


def test_no_space_during_a_write(on_descriptor):
    with Path("/dev/full").open("r+b", buffering=0) as full:
        engine = on_descriptor(full.fileno())
        assert step(engine, records((Op.WRITE, 0, 1, 0))) == [(Status.NO_SPACE, 0)]
        assert step(engine, records((Op.READ, 0, 1, 0))) == [(Status.OK, BLOCK)]
        assert engine.counters.tolist() == [BLOCK, 0, 2, 1]


@pytest.mark.parametrize("on_descriptor", ENGINES[:1], indirect=True)
def test_a_read_that_takes_long(on_descriptor):
    """A pipe, which preadv does not read, answers when we say so: wait ends then, or in time."""
    reader, writer = os.pipe()
    try:
        engine = on_descriptor(reader)
        words = records((Op.READ, 0, 1, 0)).view(np.int64).reshape(-1, 8)
        assert engine.submit(words, 1 << 20) == 1
        begin = time.monotonic()
        engine.wait(0.03)
        assert 0.02 < time.monotonic() - begin < 5
        assert engine.poll(np.zeros((4, 3), np.int64)) == 0
        timer = threading.Timer(0.05, os.write, (writer, bytes(BLOCK)))
        timer.start()
        begin = time.monotonic()
        engine.wait(20)
        assert time.monotonic() - begin < 10
        assert collect(engine, 1) == [(Status.OK, BLOCK)]
        timer.join()
    finally:
        os.close(writer)
        os.close(reader)


@pytest.mark.parametrize("on_descriptor", ENGINES[:1], indirect=True)
def test_short_transfers_of_the_kernel_are_continued(on_descriptor):
    """A pipe gives what it has: three blocks in three parts, each into its place."""
    reader, writer = os.pipe()
    try:
        engine = on_descriptor(reader)
        words = records((Op.READ, 0, 3, 1)).view(np.int64).reshape(-1, 8)
        assert engine.submit(words, 1 << 20) == 1
        for part in range(3):
            assert engine.poll(np.zeros((4, 3), np.int64)) == 0
            os.write(writer, bytes([part + 1]) * BLOCK)
            engine.wait(5)
        assert collect(engine, 1) == [(Status.OK, 3 * BLOCK)]
        blocks = on_descriptor.arenas[0].reshape(-1, BLOCK)
        assert [set(row.tolist()) for row in blocks] == [{0}, {1}, {2}, {3}]
    finally:
        os.close(writer)
        os.close(reader)


@needs_uring
def test_a_broken_ring_is_an_error_not_a_hang(path):
    transport, _ = opened(path, engine="io_uring")
    geometry = transport._engine._rings.geometry
    fd = int(geometry[uring.G_RING_FD])
    geometry[uring.G_RING_FD] = -1
    assert transport.submit(records((Op.READ, 0, 1, 0))) == 1
    with pytest.raises(OSError, match="io_uring_enter: Bad file descriptor"):
        transport.poll(np.zeros(4, COMPLETION))
    geometry[uring.G_RING_FD] = fd
    transport.close()


def test_neither_file_nor_block_device():
    with pytest.raises(UsageError, match="neither a file nor a block device"):
        FileTransport("/dev/null", direct=False)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(UsageError, match=r"cannot open .*nothing: No such file"):
        FileTransport(tmp_path / "nothing")
    with pytest.raises(UsageError, match=r"cannot open .*Is a directory"):
        FileTransport(tmp_path)
    FileTransport(tmp_path / "new", create=True).close()
    assert (tmp_path / "new").stat().st_size == 0


def test_no_descriptor_or_thread_is_left(path):
    def descriptors():
        return len(list(Path("/proc/self/fd").iterdir()))

    before, threads = descriptors(), threading.active_count()
    for engine in ("threads", "auto"):
        transport, _ = opened(path, engine=engine)
        transport.close()
    assert descriptors() == before
    assert threading.active_count() == threads


@pytest.mark.parametrize("engine", ENGINES)
def test_block_device_of_512_byte_sectors(path, engine):
    found = subprocess.run(
        ["losetup", "--find", "--show", "--sector-size", "512", str(path)],
        capture_output=True, text=True, check=False,
    ) if os.geteuid() == 0 and Path("/dev/loop-control").exists() else None  # fmt: skip
    if found is None or found.returncode:
        reason = found.stderr.strip() if found else "needs root and /dev/loop-control"
        pytest.skip(f"no loop device: {reason}")
    device = found.stdout.strip()
    try:
        transport, arena = opened(device, engine=engine)
        assert transport.nblocks == 32
        assert run(transport, records((Op.READ, 3, 2, 0)))[0] == (Status.OK, 2 * BLOCK)
        assert arena[: 2 * BLOCK].tobytes() == path.read_bytes()[3 * BLOCK : 5 * BLOCK]
        with pytest.raises(UsageError, match="use a larger device"):
            transport.grow(33)
        transport.close()
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


def test_url_options(path):
    transport = open_transport(f"file://{path}?engine=threads&depth=3&direct=0&max_transfer=64KiB")
    assert transport.limits.max_inflight == 3
    assert transport.limits.max_transfer == 65536
    assert "page cache" in transport.stats()["describe"]
    transport.close()
    for options, words in {
        "engine=fast": "engine is auto", "depth=0": "whole number", "direct=maybe": "1 or 0",
        "colour=red": "no option colour", "depth=1&depth=2": "given 2 times", "": "no options",
    }.items():  # fmt: skip
        with pytest.raises(UsageError, match=words):
            open_transport(f"file://{path}?{options}")
    with pytest.raises(UsageError, match="names no file"):
        open_transport("file://")
