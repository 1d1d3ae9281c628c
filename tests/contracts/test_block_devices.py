"""The contract suite against block devices with logical blocks of 512 and of 4096 bytes."""

import pytest
from tests.contracts.transport import TransportContract, finish, request
from tests.reference.loops import attach, detach

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, Op
from hyades.common.units import MIB
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport


class BlkContract(TransportContract):
    fixed_size = True
    sector = 512
    odd = 0  # bytes beyond the last whole block
    options = ""

    @pytest.fixture(autouse=True)
    def _detach(self):
        self.devices = []
        yield
        for device in self.devices:
            detach(device)

    def make(self, folder, nblocks):
        # A device for each test: hypothesis' examples share one, so that few are needed at once.
        if not self.devices or self.devices[0].nblocks != nblocks:
            path = folder / "device"
            with path.open("wb") as file:
                file.truncate(nblocks * BLOCK + self.odd)
            self.devices.append(Loop(attach(path, self.sector), nblocks))
        else:
            blank(self.devices[0], nblocks)
        transport = open_transport(f"blk:{self.devices[0]}{self.options}")
        assert transport.logical_block == self.sector
        assert f"logical blocks of {self.sector} bytes" in transport.describe()
        return transport

    def test_longer_than_max_transfer(self, tmp_path):
        device = self.make(tmp_path, 4 * MIB // BLOCK + 8)
        limit = device.limits.max_transfer
        device.register(allocate_arena(limit + BLOCK))
        assert finish(device, request(Op.READ, nbytes=limit, cookie=1))[1] == (0, limit)
        assert finish(device, request(Op.READ, nbytes=limit + BLOCK, cookie=2))[2][0] == -7
        device.close()


class Loop(str):
    """A device's path, which remembers its length."""

    __slots__ = ("nblocks",)

    def __new__(cls, path, nblocks):
        found = super().__new__(cls, path)
        found.nblocks = nblocks
        return found


def blank(device, nblocks):
    """Fill *device* with zeros."""
    with open(device, "r+b", buffering=0) as file:  # noqa: PTH123 - a str
        file.write(bytes(nblocks * BLOCK))


class TestBlk512(BlkContract):
    options = "?engine=io_uring"

    def test_direct(self, device):
        assert "O_DIRECT" in device.describe()


class TestBlk4096(BlkContract):
    sector = 4096

    def test_direct(self, device):
        assert "O_DIRECT" in device.describe()


class TestBlk512Threads(BlkContract):
    options = "?engine=threads&depth=7"


class TestBlk512Odd(BlkContract):
    """Three logical blocks more than whole blocks: they are not used."""

    odd = 3 * 512

    def test_the_end_is_out_of_reach(self, device, arena):
        assert finish(device, request(Op.READ, device.nblocks, 1, 0, 1))[1][0] == -7


def test_growth_says_what_is_missing(tmp_path):
    path = tmp_path / "device"
    path.write_bytes(bytes(8 * BLOCK))
    device = attach(path, 512)
    try:
        transport = open_transport(f"blk:{device}")
        with pytest.raises(UsageError, match="8192 bytes are missing, use a larger device"):
            transport.grow(10)
        transport.grow(8)
        transport.close()
    finally:
        detach(device)
