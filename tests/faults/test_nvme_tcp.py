"""nvme+tcp while targets die, links break and bytes change on the way."""

import random
import socket
import threading
import time

import numpy as np
import pytest
from tests.contracts.transport import finish, request, sweep
from tests.reference import nvme
from tests.reference.churn import Churn
from tests.reference.nvme import after, connect
from tests.reference.relay import Relay

from hyades.common.errors import PeerError, UsageError
from hyades.common.layout import BLOCK, COMPLETION, Op, Status
from hyades.proxy.arena import allocate_arena
from hyades.target_side.namespaces import MemoryNamespace

BLOCKS = 256


@pytest.fixture
def servers():
    with nvme.stopped_at_end() as started:
        yield started


@pytest.fixture
def server(servers, tmp_path):
    servers.append(nvme.file_server(tmp_path, BLOCKS, listeners=2, epoch=b"the same always!"))
    return servers[0]


@pytest.fixture
def relay(server):
    with Relay(server.addresses[0]) as relay:
        yield relay


def until(condition, transport, seconds=20.0):
    """Poll until *condition*."""
    late = after(seconds)
    completions = np.zeros(4, COMPLETION)
    while not condition():
        assert not transport.poll(completions)
        transport.wait(0.01)
        assert not late(), transport.stats()


def live(transport):
    return [path["live"] for path in transport.stats()["paths"]]


@pytest.mark.parametrize("seed", range(2))
def test_target_killed_and_restarted(tmp_path, seed):
    path = tmp_path / "pages"
    path.write_bytes(bytes(BLOCKS * BLOCK))
    moments = random.Random(seed)
    with nvme.TargetProcess(path) as target:
        transport = connect(target.address)
        churn = Churn(transport, BLOCKS, seed=seed)
        for _ in range(3):
            churn.run(after(moments.uniform(0.02, 0.4)))
            for _ in range(8):  # in the middle of some
                churn._fill()
            target.kill()
            restart = threading.Thread(target=target.start)
            restart.start()
            churn.run(lambda restart=restart: not restart.is_alive())
        churn.run(after(0.1))
        assert churn.flush() == Status.OK  # the page cache survives a process
        churn.verify()
        stats = transport.stats()
        assert stats["reconnects"] >= 3
        assert stats["losses"] >= 3
        assert stats["last_loss"].startswith(f"127.0.0.1:{target.address[1]}: ")
        assert stats["replays"] > 0
        transport.close()


def test_one_of_two_paths_is_cut(server, relay):
    transport = connect(relay.address, server.addresses[1])
    churn = Churn(transport, BLOCKS)
    churn.run(after(0.2))
    assert relay.passed
    relay.cut()
    churn.run(after(0.4))
    assert live(transport) == [False, True]
    assert churn.flush() == Status.OK
    assert transport.stats()["losses"] == 1
    relay.restore()
    until(lambda: live(transport) == [True, True], transport)
    passed = relay.passed
    churn.run(after(0.2))
    assert relay.passed > passed + BLOCK  # both carry data again
    churn.verify()
    transport.close()


def test_both_paths_are_cut_and_restored(server):
    with Relay(server.addresses[0]) as one, Relay(server.addresses[1]) as two:
        transport = connect(one.address, two.address)
        churn = Churn(transport, BLOCKS)
        for _ in range(2):
            churn.run(after(0.1))
            one.cut()
            two.cut()
            timers = [threading.Timer(s, r.restore) for s, r in ((0.3, two), (0.6, one))]
            for timer in timers:
                timer.start()
            churn.run(after(0.8))
            for timer in timers:
                timer.join()
        assert churn.flush() == Status.OK
        churn.verify()
        transport.close()


def test_a_stalled_path_is_left(server, relay):
    """The other path takes reads at once, and writes when the target must have given up."""
    transport = connect(relay.address, server.addresses[1], timeout=0.5)
    churn = Churn(transport, BLOCKS)
    churn.run(after(0.1))
    relay.stalled = True
    churn.run(after(2.5))
    assert live(transport) == [False, True]
    assert "no answer" in transport.stats()["paths"][0]["problem"]
    relay.stalled = False
    churn.run(after(0.2))
    churn.verify()
    transport.close()


def test_ctrl_loss_timeout(server, relay):
    transport = connect(relay.address, ctrl_loss_timeout=0.4)
    churn = Churn(transport, BLOCKS)
    churn.run(after(0.05))
    relay.stalled = True
    batch = np.concatenate([request(Op.READ, i, 1, i * BLOCK, i) for i in range(16)])
    assert transport.submit(batch) == 16
    relay.cut()
    results = finish(transport, batch[:0])
    assert results == {}
    found = []
    late = after(10)
    while len(found) < 16:
        found += sweep(transport)
        transport.wait(0.01)
        assert not late()
    assert sorted(cookie for cookie, _ in found) == list(range(16))
    assert {status for _, status in found} == {Status.LOST}
    again = np.concatenate([request(Op.WRITE, 3, 1, 0, 1), request(Op.FLUSH, cookie=2)])
    assert transport.submit(again) == 2
    assert sorted(sweep(transport)) == [(1, Status.LOST), (2, Status.LOST)]
    text = transport.locate(3)
    assert (
        f"nvme+tcp://127.0.0.1:{relay.address[1]}/{nvme.NQN} ns 1 LBA 3 (no path for 0.4 s" in text
    )
    transport.close()
    with pytest.raises(UsageError, match="closed"):
        transport.submit(batch)


