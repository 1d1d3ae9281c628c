"""Shared memory whose other side dies, lies, or fails to copy."""

import contextlib
import fcntl
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from tests.contracts.transport import arena_for, finish, pattern, request
from tests.reference import dma, doca
from tests.reference.nvme import QUICK, stopped_at_end

from hyades.common.dma.engine import MemcpyDevice
from hyades.common.errors import DeviceLost, PeerError, UsageError
from hyades.common.layout import BLOCK, COMPLETION, Op, Status
from hyades.common.nvme import dma as wire
from hyades.common.nvme.dma import Hello, Kind, Shape
from hyades.proxy.registry import open_transport
from hyades.proxy.transports import nvme_dma_wire
from hyades.proxy.transports.nvme_dma_session import _make_memory
from hyades.target_side.dma_output import DmaOutput
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace

NBLOCKS = 256
WAYS = [{"buffer": 8192, "buffers": 1}, {"zerocopy": 1}]
SHAPE = Shape(5, 1, 4096)


@pytest.fixture
def servers():
    with stopped_at_end() as found:
        yield found


@pytest.fixture
def server(servers):
    servers.append(dma.start({1: MemoryNamespace(NBLOCKS * BLOCK)}, handshake=2, stall=3))
    return servers[0]


def connect(url):
    device = open_transport(url)
    arena = arena_for(device, 2 * NBLOCKS * BLOCK)
    device.register(arena)
    return device, arena


def use(url, seed):
    """Write and read back everything."""
    device, arena = connect(url)
    data = pattern(NBLOCKS * BLOCK, seed)
    arena[: len(data)] = data
    writes = [request(Op.WRITE, i, 16, i * BLOCK, i) for i in range(0, NBLOCKS, 16)]
    assert {s for s, _ in finish(device, np.concatenate(writes)).values()} == {0}
    half = NBLOCKS * BLOCK
    reads = [request(Op.READ, i, 16, half + i * BLOCK, i) for i in range(0, NBLOCKS, 16)]
    assert {s for s, _ in finish(device, np.concatenate(reads)).values()} == {0}
    assert np.array_equal(arena[half : half + len(data)], data)
    device.close()


@pytest.mark.parametrize("options", WAYS)
def test_a_target_that_dies_with_requests_out(tmp_path, options):
    path = tmp_path / "namespace"
    data = pattern(NBLOCKS * BLOCK, 1)
    path.write_bytes(data.tobytes())
    with dma.TargetProcess(path) as target:
        device, arena = connect(dma.path_url(target.socket, **QUICK, **options))
        batch = [request(Op.READ, i, 1, i * BLOCK, i) for i in range(NBLOCKS)]
        taken = device.submit(np.concatenate(batch))
        assert taken
        target.kill()
        done = np.zeros(1, COMPLETION)
        target.start()  # the socket that was left is replaced
        left = set(range(taken))
        deadline = time.monotonic() + 60
        while left and time.monotonic() < deadline:
            if device.poll(done):
                assert done["status"][0] == 0
                left.remove(int(done["cookie"][0]))
            else:
                device.wait(0.05)
        assert not left
        finish(device, np.concatenate(batch))
        assert np.array_equal(arena[: len(data)], data)
        assert device.stats()["losses"] >= 1
        device.close()


@pytest.mark.parametrize("options", WAYS)
def test_a_target_that_stops_and_comes_back(servers, options):
    path = dma.socket_path()
    namespace = {1: MemoryNamespace(NBLOCKS * BLOCK)}
    servers.append(dma.start(namespace, path=path))
    device, _ = connect(dma.path_url(path, **QUICK, **options))
    assert finish(device, request(Op.READ, 0, 1, 0, 1))[1][0] == 0
    servers.pop().stop(grace=5)
    assert not Path(path).exists()
    device.submit(request(Op.READ, 0, 1, 0, 2))
    servers.append(dma.start({1: MemoryNamespace(NBLOCKS * BLOCK)}, path=path))
    done = np.zeros(1, COMPLETION)
    while not device.poll(done):
        device.wait(0.05)
    assert (done["cookie"][0], done["status"][0]) == (2, 0)
    device.close()


def test_a_target_that_is_gone_for_good(servers):
    servers.append(dma.start({1: MemoryNamespace(NBLOCKS * BLOCK)}))
    url = dma.url(servers[0], **QUICK, ctrl_loss_timeout=0.3)
    device, _ = connect(url)
    servers.pop().stop()
    assert finish(device, request(Op.READ, 0, 1, 0, 1))[1][0] == Status.LOST
    assert "no target listens there" in device.locate(0)
    device.close()
    with pytest.raises(UsageError, match=r"no target listens there .* hyades serve --listen dma:"):
        open_transport(url)


