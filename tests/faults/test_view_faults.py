"""Views whose stage is slow, whose reader stops, whose target is killed, and forged requests."""

import contextlib
import socket
import threading

import msgspec
import numpy as np
import pytest
from tests.contracts.transport import finish
from tests.reference import nvme
from tests.reference.nvme_host import Host, await_that
from tests.reference.own_views import Begun, reads_of
from tests.reference.view_host import (
    FIRST,
    HALF,
    OTHER,
    SAMPLE,
    WIDTH,
    ask,
    made_here,
    namespaces,
    read_whole,
    send_request,
    view_server,
    write_volume,
)

from hyades.common.checksum import crc32c
from hyades.common.layout import BLOCK, Status
from hyades.common.nvme import commands
from hyades.common.nvme.layout import VIEW_REQUEST, Opcode
from hyades.common.nvme.status import DNR, StatusCode
from hyades.common.nvme.vendor import ViewRequest, build_request
from hyades.common.units import KIB, MIB
from hyades.proxy.registry import open_transport
from hyades.target_side.events import ViewRefused
from hyades.target_side.namespaces import FileNamespace

WHOLE = ViewRequest("features", "float32", 64 * KIB)
INVALID = StatusCode.INVALID_FIELD | DNR


class Metered(FileNamespace):
    """Reads pages, as the stage does, only as often as it may; other hosts read 8 blocks."""

    def __init__(self, path):
        super().__init__(path, read_only=True)
        self.permits = threading.Semaphore(0)
        self.metered = False
        self.begun = 0

    def read_into(self, offset, into):
        if self.metered and len(into) > 8 * BLOCK:
            self.begun += 1
            assert self.permits.acquire(timeout=60)
        return super().read_into(offset, into)

    def open(self):
        """Let every read pass."""
        self.metered = False
        self.permits.release(10_000)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_volume(tmp_path_factory.mktemp("views") / "g.vol")


@pytest.fixture
def serve(path):
    with contextlib.ExitStack() as stack:
        yield lambda *views, **how: stack.enter_context(view_server(path, *views, **how))


# -- requests that no builder makes


