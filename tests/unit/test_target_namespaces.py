"""Namespaces, the buffer pool and faults on purpose."""

import errno
import os
import threading

import pytest

from hyades.common.errors import UsageError
from hyades.common.nvme.status import DNR, StatusCode
from hyades.common.units import MIB
from hyades.target_side import namespaces as module
from hyades.target_side.faulty import Faults, FaultyNamespace, parse_fault
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace
from hyades.target_side.pool import BufferPool
from hyades.target_side.waker import Waker


@pytest.fixture(params=["file", "memory"])
def namespace(request, tmp_path):
    if request.param == "memory":
        opened = MemoryNamespace(MIB)
    else:
        opened = FileNamespace(tmp_path / "f", create=MIB)
    yield opened
    opened.close()


def read(namespace, offset, nbytes):
    data = bytearray(nbytes)
    assert namespace.read_into(offset, memoryview(data)) == 0
    return bytes(data)


def test_bytes_come_back(namespace):
    assert namespace.blocks == 256
    assert read(namespace, 0, MIB) == bytes(MIB)
    assert namespace.write(4096, memoryview(b"ab" * 4096)) == 0
    assert read(namespace, 4096, 8192) == b"ab" * 4096
    assert namespace.zero(8192, 2048) == 0
    assert read(namespace, 4096, 8192) == b"ab" * 2048 + bytes(2048) + b"ab" * 1024
    assert namespace.flush() == 0


def test_zeroes_where_the_file_system_cannot(namespace, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "no")

    monkeypatch.setattr(module, "_fallocate", refuse)
    namespace.write(0, memoryview(b"\xff" * MIB))
    assert namespace.zero(4096, MIB - 8192) == 0
    assert read(namespace, 0, MIB) == b"\xff" * 4096 + bytes(MIB - 8192) + b"\xff" * 4096


def test_a_size_is_cut_down_to_whole_blocks(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(bytes(10_000))
    for block, blocks in ((4096, 2), (512, 19)):
        opened = FileNamespace(path, block_bytes=block)
        assert opened.blocks == blocks
        opened.close()
    assert path.stat().st_size == 10_000


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (errno.ENOSPC, StatusCode.CAPACITY_EXCEEDED | DNR),
        (errno.EDQUOT, StatusCode.CAPACITY_EXCEEDED | DNR),
        (errno.EIO, None),
        (errno.EROFS, StatusCode.WRITE_PROTECTED | DNR),
    ],
)
def test_errors_of_the_system_become_status_codes(tmp_path, monkeypatch, number, status):
    opened = FileNamespace(tmp_path / "f", create=MIB)

    def fail(*_):
        raise OSError(number, os.strerror(number))

    for name in ("pwrite", "preadv", "fdatasync"):
        monkeypatch.setattr(module.os, name, fail)
    monkeypatch.setattr(module, "_fallocate", fail)
    fault = status or StatusCode.WRITE_FAULT
    assert opened.write(0, memoryview(b"x")) == fault
    assert opened.flush() == fault
    assert opened.zero(0, 4096) == fault
    assert opened.read_into(0, memoryview(bytearray(1))) == (status or StatusCode.READ_ERROR)
    opened.close()


def test_short_reads_and_writes_go_on(tmp_path, monkeypatch):
    opened = FileNamespace(tmp_path / "f", create=MIB)
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(module.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:1000], at))
    monkeypatch.setattr(module.os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:999]], at))
    assert opened.write(5, memoryview(bytes(range(256)) * 20)) == 0
    assert read(opened, 5, 5120) == bytes(range(256)) * 20
    opened.close()


def test_what_cannot_be_opened(tmp_path):
    with pytest.raises(UsageError, match="--create"):
        FileNamespace(tmp_path / "absent")
    with pytest.raises(UsageError, match="neither"):
        FileNamespace(tmp_path)
    with pytest.raises(UsageError, match="read-only makes no file"):
        FileNamespace(tmp_path / "absent", read_only=True, create=MIB)
    (tmp_path / "short").write_bytes(b"x" * 100)
    with pytest.raises(UsageError, match="less than a block"):
        FileNamespace(tmp_path / "short")
    with pytest.raises(UsageError, match="512 or 4096"):
        FileNamespace(tmp_path / "f", block_bytes=100, create=MIB)
    first = FileNamespace(tmp_path / "f", create=MIB)
    with pytest.raises(UsageError, match="used by another"):
        FileNamespace(tmp_path / "f")
    first.close()
    FileNamespace(tmp_path / "f").close()


class Waiter:
    def __init__(self):
        self.woken = 0

    def wake(self):
        self.woken += 1


