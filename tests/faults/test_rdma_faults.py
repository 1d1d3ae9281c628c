"""What goes wrong over RDMA: keys that are not valid, peers that vanish, receives that are missing.

tests/vm/test_rdma_guest_faults.py runs this file in a guest with the kernel's software device.
"""

import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.contracts.transport import finish, request
from tests.reference import nvme, rdma
from tests.reference.nvme import stopped_at_end

from hyades.common.errors import HyadesError, UsageError
from hyades.common.layout import BLOCK, COMPLETION, Op, Status
from hyades.common.nvme.rdma import Rejected
from hyades.common.rdma.cm import Channel, Identifier, Kind, socket_address
from hyades.common.rdma.device import Devices
from hyades.common.rdma.endpoint import Broken, Endpoint, Send, Verb
from hyades.common.rdma.endpoint import Status as Work
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport
from hyades.proxy.transports import nvme_rdma_session
from hyades.target_side.namespaces import MemoryNamespace

NBLOCKS = 16
TARGET = """
import signal, sys
from pathlib import Path
from tests.reference import rdma
from hyades.target_side.namespaces import FileNamespace
path, host, port, ready = sys.argv[1:]
server = rdma.start({1: FileNamespace(path)}, host, int(port))
Path(ready).write_text(str(server.rdma_addresses[0][1]))
signal.pause()
"""


@pytest.fixture
def host():
    return rdma.address()


@pytest.fixture
def server(host):
    with stopped_at_end() as servers:
        servers.append(rdma.start({1: MemoryNamespace(NBLOCKS * BLOCK)}, host))
        yield servers[0]


class Pair:
    """Two connected endpoints of this process, *receives* on the far side."""

    def __init__(self, host, receives=1):
        self.devices = Devices()
        channels = [Channel(), Channel()]
        listener = Identifier(channels[0])
        listener.bind(socket_address(host, 0))
        listener.listen()
        near = Identifier(channels[1])
        near.resolve_address(socket_address(*listener.local), 5)
        self.expect(channels[1], Kind.ADDRESS_RESOLVED)
        near.resolve_route(5)
        self.expect(channels[1], Kind.ROUTE_RESOLVED)
        device = self.devices.open(near.device)
        self.near = Endpoint(device, sends=8, receives=1, receive_bytes=64)
        self.far = Endpoint(device, sends=8, receives=receives, receive_bytes=64)
        near.connect(self.near.number, b"asked", device.reads)
        asked = self.expect(channels[0], Kind.CONNECT_REQUEST)
        assert asked.private.startswith(b"asked")
        far = Identifier(channels[0], key=asked.key)
        self.far.connect(far, serve=4, have=4)
        far.accept(self.far.number, b"taken", serve=4, have=4)
        assert self.expect(channels[1], Kind.CONNECT_RESPONSE).private.startswith(b"taken")
        self.near.connect(near, serve=4, have=4)
        near.establish()
        self.expect(channels[0], Kind.ESTABLISHED)
        self.memory = memoryview(bytearray(BLOCK))
        self.region = device.register(self.memory, remote=True)
        self.parts = [near, far, listener, *channels]

    def expect(self, channel, kind):
        """Return the next event, which is of *kind*."""
        poll = select.poll()
        poll.register(channel.fd, select.POLLIN)
        assert poll.poll(10_000), f"no event, {kind.name} was due"
        event = channel.take()
        assert event.kind == kind, (Kind(event.kind), event.status)
        return event

    def send(self, verb=Verb.SEND, nbytes=16, key=0, remote=0, signal=True):
        """Post one request from the near side."""
        local = self.region.base
        self.near.post([Send(verb, local, nbytes, self.region.lkey, remote, key, "sent", signal)])

    def take(self, end, count=1):
        """Return (messages, attachments) of *end* once there are *count*."""
        messages, done = [], []
        deadline = time.monotonic() + 20
        while len(messages) + len(done) < count:
            end.take(lambda slot, nbytes: messages.append((slot, nbytes)), done.append)
            assert time.monotonic() < deadline, "no completion"
        return messages, done

    def close(self):
        """Free it all."""
        self.near.close()
        self.far.close()
        for part in self.parts:
            part.close()
        self.devices.close()


