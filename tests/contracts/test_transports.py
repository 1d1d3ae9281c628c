"""The contract suite against every transport of the proxy."""

import numpy as np
import pytest
from tests.contracts.transport import TransportContract, finish, request

from hyades.common.layout import BLOCK, Op
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport
from hyades.proxy.transports.faulty import FaultPlan, FaultyTransport
from hyades.proxy.transports.file import FileTransport, detail
from hyades.proxy.transports.mem import MemoryStore, MemTransport
from hyades.proxy.transports.null import NullTransport


class TestMem(TransportContract):
    def make(self, folder, nblocks):
        return MemTransport(MemoryStore(nblocks))


class TestMemSmallQueue(TransportContract):
    def make(self, folder, nblocks):
        return MemTransport(MemoryStore(nblocks), max_inflight=3)


class TestNull(TransportContract):
    keeps_data = False

    def make(self, folder, nblocks):
        return NullTransport(nblocks)


class FileContract(TransportContract):
    options: dict = {}  # noqa: RUF012
    says = ""

    def make(self, folder, nblocks):
        if self.options["engine"] == "io_uring" and "slower" in detail():
            pytest.skip(f"no io_uring: {detail()}")
        path = folder / "device"
        path.write_bytes(bytes(nblocks * BLOCK))
        transport = FileTransport(path, **self.options)
        assert self.says in transport.describe()
        return transport


class TestFileUring(FileContract):
    options = {"engine": "io_uring", "depth": 16}  # noqa: RUF012
    says = "io_uring"

    def test_arena_is_registered(self, device, arena):
        assert "registered arena" in device.describe()


class TestFileUringInSteps(FileContract):
    """Each system call moves two blocks: every longer request goes through the continuation."""

    options = {"engine": "io_uring", "depth": 5, "step": 2 * BLOCK}  # noqa: RUF012
    says = "io_uring"


class TestFileUringPageCache(FileContract):
    options = {"engine": "io_uring", "direct": False}  # noqa: RUF012
    says = "page cache"


class TestFileThreads(FileContract):
    options = {"engine": "threads", "depth": 16}  # noqa: RUF012
    says = "preadv on 4 threads"


class TestFileThreadsInSteps(FileContract):
    options = {"engine": "threads", "direct": False, "depth": 2, "step": BLOCK}  # noqa: RUF012
    says = "preadv on 2 threads, page cache"


def test_null_can_leave_the_buffer():
    device = NullTransport(8, fill=False)
    arena = allocate_arena(BLOCK)
    arena[:] = 5
    device.register(arena)
    finish(device, request(Op.READ))
    assert (arena == 5).all()
    filled = NullTransport(8)
    filled.register(arena)
    finish(filled, request(Op.READ))
    assert not np.any(arena)


class TestFaultyWithoutFaults(TransportContract):
    def make(self, folder, nblocks):
        return FaultyTransport(MemTransport(MemoryStore(nblocks)), FaultPlan())


class TestFaultyDelays(TransportContract):
    """Late, shuffled and taken three at a time: still within the rules."""

    def make(self, folder, nblocks):
        plan = FaultPlan(delay=0.002, reorder=True, accept=3, seed=5)
        return FaultyTransport(MemTransport(MemoryStore(nblocks)), plan)


class TestFaultyFile(TransportContract):
    def make(self, folder, nblocks):
        path = folder / "device"
        path.write_bytes(bytes(nblocks * BLOCK))
        url = f"faulty+file://{path}?depth=8&reorder=1&seed=2"
        return open_transport(url)