def test_the_pool_lends_up_to_its_limit_in_order():
    pool = BufferPool(4 * 4096)
    first, second, third = Waiter(), Waiter(), Waiter()
    big = pool.acquire(3 * 4096, first)  # rounded up to all of it
    assert len(big.view) == 3 * 4096
    assert pool.acquire(4 * 4096, second) is None
    assert pool.acquire(1, third) is None
    assert pool.waiting == 2
    pool.release(big)
    assert (second.woken, third.woken) == (1, 0)
    assert pool.acquire(1, third) is None  # a large request is not starved
    whole = pool.acquire(4 * 4096, second)
    assert third.woken >= 1
    assert pool.acquire(1, third) is None
    pool.release(whole)
    small = pool.acquire(1, third)
    assert (pool.lent, pool.waiting, pool.peak) == (4096, 0, 4 * 4096)
    pool.release(small)
    assert pool.lent == 0


def test_a_waiter_that_leaves_lets_the_next_one_in():
    pool = BufferPool(4096)
    holder, gone, last = Waiter(), Waiter(), Waiter()
    buffer = pool.acquire(4096, holder)
    assert pool.acquire(4096, gone) is None
    assert pool.acquire(4096, last) is None
    pool.release(buffer)
    pool.forget(gone)
    assert last.woken == 1
    assert pool.acquire(4096, last) is not None


def test_kept_buffers_count_and_make_room_for_other_sizes():
    pool = BufferPool(8 * 4096)
    waiter = Waiter()
    small = [pool.acquire(4096, waiter) for _ in range(8)]
    for buffer in small:
        pool.release(buffer)
    again = pool.acquire(4096, waiter)
    assert again in small  # reused
    pool.release(again)
    large = pool.acquire(8 * 4096, waiter)
    assert large is not None
    assert pool._kept_bytes == 0
    with pytest.raises(UsageError, match="the pool has"):
        pool.acquire(9 * 4096, waiter)


def test_the_pool_is_sound_under_threads():
    pool, wrong = BufferPool(16 * 4096), []

    def work(seed):
        event = threading.Event()

        class Me:
            wake = staticmethod(event.set)

        me = Me()
        for turn in range(300):
            size = 4096 << (seed + turn) % 4
            while (buffer := pool.acquire(size, me)) is None:
                event.wait(10)
                event.clear()
            buffer.view[:8] = seed.to_bytes(8, "little")
            if pool.lent > pool.limit or bytes(buffer.view[:8]) != seed.to_bytes(8, "little"):
                wrong.append((seed, turn))
            pool.release(buffer)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert (pool.lent, pool.waiting) == (0, 0)


def test_a_closed_waker_writes_nowhere(tmp_path):
    waker = Waker()
    number = waker.fd
    waker.wake()
    waker.wake()
    assert os.eventfd_read(number) == 2
    waker.clear()  # nothing is there: no matter
    waker.close()
    victim = os.open(tmp_path / "victim", os.O_RDWR | os.O_CREAT)
    os.dup2(victim, number)  # the number is a file's now
    waker.wake()
    waker.close()
    assert os.fstat(victim).st_size == 0
    os.close(victim)
    if number != victim:
        os.close(number)


@pytest.mark.parametrize(
    "text",
    ["", "read", "read:x", "read:1+0", "read:1=what", "flush:1", "digest:0", "drop:-1", "delay:x",
     "delay:1=2", "full:lots", "read:1,twice", "explode:1"],
)  # fmt: skip
def test_faults_that_make_no_sense(text):
    with pytest.raises(UsageError, match="--fault"):
        parse_fault(text)


def test_faults_strike_where_and_as_often_as_they_say():
    rules = ["read:10+2", "write:20=invalid_field,once", "flush=0x6,once", "full:64KiB"]
    faulty = FaultyNamespace(MemoryNamespace(MIB), [parse_fault(rule) for rule in rules])
    block = memoryview(bytearray(4096))
    hits = [lba for lba in range(16) if faulty.read_into(lba * 4096, block)]
    assert hits == [10, 11]
    assert faulty.read_into(9 * 4096, memoryview(bytearray(8192))) == StatusCode.READ_ERROR
    assert faulty.write(20 * 4096, block) == StatusCode.INVALID_FIELD
    assert faulty.write(20 * 4096, block) == 0
    assert [faulty.flush(), faulty.flush()] == [6, 0]
    assert [faulty.write(at * 4096, block) for at in range(16)] == [0] * 15 + [
        StatusCode.CAPACITY_EXCEEDED
    ]
    assert faulty.view(0, 4096) is None
    assert faulty.reference(0, 4096) is None


def test_faults_of_connections_are_counted():
    faults = Faults([parse_fault("drop:3"), parse_fault("digest:2,once")])
    assert [faults.drops() for _ in range(7)] == [False, False, True, False, False, True, False]
    assert [faults.spoils() for _ in range(5)] == [False, True, False, False, False]
    memory = MemoryNamespace(MIB)
    assert faults.wrap(memory) is memory
