"""The contract suite, as far as it reads, against views: a target's over each wire, and ours."""

import numpy as np
import pytest
from tests.contracts.transport import (
    ARENA,
    BLOCKS,
    TransportContract,
    arena_for,
    finish,
    request,
)
from tests.reference import dma, nvme
from tests.reference.stage import make_volume, random_edges
from tests.reference.view_host import made_here, view_server

from hyades.common.blocks import MemoryBlocks
from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, Op, Status
from hyades.common.nvme.vendor import ViewRequest, build_request
from hyades.common.units import KIB
from hyades.deploy.local_stage import open_local_view
from hyades.proxy.transports.switch import SwitchableDevice
from hyades.proxy.views import open_view

# A head of one block, and nine ranges of one page of seven blocks each.
VERTICES, WIDTH, RANGE = 4500, 13, 512
WHAT = ViewRequest("features", "float32", 64 * KIB)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("views") / "g.vol"
    x = np.random.default_rng(3).standard_normal((VERTICES, WIDTH)).astype(np.float32)
    volume = make_volume(random_edges(VERTICES, 9000), x, page_size=64 * KIB, range_rows=RANGE)
    assert isinstance(volume.blocks, MemoryBlocks)
    path.write_bytes(volume.blocks.data.tobytes())
    return path


@pytest.fixture(scope="module")
def expected(path):
    data = np.frombuffer(made_here(path, WHAT), np.uint8)
    assert len(data) == BLOCKS * BLOCK
    return data


class ViewContract(TransportContract):
    """Reads give the view's blocks, and writes are refused."""

    fixed_size = True
    options: dict = {}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def server(self, path, tmp_path):
        self._path, self._socket = path, dma.socket_path()
        with view_server(path, dma=[self._socket], keys=self.keys(tmp_path)) as (self._server, _):
            yield

    def keys(self, folder):
        return None

    def url(self, **options):
        return nvme.url(self._server, **self.options, **options)

    def make(self, folder, nblocks):
        return open_view(self.url(), build_request(WHAT))

    @pytest.mark.parametrize("nblocks", [1, 2, 3, 16, BLOCKS])
    def test_read(self, device, arena, expected, nblocks):
        for lba in {0, 1, BLOCKS - nblocks} & set(range(BLOCKS - nblocks + 1)):
            arena[:] = 0xEE
            assert finish(device, request(Op.READ, lba, nblocks, 3 * BLOCK, 8)) == {
                8: (0, nblocks * BLOCK)
            }
            at, end = lba * BLOCK, (lba + nblocks) * BLOCK
            got = arena[3 * BLOCK : 3 * BLOCK + end - at]
            assert np.array_equal(got, expected[at:end])
            assert (arena[: 3 * BLOCK] == 0xEE).all()
            assert (arena[3 * BLOCK + end - at :] == 0xEE).all()

    def test_blocks_in_any_order(self, device, arena, expected):
        order = np.random.default_rng(1).permutation(BLOCKS)
        reads = np.concatenate([request(Op.READ, b, 1, b * BLOCK, b) for b in order])
        assert finish(device, reads) == dict.fromkeys(range(BLOCKS), (0, BLOCK))
        assert np.array_equal(arena[: BLOCKS * BLOCK], expected)

    def test_writes_are_refused(self, device, arena, expected):
        assert finish(device, request(Op.WRITE, 0, 1, 0, 1)) == {1: (Status.INVALID, 0)}
        finish(device, request(Op.READ, 0, BLOCKS, 0, 2))
        assert np.array_equal(arena[: BLOCKS * BLOCK], expected)

    def test_head(self, device):
        assert device.head.nblocks == device.nblocks == BLOCKS
        assert device.head.spec.source == "features"

    def test_flush(self, device, arena):
        assert finish(device, request(Op.FLUSH, cookie=2))[2][0] == Status.OK

    def test_grow(self, device):
        device.grow(BLOCKS)
        with pytest.raises(UsageError, match="larger"):
            device.grow(BLOCKS + 1)

    def test_longer_than_max_transfer(self):
        device = open_view(self.url(max_transfer="64KiB"), build_request(WHAT))
        assert device.limits.max_transfer == 64 * KIB
        device.register(arena_for(device, ARENA))
        assert finish(device, request(Op.READ, 0, 16, 0, 1))[1] == (0, 64 * KIB)
        assert finish(device, request(Op.READ, 0, 17, 0, 2))[2] == (Status.INVALID, 0)
        device.close()

    def test_counters(self, device, arena):
        finish(device, request(Op.READ, 0, 2, 0, 2))
        finish(device, request(Op.FLUSH, cookie=3))
        stats = device.stats()
        assert (stats["bytes_read"], stats["bytes_written"]) == (2 * BLOCK, 0)
        assert (stats["requests"], stats["errors"]) == (2, 0)
        assert "view of" in stats["describe"]

    # These write.
    test_write_then_read = test_fresh_blocks_are_zero = test_last_block = None
    test_a_whole_batch_in_any_order = test_against_a_model = None
    test_the_callers_records_are_copied = None


class TestTcp(ViewContract):
    pass


class TestTcpDigests(ViewContract):
    options = {"digest": "header,data", "queues": 1, "depth": 4}  # noqa: RUF012


class TestTlsView(ViewContract):
    def keys(self, folder):
        key, keys = nvme.make_key(folder)
        self.options = {"tls": key}
        return keys


class TestDmaView(ViewContract):
    options = {"buffer": 5001, "buffers": 2}  # noqa: RUF012

    def url(self, **options):
        text = "&".join(f"{k}={v}" for k, v in {**self.options, **options}.items())
        return f"dma://{self._socket}/{nvme.NQN}?ns=1&{text}"


class TestDmaZeroCopyView(TestDmaView):
    options = {"zerocopy": 1}  # noqa: RUF012


class TestFaultyView(ViewContract):
    def make(self, folder, nblocks):
        url = f"faulty+{self.url()}&delay=0.002&reorder=1&seed=3"
        return open_view(url, build_request(WHAT))


class TestSwitchedView(ViewContract):
    def make(self, folder, nblocks):
        device = SwitchableDevice(super().make(folder, nblocks))
        device.replace(super().make(folder, nblocks))
        return device

    def test_head(self, device):
        assert device.transport.head.nblocks == device.nblocks == BLOCKS


class TestLocalStage(ViewContract):
    def make(self, folder, nblocks):
        view = super().make(folder, nblocks)
        view.close()
        return open_local_view(str(self._path), build_request(WHAT), view.head)

    test_longer_than_max_transfer = None  # any view is shorter