def test_who_looks_late_does_not_wait_as_long_again(server, relay):
    """As closing a volume does after a run that has waited in vain: one more attempt, no more."""
    transport = connect(relay.address, ctrl_loss_timeout=60)
    engine, path = transport._engine, transport._paths.paths[0]
    relay.cut()
    late = after(10)
    while path.problem is None:  # its own thread has noticed; nobody has asked the transport yet
        time.sleep(0.01)
        assert not late()
    assert engine.losses == 0
    now = time.monotonic() + 100
    engine.look(now)
    assert engine.losses == 1
    assert not engine.gone
    engine.look(now + 5)
    assert not engine.gone
    engine.look(now + 6.1)
    assert engine.gone.startswith("no path for 60 s: 127.0.0.1:")
    assert engine.gone.count(f":{relay.address[1]}") < 3  # the address not before a text with it
    transport.close()


def test_a_target_that_never_answers():
    listener = socket.create_server(("127.0.0.1", 0))  # the kernel connects, nobody accepts
    with listener, pytest.raises(PeerError, match=r"127\.0\.0\.1:\d+.*no answer"):
        connect(listener.getsockname(), timeout=0.3)


def test_opening_waits_for_a_target_that_comes(servers, tmp_path):
    sock = socket.create_server(("127.0.0.1", 0))
    address = sock.getsockname()
    sock.close()

    def serve():
        servers.append(nvme.start({1: MemoryNamespace(64 * BLOCK)}, port=address[1]))

    timer = threading.Timer(0.3, serve)
    timer.start()
    try:
        transport = connect(address, connect_timeout=20)
    finally:
        timer.join()
    assert live(transport) == [True]
    transport.close()
    with pytest.raises(UsageError, match="no such namespace"):  # waiting would not help
        connect(address, connect_timeout=100, ns=9)
    servers[0].stop()
    with pytest.raises(UsageError, match="hyades serve"):
        connect(address, connect_timeout=0.2)


def test_closing_is_quick_while_a_path_connects(server):
    listener = socket.create_server(("127.0.0.1", 0))
    with listener:
        transport = connect(server.addresses[0], listener.getsockname(), timeout=60)
        assert live(transport) == [True, False]
        begin = time.monotonic()
        transport.close()
        assert time.monotonic() - begin < 5  # not the 60 s of the timeout


def test_a_second_path_to_nowhere_does_not_matter(server):
    closed = socket.create_server(("127.0.0.1", 0))
    address = closed.getsockname()
    closed.close()
    transport = connect(server.addresses[0], address)
    assert live(transport) == [True, False]
    assert "hyades serve" in transport.stats()["paths"][1]["problem"]
    churn = Churn(transport, BLOCKS)
    churn.run(after(0.1))
    churn.verify()
    transport.close()


def test_keep_alive_holds_an_idle_association(server):
    transport = connect(server.addresses[0], kato=0.3)
    time.sleep(1.5)
    transport.register(arena := allocate_arena(BLOCK))
    assert finish(transport, request(Op.READ, cookie=1))[1] == (0, BLOCK)
    stats = transport.stats()
    assert (stats["reconnects"], stats["losses"]) == (0, 0)
    assert not arena.any()
    transport.close()


def test_without_keep_alive_the_target_ends_it(server, relay):
    """The relay swallows keep-alives; both sides notice, and the host comes back."""
    transport = connect(relay.address, kato=0.4)
    relay.stalled = True
    time.sleep(1.5)
    relay.stalled = False
    transport.register(allocate_arena(BLOCK))
    assert finish(transport, request(Op.READ, cookie=1))[1] == (0, BLOCK)
    assert transport.stats()["reconnects"] >= 1
    transport.close()


@pytest.mark.parametrize("way", [0, 1])
def test_damaged_bytes(server, relay, way):
    """Digests find every wrong byte, in headers and data, in both directions."""
    transport = connect(relay.address, digest="header,data", kato=0.5, timeout=0.5)
    churn = Churn(transport, BLOCKS, longest=16, depth=12)
    churn.run(after(0.1))
    relay.damage = (0.01, 0.0) if way == 0 else (0.0, 0.01)
    churn.run(after(1.5))
    relay.damage = (0.0, 0.0)
    churn.verify()
    stats = transport.stats()
    assert relay.damaged > 0
    assert stats["digest_errors"] + stats["losses"] > 0
    transport.close()


def test_data_that_is_always_damaged_fails(server, relay):
    transport = connect(relay.address, digest="data")
    transport.register(allocate_arena(64 * BLOCK))
    relay.damage = (0.0, 1.0)
    late = after(15)
    statuses = set()
    for turn in range(20):  # a wrong byte in the header ends the connection instead
        results = finish(transport, request(Op.READ, 0, 64, 0, turn))
        statuses.add(results[turn][0])
        if Status.IO in statuses or late():
            break
    assert Status.IO in statuses
    assert transport.stats()["digest_errors"] > 5
    assert "transient transport" in transport.locate(0)
    transport.close()


def test_pdus_cut_off_anywhere(server, relay):
    transport = connect(relay.address, digest="header,data")
    churn = Churn(transport, BLOCKS, longest=16, depth=12)
    churn.run(after(0.1))
    relay.shorten = 0.01
    churn.run(after(1.5))
    relay.shorten = 0.0
    churn.verify()
    assert transport.stats()["losses"] > 0
    transport.close()


def test_slow_link(server, relay):
    relay.delay = 0.005
    transport = connect(relay.address)
    churn = Churn(transport, BLOCKS)
    churn.run(after(0.5))
    churn.verify()
    assert transport.stats()["losses"] == 0
    transport.close()
