"""The stage on this machine: the same blocks as a target's view, and what keeps it from that."""

import threading
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.contracts.transport import finish, request, sweep
from tests.reference import nvme
from tests.reference.nvme_host import await_that
from tests.reference.view_host import (
    HALF,
    SAMPLE,
    W,
    made_here,
    view_server,
    write_volume,
)

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, COMPLETION, Op, Status
from hyades.common.nvme.vendor import ViewRequest, build_request
from hyades.common.units import KIB, MIB
from hyades.common.viewspec import parse_head
from hyades.deploy.local_stage import LocalStageTransport, open_local_view
from hyades.deploy.volumes import open_volume
from hyades.proxy.arena import allocate_arena
from hyades.proxy.views import open_view
from hyades.target_side.stage.viewpages import ViewPages, open_volume_view

VIEWS = [
    (HALF, ()),
    (ViewRequest("features", "int8", 64 * KIB), ()),
    (ViewRequest("features", "bfloat16"), (W,)),
    (ViewRequest("features", sample=SAMPLE), ()),
    (ViewRequest("features", "int8", 64 * KIB, SAMPLE), (W, W[:3])),
]
NAMES = ["float16", "int8", "project", "sample", "all"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_volume(tmp_path_factory.mktemp("local") / "g.vol")


def read_all(device):
    arena = allocate_arena(device.nblocks * BLOCK)
    device.register(arena)
    reads = [request(Op.READ, b, 1, b * BLOCK, b) for b in range(device.nblocks)]
    done = finish(device, np.concatenate(reads))
    assert done == dict.fromkeys(range(device.nblocks), (Status.OK, BLOCK))
    return arena[: device.nblocks * BLOCK].tobytes()


@pytest.mark.parametrize(("what", "weights"), VIEWS, ids=NAMES)
def test_the_bytes_are_those_of_the_target(path, what, weights):
    data = build_request(what, weights)
    with view_server(path) as (server, _):
        view = open_view(nvme.url(server), data)
        theirs = read_all(view)
        view.close()
        # The volume is read over the wire, as when a target refuses views and still has it.
        local = open_local_view(nvme.url(server), data, view.head)
        assert local.nblocks == view.nblocks
        assert read_all(local) == theirs == made_here(path, what, weights)
        assert local.stats()["raw"]["bytes_read"] > 0
        local.close()


def head_of(path, what, weights=()):
    return parse_head(made_here(path, what, weights))


def test_another_volume_is_refused(path, tmp_path):
    other = write_volume(tmp_path / "other.vol")
    with pytest.raises(UsageError, match="it has changed since the run began"):
        open_local_view(str(other), build_request(HALF), head_of(path, HALF))


def test_a_later_commit_is_refused(tmp_path):
    own = write_volume(tmp_path / "g.vol")
    head = head_of(own, HALF)
    with open_volume(str(own), writable=True) as volume:
        volume.commit()
    with pytest.raises(UsageError, match=r"generation=3.*not.*generation=2"):
        open_local_view(str(own), build_request(HALF), head)


def test_another_request_is_refused(path):
    head = head_of(path, HALF)
    for what in (ViewRequest("features", "int8"), ViewRequest("features", "float16", 64 * KIB)):
        with pytest.raises(UsageError, match="is not what the view was of"):
            open_local_view(str(path), build_request(what), head)
    with pytest.raises(UsageError, match="view request"):
        open_local_view(str(path), b"nothing", head)
    with pytest.raises(UsageError, match="stage memory"):
        open_local_view(str(path), build_request(HALF), head, memory=64 * KIB)


def test_other_counts_are_refused(path):
    what = ViewRequest("features", sample=SAMPLE)
    head = head_of(path, what)
    wrong = replace(head, counts=head.counts + np.uint32(1))
    with pytest.raises(UsageError, match="other rows are needed"):
        open_local_view(str(path), build_request(what), wrong)


def test_a_damaged_page_is_an_error_that_says_which(tmp_path):
    own = write_volume(tmp_path / "g.vol")
    head = head_of(own, HALF)
    with open_volume(str(own)) as volume:
        lba = int(volume.catalog.objects["features"].lba(0))
    data = bytearray(own.read_bytes())
    data[lba * BLOCK + 100] ^= 4
    own.write_bytes(data)
    local = open_local_view(str(own), build_request(HALF), head)
    local.register(allocate_arena(MIB))
    done = finish(local, np.concatenate([request(Op.READ, 0, 1, 0, 1), request(Op.READ, 1, 1)]))
    assert done == {1: (Status.OK, BLOCK), 0: (Status.IO, 0)}
    assert "'features' page 0" in local.locate(local.failed_lba(0, 4))
    assert local.stats()["errors"] == 1
    local.close()


class Stuck:
    """Reads of pages wait until `open` is called."""

    def __init__(self, volume):
        self.volume, self.gate, self.asked = volume, threading.Event(), threading.Event()

    def read_page(self, *args):
        self.asked.set()
        assert self.gate.wait(60)
        return self.volume.read_page(*args)


def test_polling_does_not_wait_and_close_cancels_what_has_not_begun(path):
    with open_volume(str(path)) as volume:
        spec = msgspec.structs.replace(open_volume_view(volume, "features").spec)
        stuck = Stuck(volume)
        pages = ViewPages(spec, volume.catalog, stuck.read_page)
        closed = threading.Event()
        local = LocalStageTransport(pages, "g.vol", closing=closed.set)
        local.register(allocate_arena(MIB))
        reads = np.concatenate([request(Op.READ, 1 + i, 1, i * BLOCK, i) for i in range(5)])
        assert local.submit(reads) == 5
        assert stuck.asked.wait(60)
        completions = np.zeros(8, COMPLETION)
        for _ in range(3):
            assert local.poll(completions) == 0
            local.wait(0.001)
        closing = threading.Thread(target=local.close)
        closing.start()
        await_that(lambda: local._closed, "close has not begun")
        stuck.gate.set()
        closing.join()
        found = dict(sweep(local))
        assert found == {0: Status.OK, **dict.fromkeys(range(1, 5), Status.CANCELLED)}
        assert closed.is_set()
