"""The contract suite over SPDK: the stand-in that tests compile, and a real one where there is one.

The real one is what HYADES_SPDK_LIB names, with a namespace at HYADES_SPDK_URL of at least 4 MiB
that may be overwritten.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.contracts.transport import TransportContract, arena_for, finish, request
from tests.reference.spdk import (
    REAL_URL,
    StandIn,
    needs_compiler,
    needs_real_spdk,
    remove_builds,
)

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, Op
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    yield
    remove_builds()


class SpdkContract(TransportContract):
    fixed_size = True

    @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def test_against_a_model(self, tmp_path_factory, data):
        """Fewer examples than the base: each starts a process."""
        self.check_model(tmp_path_factory, data)


@needs_compiler
class StandInContract(SpdkContract):
    options = "ns=1"
    faults: dict = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _stand_in(self, monkeypatch, tmp_path):
        self.stand_in = StandIn(monkeypatch, tmp_path)
        self.stand_in.faults(**self.faults)

    def make(self, folder, nblocks):
        self.stand_in.device(nblocks)
        return self.stand_in.open(self.options)

    def test_longer_than_max_transfer(self, tmp_path):
        """The base's version grows the device, which a namespace cannot."""
        device = self.make(tmp_path, 2048)
        limit = device.limits.max_transfer
        device.register(arena_for(device, limit + BLOCK))
        assert finish(device, request(Op.READ, nbytes=limit, cookie=1))[1] == (0, limit)
        assert finish(device, request(Op.READ, nbytes=limit + BLOCK, cookie=2))[2][0] == -7
        device.close()

    def test_a_private_arena_is_refused(self, device):
        with pytest.raises(UsageError, match=r"allocate_arena\(nbytes, shared=True\)"):
            device.register(allocate_arena(BLOCK))
        device.register(arena_for(device, BLOCK))


class TestStandIn(StandInContract):
    pass


class TestStandInUnwilling(StandInContract):
    """Small sectors, two queues, refused submits, and answers that are late and out of order."""

    options = "ns=1&queues=2&depth=5&max_transfer=512KiB"
    faults = {"sector": 512, "enomem": 3, "hold": 2}  # noqa: RUF012
    test_invalid_requests = None  # refused before they reach the process


@needs_real_spdk
class TestRealSpdk(SpdkContract):
    def make(self, folder, nblocks):
        device = open_transport(REAL_URL)
        zeros = arena_for(device, 4 * nblocks * BLOCK)
        device.register(zeros)
        step = device.limits.max_transfer // BLOCK
        for lba in range(0, nblocks, step):
            count = min(step, nblocks - lba)
            assert finish(device, request(Op.WRITE, lba, count, 0, 1)) == {1: (0, count * BLOCK)}
        device.close()
        return _FirstBlocks(open_transport(REAL_URL), nblocks)

    def test_longer_than_max_transfer(self, tmp_path):
        device = open_transport(REAL_URL)
        limit = device.limits.max_transfer
        device.register(arena_for(device, limit + BLOCK))
        assert finish(device, request(Op.READ, nbytes=limit, cookie=1))[1] == (0, limit)
        assert finish(device, request(Op.READ, nbytes=limit + BLOCK, cookie=2))[2][0] == -7
        device.close()


class _FirstBlocks:
    """A device that is larger than the suite expects, as if it ended after some blocks."""

    def __init__(self, inner, nblocks):
        self.inner, self.nblocks = inner, nblocks
        inner._nblocks = nblocks

    def __getattr__(self, name):
        return getattr(self.inner, name)


def test_both_sides_map_the_same_pages(monkeypatch, tmp_path):
    """What the process reads is in the caller's arena without a copy on this side."""
    stand_in = StandIn(monkeypatch, tmp_path)
    path = stand_in.device(4)
    path.write_bytes(np.arange(4 * BLOCK // 4, dtype=np.uint32).tobytes())
    device = stand_in.open()
    arena = arena_for(device, 8 * BLOCK)
    device.register(arena)
    finish(device, request(Op.READ, 0, 4, 2 * BLOCK, 1))
    assert np.array_equal(arena[2 * BLOCK : 6 * BLOCK].view(np.uint32), np.arange(4096))
    device.close()
