"""A view that a host asks for: what is refused, damaged or slow.

Targets run in this process, so that a test can hold up what they do.
"""

import threading

import numpy as np
import pytest
from tests.contracts.transport import finish
from tests.reference import nvme
from tests.reference.nvme_host import await_that
from tests.reference.own_views import NONE, WHAT, Begun, read_again, reads_of
from tests.reference.stage import make_volume, random_edges
from tests.reference.view_host import (
    HALF,
    made_here,
    view_server,
)

from hyades.common.blocks import MemoryBlocks
from hyades.common.errors import DataError, PeerError, UsageError
from hyades.common.layout import BLOCK, COMPLETION, Status
from hyades.common.nvme.bringup import ViewDeferred, ViewRefused
from hyades.common.nvme.vendor import ViewRequest, build_request
from hyades.common.units import MIB
from hyades.proxy.transports import nvme_talk
from hyades.target_side.events import ViewOpened
from hyades.target_side.stage import viewpages
from hyades.target_side.view_service import ViewService

# -- the first time


def test_what_is_refused_at_once(serve_views, open_views, view_volume, tmp_path):
    server, *_ = serve_views("features:int8")
    for views, options, text in (
        (ViewRequest("hidden"), {}, "its log says why"),
        (WHAT, {"ns": 2}, "its log says why"),
        (WHAT, {"ns": 9}, "there is no such namespace"),
    ):
        with pytest.raises(UsageError, match=text):
            open_views(server, what=views, **options)
    small, *_ = serve_views(memory=MIB)
    with pytest.raises(ViewDeferred, match="--stage-memory"):
        open_views(small)
    closed, *_ = serve_views(limits=NONE)
    with pytest.raises(ViewRefused, match=r"view of ns 1: .*--view-host"):
        open_views(closed)
    with nvme.stopped_at_end() as servers:
        servers.append(nvme.file_server(tmp_path, 64))
        with pytest.raises(ViewRefused, match="it has no views"):
            open_views(servers[0])


def test_sixteen_mebibytes_of_weights(open_views, tmp_path):
    rng = np.random.default_rng(1)
    volume = make_volume(
        random_edges(64, 200), rng.standard_normal((64, 4096)).astype(np.float32), range_rows=64
    )
    assert isinstance(volume.blocks, MemoryBlocks)
    wide = tmp_path / "wide.vol"
    wide.write_bytes(volume.blocks.data.tobytes())
    weights = (rng.standard_normal((1000, 4096)).astype(np.float32),)
    assert len(build_request(HALF, weights)) > 15 * MIB
    with view_server(wide, memory=512 * MIB) as (server, _):
        view = open_views(server, what=HALF, weights=weights)
        arena, reads = reads_of(view)
        assert read_again(view, arena, reads) == made_here(wide, HALF, weights)


def test_a_head_that_is_damaged(serve_views, open_views, monkeypatch):
    inner = viewpages.build_head

    def damage(*args):
        head = bytearray(inner(*args))
        head[70] ^= 1
        return bytes(head)

    monkeypatch.setattr(viewpages, "build_head", damage)
    server, *_ = serve_views()
    with pytest.raises(DataError, match="view of ns 1: view head: CRC32C"):
        open_views(server)


# -- slow targets


class Held:
    """Holds up the making of views, and counts keep-alives that were answered."""

    def __init__(self, monkeypatch):
        self.gate, self.asked, self.beats = threading.Event(), threading.Event(), 0
        make, check = ViewService._make, nvme_talk.check_alive

        def held(service, job):
            self.asked.set()
            while not self.gate.wait(0.01) and not job.stopped.is_set():
                pass
            return make(service, job)

        def counted(code):
            check(code)
            self.beats += 1

        monkeypatch.setattr(ViewService, "_make", held)
        monkeypatch.setattr(nvme_talk, "check_alive", counted)


@pytest.fixture
def held(monkeypatch):
    found = Held(monkeypatch)
    yield found
    found.gate.set()


def test_a_view_that_takes_longer_than_any_timeout(serve_views, open_views, held, view_volume):
    server, *_ = serve_views()
    found = []
    thread = threading.Thread(target=lambda: found.append(open_views(server)))
    thread.start()
    await_that(lambda: held.beats >= 4, "the target is not kept alive")  # every 2 s
    assert not found
    held.gate.set()
    thread.join()
    (view,) = found
    assert read_again(view, *reads_of(view)) == made_here(view_volume, WHAT)


def test_a_slow_view_is_waited_for_longer_than_for_a_path(
    serve_views, open_views, held, view_volume
):
    """After a restart, too: what shows that it is alive is not lost."""
    held.gate.set()
    server, _, stop = serve_views()
    view = open_views(server, ctrl_loss_timeout=1.5)
    arena, reads = reads_of(view)
    assert read_again(view, arena, reads) == made_here(view_volume, WHAT)
    held.gate.clear()
    held.asked.clear()
    # Nobody polls until the target is asked: what it then takes is what is tested.
    port = server.addresses[0][1]
    stop()
    before = held.beats
    serve_views(port=port)
    await_that(lambda: held.beats > before, "the target was not asked")
    arena[:] = 0xEE
    taken, before = view.submit(reads), held.beats
    completions = np.zeros(4, COMPLETION)

    def beaten():
        assert not view.poll(completions)
        return held.beats >= before + 3

    await_that(beaten, "the target is not kept alive")
    held.gate.set()
    done = finish(Begun(view, taken), reads)
    assert done == dict.fromkeys(range(len(reads)), (Status.OK, BLOCK))
    assert arena[: len(reads) * BLOCK].tobytes() == made_here(view_volume, WHAT)


def test_closing_does_not_wait_for_a_view(serve_views, open_views, held):
    held.gate.set()
    server, _, stop = serve_views()
    view = open_views(server)
    held.gate.clear()
    held.asked.clear()
    stop()
    _, log, _ = serve_views(port=server.addresses[0][1])
    assert held.asked.wait(60)
    view.close()
    (path,) = view._paths.paths
    await_that(lambda: not path.thread.is_alive(), "its path waits for the view")
    assert not log.named(ViewOpened)


def test_a_target_that_keeps_silent_meanwhile(serve_views, open_views, held, monkeypatch):
    monkeypatch.setattr(nvme_talk.Talker, "_beaten", staticmethod(lambda wire, cid: False))
    server, *_ = serve_views()
    with pytest.raises(PeerError, match=r"no answer from|closed the connection"):
        open_views(server, kato=1, timeout=1)


def test_a_target_that_stops_meanwhile(serve_views, open_views, held):
    server, _, stop = serve_views()
    errors = []

    def ask():
        try:
            open_views(server)
        except PeerError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert held.asked.wait(60)
    stop()
    thread.join()
    assert errors
