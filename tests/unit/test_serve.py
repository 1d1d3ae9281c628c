"""The embedded target over loopback: data, digests, refusals, several hosts and queues."""

import os
import threading
import time

import pytest
from tests.reference.nvme import start, stopped_at_end
from tests.reference.nvme_host import NQN, Host, Queue, await_that, discover, pattern

from hyades.common.errors import PeerError, UsageError
from hyades.common.nvme import bringup, commands
from hyades.common.nvme.layout import Admin, Feature, Opcode
from hyades.common.nvme.status import DNR, StatusCode
from hyades.common.units import MIB
from hyades.target_side.faulty import FaultyNamespace, parse_fault
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace

DIGESTS = [(False, False), (True, False), (False, True), (True, True)]
SIZE = 4 * MIB


@pytest.fixture
def servers():
    with stopped_at_end() as servers:
        yield servers


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "namespace"
    path.write_bytes(pattern(SIZE))
    return path


@pytest.fixture
def serve(servers, path):
    """Start a target with the file as namespace 1 and memory with 512-byte blocks as 2."""

    def begin(**options):
        namespaces = {1: FileNamespace(path), 2: MemoryNamespace(SIZE, block_bytes=512)}
        servers.append(start(namespaces, **options))
        return servers[-1]

    return begin


@pytest.fixture
def server(serve):
    return serve()


