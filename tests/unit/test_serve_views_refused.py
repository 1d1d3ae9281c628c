"""Views over NVMe/TCP: what is refused, limits, and who may ask."""

import contextlib
import threading

import numpy as np
import pytest
from tests.reference.nvme_host import HOST, Host, Queue
from tests.reference.view_host import (
    FIRST,
    HALF,
    OTHER,
    SAMPLE,
    VERTICES,
    WIDTH,
    ServedView,
    ask,
    delete,
    identify,
    made_here,
    namespaces,
    read_whole,
    send_request,
    view_server,
    write_volume,
)

from hyades.common.layout import BLOCK
from hyades.common.nvme import bringup, commands
from hyades.common.nvme.layout import DISCOVERY_NQN
from hyades.common.nvme.status import DNR, StatusCode
from hyades.common.nvme.vendor import ViewRequest, build_request, create_view, parse_answer
from hyades.common.units import KIB, MIB
from hyades.common.viewspec import SampleSpec
from hyades.common.volume import Volume
from hyades.target_side.events import (
    NullSink,
    ViewRefused,
)
from hyades.target_side.limits import ViewLimits
from hyades.target_side.namespaces import FileNamespace
from hyades.target_side.stage.viewpages import open_volume_view
from hyades.target_side.view_namespace import NamespaceBlocks, ViewNamespace


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_volume(tmp_path_factory.mktemp("views") / "g.vol")


@pytest.fixture
def serve(path):
    with contextlib.ExitStack() as stack:
        yield lambda *views, **how: stack.enter_context(view_server(path, *views, **how))


def refused(host, log, data, status, reason, **how):
    before = len(log.named(ViewRefused))
    assert send_request(host, data, **how) == (status, 0)
    event = log.named(ViewRefused)[before]
    assert reason in event.reason
    assert host.admin.run(commands.keep_alive())[0] == 0


INVALID = StatusCode.INVALID_FIELD | DNR
SHORT = np.ones((3, WIDTH - 1), np.float32)


