"""The contract suite against the gds transport: a stand-in of kvikio, and kvikio itself."""

import importlib

import pytest
from tests.contracts.transport import ARENA, TransportContract
from tests.reference import kvikio

from hyades.proxy.transports import gds
from hyades.proxy.transports.gds import GdsTransport


class GdsContract(TransportContract):
    options: dict = {}  # noqa: RUF012
    says = ""

    def make(self, folder, nblocks):
        path = folder / "device"
        path.write_bytes(bytes(nblocks * 4096))
        transport = GdsTransport(path, depth=16, **self.options)
        assert self.says in transport.describe()
        return transport


class Standin(GdsContract):
    @pytest.fixture(autouse=True)
    def _standin(self, monkeypatch):
        state = kvikio.install(monkeypatch)
        yield
        state.close()


class TestGdsOnAGpu(Standin):
    """The arena says that it is in GPU memory."""

    says = "cuFile"

    @pytest.fixture
    def arena(self, device):
        arena = kvikio.device_arena(ARENA)
        device.register(arena)
        assert "GPU memory" in device.describe()
        return arena


class TestGdsHostArena(Standin):
    says = "cuFile"

    def test_it_says_where_the_arena_is(self, device, arena):
        assert "arena in host memory" in device.describe()


class TestGdsCompat(Standin):
    options = {"compat": True}  # noqa: RUF012
    says = "POSIX mode"


class TestRealKvikio(GdsContract):
    """kvikio itself in its POSIX mode; it needs libcuda.so.1 even so."""

    options = {"compat": True}  # noqa: RUF012
    says = "POSIX mode"

    @pytest.fixture(autouse=True)
    def _real(self):
        problem = gds.probe_compat()
        if problem is not None:
            pytest.skip(problem)
        assert hasattr(importlib.import_module("kvikio.cufile"), "IOFuture")
