"""What the embedded target takes at most, and peers that are stuck: none of them stalls another."""

import socket
import threading
import time

import pytest
from tests.reference.nvme import start, stopped_at_end
from tests.reference.nvme_host import ClosedError, Host, Queue, await_that, pattern

from hyades.common.errors import UsageError
from hyades.common.nvme import commands
from hyades.common.nvme.layout import COMMON_HEADER, IC_BODY, Opcode, PduType
from hyades.common.nvme.pdu import build_pdu
from hyades.common.units import KIB, MIB
from hyades.target_side.events import Closed, Refused
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import FileNamespace
from hyades.target_side.server import Server

SIZE = 4 * MIB
pytestmark = pytest.mark.timeout(100)


class ListSink:
    """Keeps events."""

    def __init__(self):
        self.events = []

    def emit(self, event):
        self.events.append(event)


@pytest.fixture
def servers():
    with stopped_at_end() as servers:
        yield servers


@pytest.fixture
def serve(servers, tmp_path):
    """Start a target of one file with these limits; its events are in `service.sink.events`."""

    def begin(**limits) -> Server:
        path = tmp_path / "namespace"
        path.write_bytes(pattern(SIZE))
        servers.append(start({1: FileNamespace(path)}, **limits))
        servers[-1].service.sink = ListSink()
        return servers[-1]

    return begin


def reasons(server, kind=Refused):
    return [event.reason for event in server.service.sink.events if isinstance(event, kind)]


def begin_write(host, blocks=256):
    """Start a write, take the R2T, and keep the data back."""
    queue = host.io.queue
    queue._send_for_test = queue._send
    held = []
    write = commands.transfer(Opcode.WRITE, 1, 0, blocks)
    host.io.start(write, source=memoryview(pattern(blocks * 4096)))
    queue._send = lambda *what: held.append(what)
    while not held:
        host.io.receive()
    return held


def test_a_peer_that_never_reads_stalls_nobody(serve):
    server = serve(stall=1.0, buffers=2 * MIB)
    stuck = Host(server.addresses[0], data_digest=True)
    slots = [memoryview(bytearray(MIB)) for _ in range(31)]
    for slot in slots:  # far more than any socket buffer takes
        stuck.io.start(commands.transfer(Opcode.READ, 1, 0, 256), into=slot)
    other = Host(server.addresses[0], data_digest=True)
    for turn in range(20):
        assert other.io.write(256 + turn, pattern(65536, turn)) == 0
        assert other.io.read(256 + turn, 16) == (0, pattern(65536, turn))
    await_that(lambda: server.service.totals.stalled == 1, "the stuck peer was not cut")
    await_that(lambda: reasons(server, Closed), "no reason in the log")
    assert "stalled" in reasons(server, Closed)[0]
    other.close()
    await_that(lambda: server.service.pool.lent == 0, "its buffer did not come back")


def test_half_a_write_gives_its_buffer_back_to_those_who_wait(serve):
    server = serve(stall=1.0, buffers=MIB)
    stuck = Host(server.addresses[0])
    assert begin_write(stuck)
    assert server.service.pool.lent == MIB
    other = Host(server.addresses[0])
    data = pattern(MIB, 8)
    assert other.io.write(256, data) == 0  # waited until the stuck one was cut
    assert server.service.totals.stalled == 1
    assert other.io.read(256, 256) == (0, data)
    assert stuck.io.closed_by_peer()


def test_many_queues_share_few_buffers(serve):
    server = serve(buffers=MIB)
    host = Host(server.addresses[0], queues=4, depth=16)
    wrong = []

    def work(index):
        queue, data = host.queues[index], memoryview(pattern(256 * KIB, index))
        for _ in range(3):
            writes = [commands.transfer(Opcode.WRITE, 1, 64 * index, 64) for _ in range(8)]
            found = queue.wait([queue.start(write, source=data) for write in writes])
            wrong.extend(code for code, _ in found.values() if code)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert server.service.pool.peak <= MIB
    assert server.service.pool.waiting == 0
    for index, queue in enumerate(host.queues):
        assert queue.read(64 * index, 64) == (0, pattern(256 * KIB, index))


