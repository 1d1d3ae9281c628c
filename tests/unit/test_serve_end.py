"""How the embedded target's connections begin and end: TLS, stop, restart, garbage, lost hosts."""

import contextlib
import socket
import threading

import pytest
from tests.reference.nvme import start, stopped_at_end
from tests.reference.nvme_host import HOST, NQN, Host, await_that, discover, pattern

from hyades.common.errors import PeerError, UsageError
from hyades.common.nvme import commands
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.psk import Keyring, Psk
from hyades.common.nvme.status import StatusCode
from hyades.common.nvme.tls import wrap_client
from hyades.common.units import MIB
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace

KEY = Psk(bytes(range(32)), 1, "a test's key")
SIZE = 4 * MIB


def tls(sock):
    return wrap_client(sock, KEY, HOST, NQN)


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


def test_tls_with_a_psk(serve, path):
    server = serve(keys=Keyring([KEY]))
    host = Host(server.addresses[0], queues=2, wrap=tls, data_digest=True)
    content = path.read_bytes()
    for queue in host.queues:
        assert queue.read(0, 256) == (0, content[:MIB])
        fresh = pattern(MIB, 9)
        assert queue.write(300, fresh) == 0
        assert queue.read(300, 256) == (0, fresh)
    assert [e.secure for e in discover(server.addresses[0], wrap=tls)] == [True]


def test_without_the_key_nobody_gets_in(serve):
    server = serve(keys=Keyring([KEY]), handshake=2.0)
    wrong = Psk(bytes(32), 1, "another key")
    with pytest.raises((PeerError, OSError)):
        Host(server.addresses[0], wrap=lambda sock: wrap_client(sock, wrong, HOST, NQN))
    with pytest.raises((EOFError, ConnectionError)):
        Host(server.addresses[0])  # no TLS at all
    host = Host(server.addresses[0], wrap=tls)
    assert host.io.read(0, 1)[0] == 0


@pytest.mark.parametrize("names", [(HOST + "2", NQN), (HOST, NQN + "2")])
def test_a_key_holds_for_the_names_of_its_handshake_alone(serve, names):
    server = serve(keys=Keyring([KEY]))
    with pytest.raises(UsageError, match="list of allowed hosts"):
        Host(server.addresses[0], wrap=lambda sock: wrap_client(sock, KEY, *names))


def test_a_stop_finishes_what_is_in_flight(serve, path):
    server = serve()
    host = Host(server.addresses[0], depth=8)
    data = pattern(MIB, 4)
    held, original = [], host.io.queue._send

    def hold(kind, flags, body, payload, *rest):
        held.append((kind, flags, body, payload, *rest))

    write = host.io.start(commands.transfer(Opcode.WRITE, 1, 0, 256), source=memoryview(data))
    host.io.queue._send = hold  # the R2T comes, the data stays here for now
    while not held:
        host.io.receive()
    stopper = threading.Thread(target=server.stop)
    stopper.start()
    await_that(lambda: all(c.draining for c in server.connections), "no draining")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(server.addresses[0])
    host.io.queue._send = original
    late = host.io.start(commands.transfer(Opcode.READ, 1, 0, 1), into=memoryview(bytearray(4096)))
    for call in held:
        original(*call)
    host.io.send()
    found = host.io.wait([write, late])
    assert found[write] == (0, 0)
    assert found[late][0] == StatusCode.ABORTED_QUEUE_DELETED
    assert host.io.closed_by_peer()
    stopper.join(30)
    assert path.read_bytes()[:MIB] == data


def test_a_target_starts_again_on_its_port(serve, path, servers):
    first = serve()
    address = first.addresses[0]
    host = Host(address)
    assert host.io.write(0, b"x" * 4096) == 0
    first.stop()
    assert host.io.closed_by_peer()
    servers.append(start({1: FileNamespace(path)}, port=address[1]))
    again = Host(address)
    assert again.io.read(0, 1) == (0, b"x" * 4096)


def test_a_port_in_use_is_a_usage_error(server):
    with pytest.raises(UsageError, match="choose another port"):
        start({1: MemoryNamespace(MIB)}, port=server.addresses[0][1])


def test_garbage_on_the_port_hurts_nobody(server):
    host = Host(server.addresses[0])
    for seed, garbage in enumerate(
        (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 5000, pattern(100_000), b"")
    ):
        sock = socket.create_connection(server.addresses[0], 10)
        with sock, contextlib.suppress(ConnectionError):
            sock.sendall(garbage)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                pass
        assert host.io.read(seed, 1)[0] == 0
    await_that(lambda: len(server.connections) == 2, "garbage's connections are left")
    assert server.service.totals.refused == 4


def test_a_dropped_connection_gives_everything_back(server):
    for _ in range(10):
        host = Host(server.addresses[0], data_digest=True)
        data = memoryview(pattern(MIB))
        host.io.start(commands.transfer(Opcode.WRITE, 1, 0, 256), source=data)
        host.io.start(commands.transfer(Opcode.READ, 1, 0, 256), into=memoryview(bytearray(MIB)))
        host.close()
    await_that(lambda: not server.connections, "connections are left")
    assert server.service.pool.lent == 0
