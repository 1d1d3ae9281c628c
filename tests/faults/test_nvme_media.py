"""nvme+tcp where the medium fails, and where a flush cannot know what was kept."""

import numpy as np
import pytest
from tests.contracts.transport import finish, request
from tests.reference import nvme
from tests.reference.churn import Churn
from tests.reference.nvme import after, connect
from tests.reference.relay import Relay

from hyades.common.layout import BLOCK, Op, Status
from hyades.common.nvme.status import StatusCode
from hyades.proxy.arena import allocate_arena
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace

BLOCKS = 256


@pytest.fixture
def servers():
    with nvme.stopped_at_end() as started:
        yield started


class BadBlocks(MemoryNamespace):
    """Blocks 40 to 43 cannot be read, block 50 cannot be written."""

    def view(self, offset, nbytes):
        return None

    def expect(self, offset, nbytes):
        pass

    def read_into(self, offset, into):
        if offset < 44 * BLOCK and offset + len(into) > 40 * BLOCK:
            return StatusCode.READ_ERROR
        return super().read_into(offset, into)

    def write(self, offset, data):
        if offset <= 50 * BLOCK < offset + len(data):
            return StatusCode.CAPACITY_EXCEEDED
        return super().write(offset, data)


def test_media_errors_name_the_place(servers):
    servers.append(nvme.start({1: BadBlocks(BLOCKS * BLOCK)}))
    transport = connect(servers[0].addresses[0])
    transport.register(allocate_arena(8 * BLOCK))
    requests = [
        request(Op.READ, 36, 4, 0, 1), request(Op.READ, 40, 4, 4 * BLOCK, 2),
        request(Op.WRITE, 50, 1, 0, 3), request(Op.WRITE, 51, 1, 0, 4),
    ]  # fmt: skip
    results = finish(transport, np.concatenate(requests))
    assert [results[i][0] for i in (1, 2, 3, 4)] == [0, Status.IO, Status.NO_SPACE, 0]
    host, port = servers[0].addresses[0]
    place = f"nvme+tcp://{host}:{port}/{nvme.NQN} ns 1 LBA 40"
    said = "NVMe status read error (SCT 0x2 SC 0x81)"
    assert transport.locate(40) == f"{place} ({said})"
    assert transport.locate(50).endswith("LBA 50 (NVMe status capacity exceeded (SCT 0x0 SC 0x81))")
    assert transport.failed_lba(38, 8) == 40
    assert transport.failed_lba(0, 8) == 0
    assert transport.stats()["errors"] == 2
    transport.close()


@pytest.mark.parametrize(
    ("before", "later", "options", "expected"),
    [
        (b"a" * 16, b"a" * 16, {}, Status.OK),
        (b"a" * 16, b"b" * 16, {}, Status.LOST),
        (bytes(16), bytes(16), {}, Status.LOST),
        (b"a" * 16, b"b" * 16, {"trust_cache": 1}, Status.OK),
    ],
    ids=["same", "other", "unknown", "trusted"],
)
def test_a_flush_after_the_target_came_back(tmp_path, servers, before, later, options, expected):
    """It succeeds only if the writes before it cannot have been lost with a cache."""
    path = tmp_path / "pages"
    path.write_bytes(bytes(BLOCKS * BLOCK))
    servers.append(nvme.start({1: FileNamespace(path)}, epoch=before))
    port = servers[0].addresses[0][1]
    transport = connect(servers[0].addresses[0], **options)
    transport.register(allocate_arena(BLOCK))
    assert finish(transport, request(Op.WRITE, cookie=1))[1][0] == Status.OK
    servers[0].stop(grace=0.1)
    servers.append(nvme.start({1: FileNamespace(path)}, epoch=later, port=port))
    assert finish(transport, request(Op.FLUSH, cookie=2))[2][0] == expected
    assert finish(transport, request(Op.FLUSH, cookie=3))[3][0] == Status.OK
    said = "lost writes" in transport.stats()["last_failure"]
    assert said == (expected == Status.LOST)
    transport.close()


def test_a_flush_without_writes_before_it_is_never_in_doubt(tmp_path, servers):
    servers.append(nvme.file_server(tmp_path, BLOCKS))
    with Relay(servers[0].addresses[0]) as relay:
        transport = connect(relay.address)
        transport.register(allocate_arena(BLOCK))
        finish(transport, request(Op.WRITE, cookie=1))
        assert finish(transport, request(Op.FLUSH, cookie=2))[2][0] == Status.OK
        relay.reset()
        assert finish(transport, request(Op.FLUSH, cookie=3))[3][0] == Status.OK
        transport.close()


def test_a_flush_goes_to_the_path_that_is_left(tmp_path, servers):
    servers.append(nvme.file_server(tmp_path, BLOCKS, listeners=2))
    with Relay(servers[0].addresses[0]) as relay:
        transport = connect(relay.address, servers[0].addresses[1])
        churn = Churn(transport, BLOCKS)
        churn.run(after(0.1))
        relay.cut()
        churn.run(after(0.1))
        assert churn.flush() == Status.OK
        transport.close()
