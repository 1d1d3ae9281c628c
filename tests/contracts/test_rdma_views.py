"""Views that a host asks for over RDMA, where an RDMA device is.

tests/vm/test_rdma_contract.py runs this file in a guest with the kernel's software device.
"""

import threading

import numpy as np
import pytest
from tests.reference import rdma
from tests.reference.nvme_host import await_that
from tests.reference.own_views import read_again, reads_of
from tests.reference.view_host import SAMPLE, WIDTH, made_here, view_server, write_volume

from hyades.common.nvme.vendor import ViewRequest, build_request
from hyades.common.units import KIB
from hyades.proxy.transports import nvme_talk
from hyades.proxy.views import open_view
from hyades.target_side.view_service import ViewService

SAMPLED = ViewRequest("features", "int8", 64 * KIB, SAMPLE)


@pytest.fixture
def path(tmp_path):
    return write_volume(tmp_path / "g.vol")


@pytest.fixture
def server(path):
    with view_server(path, rdma=[(rdma.address(), 0)]) as (started, _):
        yield started


def test_a_request_in_parts(server, path):
    """Its weights need more than one command."""
    weights = np.random.default_rng(0).standard_normal((1500, WIDTH)).astype(np.float32)
    what = ViewRequest("features", "float16", 64 * KIB)
    view = open_view(rdma.url(server), build_request(what, (weights,)))
    assert read_again(view, *reads_of(view)) == made_here(path, what, (weights,))
    view.close()


def test_a_view_that_takes_longer_than_any_timeout(server, path, monkeypatch):
    gate, beats, found = threading.Event(), [], []
    make, check = ViewService._make, nvme_talk.check_alive

    def held(service, job):
        assert gate.wait(60)
        return make(service, job)

    def counted(code):
        check(code)
        beats.append(code)

    monkeypatch.setattr(ViewService, "_make", held)
    monkeypatch.setattr(nvme_talk, "check_alive", counted)
    url = rdma.url(server, kato=6, timeout=6)
    asking = threading.Thread(target=lambda: found.append(open_view(url, build_request(SAMPLED))))
    asking.start()
    await_that(lambda: len(beats) >= 4, "the target is not kept alive")
    assert not found
    gate.set()
    asking.join()
    (view,) = found
    assert read_again(view, *reads_of(view)) == made_here(path, SAMPLED)
    view.close()
