"""The contract suite against nvme+tcp and the project's own target."""

import numpy as np
import pytest
from tests.contracts.transport import BLOCKS, TransportContract, finish, request
from tests.reference import nvme

from hyades.common.layout import BLOCK, Op, Status
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport


class NvmeContract(TransportContract):
    fixed_size = True
    server_options: dict = {}  # noqa: RUF012
    options: dict = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def servers(self):
        with nvme.stopped_at_end() as self._servers:
            yield

    def serve(self, folder, nblocks):
        server = nvme.file_server(folder, nblocks, **self.server_options)
        self._servers.append(server)
        return server

    def make(self, folder, nblocks):
        server = self.serve(folder, nblocks)
        return open_transport(nvme.url(server, **self.options))

    def test_longer_than_max_transfer(self, tmp_path):
        device = self.make(tmp_path, BLOCKS)
        limit = device.limits.max_transfer
        device.close()
        device = self.make(tmp_path, limit // BLOCK + 8)
        device.register(allocate_arena(limit + BLOCK))
        assert finish(device, request(Op.READ, nbytes=limit, cookie=1))[1] == (0, limit)
        longer = request(Op.READ, nbytes=limit + BLOCK, cookie=2)
        assert finish(device, longer)[2] == (Status.INVALID, 0)
        device.close()


class TestPlain(NvmeContract):
    pass


class TestOneQueue(NvmeContract):
    options = {"queues": 1, "depth": 4}  # noqa: RUF012


class TestManyQueues(NvmeContract):
    options = {"queues": 4, "depth": 3}  # noqa: RUF012


class TestHeaderDigest(NvmeContract):
    options = {"digest": "header"}  # noqa: RUF012


class TestDigests(NvmeContract):
    options = {"digest": "header,data"}  # noqa: RUF012


class TestSmallBlocks(NvmeContract):
    """512-byte logical blocks, small transfers, data PDUs and capsules."""

    server_options = {  # noqa: RUF012
        "block_bytes": 512, "max_transfer": 4 * BLOCK, "max_data_pdu": BLOCK, "in_capsule": 1024,
    }  # fmt: skip

    def make(self, folder, nblocks):
        transport = super().make(folder, nblocks)
        assert transport.limits.max_transfer == 4 * BLOCK
        return transport

    # The suite's own requests are up to BLOCKS long; here the longest is four blocks.
    @pytest.mark.parametrize("nblocks", [1, 2, 3, 4])
    def test_write_then_read(self, device, arena, nblocks):
        super().test_write_then_read(device, arena, nblocks)

    def test_fresh_blocks_are_zero(self, device, arena):
        arena[:] = 0x55
        batch = [request(Op.READ, i, 4, i * BLOCK, i) for i in range(0, BLOCKS, 4)]
        finish(device, np.concatenate(batch))
        assert not arena[: BLOCKS * BLOCK].any()
        assert (arena[BLOCKS * BLOCK :] == 0x55).all()

    test_against_a_model = None


class TestTwoPaths(NvmeContract):
    server_options = {"listeners": 2}  # noqa: RUF012

    def make(self, folder, nblocks):
        transport = super().make(folder, nblocks)
        assert "2 of 2 paths live" in transport.describe()
        return transport


class TestTls(NvmeContract):
    options = {"digest": "header"}  # noqa: RUF012

    def serve(self, folder, nblocks):
        key, keys = nvme.make_key(folder)
        self.options = {**type(self).options, "tls": key}
        server = nvme.file_server(folder, nblocks, keys=keys)
        self._servers.append(server)
        return server


class TestFaulty(NvmeContract):
    """Behind the transport that injects faults, here only delays and another order."""

    def make(self, folder, nblocks):
        address = nvme.url(self.serve(folder, nblocks), **self.options)
        return open_transport(f"faulty+{address}&delay=0.002&reorder=1&seed=3")