@pytest.mark.parametrize(
    ("what", "weights", "status", "reason"),
    [
        (ViewRequest("hidden"), (), INVALID, "no matrix 'hidden'"),
        (ViewRequest("tiles"), (), INVALID, "no matrix 'tiles'"),
        (HALF, (SHORT,), INVALID, "for rows of 50 values"),
        (ViewRequest("features", page_size=100_000), (), INVALID, "page size 100000"),
        (
            ViewRequest("features", sample=SampleSpec(1, 1, 0, ((0, 9),))), (), INVALID,
            "lanes [0, 9)",
        ),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_met(serve, what, weights, status, reason):
    server, log = serve()
    host = Host(server.addresses[0])
    refused(host, log, build_request(what, weights), status, reason)
    assert namespaces(host) == [1]
    assert server.service.views.reserved == 0
    assert ask(host, HALF) == FIRST  # and it goes on


def test_requests_that_are_none(serve):
    server, log = serve("features:int8")
    host = Host(server.addresses[0])
    good = build_request(HALF)
    refused(host, log, bytes([good[0] ^ 1]) + good[1:], INVALID, "magic")
    refused(host, log, good[:30].ljust(40, b"\0"), INVALID, "view request")
    refused(host, log, good[:-1] + b"x", INVALID, "CRC32C")
    missing = StatusCode.INVALID_NAMESPACE | DNR
    refused(host, log, good, missing, "no namespace 7", nsid=7)
    refused(host, log, good, INVALID, "is a view itself", nsid=2)
    (_, second) = list(create_view(1, good, 64))[:2]
    code, _, _ = host.admin.run(second[0], source=second[1])
    assert code == INVALID
    assert "has not begun" in log.named(ViewRefused)[-1].reason
    sqe, part = next(create_view(1, good, 64))
    assert host.admin.run(sqe, source=part[:32])[0] == INVALID  # the SGL says less
    assert host.admin.run(sqe)[0] in (INVALID, StatusCode.SGL_TYPE_INVALID | DNR)
    assert host.admin.run(commands.keep_alive())[0] == 0
    assert len(log.named(ViewRefused)) == 8


def test_no_volume_is_a_read_error(serve, tmp_path):
    blank = tmp_path / "blank"
    blank.write_bytes(bytes(MIB))
    server, log = serve(space=FileNamespace(blank, read_only=True))
    host = Host(server.addresses[0])
    refused(host, log, build_request(HALF), StatusCode.READ_ERROR, "")


def test_limits_of_a_host(serve):
    server, log = serve(limits=ViewLimits(count=2, request=4 * KIB))
    host, other = Host(server.addresses[0]), Host(server.addresses[0], host=OTHER)
    assert [ask(host, HALF), ask(host, ViewRequest("features"))] == [2, 3]
    many = StatusCode.NAMESPACE_NO_IDENTIFIER | DNR
    refused(host, log, build_request(HALF), many, "2 views")
    assert delete(host, 2) == 0
    assert ask(host, HALF) == 2
    assert ask(other, HALF) == 2
    large = build_request(HALF, (np.ones((30, WIDTH), np.float32),))
    refused(other, log, large, INVALID, "at most 4096")


def test_limit_of_memory(serve):
    server, log = serve(memory=3 * MIB, threads=0)
    host = Host(server.addresses[0])
    full = StatusCode.NAMESPACE_NO_CAPACITY
    made = [ask(host, HALF)]
    while (answer := send_request(host, build_request(HALF)))[0] == 0:
        made.append(parse_answer(answer[1]))
        assert len(made) < 8
    assert answer == (full, 0)
    assert "--stage-memory" in log.named(ViewRefused)[-1].reason
    assert server.service.views.reserved <= 3 * MIB
    assert delete(host, made[0]) == 0
    assert ask(host, HALF) == made[0]  # what was deleted is closed before


def test_parts_within_the_largest_transfer(serve):
    server, log = serve(max_transfer=8 * KIB)
    host = Host(server.addresses[0])
    data = build_request(HALF, (np.ones((64, WIDTH), np.float32),))
    refused(host, log, data, INVALID, "at most 8192")
    code, nsid = send_request(host, data, most=8 * KIB)
    assert (code, nsid) == (0, FIRST)


@pytest.mark.parametrize("hosts", [frozenset({OTHER}), None])
def test_who_may_ask(serve, hosts):
    limits = ViewLimits(hosts=hosts) if hosts else ViewLimits(count=0)
    server, log = serve(limits=limits)
    denied = StatusCode.OPERATION_DENIED | DNR
    host = Host(server.addresses[0])
    refused(host, log, build_request(HALF), denied, "may not ask")
    assert delete(host, 2) == denied
    if hosts:
        assert ask(Host(server.addresses[0], host=OTHER), HALF) == FIRST


def test_views_of_a_volume_that_is_written_stay_where_they_were(serve, tmp_path):
    path = write_volume(tmp_path / "rw.vol")
    server, _ = serve(space=FileNamespace(path))
    host = Host(server.addresses[0])
    nsid = ask(host, HALF)
    before = read_whole(host.io, nsid, identify(host, nsid).blocks)
    assert host.io.write(0, host.io.read(0, 8)[1]) == 0
    assert read_whole(host.io, nsid, identify(host, nsid).blocks) == before
    assert ServedView(before).spec.rows == VERTICES


def test_a_discovery_controller_has_no_views(serve):
    server, log = serve()
    queue = Queue(server.addresses[0])
    want = commands.Connect(0, 32, DISCOVERY_NQN, HOST, bytes(16))
    queue.talk(bringup.bring_up(want, 0))
    sqe, part = next(create_view(1, build_request(HALF), MIB))
    code, _, _ = queue.run(sqe, source=part, in_capsule=True)
    assert code == StatusCode.INVALID_OPCODE | DNR
    assert "no views here" in log.named(ViewRefused)[0].reason
    queue.close()


def test_what_a_buffer_held_before_is_gone(path):
    what = ViewRequest("features", "int8", sample=SAMPLE)  # its pages are partly empty
    expected = made_here(path, what)
    source = FileNamespace(path, read_only=True)
    with Volume.open(NamespaceBlocks(source, threading.Event())) as volume:
        pages = open_volume_view(volume, "features", encoding="int8", sample=SAMPLE)
        view = ViewNamespace(
            pages, "v", stopped=threading.Event(), sink=NullSink(), closed=lambda: None
        )
        for lba in range(view.blocks - 1):
            into = bytearray(b"\xff" * 2 * BLOCK)
            assert view.read_into(lba * BLOCK, memoryview(into)) == 0
            assert into == expected[lba * BLOCK : (lba + 2) * BLOCK]
        assert view.view(0, BLOCK) is view.reference(0, BLOCK) is None
        assert view.zero(0, BLOCK) == StatusCode.WRITE_PROTECTED | DNR
        view.close()
        view.close()
        gone = StatusCode.INVALID_NAMESPACE | DNR
        assert view.read_into(0, memoryview(bytearray(BLOCK))) == gone
    source.close()