@contextlib.contextmanager
def paused(tmp_path, **options):
    """Give a process, a transport to it, its arena, and the data; the process is stopped."""
    path = tmp_path / "namespace"
    data = pattern(NBLOCKS * BLOCK, 1)
    path.write_bytes(data.tobytes())
    with dma.TargetProcess(path) as target:
        device, arena = connect(dma.path_url(target.socket, **{**QUICK, "timeout": 2, **options}))
        assert finish(device, request(Op.READ, 0, 1, 0, 1))[1][0] == 0
        target.pause()
        try:
            assert device.submit(request(Op.READ, 9, 1, BLOCK, 2)) == 1
            yield target, device, arena, data
        finally:
            target.signal(signal.SIGKILL)
            device.close()


def wait_for(device, until):
    """Poll until *until* says so, or a completion comes; return whether one came."""
    done = np.zeros(1, COMPLETION)
    deadline = time.monotonic() + 60
    while not until():
        assert time.monotonic() < deadline, "nothing happens"
        if device.poll(done):
            assert (done["cookie"][0], done["status"][0]) == (2, 0)
            return True
        device.wait(0.05)
    return False


def test_slots_are_not_used_again_while_a_stuck_target_may_write_to_them(tmp_path, monkeypatch):
    monkeypatch.setattr(nvme_dma_wire, "_LET_GO", 0.3)
    with paused(tmp_path, zerocopy=1) as (_, device, _, _):  # noqa: SIM117 - not while it closes
        with pytest.raises(DeviceLost, match="does not let go of the slots"):
            wait_for(device, lambda: False)


def resume_when_lost(target, device):
    """Let the target go on once the transport has given its connection up."""
    deadline = time.monotonic() + 60
    while not device.stats()["losses"] and time.monotonic() < deadline:
        time.sleep(0.01)
    target.signal(signal.SIGCONT)


@pytest.mark.parametrize("options", WAYS)
def test_a_target_that_was_stuck_goes_on(tmp_path, options):
    """With zerocopy the host waits until it has let go; else it goes by the new connection."""
    with paused(tmp_path, **options) as (target, device, arena, data):
        waker = Thread(target=resume_when_lost, args=(target, device))
        waker.start()
        assert wait_for(device, lambda: False)
        waker.join()
        assert np.array_equal(arena[BLOCK : 2 * BLOCK], data[9 * BLOCK : 10 * BLOCK])
        assert device.stats()["losses"] == 1


def test_two_hosts_at_once(server):
    one, _ = connect(dma.url(server, buffer=8192))
    use(dma.url(server, zerocopy=1), 3)
    use(dma.url(server, buffer=5001, buffers=1), 4)
    assert finish(one, request(Op.READ, 0, 1, 0, 1))[1][0] == 0
    one.close()


