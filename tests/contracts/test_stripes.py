"""The contract suite against stripes of every kind of member."""

import pytest
from tests.contracts.transport import BLOCKS, TransportContract, finish, request
from tests.reference import nvme

from hyades.common.layout import BLOCK, Op
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport
from hyades.proxy.stripe_tables import Geometry
from hyades.proxy.transports.faulty import FaultPlan, FaultyTransport
from hyades.proxy.transports.file import FileTransport
from hyades.proxy.transports.mem import MemoryStore, MemTransport
from hyades.proxy.transports.stripe import StripeTransport


class StripeContract(TransportContract):
    unit = 1  # blocks
    count = 2

    def make_member(self, folder, index, nblocks):
        raise NotImplementedError

    def make(self, folder, nblocks):
        geometry = Geometry(self.unit, self.count)
        members = [
            self.make_member(folder, i, geometry.member_blocks(nblocks, i))
            for i in range(self.count)
        ]
        names = [f"member-{i}" for i in range(self.count)]
        return StripeTransport(members, names, self.unit * BLOCK)


class MemStripe(StripeContract):
    def make_member(self, folder, index, nblocks):
        return MemTransport(MemoryStore(nblocks))


class TestMemTwo(MemStripe):
    unit = 4


class TestMemOneBlock(MemStripe):
    unit, count = 1, 3


class TestMemOdd(MemStripe):
    unit, count = 7, 3


class TestMemOne(MemStripe):
    unit, count = 5, 1


class TestMemLargeUnit(MemStripe):
    unit, count = 2 * BLOCKS, 2


class TestMemSmallQueues(MemStripe):
    """Members that take two requests at a time, of one block."""

    unit, count = 3, 3

    def make_member(self, folder, index, nblocks):
        return MemTransport(MemoryStore(nblocks), max_inflight=2 + index)


class FileStripe(StripeContract):
    options: dict = {}  # noqa: RUF012

    def make_member(self, folder, index, nblocks):
        path = folder / f"member-{index}"
        path.write_bytes(bytes(nblocks * BLOCK))
        return FileTransport(path, **self.options)


class TestFiles(FileStripe):
    unit, count = 4, 2
    options = {"depth": 16}  # noqa: RUF012


class TestFilesOdd(FileStripe):
    unit, count = 5, 3
    options = {"depth": 3, "engine": "threads"}  # noqa: RUF012


class TestFileOne(FileStripe):
    unit, count = 3, 1


class TestLateMembers(StripeContract):
    """One member is late, shuffles, and takes two at a time."""

    unit, count = 3, 2

    def make_member(self, folder, index, nblocks):
        inner = MemTransport(MemoryStore(nblocks))
        plan = FaultPlan(delay=0.002, reorder=True, accept=2, seed=index) if index else FaultPlan()
        return FaultyTransport(inner, plan)


class TestNvme(StripeContract):
    """Namespaces of two targets; neither can grow."""

    unit, count, fixed_size = 4, 2, True

    @pytest.fixture(autouse=True)
    def servers(self):
        with nvme.stopped_at_end() as self._servers:
            yield

    def make_member(self, folder, index, nblocks):
        self._servers.append(nvme.file_server(folder, nblocks))
        digest = "header,data" if index else "none"
        return open_transport(nvme.url(self._servers[-1], digest=digest))

    def test_longer_than_max_transfer(self, tmp_path):
        """The base's version grows the device, which a namespace cannot."""
        device = self.make(tmp_path, BLOCKS)
        limit = device.limits.max_transfer
        device.close()
        device = self.make(tmp_path, limit // BLOCK + 8)
        device.register(allocate_arena(limit + BLOCK))
        assert finish(device, request(Op.READ, nbytes=limit, cookie=1))[1] == (0, limit)
        assert finish(device, request(Op.READ, nbytes=limit + BLOCK, cookie=2))[2][0] == -7
        device.close()


class TestByUrl(TransportContract):
    """Created, closed and opened with its members in another order."""

    def make(self, folder, nblocks):
        paths = [str(folder / name) for name in ("a", "b", "c")]
        created = open_transport(f"stripe:unit=16KiB,{','.join(paths)}", create=True)
        created.grow(nblocks)
        created.close()
        opened = open_transport(f"stripe:{paths[2]},file://{paths[0]}?depth=8,{paths[1]}")
        assert opened.names[1] == paths[1]
        return opened


@pytest.mark.parametrize(("unit", "count"), [(1, 1), (1, 2), (3, 2), (4, 3), (7, 5)])
def test_where_blocks_lie(unit, count):
    """Each block of a set has its own place; sizes and places agree."""
    geometry = Geometry(unit, count)
    for total in range(1, 6 * unit * count):
        sizes = [geometry.member_blocks(total, i) for i in range(count)]
        assert geometry.set_blocks(sizes) >= total
        places = {geometry.place(lba) for lba in range(total)}
        assert len(places) == total
        expected = {(i, lba) for i in range(count) for lba in range(unit, sizes[i])}
        assert places == expected
        assert geometry.place(total) not in places