@pytest.mark.parametrize(("header", "data"), DIGESTS)
@pytest.mark.parametrize("nbytes", [4096, 8192, 32768, 65536, MIB])
def test_what_is_written_is_read(server, path, header, data, nbytes):
    host = Host(server.addresses[0], header_digest=header, data_digest=data)
    before = path.read_bytes()
    assert host.io.read(3, nbytes // 4096) == (0, before[3 * 4096 : 3 * 4096 + nbytes])
    fresh = pattern(nbytes, nbytes)
    assert host.io.write(5, fresh) == 0
    assert host.io.read(5, nbytes // 4096) == (0, fresh)
    assert host.io.flush() == 0
    assert path.read_bytes()[5 * 4096 : 5 * 4096 + nbytes] == fresh
    small = fresh[: 3 * 512] + fresh[3 * 512 :]
    assert host.io.write(7, small, nsid=2, block=512) == 0
    assert host.io.read(7, nbytes // 512, nsid=2, block=512) == (0, small)
    host.close()


@pytest.mark.parametrize("flow_control", [True, False])
def test_both_ways_of_counting_heads(server, flow_control):
    host = Host(server.addresses[0], queues=0)
    queue = Queue(server.addresses[0])
    want = host.want(1, host.controller.cntlid, no_flow_control=not flow_control)
    queue.talk(bringup.connect_queue(want))
    for _ in range(70):  # more than the queue has entries
        assert queue.read(0, 1)[0] == 0


def test_a_batch_of_everything_at_once(server, path):
    host = Host(server.addresses[0], depth=32)
    content, io = path.read_bytes(), host.io
    slots = [bytearray(131072) for _ in range(10)]
    sources = [pattern(131072, 100 + i) for i in range(10)]
    cids = []
    for i in range(10):
        read = commands.transfer(Opcode.READ, 1, 32 * i, 32)
        write = commands.transfer(Opcode.WRITE, 1, 512 + 32 * i, 32)
        cids.append(io.start(read, into=memoryview(slots[i])))
        cids.append(io.start(write, source=memoryview(sources[i])))
        cids.append(io.start(commands.flush(1)))
    assert set(io.wait(cids).values()) == {(0, 0)}
    assert b"".join(slots) == content[: 10 * 131072]
    assert path.read_bytes()[512 * 4096 : 512 * 4096 + 10 * 131072] == b"".join(sources)


def test_write_zeroes(server, path):
    host = Host(server.addresses[0])
    for nsid, block in ((1, 4096), (2, 512)):
        ones = b"\xff" * (64 * block)
        assert host.io.write(0, ones, nsid, block) == 0
        sqe = commands.transfer(Opcode.WRITE_ZEROES, nsid, 3, 50)
        assert host.io.run(sqe)[0] == 0
        expected = ones[: 3 * block] + bytes(50 * block) + ones[53 * block :]
        assert host.io.read(0, 64, nsid, block) == (0, expected)
    assert path.stat().st_size == SIZE
    whole = commands.transfer(Opcode.WRITE_ZEROES, 1, 0, SIZE // 4096)  # beyond MDTS
    assert host.io.run(whole)[0] == 0
    assert path.read_bytes() == bytes(SIZE)


def test_what_is_refused(server):
    host = Host(server.addresses[0])
    io = host.io
    blocks = SIZE // 4096
    assert io.read(blocks - 1, 2)[0] == StatusCode.LBA_OUT_OF_RANGE | DNR
    assert io.read(1 << 63, 1)[0] == StatusCode.LBA_OUT_OF_RANGE | DNR
    assert io.write(blocks, bytes(4096)) == StatusCode.LBA_OUT_OF_RANGE | DNR
    assert io.read(0, 1, nsid=3)[0] == StatusCode.INVALID_NAMESPACE | DNR
    assert io.flush(9) == StatusCode.INVALID_NAMESPACE | DNR
    assert io.flush(0xFFFFFFFF) == 0
    assert io.read(0, 257)[0] == StatusCode.INVALID_FIELD | DNR  # MDTS is 1 MiB
    assert io.read(0, 256)[0] == 0
    wrong = commands.transfer(Opcode.READ, 1, 0, 2)
    assert io.run(wrong, 4096)[0] == StatusCode.SGL_LENGTH_INVALID | DNR
    trim = commands.build(Opcode.DATASET_MANAGEMENT, 1, 0, 4)
    assert io.run(trim)[0] == StatusCode.INVALID_OPCODE | DNR
    assert io.run(commands.build(Admin.KEEP_ALIVE))[0] == 0  # SPDK sends them here, too
    assert io.read(0, 1)[0] == 0  # and none of it ended the connection


def test_a_read_only_namespace(servers, path):
    servers.append(start({1: FileNamespace(path, read_only=True)}))
    host = Host(servers[0].addresses[0])
    assert host.io.write(0, bytes(4096)) == StatusCode.WRITE_PROTECTED | DNR
    zeroes = commands.transfer(Opcode.WRITE_ZEROES, 1, 0, 1)
    assert host.io.run(zeroes)[0] == StatusCode.WRITE_PROTECTED | DNR
    assert host.io.flush() == 0
    assert host.io.read(0, 1) == (0, pattern(SIZE)[:4096])


def test_connect_refusals_reach_the_host(server, serve):
    with pytest.raises(UsageError, match="the subsystem's name"):
        Host(server.addresses[0], nqn="nqn.2026-01.org.example:nothing")
    host = Host(server.addresses[0], queues=1)
    with pytest.raises(PeerError, match="invalid queue id"):
        host.connect(1)
    with pytest.raises(UsageError, match="queue's depth"):
        host.connect(2, depth=1000)
    with pytest.raises(UsageError, match="queue id"):
        host.connect(2)  # one was asked for
    queue = Queue(server.addresses[0])
    want = host.want(1, host.controller.cntlid, hostnqn="nqn.2026-01.org.example:other")
    with pytest.raises(UsageError, match="host's name"):
        queue.talk(bringup.connect_queue(want))
    assert host.io.read(0, 1)[0] == 0


def test_hosts_that_are_not_allowed_see_nothing(servers, path):
    servers.append(start({1: FileNamespace(path)}, hosts=frozenset(("nqn.2026-01.org.x:y",))))
    address = servers[0].addresses[0]
    with pytest.raises(UsageError, match="allowed hosts does not have"):
        Host(address)
    assert discover(address) == []
    assert [e.subnqn for e in discover(address, "nqn.2026-01.org.x:y")] == [NQN]


def test_discovery_tells_every_listener(servers, path):
    servers.append(start({1: FileNamespace(path)}, listeners=3))
    found = discover(servers[0].addresses[1])
    assert [(e.address, int(e.service)) for e in found] == servers[0].addresses
    for address in servers[0].addresses:
        host = Host(address)
        assert host.io.read(0, 1)[0] == 0


def test_several_hosts_and_queues_at_once(server):
    wrong = []

    def work(number):
        host = Host(server.addresses[0], queues=3)
        for turn in range(20):
            for index, queue in enumerate(host.queues):
                lba = (number * 3 + index) * 64
                data = pattern(65536, number * 1000 + turn * 10 + index)
                if queue.write(lba, data) or queue.read(lba, 16) != (0, data):
                    wrong.append((number, turn, index))
        host.close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_abort_and_events(server):
    host = Host(server.addresses[0])
    event = host.admin.start(commands.async_event())
    assert host.admin.run(commands.keep_alive())[0] == 0
    assert host.admin.run(commands.abort(1, 5))[1] == 1
    abort = host.admin.start(commands.abort(0, event))
    found = host.admin.wait([event, abort])
    assert found[event] == (StatusCode.ABORTED, 0)
    assert found[abort] == (0, 0)


def test_keep_alive_expiry_ends_all_queues(server):
    host = Host(server.addresses[0], queues=2, kato=1000)
    other = Host(server.addresses[0])
    assert host.io.read(0, 1)[0] == 0
    assert all(queue.closed_by_peer() for queue in [host.admin, *host.queues])
    assert server.service.totals.expired == 1
    assert other.io.read(0, 1)[0] == 0


def test_keep_alive_keeps_alive(server):
    host = Host(server.addresses[0], kato=1000)
    for _ in range(12):
        assert host.admin.run(commands.keep_alive())[0] == 0
        time.sleep(0.2)
    assert host.io.read(0, 1)[0] == 0
    assert server.service.totals.expired == 0


def test_the_end_of_the_admin_queue_ends_the_others(server):
    host = Host(server.addresses[0], queues=2)
    host.admin.close()
    assert all(queue.closed_by_peer() for queue in host.queues)
    await_that(lambda: not server.connections, "connections are left")
    assert server.service.target.controllers == {}


def test_flush_and_write_through_reach_the_disk(servers, path):
    class Counting(FileNamespace):
        flushes = 0

        def flush(self):
            self.flushes += 1
            return super().flush()

    namespace = Counting(path)
    servers.append(start({1: namespace}))
    host = Host(servers[0].addresses[0])
    assert host.io.write(0, bytes(4096)) == 0
    assert namespace.flushes == 0
    fua = commands.transfer(Opcode.WRITE, 1, 0, 1)
    fua[51] |= 0x40
    assert host.io.run(fua, source=bytes(4096))[0] == 0
    assert namespace.flushes == 1
    assert host.admin.run(commands.set_features(Feature.WRITE_CACHE, 0))[0] == 0
    assert host.io.write(0, bytes(65536)) == 0
    assert namespace.flushes == 2
    host.admin.talk(bringup.shut_down())
    assert namespace.flushes == 3


@pytest.mark.parametrize("big", [False, True])
def test_a_file_that_is_cut_is_a_read_error(server, path, big):
    host = Host(server.addresses[0])
    blocks = 64 if big else 1
    os.truncate(path, 4096 * 32)
    assert host.io.read(32, blocks)[0] == StatusCode.READ_ERROR
    assert host.io.read(16, 64)[0] == StatusCode.READ_ERROR
    assert host.io.read(0, 32) == (0, pattern(SIZE)[: 4096 * 32])
    total = server.service.totals.sum()
    assert total.failures == {StatusCode.READ_ERROR: 2}


def test_media_errors_name_what_they_hit(servers, path):
    faults = [parse_fault(text) for text in ("read:40+2", "write:50=0x280", "full:1MiB")]
    servers.append(start({1: FaultyNamespace(FileNamespace(path), faults)}))
    host = Host(servers[0].addresses[0])
    assert host.io.read(0, 40)[0] == 0
    assert host.io.read(0, 41)[0] == StatusCode.READ_ERROR
    assert host.io.read(41, 1)[0] == StatusCode.READ_ERROR
    assert host.io.read(42, 1)[0] == 0
    assert host.io.write(49, bytes(8192)) == StatusCode.WRITE_FAULT
    assert host.io.write(100, bytes(MIB)) == 0
    assert host.io.write(100, bytes(4096)) == StatusCode.CAPACITY_EXCEEDED


def test_page_data_is_not_copied(servers, path, monkeypatch):
    """Reads go by reference, and writes into pooled buffers: nothing else holds page data."""
    import tracemalloc

    servers.append(start({1: FileNamespace(path), 2: MemoryNamespace(SIZE)}))
    host = Host(servers[0].addresses[0])
    slot, source = bytearray(MIB), pattern(MIB, 3)

    def work():
        for nsid in (1, 2):
            read = commands.transfer(Opcode.READ, nsid, 0, 256)
            write = commands.transfer(Opcode.WRITE, nsid, 256, 256)
            for _ in range(4):
                cid = host.io.start(read, into=memoryview(slot))
                assert host.io.wait([cid])[cid] == (0, 0)
                cid = host.io.start(write, source=memoryview(source))
                assert host.io.wait([cid])[cid] == (0, 0)

    work()
    pool = servers[0].service.pool
    assert pool.lent == 0
    assert pool.peak == MIB  # one write of the file; neither reads nor memory need buffers
    tracemalloc.start()
    try:
        work()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 256 * 1024, f"{peak} bytes of Python objects while moving pages of 1 MiB"


def test_small_reads_and_digests_use_the_pool_and_give_back(server):
    host = Host(server.addresses[0], data_digest=True)
    for blocks in (1, 2, 8, 256):
        assert host.io.read(0, blocks)[0] == 0
    pool = server.service.pool
    await_that(lambda: pool.lent == 0, "a buffer was kept")
    assert pool.peak == MIB
