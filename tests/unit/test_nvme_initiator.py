"""The nvme+tcp transport: memory, limits, messages, steering."""

import time
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from tests.contracts.transport import finish, request
from tests.reference import nvme

from hyades.common.errors import BackendMissing, PeerError, UsageError
from hyades.common.layout import BLOCK, COMPLETION, REQUEST, Op, Status
from hyades.common.nvme.host import HostQueue
from hyades.common.nvme.psk import Keyring, Psk
from hyades.common.nvme.tls import probe as probe_tls
from hyades.common.units import KIB, MIB
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport, probe_all
from hyades.proxy.transports.nvme_flushes import Flushes
from hyades.proxy.transports.nvme_links import least_loaded
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace


@pytest.fixture
def servers():
    with nvme.stopped_at_end() as started:
        yield started


def records(op, nbytes, count, arena_bytes):
    batch = np.zeros(count, REQUEST)
    index = np.arange(count)
    batch["op"], batch["nbytes"], batch["cookie"] = op, nbytes, index
    batch["lba"] = index * (nbytes // BLOCK)
    batch["offset"] = index * nbytes % arena_bytes
    return batch


def scan(transport, batch, depth=16):
    """Run *batch* with *depth* in flight."""
    completions = np.zeros(16, COMPLETION)
    sent = ended = 0
    while ended < len(batch):
        if sent < len(batch) and sent - ended < depth:
            sent += transport.submit(batch[sent : sent + depth - (sent - ended)])
        count = transport.poll(completions)
        assert not completions["status"][:count].any()
        ended += count
        if not count:
            transport.wait(0.01)


@pytest.mark.parametrize("digest", ["none", "header,data"])
def test_a_scan_copies_no_page_on_either_side(tmp_path, servers, digest):
    """256 MiB from a file, the target in this process, too: hardly any memory is allocated."""
    servers.append(nvme.file_server(tmp_path, 32 * MIB // BLOCK))
    transport = open_transport(nvme.url(servers[0], digest=digest, queues=1))
    transport.register(allocate_arena(16 * MIB))
    batch = records(Op.READ, MIB, 32, 16 * MIB)
    scan(transport, batch)
    tracemalloc.start()
    try:
        for _ in range(8):
            scan(transport, batch)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # With digests the target reads into a buffer instead of sending from the file.
    assert peak < (MIB if digest == "none" else 24 * MIB)
    assert transport.stats()["bytes_read"] == 9 * 32 * MIB
    transport.close()


def test_data_goes_between_the_socket_and_the_arena(tmp_path, servers, monkeypatch):
    """Every memory that a command names is a part of the arena, and it is the right part."""
    servers.append(nvme.file_server(tmp_path, 64))
    transport = open_transport(nvme.url(servers[0]))
    arena = allocate_arena(64 * BLOCK)
    transport.register(arena)
    inner, seen = HostQueue.submit, []

    def submit(queue, sqe, *, into=None, source=None, **rest):
        for memory in (into, source):
            if memory is not None:
                rows = np.frombuffer(memory, np.uint8)
                seen.append((rows.ctypes.data - arena.ctypes.data, len(rows)))
        return inner(queue, sqe, into=into, source=source, **rest)

    monkeypatch.setattr(HostQueue, "submit", submit)
    batch = [request(Op.READ, 0, 4, 8 * BLOCK, 1), request(Op.WRITE, 9, 20, 16 * BLOCK, 2)]
    finish(transport, np.concatenate(batch))
    assert seen == [(8 * BLOCK, 4 * BLOCK), (16 * BLOCK, 20 * BLOCK)]
    transport.close()


@pytest.mark.parametrize(
    ("server", "options", "limits"),
    [
        ({"max_transfer": 64 * KIB}, {}, (64 * KIB, 64)),
        ({"max_transfer": 4 * MIB}, {}, (MIB, 64)),
        ({"max_transfer": 4 * MIB}, {"max_transfer": "8MiB", "depth": 3}, (4 * MIB, 6)),
        ({}, {"max_transfer": "128KiB", "queues": 1}, (128 * KIB, 32)),
        ({"listeners": 2}, {"queues": 3, "depth": 5}, (MIB, 30)),
    ],
)
def test_limits(tmp_path, servers, server, options, limits):
    servers.append(nvme.file_server(tmp_path, 64, **server))
    transport = open_transport(nvme.url(servers[0], **options))
    assert (transport.limits.max_transfer, transport.limits.max_inflight) == limits
    transport.close()


def test_a_target_that_grants_less(tmp_path, servers):
    """Fewer queues, and shorter ones, than were asked for."""
    servers.append(nvme.file_server(tmp_path, 64, queues=1, depth=33))
    transport = open_transport(nvme.url(servers[0], queues=4, depth=100))
    assert transport.stats()["paths"][0]["queues"] == 1
    transport.register(allocate_arena(64 * BLOCK))
    batch = np.concatenate([request(Op.READ, i, 1, i * BLOCK, i) for i in range(64)])
    assert finish(transport, batch) == dict.fromkeys(range(64), (0, BLOCK))
    transport.close()


def test_read_only(tmp_path, servers):
    servers += [nvme.file_server(tmp_path, 64, read_only=ro) for ro in (True, False)]
    assert "is served read-only" in refusal(nvme.url(servers[0]))
    for server in servers:
        transport = open_transport(nvme.url(server), writable=False)
        transport.register(allocate_arena(BLOCK))
        assert finish(transport, request(Op.WRITE, cookie=1))[1][0] == Status.INVALID
        assert finish(transport, request(Op.READ, cookie=2))[2][0] == Status.OK
        transport.close()


def test_a_namespace_has_a_fixed_size(tmp_path, servers):
    servers.append(nvme.file_server(tmp_path, 64))
    transport = open_transport(nvme.url(servers[0]))
    transport.grow(64)
    with pytest.raises(UsageError, match=r"ns 1 has 256\.0 KiB; 260\.0 KiB are needed: serve"):
        transport.grow(65)
    transport.close()


def refusal(url):
    with pytest.raises(UsageError) as caught:
        open_transport(url)
    return str(caught.value)


def test_what_keeps_a_connection_from_being_made(tmp_path, servers):
    namespaces = {n: MemoryNamespace(64 * BLOCK) for n in (1, 3)}
    servers.append(nvme.start(namespaces, hosts=frozenset([nvme.HOST])))
    url = nvme.url(servers[0])
    host, port = servers[0].addresses[0]
    assert "ns 2: there is no such namespace; active are 1, 3: write ?ns=N" in refusal(
        f"{url}&ns=2"
    )
    text = refusal(url.replace(nvme.NQN, "nqn.2026-01.org.example:other"))
    assert text.endswith(f"{host}:{port} offers {nvme.NQN} to {nvme.HOST}")
    text = refusal(url.replace(nvme.HOST, "nqn.2026-01.org.example:stranger"))
    assert "the target's list of allowed hosts does not have this host" in text
    servers[0].stop()
    assert f"hyades serve --listen {host}:{port}" in refusal(url)
    assert "no such host" in refusal(f"nvme+tcp://nowhere.invalid/{nvme.NQN}")


def test_paths_to_different_namespaces(tmp_path, servers):
    servers.append(nvme.file_server(tmp_path, 64))
    servers.append(nvme.file_server(tmp_path, 65))
    assert "is another namespace than" in refusal(nvme.url(*servers))


def test_blocks_that_do_not_fit(servers):
    namespace = MemoryNamespace(64 * BLOCK)
    namespace.block_bytes, namespace.blocks = 8192, 32
    servers.append(nvme.start({1: namespace}))
    assert "has blocks of 8192 bytes, at most 4096 work" in refusal(nvme.url(servers[0]))


def test_a_namespace_of_half_a_block_more(tmp_path, servers):
    path = tmp_path / "odd"
    path.write_bytes(bytes(64 * BLOCK + 2048))
    servers.append(nvme.start({1: FileNamespace(path, block_bytes=512)}))
    transport = open_transport(nvme.url(servers[0]))
    assert transport.nblocks == 64
    assert transport.locate(3).endswith("ns 1 LBA 24")  # the namespace's own blocks
    transport.close()


def test_a_peer_that_is_no_target(servers, tmp_path):
    import socket
    import threading

    listener = socket.create_server(("127.0.0.1", 0))

    def greet():
        sock, _ = listener.accept()
        sock.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2+deb12u3\r\n" * 4)
        sock.recv(1000)
        sock.close()

    thread = threading.Thread(target=greet)
    with listener:
        thread.start()
        with pytest.raises(PeerError, match="PDU type 0x53"):
            open_transport(nvme.address_url(listener.getsockname()))
        thread.join()


def test_work_is_spread_over_queues_and_paths(tmp_path, servers):
    servers.append(nvme.file_server(tmp_path, 1024, listeners=2))
    transport = open_transport(nvme.url(servers[0], queues=2))
    transport.register(allocate_arena(4 * MIB))
    scan(transport, records(Op.READ, 64 * KIB, 64, 4 * MIB))
    moved = [path["bytes_received"] for path in transport.stats()["paths"]]
    assert sum(moved) > 4 * MIB
    assert min(moved) > MIB
    transport.close()


def test_the_least_loaded_lane():
    def lane(outstanding, depth=4):
        return SimpleNamespace(queue=SimpleNamespace(outstanding=outstanding, depth=depth))

    lanes = [lane(3), lane(1), lane(2), lane(1)]
    assert least_loaded(lanes) is lanes[1]
    assert least_loaded([lane(4), lane(8, 8)]) is None
    assert least_loaded([lane(4), lane(7, 8)]).queue.outstanding == 7
    assert least_loaded([]) is None


def info(*, cache=True, epoch=b"a" * 16):
    return SimpleNamespace(write_cache=cache, cache_epoch=epoch)


@pytest.mark.parametrize(
    ("before", "later", "trust", "doubt"),
    [
        (info(), info(), False, False),
        (info(), info(epoch=b"b" * 16), False, True),
        (info(), info(epoch=bytes(16)), False, True),
        (info(epoch=bytes(16)), info(epoch=bytes(16)), False, True),
        (info(epoch=bytes(16)), info(epoch=bytes(16)), True, False),
        (info(cache=False, epoch=bytes(16)), info(epoch=bytes(16)), False, False),
    ],
)
def test_when_writes_are_in_doubt(before, later, trust, doubt):
    flushes = Flushes(trust=trust)
    assert not flushes.link_lost(before, unflushed=True, alone=True)
    assert flushes.link_found(later)  # its cache may hold what the lost link wrote
    assert flushes.in_doubt == doubt
    assert not flushes.link_found(later)


def test_a_link_without_unflushed_writes_leaves_nothing_behind():
    flushes = Flushes(trust=False)
    assert not flushes.link_lost(info(), unflushed=False, alone=True)
    assert not flushes.link_found(info(epoch=b"b" * 16))
    assert not flushes.in_doubt
    assert flushes.link_lost(info(), unflushed=True, alone=False)  # the other links are flushed


def test_flushes_in_parts():
    flushes = Flushes(trust=False)
    flushes.sent(5, 3)
    assert flushes.answered(5, 0) == (False, 0, False)
    assert flushes.answered(5, 6) == (False, 6, False)
    assert flushes.lost(5) == (True, 6, True)
    flushes.sent(5, 1)
    assert flushes.answered(5, 0) == (True, 0, False)


def test_stats_and_description(tmp_path, servers):
    servers.append(nvme.file_server(tmp_path, 64))
    transport = open_transport(nvme.url(servers[0], digest="header,data"))
    text = transport.describe()
    assert "256.0 KiB in blocks of 4096, 1 of 1 paths live, 2 queues of 32" in text
    assert text.endswith("header and data digests")
    (path,) = transport.stats()["paths"]
    assert path["live"]
    assert path["connects"] == 1
    assert path["connect_seconds"] > 0
    assert transport.patience >= 60
    begin = time.monotonic()
    transport.close()
    transport.close()
    assert time.monotonic() - begin < 5
    assert "CRC32C" in next(p.detail for p in probe_all() if p.scheme == "nvme+tcp")


@pytest.fixture
def psk(tmp_path):
    try:
        probe_tls()
    except BackendMissing as missing:
        pytest.skip(str(missing))
    psk = Psk(bytes(range(48)), 0, "test")
    (tmp_path / "key").write_text(psk.interchange())
    (tmp_path / "key").chmod(0o600)
    return psk


@pytest.mark.parametrize("version", [0, 1])
def test_tls(tmp_path, servers, psk, version):
    servers.append(nvme.file_server(tmp_path, 64, keys=Keyring([psk])))
    url = nvme.url(servers[0], tls=tmp_path / "key", tls_identity=version, digest="header,data")
    transport = open_transport(url)
    transport.register(allocate_arena(64 * BLOCK))
    assert finish(transport, request(Op.WRITE, 0, 64, 0, 1))[1] == (0, 64 * BLOCK)
    assert finish(transport, request(Op.READ, 0, 64, 0, 2))[2] == (0, 64 * BLOCK)
    assert transport.describe().endswith("TLS")
    transport.close()


def test_tls_that_does_not_come_about(tmp_path, servers, psk):
    """Another key, no key, and a target without TLS: said within the timeout, with the address."""
    servers.append(nvme.file_server(tmp_path, 64, keys=Keyring([psk])))
    servers.append(nvme.file_server(tmp_path, 64))
    other = tmp_path / "other"
    other.write_text(Psk(bytes(48), 0, "test").interchange())
    other.chmod(0o600)
    cases = [
        nvme.url(servers[0], tls=other), nvme.url(servers[0], timeout=1),
        nvme.url(servers[1], tls=tmp_path / "key", timeout=1),
    ]  # fmt: skip
    for url, server in zip(cases, (servers[0], servers[0], servers[1]), strict=True):
        with pytest.raises(PeerError, match=str(server.addresses[0][1])):
            open_transport(url)