def test_a_host_that_is_paused_is_expired_and_comes_back(server):
    """Keep-alive works as everywhere: the target forgets who is silent."""
    script = (
        "import os, signal, sys; from hyades.proxy.registry import open_transport;"
        " device = open_transport(sys.argv[1]); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    host = subprocess.Popen([sys.executable, "-c", script, dma.url(server, kato=0.5)])
    try:
        deadline = time.monotonic() + 60
        while not server.service.totals.expired:
            assert time.monotonic() < deadline, "the controller stays"
            time.sleep(0.02)
    finally:
        host.kill()
        host.wait()
    use(dma.url(server), 5)


# -- hosts that lie


class Raw:
    """A host that sends what a test wants."""

    def __init__(self, server):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.settimeout(30)
        self.sock.connect(server.dma_paths[0])

    def hello(self, shape=SHAPE, *, direct=False):
        self.sock.send(Hello(shape, direct).pack())
        data, fds, _, _ = socket.recv_fds(self.sock, wire.MESSAGE, 4)
        self.bells = list(fds)
        return wire.parse_welcome(data, shape)

    def memory(self, nbytes=SHAPE.nbytes, *, seal=True):
        if seal:
            memory, file = _make_memory(nbytes)
        else:
            file = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
            os.ftruncate(file, nbytes)
            memory = None
        socket.send_fds(self.sock, [wire.pack_plain(Kind.MEMORY)], [file])
        os.close(file)
        return memory

    def ends(self):
        """Wait until the target has closed the connection."""
        while self.sock.recv(wire.MESSAGE):
            pass
        self.close()

    def close(self):
        self.sock.close()
        for bell in getattr(self, "bells", ()):
            os.close(bell)


@pytest.mark.parametrize(
    "message",
    [b"GET / HTTP/1.1", wire.pack_plain(Kind.READY), Hello(SHAPE, True).pack()[:-1],
     Hello(Shape(4096, 1, 4096), False).pack()],
)  # fmt: skip
def test_a_hello_that_is_none(server, message):
    raw = Raw(server)
    raw.sock.send(message)
    with pytest.raises(PeerError, match="the target refused the connection"):
        wire.parse_welcome(raw.sock.recv(wire.MESSAGE), SHAPE)
    raw.ends()
    use(dma.url(server), 1)


@pytest.mark.parametrize("how", ["unsealed", "short", "no file", "no memory file", "silent"])
def test_memory_that_cannot_be_trusted(server, how):
    raw = Raw(server)
    raw.hello()
    if how == "unsealed":
        raw.memory(seal=False)
    elif how == "short":
        raw.memory(SHAPE.nbytes - 4096)
    elif how == "no file":
        raw.sock.send(wire.pack_plain(Kind.MEMORY))
    elif how == "no memory file":
        with socket.socket() as other:
            socket.send_fds(raw.sock, [wire.pack_plain(Kind.MEMORY)], [other.fileno()])
    raw.ends()  # the last one after `handshake` seconds
    use(dma.url(server), 1)


def test_an_arena_that_shrinks(server):
    raw = Raw(server)
    raw.hello(direct=True)
    raw.memory()
    assert raw.sock.recv(64) == wire.pack_plain(Kind.READY)
    file = os.memfd_create("arena", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 8192)
    socket.send_fds(raw.sock, [wire.pack_arena(0, 8192)], [file])
    fcntl.fcntl(file, fcntl.F_GET_SEALS)
    os.close(file)
    raw.ends()
    use(dma.url(server, zerocopy=1), 1)


@pytest.mark.parametrize("seed", range(12))
def test_random_memory_ends_the_connection_and_nothing_else(server, seed):
    random = np.random.default_rng(seed)
    raw = Raw(server)
    raw.hello()
    memory = raw.memory()
    assert raw.sock.recv(64) == wire.pack_plain(Kind.READY)
    words = np.frombuffer(memory, np.int64, wire.WORDS)
    space = np.frombuffer(memory, np.uint8)
    space[wire.PAGE :] = random.integers(0, 256, len(space) - wire.PAGE, np.uint8)
    for word in (wire.SQ_TAIL, wire.OUT_FILLED, wire.CQ_HEAD, wire.IN_EMPTIED):
        words[word] = random.choice([0, 1, 2, 5, 6, -1, 1 << 62])
    words[wire.SQ_TAIL] = words[wire.SQ_TAIL] or 7
    os.eventfd_write(raw.bells[0], 1)
    raw.ends()  # at the latest because there was no Connect
    use(dma.url(server), seed)


# -- the socket


def test_the_socket_is_this_users_only(server):
    mode = Path(server.dma_paths[0]).stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600


def test_a_path_that_is_taken(server, tmp_path):
    with pytest.raises(UsageError, match="another target listens there"):
        dma.start({1: MemoryNamespace(BLOCK)}, path=server.dma_paths[0])
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(UsageError, match="cannot listen on dma:"):
        dma.start({1: MemoryNamespace(BLOCK)}, path=str(file))
    assert file.read_text() == "mine"
    with pytest.raises(UsageError, match="at most 107 bytes"):
        dma.start({1: MemoryNamespace(BLOCK)}, path=f"{tmp_path}/{'x' * 107}")
    use(dma.url(server), 1)


# -- the engine


@pytest.mark.parametrize("options", WAYS)
def test_a_copy_that_fails_is_made_again_on_a_new_connection(
    tmp_path, servers, monkeypatch, options
):
    doca.use(monkeypatch, "fail=5,late=2")
    path = tmp_path / "namespace"
    data = pattern(NBLOCKS * BLOCK, 1)
    path.write_bytes(data.tobytes())
    servers.append(dma.start({1: FileNamespace(path)}, engine="doca"))
    device, arena = connect(dma.url(servers[0], **QUICK, **options))
    batch = [request(Op.READ, i, 1, i * BLOCK, i) for i in range(NBLOCKS)]
    assert {s for s, _ in finish(device, np.concatenate(batch)).values()} == {0}
    assert np.array_equal(arena[: len(data)], data)
    assert device.stats()["losses"] == 1
    device.close()
    servers.pop().stop()
    assert doca.leaks() == 0


def test_memory_is_forgotten_while_it_is_mapped(servers, monkeypatch):
    """Else another connection's memory might have its address by then, and be forgotten."""
    events, forget, abandon = [], MemcpyDevice.forget, DmaOutput.abandon

    def note(what, inner):
        def noted(self, *given):
            events.append((threading.get_ident(), what))
            return inner(self, *given)

        return noted

    monkeypatch.setattr(MemcpyDevice, "forget", note("forgotten", forget))
    monkeypatch.setattr(DmaOutput, "abandon", note("unmapped", abandon))
    servers.append(dma.start({1: MemoryNamespace(NBLOCKS * BLOCK)}))
    use(dma.url(servers[0], zerocopy=1, queues=1), 1)
    servers.pop().stop()
    by_thread = {who: [what for other, what in events if other == who] for who, _ in events}
    ends = [found for found in by_thread.values() if "unmapped" in found]
    assert sorted(map(len, ends)) == [2, 3]  # the admin queue has no arena
    assert all(found.index("unmapped") == len(found) - 1 for found in ends)
