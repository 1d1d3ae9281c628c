"""A host's own view over connections that are lost and targets that change meanwhile.

Targets run in this process.
"""

import numpy as np
from tests.contracts.transport import finish
from tests.reference import nvme
from tests.reference.nvme_host import await_that
from tests.reference.own_views import (
    NONE,
    QUICK,
    WHAT,
    Begun,
    live,
    read_again,
    reads_of,
)
from tests.reference.view_host import (
    SAMPLE,
    W,
    made_here,
    view_server,
    write_volume,
)

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, COMPLETION, Status
from hyades.common.nvme.vendor import ViewRequest, build_request
from hyades.common.units import KIB, MIB
from hyades.deploy.local_stage import open_local_view
from hyades.deploy.volumes import open_volume
from hyades.proxy.transports.switch import SwitchableDevice
from hyades.proxy.views import open_view, why_no_views
from hyades.target_side.events import ViewClosed, ViewOpened

# -- paths


def test_each_path_has_a_view_of_its_own_and_one_may_go(serve_views, open_views, view_volume):
    (one, log, stop), (two, other, _) = serve_views(), serve_views()
    view = open_views(one, two)
    await_that(lambda: live(view, 2), "a path is not live")
    expected = made_here(view_volume, WHAT)
    arena, reads = reads_of(view)
    assert read_again(view, arena, reads) == expected
    assert len(log.named(ViewOpened)) == len(other.named(ViewOpened)) == 1
    stop()
    assert read_again(view, arena, reads) == expected
    assert view.stats()["losses"] == 1
    assert len(other.named(ViewOpened)) == 1
    view.close()
    await_that(lambda: other.named(ViewClosed), "the view outlives its host")


def test_a_path_to_another_volume_is_refused(serve_views, open_views, tmp_path):
    first, *_ = serve_views()
    with view_server(write_volume(tmp_path / "other.vol")) as (second, _):
        try:
            view = open_views(first, second)
        except UsageError as error:
            said = str(error)
        else:  # the second path came late, so opening has not waited for it

            def problems():
                return [found["problem"] for found in view.stats()["paths"] if found["problem"]]

            await_that(problems, "both paths are used")
            (said,) = problems()
            assert live(view, 1)
        assert "another volume than when the run began" in said


def test_a_target_that_was_restarted_is_asked_again(serve_views, open_views, view_volume):
    server, log, stop = serve_views()
    view = open_views(server, what=ViewRequest("features", "int8", 64 * KIB, SAMPLE))
    expected = made_here(view_volume, ViewRequest("features", "int8", 64 * KIB, SAMPLE))
    arena, reads = reads_of(view)
    port = server.addresses[0][1]
    for _ in range(2):
        assert read_again(view, arena, reads) == expected
        stop()
        # Another namespace takes the id that the view had before.
        _, log, stop = serve_views("features:float32", port=port)
        assert read_again(view, arena, reads) == expected
        (seen,) = log.named(ViewOpened)
        assert seen.namespace == 3
    assert view.stats()["reconnects"] == 2


def lose(view, reads):
    """Read, and return what the transport says of it when all is lost."""
    assert finish(view, reads) == dict.fromkeys(range(len(reads)), (Status.LOST, 0))
    assert finish(view, reads[:2]) == dict.fromkeys(range(2), (Status.LOST, 0))
    said = view.locate(0)
    assert "the view is gone" in said
    assert "0 of 1 paths live" in view.describe()
    assert said.partition("(")[2].rstrip(")") in view.describe()
    return said


def test_a_target_that_refuses_later_ends_all_at_once(serve_views, open_views):
    """The limit of ten minutes is not waited for."""
    server, _, stop = serve_views()
    view = open_views(server)
    _, reads = reads_of(view)
    stop()
    serve_views(port=server.addresses[0][1], limits=NONE)
    assert "operation denied" in (said := lose(view, reads))
    assert "--view-host on the target" in said


def test_a_volume_that_has_changed_meanwhile(serve_views, open_views, view_volume):
    server, _, stop = serve_views()
    view = open_views(server)
    _, reads = reads_of(view)
    stop()
    with open_volume(str(view_volume), writable=True) as volume:
        volume.commit()
    serve_views(port=server.addresses[0][1])
    assert "the volume has changed since the run began" in (said := lose(view, reads))
    assert "commit 3, it was at 2" in said


def test_too_little_memory_passes(serve_views, open_views, view_volume):
    """The view of a lost connection holds memory for a while, so that is waited for."""
    server, _, stop = serve_views()
    view = open_views(server)
    arena, reads = reads_of(view)
    stop()
    port = server.addresses[0][1]
    *_, stop = serve_views(port=port, memory=MIB)
    taken = view.submit(reads)
    completions = np.zeros(4, COMPLETION)
    await_that(
        lambda: view.poll(completions) or "--stage-memory" in view.stats()["paths"][0]["problem"],
        "memory was not missing",
    )
    assert "too little memory" in view.stats()["paths"][0]["problem"]
    stop()
    serve_views(port=port)
    done = finish(Begun(view, taken), reads)
    assert done == dict.fromkeys(range(len(reads)), (Status.OK, BLOCK))
    assert arena[: len(reads) * BLOCK].tobytes() == made_here(view_volume, WHAT)


# -- in place of a target's view


def test_a_run_that_loses_its_view_goes_on_with_raw_pages(serve_views, view_volume):
    server, _, stop = serve_views()
    url = nvme.address_url(server.addresses[0], **QUICK)
    assert why_no_views(url) is None
    request_ = build_request(ViewRequest("features", "int8", 64 * KIB, SAMPLE), (W,))
    view = open_view(url, request_)
    head = view.head
    device = SwitchableDevice(view, fallback=lambda _: open_local_view(url, request_, head))
    arena, reads = reads_of(device)
    expected = made_here(view_volume, ViewRequest("features", "int8", 64 * KIB, SAMPLE), (W,))
    assert read_again(device, arena, reads) == expected
    stop()
    serve_views(port=server.addresses[0][1], limits=NONE)
    assert read_again(device, arena, reads) == expected
    assert "--view-host on the target" in device.fell_back
    assert "computed here" in device.describe()
    device.close()


def test_a_changed_volume_is_not_fallen_back_to(serve_views, view_volume):
    server, _, stop = serve_views()
    url, data = nvme.address_url(server.addresses[0], **QUICK), build_request(WHAT)
    view = open_view(url, data)
    head = view.head
    device = SwitchableDevice(view, fallback=lambda _: open_local_view(url, data, head))
    _, reads = reads_of(device)
    stop()
    with open_volume(str(view_volume), writable=True) as volume:
        volume.commit()
    serve_views(port=server.addresses[0][1])
    assert finish(device, reads) == dict.fromkeys(range(len(reads)), (Status.LOST, 0))
    said = device.locate(0)
    assert "the volume has changed since the run began" in said
    assert "start the run again" in said
    device.close()
