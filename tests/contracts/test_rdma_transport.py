"""The contract suite against nvme+rdma and the project's own target, where an RDMA device is.

tests/vm/test_rdma_contract.py runs this file in a guest with the kernel's software device.
"""

import pytest
from tests.contracts.transport import TransportContract, finish, request
from tests.reference import rdma
from tests.reference.nvme import stopped_at_end

from hyades.common.layout import BLOCK, Op, Status
from hyades.common.units import MIB
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace


class RdmaContract(TransportContract):
    fixed_size = True
    options: dict = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def servers(self):
        self.host = rdma.address()
        with stopped_at_end() as self._servers:
            yield

    def namespace(self, folder, nblocks):
        return MemoryNamespace(nblocks * BLOCK)

    def make(self, folder, nblocks):
        server = rdma.start({1: self.namespace(folder, nblocks)}, self.host)
        self._servers.append(server)
        return open_transport(rdma.url(server, **self.options))

    def test_longer_than_max_transfer(self, tmp_path):
        device = self.make(tmp_path, MIB // BLOCK + 8)
        limit = device.limits.max_transfer
        assert limit == MIB
        device.register(allocate_arena(limit + BLOCK))
        assert finish(device, request(Op.READ, nbytes=limit, cookie=1))[1] == (0, limit)
        longer = request(Op.READ, nbytes=limit + BLOCK, cookie=2)
        assert finish(device, longer)[2] == (Status.INVALID, 0)
        device.close()


class TestMemory(RdmaContract):
    """The device moves pages between the namespace itself and the arena."""


class TestFile(RdmaContract):
    """Through buffers; one queue that is smaller than what is asked for."""

    options = {"queues": 1, "depth": 4}  # noqa: RUF012

    def namespace(self, folder, nblocks):
        path = folder / f"namespace-{len(self._servers)}"
        path.write_bytes(bytes(nblocks * BLOCK))
        return FileNamespace(path)

    test_against_a_model = None
