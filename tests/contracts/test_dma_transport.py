"""The contract suite against dma:// and the project's own target."""

import pytest
from tests.contracts.transport import TransportContract, arena_for, finish, request
from tests.reference import dma, doca
from tests.reference.nvme import stopped_at_end

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, Op, Status
from hyades.common.units import MIB
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace


@pytest.fixture(scope="module", autouse=True)
def _builds():
    yield
    doca.remove_builds()


class DmaContract(TransportContract):
    fixed_size = True
    options: dict = {}  # noqa: RUF012
    limits: dict = {}  # noqa: RUF012
    engine = "memcpy"

    @pytest.fixture(autouse=True)
    def servers(self):
        with stopped_at_end() as self._servers:
            yield

    def namespace(self, folder, nblocks):
        return MemoryNamespace(nblocks * BLOCK)

    def make(self, folder, nblocks):
        namespaces = {1: self.namespace(folder, nblocks)}
        server = dma.start(namespaces, engine=self.engine, **self.limits)
        self._servers.append(server)
        return open_transport(dma.url(server, **self.options))

    def test_longer_than_max_transfer(self, tmp_path):
        device = self.make(tmp_path, MIB // BLOCK + 8)
        limit = device.limits.max_transfer
        assert limit == MIB
        device.register(arena_for(device, limit + BLOCK))
        assert finish(device, request(Op.READ, nbytes=limit, cookie=1))[1] == (0, limit)
        longer = request(Op.READ, nbytes=limit + BLOCK, cookie=2)
        assert finish(device, longer)[2] == (Status.INVALID, 0)
        device.close()


class FileContract(DmaContract):
    def namespace(self, folder, nblocks):
        path = folder / f"namespace-{len(self._servers)}"
        path.write_bytes(bytes(nblocks * BLOCK))
        return FileNamespace(path)


class TestBuffers(DmaContract):
    """A page fits into a buffer."""


class TestSmallBuffers(FileContract):
    """A page takes many, and there are few."""

    options = {"buffer": "64KiB", "buffers": 2}  # noqa: RUF012


class TestOddBuffers(FileContract):
    """Chunks that begin and end nowhere in particular; one buffer; one queue."""

    options = {"buffer": 5001, "buffers": 1, "queues": 1, "depth": 4}  # noqa: RUF012


class TestTargetTakesLess(DmaContract):
    limits = {"dma_buffer": 4099}  # noqa: RUF012
    options = {"buffer": "256KiB"}  # noqa: RUF012


class TestZeroCopy(FileContract):
    """The slots are where the engine copies to."""

    options = {"zerocopy": 1}  # noqa: RUF012

    def test_it_needs_an_arena_that_both_can_map(self, device):
        with pytest.raises(UsageError, match="shared=True"):
            device.register(allocate_arena(MIB))


class TestZeroCopyFromMemory(DmaContract):
    options = {"zerocopy": 1, "queues": 3, "depth": 3}  # noqa: RUF012


class DocaContract(FileContract):
    """DOCA's engine, for which a library that is compiled here stands in."""

    engine = "doca"
    faults = ""

    @pytest.fixture(autouse=True)
    def servers(self, monkeypatch):
        doca.use(monkeypatch, self.faults)
        with stopped_at_end() as self._servers:
            yield
        assert doca.leaks() == 0


class TestDoca(DocaContract):
    pass


class TestDocaLateAndSmall(DocaContract):
    """Copies end late, three are out at most, none is longer than 10,000 bytes."""

    faults = "late=3,tasks=3,max=10000"
    options = {"buffer": "64KiB", "buffers": 3}  # noqa: RUF012


class TestDocaZeroCopy(DocaContract):
    faults = "late=2,tasks=5,max=65536"
    options = {"zerocopy": 1}  # noqa: RUF012


class TestFaulty(DmaContract):
    """Behind the transport that injects faults, here only delays and another order."""

    options = {"buffer": "64KiB"}  # noqa: RUF012

    def make(self, folder, nblocks):
        server = dma.start({1: self.namespace(folder, nblocks)})
        self._servers.append(server)
        address = dma.url(server, **self.options)
        return open_transport(f"faulty+{address}&delay=0.002&reorder=1&seed=3")