def test_a_slow_writer_is_left_alone_while_it_moves(serve):
    server = serve(stall=1.0)
    host = Host(server.addresses[0])
    held = begin_write(host, 64)
    host.io.queue._send = host.io.queue._send_for_test
    for call in held:
        host.io.queue._send(*call)
    stream = b"".join(bytes(s) for s in host.io.queue.take_output())
    for at in range(0, len(stream), 16 * KIB):
        host.io.sock.sendall(stream[at : at + 16 * KIB])
        time.sleep(0.15)  # 2.4 s in all
    while not host.io.queue.completions:
        host.io.receive()
    assert host.io.queue.completions[0][1] == 0
    assert server.service.totals.stalled == 0


@pytest.mark.parametrize("words", [b"", b"\x00", "ic", "icresp"])
def test_half_a_handshake_is_cut(serve, words):
    server = serve(handshake=1.0)
    other = Host(server.addresses[0])
    ic = build_pdu(PduType.IC_REQ, 0, IC_BODY.pack(0, 0, 0, 0))
    with socket.create_connection(server.addresses[0], 20) as sock:
        sock.sendall({"ic": ic[:100], "icresp": ic}.get(words, words))
        received = b""
        while piece := sock.recv(4096):
            received += piece
    assert len(received) == (128 if words == "icresp" else 0)
    await_that(lambda: reasons(server) == ["not connected after 1 s"], "no reason in the log")
    assert other.io.read(0, 1)[0] == 0


def test_connections_beyond_the_limit_are_refused_with_a_reason(serve):
    server = serve(connections=3)
    host = Host(server.addresses[0], queues=2)
    with pytest.raises((ClosedError, ConnectionError)):
        Queue(server.addresses[0])
    await_that(lambda: reasons(server) == ["3 connections are open, the limit"], "no reason")
    host.close()
    await_that(lambda: not server.connections, "connections are left")
    assert Host(server.addresses[0]).controller.queues == 1


def test_queues_and_depth_are_limited(serve):
    server = serve(queues=2, depth=32)
    host = Host(server.addresses[0], queues=5)
    assert host.controller.max_depth == 32
    assert host.controller.info.max_commands == 32
    assert host.controller.queues == 2


def test_more_commands_than_the_queue_has_end_the_connection(serve):
    server = serve()
    host = Host(server.addresses[0], depth=4)
    host.io.queue._free += [4, 5, 6, 7]
    host.io.queue._exchanges += [None] * 4
    for _ in range(4):
        write = commands.transfer(Opcode.WRITE, 1, 0, 256)
        cid = host.io.queue.submit(write, source=memoryview(bytes(MIB)))
        host.io.sock.sendall(b"".join(host.io.queue.take_output()))
        assert cid >= 4
    for _ in range(2):
        host.io.queue.submit(commands.flush(1))
        host.io.sock.sendall(b"".join(host.io.queue.take_output()))
    await_that(lambda: server.service.totals.violations == 1, "it was taken")
    await_that(lambda: reasons(server, Closed), "no reason in the log")
    assert "queue of 4" in reasons(server, Closed)[0]


def test_a_pdu_that_is_too_long_is_refused_before_memory_is_taken(serve):
    server = serve()
    host = Host(server.addresses[0])
    head = COMMON_HEADER.pack(PduType.CAPSULE_CMD, 0, 72, 72, 72 + (1 << 30))
    host.io.sock.sendall(head + bytes(64))
    data = b""
    while piece := host.io.sock.recv(4096):
        data += piece
    assert data[0] == PduType.C2H_TERM
    await_that(lambda: server.service.totals.violations == 1, "it was taken")
    assert server.service.pool.lent == 0


@pytest.mark.parametrize(
    "limits",
    [
        {"max_transfer": 3000}, {"max_transfer": 3 * MIB}, {"buffers": 4096}, {"depth": 31},
        {"queues": 0}, {"connections": 0}, {"in_capsule": 100}, {"max_data_pdu": 4098},
        {"stall": 0},
    ],
)  # fmt: skip
def test_limits_that_cannot_be(limits):
    with pytest.raises(UsageError, match=next(iter(limits)).replace("_", "-")):
        Limits(**limits)


@pytest.mark.parametrize("transfer", [8192, 64 * KIB, 4 * MIB])
def test_mdts_is_what_it_says(serve, transfer):
    server = serve(max_transfer=transfer)
    host = Host(server.addresses[0])
    assert host.controller.info.max_transfer == transfer
    assert host.io.read(0, transfer // 4096) == (0, pattern(SIZE)[:transfer])
    if transfer < SIZE:
        assert host.io.read(0, transfer // 4096 + 1)[0] & 0xFF == 2
    assert host.io.write(0, pattern(transfer, 5)) == 0
