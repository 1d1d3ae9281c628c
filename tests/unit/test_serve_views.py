"""Views over NVMe/TCP: static ones and those that hosts ask for."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from tests.reference.nvme_host import Host, await_that
from tests.reference.stage import needed_rows, read_view
from tests.reference.view_host import (
    EDGES,
    FIRST,
    HALF,
    OTHER,
    RANGE,
    SAMPLE,
    ServedView,
    W,
    X,
    ask,
    delete,
    identify,
    identify_controller,
    made_here,
    namespaces,
    read_whole,
    view_server,
    write_volume,
)

from hyades.common.blocks import FileBlocks
from hyades.common.layout import BLOCK
from hyades.common.nvme import commands
from hyades.common.nvme.layout import Property
from hyades.common.nvme.status import DNR, StatusCode
from hyades.common.nvme.vendor import ViewRequest, build_request, create_view
from hyades.common.quantize import encode_rows
from hyades.common.units import KIB, MIB
from hyades.common.volume import Volume
from hyades.target_side.events import (
    Failed,
    ViewClosed,
    ViewFailed,
    ViewOpened,
)
from hyades.target_side.namespaces import FileNamespace


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_volume(tmp_path_factory.mktemp("views") / "g.vol")


@pytest.fixture
def serve(path):
    with contextlib.ExitStack() as stack:
        yield lambda *views, **how: stack.enter_context(view_server(path, *views, **how))


class Gated(FileNamespace):
    """Counts reads, and holds them back while `gate` is clear."""

    def __init__(self, path):
        super().__init__(path, read_only=True)
        self.gate, self.reached = threading.Event(), threading.Event()
        self.gate.set()

    def read_into(self, offset, into):
        if not self.gate.is_set():
            self.reached.set()
            assert self.gate.wait(30)
        return super().read_into(offset, into)


# -- static views


@pytest.mark.parametrize("encoding", ["float32", "float16", "bfloat16", "int8"])
def test_a_static_view_is_the_volume(serve, path, encoding):
    server, _ = serve(f"features:{encoding},page=256KiB")
    host = Host(server.addresses[0])
    assert namespaces(host) == [1, 2]
    info = identify(host, 2)
    assert (info.block_bytes, info.read_only, info.shared) == (BLOCK, True, True)
    data = read_whole(host.io, 2, info.blocks)
    assert data == made_here(path, ViewRequest("features", encoding, 256 * KIB))
    view: Any = ServedView(data)
    assert view.head.nblocks == info.blocks
    assert read_view(view)[1].tobytes() == encode_rows(X, encoding)[0].tobytes()
    assert host.io.write(0, bytes(BLOCK), 2) == StatusCode.WRITE_PROTECTED | DNR
    assert host.io.read(info.blocks, 1, 2)[0] == StatusCode.LBA_OUT_OF_RANGE | DNR
    assert host.io.flush(2) == 0
    raw = path.read_bytes()
    assert read_whole(host.io, 1, len(raw) // BLOCK) == raw


def test_identities_of_static_views_are_theirs_and_stay(serve, path):
    with view_server(path, "features:int8", "features:float16") as (server, _):
        host = Host(server.addresses[0])
        before = [identify(host, nsid).guid for nsid in (1, 2, 3)]
    server, _ = serve("features:int8", "features:float16,of=1")
    host = Host(server.addresses[0])
    after = [identify(host, nsid).guid for nsid in (1, 2, 3)]
    assert before == after
    assert len(set(before)) == 3
    assert host.admin.run(commands.identify(3, 2), 4096)[2][4:20] == before[1]
    changed, _ = serve("features:bfloat16")
    assert identify(Host(changed.addresses[0]), 2).guid != before[1]


def test_many_readers_in_any_order(serve, path):
    server, _ = serve("features:int8,page=64KiB", threads=2)
    expected = made_here(path, ViewRequest("features", "int8", 64 * KIB))
    host = Host(server.addresses[0], queues=4)
    blocks = len(expected) // BLOCK

    def read(number):
        rng, queue = np.random.default_rng(number), host.queues[number]
        for _ in range(40):
            lba = int(rng.integers(0, blocks))
            count = int(rng.integers(1, min(64, blocks - lba) + 1))
            code, data = queue.read(lba, count, 2)
            if (code, data) != (0, expected[lba * BLOCK : (lba + count) * BLOCK]):
                return f"reader {number}: {count} blocks at {lba}: {code:#x}"
        return ""

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(read, range(4))) == [""] * 4


def test_a_slow_view_blocks_no_other_connection(serve, path):
    slow = Gated(path)
    server, _ = serve("features:float16", space=slow)
    host = Host(server.addresses[0], queues=2)
    slow.gate.clear()
    sqe = commands.transfer(commands.Opcode.READ, 2, 1, 1)
    into = bytearray(BLOCK)
    cid = host.queues[0].start(sqe, into=memoryview(into))
    assert slow.reached.wait(30)
    assert host.queues[1].flush() == 0
    assert host.admin.run(commands.keep_alive())[0] == 0
    slow.gate.set()
    assert host.queues[0].wait([cid])[cid] == (0, 0)
    assert bytes(into) == made_here(path, HALF)[BLOCK : 2 * BLOCK]


def test_a_damaged_source_is_a_read_error_of_its_pages_only(serve, tmp_path):
    path = write_volume(tmp_path / "bad.vol")
    with Volume.open(FileBlocks(path, writable=False)) as volume:
        info = volume.object("features")
        lba, last = info.lba(0), info.pages - 1
    clean = made_here(path, HALF)
    with path.open("r+b") as file:
        file.seek(lba * BLOCK + 99)
        file.write(b"?!?")
    server, log = serve("features:float16", space=FileNamespace(path, read_only=True))
    host = Host(server.addresses[0])
    assert host.io.read(0, 1, 2) == (0, clean[:BLOCK])  # the head
    for _ in range(2):
        assert host.io.read(1, 1, 2)[0] == StatusCode.READ_ERROR
    blocks = len(clean) // BLOCK
    assert host.io.read(blocks - 1, 1, 2) == (0, clean[-BLOCK:])
    failed = log.named(ViewFailed)
    assert len(failed) == 2
    assert "object 'features' page 0" in failed[0].reason
    assert "CRC32C" in failed[0].reason
    assert log.named(Failed)[0].namespace == failed[0].view
    assert last > 0


# -- views that hosts ask for


ASKED = {
    "whole": (HALF, ()),
    "sampled": (ViewRequest("features", "float32", sample=SAMPLE), ()),
    "projected": (ViewRequest("features", "float16", 64 * KIB), (W, W[:3])),
    "both": (ViewRequest("features", "int8", sample=SAMPLE), (W,)),
}


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize(
    "how",
    [{"in_capsule": True, "most": 4096}, {"most": 1024}, {}],
    ids=["in capsules", "in parts", "asked for"],
)
def test_a_view_that_a_host_asks_for(serve, path, name, how):
    what, weights = ASKED[name]
    server, log = serve()
    host = Host(server.addresses[0])
    nsid = ask(host, what, weights, **how)
    assert nsid == FIRST
    assert namespaces(host) == [1, FIRST]
    assert identify_controller(host).namespaces >= FIRST
    info = identify(host, nsid)
    assert (info.block_bytes, info.read_only, info.shared) == (BLOCK, True, False)
    assert host.admin.run(commands.identify(3, nsid), 4096)[2][4:20] == info.guid
    data = read_whole(host.io, nsid, info.blocks)
    assert data == made_here(path, what, weights)
    view: Any = ServedView(data)
    ids, rows = read_view(view)
    with Volume.open(FileBlocks(path, writable=False)) as volume:
        needed = needed_rows(volume, EDGES, SAMPLE)
    assert ids == (needed if what.sample else [list(range(n)) for n in (512, 512, 258)])
    if not weights:
        take = [i * RANGE + local for i, own in enumerate(ids) for local in own]
        assert rows.tobytes() == encode_rows(X[take], what.encoding)[0].tobytes()
    (opened,) = log.named(ViewOpened)
    assert (opened.namespace, opened.blocks) == (nsid, info.blocks)
    assert delete(host, nsid) == 0
    assert namespaces(host) == [1]
    assert host.io.read(0, 1, nsid)[0] == StatusCode.INVALID_NAMESPACE | DNR
    await_that(lambda: log.named(ViewClosed), "the view is closed")
    await_that(lambda: server.service.views.reserved == 0, "its memory is free")
    assert delete(host, nsid) == StatusCode.INVALID_NAMESPACE | DNR
    assert delete(host, 1) == StatusCode.INVALID_NAMESPACE | DNR


def test_hosts_see_their_own_views_only_and_keep_them_while_they_stay(serve, path):
    server, _ = serve()
    first, second = Host(server.addresses[0]), Host(server.addresses[0], host=OTHER)
    one = ask(first, HALF)
    assert namespaces(second) == [1]
    assert second.io.read(0, 1, one)[0] == StatusCode.INVALID_NAMESPACE | DNR
    other = ViewRequest("features", "int8")
    assert ask(second, other) == one  # numbers are each host's own
    assert identify(first, one).guid != identify(second, one).guid
    assert first.io.read(0, 1, one) == (0, made_here(path, HALF)[:BLOCK])
    assert second.io.read(0, 1, one) == (0, made_here(path, other)[:BLOCK])
    held = server.service.views.reserved
    first.close()
    await_that(lambda: server.service.views.reserved < held, "the first host's view is gone")
    assert namespaces(second) == [1, one]
    assert second.io.read(0, 1, one)[0] == 0
    second.close()
    await_that(lambda: server.service.views.reserved == 0, "all views are gone")


def test_a_reset_ends_views(serve):
    server, _ = serve()
    host = Host(server.addresses[0])
    ask(host, HALF)
    enable = 6 << 16 | 4 << 20 | 1
    for cc in (enable & ~1, enable):
        assert host.admin.run(commands.property_set(Property.CC, cc))[0] == 0
    assert namespaces(host) == [1]
    await_that(lambda: server.service.views.reserved == 0, "the view is closed")


# -- while a view is made


def begin(host, what):
    """Send a request; return its command id."""
    ((sqe, part),) = create_view(1, build_request(what), MIB)
    return host.admin.start(sqe, source=part, in_capsule=True)


def test_keep_alive_goes_on_while_a_view_is_made(serve, path):
    slow = Gated(path)
    server, _ = serve(space=slow)
    host = Host(server.addresses[0], kato=20_000)
    slow.gate.clear()
    cid = begin(host, HALF)
    assert slow.reached.wait(30)
    assert host.admin.run(commands.keep_alive())[0] == 0
    assert namespaces(host) == [1]
    assert host.io.flush() == 0
    with Host(server.addresses[0], host=OTHER).admin.sock:  # the lock of controllers is free
        pass
    slow.gate.set()
    assert host.admin.wait([cid])[cid] == (0, FIRST)
    assert namespaces(host) == [1, FIRST]


def test_a_host_that_goes_leaves_nothing_behind(serve, path):
    slow = Gated(path)
    server, log = serve(space=slow)
    host = Host(server.addresses[0])
    slow.gate.clear()
    begin(host, ViewRequest("features", sample=SAMPLE))
    assert slow.reached.wait(30)
    host.close()
    await_that(lambda: not server.connections, "the connections are over")
    slow.gate.set()
    await_that(lambda: not server.service.views.jobs(), "the helper has given up")
    assert server.service.views.reserved == 0
    assert not log.named(ViewOpened)


def test_a_reset_meanwhile_is_noticed(serve, path):
    slow = Gated(path)
    server, _ = serve(space=slow)
    host = Host(server.addresses[0])
    slow.gate.clear()
    cid = begin(host, HALF)
    assert slow.reached.wait(30)
    host.admin.run(commands.property_set(Property.CC, 6 << 16 | 4 << 20))
    slow.gate.set()
    assert host.admin.wait([cid])[cid] == (StatusCode.ABORTED, 0)
    await_that(lambda: server.service.views.reserved == 0, "the view is closed")


def test_a_stop_does_not_wait_for_views(serve, path):
    slow = Gated(path)
    server, _ = serve(space=slow)
    host = Host(server.addresses[0])
    slow.gate.clear()
    cid = begin(host, HALF)
    assert slow.reached.wait(30)
    stopping = threading.Thread(target=partial(server.stop, grace=20.0))
    stopping.start()
    await_that(lambda: all(c.draining for c in server.connections), "draining")
    await_that(lambda: all(job.stopped.is_set() for job in server.service.views.jobs()), "stopped")
    slow.gate.set()
    assert host.admin.wait([cid])[cid][0] == StatusCode.ABORTED_QUEUE_DELETED
    stopping.join(30)
    assert not stopping.is_alive()