@pytest.fixture
def pair(host):
    found = Pair(host)
    yield found
    found.close()


# -- queue pairs


def test_messages_and_data(pair):
    pair.memory[:16] = b"sixteen bytes!!!"
    pair.send()
    assert pair.take(pair.near) == ([], ["sent"])
    ((slot, nbytes),), _ = pair.take(pair.far)
    assert bytes(pair.far.message(slot, nbytes)) == b"sixteen bytes!!!"
    pair.send(Verb.WRITE, 16, pair.region.rkey, pair.region.base + 100)
    pair.take(pair.near)
    assert bytes(pair.memory[100:116]) == b"sixteen bytes!!!"
    pair.memory[100:116] = bytes(16)
    pair.send(Verb.READ, 16, pair.region.rkey, pair.region.base + 100)
    pair.take(pair.near)
    assert not any(pair.memory[:16])


def test_a_message_waits_for_a_receive(pair):
    """Receiver not ready: the device sends it again."""
    pair.send()
    pair.take(pair.near)
    ((slot, _),), _ = pair.take(pair.far)
    pair.send()  # the one receive is used up
    pair.far.post_receive(slot)
    assert pair.take(pair.near) == ([], ["sent"])
    assert len(pair.take(pair.far)[0]) == 1


def test_a_receive_that_never_comes(pair):
    pair.send()
    pair.take(pair.near)
    pair.send()
    with pytest.raises(Broken, match="no receive") as caught:
        pair.take(pair.near)
    assert caught.value.status == Work.RNR_RETRIES_EXCEEDED
    assert pair.near.close() == ["sent"]  # what was not done comes back


@pytest.mark.parametrize("verb", [Verb.WRITE, Verb.READ])
@pytest.mark.parametrize("what", ["key", "range"])
def test_memory_that_may_not_be_touched(pair, verb, what):
    key = pair.region.rkey ^ (0xFF00 if what == "key" else 0)
    remote = pair.region.base + (0 if what == "key" else BLOCK)
    pair.memory[:16] = b"sixteen bytes!!!"
    pair.send(verb, 16, key, remote)
    with pytest.raises(Broken, match="may not be accessed") as caught:
        pair.take(pair.near)
    assert caught.value.status == Work.REMOTE_ACCESS
    assert bytes(pair.memory[:16]) == b"sixteen bytes!!!"


def test_a_message_that_is_too_long(pair):
    pair.send(nbytes=65)
    with pytest.raises(Broken):
        pair.take(pair.near)
    with pytest.raises(Broken) as caught:
        pair.take(pair.far)
    assert caught.value.status in (Work.LOCAL_LENGTH, Work.LOCAL_OPERATION)  # devices differ


# -- initiator and target


def test_a_host_with_a_wrong_key_is_cut_and_others_are_served(server, monkeypatch):
    good = open_transport(rdma.url(server))
    arena = allocate_arena(BLOCK)
    good.register(arena)
    arena[:] = 7
    assert finish(good, request(Op.WRITE)) == {0: (Status.OK, BLOCK)}

    bad = open_transport(rdma.url(server, ctrl_loss_timeout=0.5, kato=0.5))
    place = np.full(BLOCK, 0x55, np.uint8)
    memory = allocate_arena(BLOCK)
    memory[:] = place
    bad.register(memory)
    right = nvme_rdma_session._describe

    def wrong(device, view):
        address, key = right(device, view)
        return address, key ^ 0xFF00

    monkeypatch.setattr(nvme_rdma_session, "_describe", wrong)
    assert finish(bad, request(Op.READ))[0][0] == Status.LOST
    assert (memory == 0x55).all()
    assert bad.stats()["losses"] >= 1
    bad.close()
    monkeypatch.undo()

    arena[:] = 0
    assert finish(good, request(Op.READ)) == {0: (Status.OK, BLOCK)}
    assert (arena == 7).all()
    good.close()