def forged(**changed):
    """Return a well-formed request of HALF's fields with *changed*."""
    text = msgspec.json.encode({"source": "features", "encoding": "float16", **changed})
    head = VIEW_REQUEST.pack(b"HYVIEWRQ", 1, len(text), 0, 0)
    data = bytearray(head + text.ljust(-(-len(text) // 4) * 4, b"\0"))
    data[20:24] = crc32c(data).to_bytes(4, "little")
    return bytes(data)


def sample(**changed):
    return {"sample": {"fanout": 1, "seed": 1, "layer": 0, "lanes": [[0, 1]], **changed}}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (sample(fanout=0), "fanout"),
        (sample(fanout=-3), "fanout"),
        (sample(fanout=1 << 40), "fanout"),
        (sample(layer=-1), "layer"),
        (sample(layer=1 << 17), "layer"),
        (sample(layer="first"), "layer"),
        (sample(seed=-1), "seed"),
        (sample(own="some"), "own"),
        (sample(lanes=[]), "lanes"),
        (sample(lanes=[[1, 1]]), "lanes [1, 1)"),
        (sample(lanes=[[0, 4]]), "lanes [0, 4)"),
        ({"encoding": "float8"}, "encoding"),
        ({"hops": 2}, "hops"),
    ],
)
def test_values_that_no_view_has(serve, changed, reason):
    server, log = serve()
    host = Host(server.addresses[0])
    assert send_request(host, forged(**changed)) == (INVALID, 0)
    assert reason in log.named(ViewRefused)[0].reason
    assert namespaces(host) == [1]
    assert server.service.views.reserved == 0
    assert send_request(host, forged()) == (0, FIRST)  # and the forger can make a good one


@pytest.mark.parametrize("width", [WIDTH - 1, WIDTH + 1, 1])
def test_weights_of_a_wrong_width_among_right_ones(serve, width):
    server, log = serve()
    host = Host(server.addresses[0])
    weights = (np.ones((4, WIDTH), np.float32), np.ones((4, width), np.float32))
    assert send_request(host, build_request(HALF, weights)) == (INVALID, 0)
    assert f"for rows of {WIDTH} values" in log.named(ViewRefused)[0].reason
    assert server.service.views.reserved == 0


# -- a slow stage


def test_a_slow_stage_holds_bounded_memory_and_nobody_else(serve, path):
    """Each step lets the medium give one read; what is held never grows with what is asked."""
    medium = Metered(path)
    server, _ = serve("features:float32,page=64KiB", space=medium, memory=4 * MIB, buffers=2 * MIB)
    pool, views = server.service.pool, server.service.views
    expected, raw = made_here(path, WHOLE), path.read_bytes()
    blocks = len(expected) // BLOCK
    reader, other = Host(server.addresses[0]), Host(server.addresses[0], host=OTHER)
    reserved = views.reserved
    assert 0 < reserved <= MIB  # a quarter of the stage's memory at most
    medium.metered = True
    slots = [bytearray(blocks * BLOCK) for _ in range(31)]
    sqe = commands.transfer(Opcode.READ, 2, 0, blocks)
    cids = [reader.io.start(sqe, into=memoryview(slot)) for slot in slots]
    await_that(lambda: medium.begun, "the stage has not begun")
    for _ in range(3):
        medium.permits.release()
        for lba in (0, len(raw) // BLOCK - 8):
            at = lba * BLOCK
            assert other.io.read(lba, 8) == (0, raw[at : at + 8 * BLOCK])
        assert other.admin.run(commands.keep_alive())[0] == 0
        assert views.reserved == reserved
        assert pool.peak <= pool.limit == 2 * MIB
    medium.open()
    assert set(reader.io.wait(cids).values()) == {(0, 0)}
    assert all(slot == expected for slot in slots)
    assert pool.peak <= pool.limit
    assert views.reserved == reserved
    await_that(lambda: pool.lent == 0, "buffers have not come back")


def test_a_slow_view_of_one_host_delays_no_view_of_another(serve, path):
    """The one waits for the medium in a read, the other's rows are in its window already."""
    medium = Metered(path)
    server, _ = serve(space=medium)
    slow, quick = Host(server.addresses[0]), Host(server.addresses[0], host=OTHER)
    first, second = ask(slow, HALF), ask(quick, WHOLE)
    expected = made_here(path, WHOLE)
    assert quick.io.read(1, 1, second) == (0, expected[BLOCK : 2 * BLOCK])
    assert slow.io.read(0, 1, first)[0] == 0  # the head, without a read of the medium
    medium.metered = True
    into = bytearray(BLOCK)
    last = len(made_here(path, HALF)) // BLOCK - 1
    cid = slow.io.start(commands.transfer(Opcode.READ, first, last, 1), into=memoryview(into))
    await_that(lambda: medium.begun, "the slow one has not begun")
    assert quick.io.read(2, 1, second) == (0, expected[2 * BLOCK : 3 * BLOCK])
    assert quick.admin.run(commands.keep_alive())[0] == 0
    medium.open()
    assert slow.io.wait([cid])[cid] == (0, 0)


def test_a_view_is_made_while_another_is_slow(serve, path):
    """A dense view is made of the catalog alone, so it need not wait for pages."""
    medium = Metered(path)
    server, _ = serve(space=medium)
    slow, other = Host(server.addresses[0]), Host(server.addresses[0], host=OTHER)
    first = ask(slow, ViewRequest("features", sample=SAMPLE))
    medium.metered = True
    into = memoryview(bytearray(BLOCK))
    cid = slow.io.start(commands.transfer(Opcode.READ, first, 1, 1), into=into)
    await_that(lambda: medium.begun, "the slow one has not begun")
    assert ask(other, HALF) == FIRST
    assert namespaces(other) == [1, FIRST]
    assert other.io.read(0, 1, FIRST) == (0, made_here(path, HALF)[:BLOCK])
    medium.open()
    assert slow.io.wait([cid])[cid] == (0, 0)


# -- a reader that stops


@pytest.mark.parametrize("how", ["never reads", "goes away"])
def test_a_reader_that_stops_in_the_middle(serve, path, how):
    server, _ = serve("features:float32,page=64KiB", stall=1.0, buffers=2 * MIB)
    pool, views = server.service.pool, server.service.views
    expected = made_here(path, WHOLE)
    blocks, reserved = len(expected) // BLOCK, views.reserved
    stuck = Host(server.addresses[0], queues=1, depth=128)
    stuck.io.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slots = [bytearray(blocks * BLOCK) for _ in range(127)]  # more than any socket buffer takes
    sqe = commands.transfer(Opcode.READ, 2, 0, blocks)
    for slot in slots:
        stuck.io.start(sqe, into=memoryview(slot))
    await_that(lambda: pool.lent, "nothing is on its way")
    if how == "goes away":
        stuck.close()
    other = Host(server.addresses[0], host=OTHER)
    assert read_whole(other.io, 2, blocks) == expected
    if how == "never reads":
        await_that(lambda: server.service.totals.stalled == 1, "the stuck reader was not cut")
    other.close()
    await_that(lambda: pool.lent == 0, "its buffers have not come back")
    assert pool.peak <= pool.limit
    assert views.reserved == reserved


# -- a target that is killed


@pytest.mark.parametrize("encoding", ["float16", "int8"])
def test_a_target_killed_while_a_view_is_read(path, tmp_path, encoding):
    """The view is the same after the restart, so reads go on where they were."""
    copy = tmp_path / "g.vol"
    copy.write_bytes(path.read_bytes())
    expected = made_here(copy, ViewRequest("features", encoding, 64 * KIB))
    with nvme.TargetProcess(copy, "--view", f"features:{encoding},page=64KiB") as target:
        url = nvme.address_url(target.address, **nvme.QUICK, ns=2, depth=4, ctrl_loss_timeout=60)
        device = open_transport(url, writable=False)
        try:
            assert device.nblocks * BLOCK == len(expected)
            arena, reads = reads_of(device)
            for _ in range(2):
                arena[:] = 0xEE
                begun = device.submit(reads)
                assert begun
                target.kill()
                restart = threading.Thread(target=target.start)
                restart.start()
                done = finish(Begun(device, begun), reads)
                restart.join()
                assert done == dict.fromkeys(range(device.nblocks), (Status.OK, BLOCK))
                assert arena[: len(expected)].tobytes() == expected
        finally:
            device.close()
