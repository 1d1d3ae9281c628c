"""Views over shared memory: static ones, and one that a host asks for on its admin queue."""

import time

import numpy as np
import pytest
from tests.contracts.transport import arena_for, finish, request
from tests.reference import dma
from tests.reference.view_host import FIRST, HALF, NQN, W, made_here, view_server, write_volume

from hyades.common.errors import PeerError, UsageError
from hyades.common.layout import BLOCK, Op
from hyades.common.nvme import bringup
from hyades.common.nvme.vendor import ViewRequest, build_request, create_view, parse_answer
from hyades.common.units import KIB, MIB
from hyades.proxy.registry import open_transport
from hyades.proxy.transports.nvme_discovery import discover
from hyades.proxy.transports.nvme_dma_session import DmaSession
from hyades.proxy.transports.nvme_dma_url import parse
from hyades.proxy.transports.nvme_talk import Waker
from hyades.proxy.urls import Url
from hyades.target_side.events import ViewClosed

WAYS = [{"buffer": 5001, "buffers": 2}, {"zerocopy": 1}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_volume(tmp_path_factory.mktemp("views") / "g.vol")


@pytest.fixture
def socket():
    return dma.socket_path()


def url(socket, **options):
    text = "&".join(f"{key}={value}" for key, value in options.items())
    return f"dma://{socket}/{NQN}?{text}"


def read_all(address):
    """Return all bytes of a namespace."""
    device = open_transport(address, writable=False)
    nblocks = device.nblocks
    arena = arena_for(device, nblocks * BLOCK)
    device.register(arena)
    batch = [
        request(Op.READ, lba, min(16, nblocks - lba), lba * BLOCK, lba)
        for lba in range(0, nblocks, 16)
    ]
    assert {status for status, _ in finish(device, np.concatenate(batch)).values()} == {0}
    device.close()
    return arena[: nblocks * BLOCK].tobytes()


@pytest.mark.parametrize("options", WAYS)
def test_a_static_view(path, socket, options):
    with view_server(path, "features:float16", dma=[socket]):
        assert read_all(url(socket, ns=2, **options)) == made_here(path, HALF)
        assert read_all(url(socket, ns=1, **options)) == path.read_bytes()


def test_a_view_that_a_host_asks_for(path, socket):
    """Its weights need more than one buffer; it is read by another queue of the same host."""
    what = ViewRequest("features", "float16", 64 * KIB)
    with view_server(path, dma=[socket]) as (_, log):
        waker = Waker()
        options = parse(Url(url(socket, buffer=4096)))
        session = DmaSession(None, options, options.addresses[0], waker, lambda: False)
        session.open()

        def conversation():
            code = result = 0
            for sqe, part in create_view(1, build_request(what, (W, W[:3])), MIB):
                code, result, _ = yield bringup.Call(sqe, source=bytes(part))
                assert not code
            nsid = parse_answer(result)
            active = yield from bringup.read_namespaces()
            info = yield from bringup.read_namespace(nsid)
            return nsid, active, info

        session._deadline = time.monotonic() + 30
        nsid, active, info = session._talk(conversation())
        assert (nsid, list(active)) == (FIRST, [1, FIRST])
        assert info.read_only
        assert info.blocks * BLOCK == len(made_here(path, what, (W, W[:3])))
        session.close()
        deadline = time.monotonic() + 30
        while not log.named(ViewClosed):
            assert time.monotonic() < deadline, "the view outlives its host"
            time.sleep(0.01)
        waker.close()


def test_discovery_tells_the_socket_to_who_came_by_it(path, socket):
    with view_server(path, dma=[socket]) as (server, _):
        options = parse(Url(url(socket, ns=1)))
        (entry,) = discover(options, options.addresses[0], lambda *a: DmaSession(None, *a))
        assert (entry.subnqn, entry.address, entry.transport) == (NQN, socket, 254)
        with pytest.raises(UsageError, match=f"{socket} offers {NQN} to"):
            open_transport(f"dma://{socket}/nqn.2026-01.org.example:other?ns=1")
        assert server.dma_paths == [socket]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dma://run/hyades.sock/nqn.a:b", "the target's socket, then the subsystem"),
        ("dma:///run/hyades.sock", "the target's socket, then the subsystem"),
        ("dma:///run/hyades.sock/nqn.a:b?buffer=1", "buffer is from 4.0 KiB"),
        ("dma:///run/hyades.sock/nqn.a:b?buffers=65", "buffers is at most 64"),
        ("dma:///run/hyades.sock/nqn.a:b?zerocopy=2", "zerocopy is 1 or 0"),
        ("dma:///run/hyades.sock/nqn.a:b?digest=data", "has no option digest"),
        ("dma:///nowhere/hyades.sock/nqn.a:b", "no target listens there"),
    ],
)
def test_urls_that_cannot_be_meant(text, said):
    with pytest.raises((UsageError, PeerError), match=said):
        open_transport(text)