def test_a_killed_target_comes_back(host, tmp_path):
    """What was not answered is sent again; writes wait until the target cannot execute them."""
    path, ready, port = tmp_path / "disk", tmp_path / "ready", 4455
    path.write_bytes(bytes(NBLOCKS * BLOCK))

    def start():
        ready.unlink(missing_ok=True)
        command = [sys.executable, "-c", TARGET, str(path), host, str(port), str(ready)]
        process = subprocess.Popen(command)
        deadline = time.monotonic() + 120
        while not ready.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return process

    process = start()
    try:
        url = f"nvme+rdma://{host}:{port}/{nvme.NQN}?kato=1&ctrl_loss_timeout=120"
        device = open_transport(url)
        arena = allocate_arena(2 * BLOCK)
        device.register(arena)
        arena[:BLOCK] = 9
        assert finish(device, request(Op.WRITE)) == {0: (Status.OK, BLOCK)}
        process.send_signal(signal.SIGSTOP)
        batch = [request(Op.READ, 0, 1, BLOCK, 1), request(Op.WRITE, 1, 1, 0, 2)]
        assert device.submit(np.concatenate(batch)) == 2
        process.kill()
        process.wait()
        process = start()
        found = {}
        completions = np.zeros(4, COMPLETION)
        deadline = time.monotonic() + 60
        while len(found) < 2:
            for done in completions[: device.poll(completions)]:
                found[int(done["cookie"])] = int(done["status"])
            device.wait(0.01)
            assert time.monotonic() < deadline, found
        assert found == {1: Status.OK, 2: Status.OK}
        assert (arena == 9).all()
        assert device.stats()["reconnects"] >= 1
        device.close()
        assert np.fromfile(path, np.uint8)[: 2 * BLOCK].min() == 9
    finally:
        process.kill()
        process.wait()


def test_a_target_that_stops_is_lost_and_named(host):
    with stopped_at_end() as servers:
        server = rdma.start({1: MemoryNamespace(NBLOCKS * BLOCK)}, host)
        servers.append(server)
        device = open_transport(rdma.url(server, ctrl_loss_timeout=0.3, kato=0.5))
        device.register(allocate_arena(BLOCK))
        assert finish(device, request(Op.READ))[0][0] == Status.OK
        assert server.stop() == 0  # nobody had to be cut
        assert finish(device, request(Op.READ))[0][0] == Status.LOST
        assert "no NVMe/RDMA target listens there" in device.stats()["last_failure"]
        device.close()


def test_what_a_target_refuses(server, host, monkeypatch):
    with pytest.raises(UsageError, match="no NVMe/RDMA target listens"):
        open_transport(f"nvme+rdma://{host}:9/{nvme.NQN}?timeout=5")
    with pytest.raises(UsageError, match="no such namespace"):
        open_transport(rdma.url(server, ns=7))
    other = rdma.url(server).replace(nvme.NQN, nvme.NQN + "-not")
    with pytest.raises(UsageError, match=f"offers {nvme.NQN} to"):
        open_transport(other)
    pack = partial(nvme_rdma_session.CmRequest, 0, 0)
    monkeypatch.setattr(nvme_rdma_session, "CmRequest", lambda *_: pack(32))
    with pytest.raises(HyadesError, match="invalid receive size") as caught:
        open_transport(rdma.url(server))
    assert Rejected.__name__ in repr(caught.type)


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def test_nothing_is_left_open(server):
    before = descriptors()
    for _ in range(3):
        device = open_transport(rdma.url(server))
        device.register(allocate_arena(BLOCK))
        finish(device, request(Op.READ))
        device.close()
    deadline = time.monotonic() + 10
    while descriptors() > before + 2:
        # the target's device stays open; its connections end a moment later
        assert time.monotonic() < deadline, "connections are left open"
        time.sleep(0.05)
