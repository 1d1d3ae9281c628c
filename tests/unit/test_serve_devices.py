"""Block devices as namespaces of the embedded target."""

import pytest
from tests.reference.loops import loop_device
from tests.reference.nvme import start, stopped_at_end
from tests.reference.nvme_host import Host, pattern

from hyades.common.errors import UsageError
from hyades.common.nvme import commands
from hyades.common.nvme.layout import Opcode
from hyades.common.units import MIB
from hyades.target_side.namespaces import FileNamespace

SIZE = 4 * MIB


@pytest.fixture(params=[512, 4096])
def device(request, tmp_path):
    """Give a block device with sectors of that size over `disk`."""
    with loop_device(tmp_path / "disk", request.param, nbytes=SIZE) as device:
        yield device


@pytest.mark.parametrize("block", [512, 4096])
def test_a_device_is_read_written_flushed_and_zeroed(device, tmp_path, block):
    with stopped_at_end() as servers:
        servers.append(start({1: FileNamespace(device, block_bytes=block)}))
        host = Host(servers[0].addresses[0])
        assert servers[0].subsystems[0].namespaces[1].blocks == SIZE // block
        data = pattern(MIB)
        write = commands.transfer(Opcode.WRITE, 1, 8, MIB // block)
        assert host.io.run(write, source=data)[0] == 0
        zero = commands.transfer(Opcode.WRITE_ZEROES, 1, 16, 8)
        assert host.io.run(zero)[0] == 0
        assert host.io.run(commands.flush(1))[0] == 0
        expected = bytearray(SIZE)
        expected[8 * block : 8 * block + MIB] = data
        expected[16 * block : 24 * block] = bytes(8 * block)
        slot = bytearray(MIB)
        read = commands.transfer(Opcode.READ, 1, 8, MIB // block)
        cid = host.io.start(read, into=memoryview(slot))
        assert host.io.wait([cid])[cid] == (0, 0)
        assert slot == expected[8 * block : 8 * block + MIB]
        assert (tmp_path / "disk").read_bytes() == expected
        host.close()


def test_a_device_is_served_once(device):
    first = FileNamespace(device)
    with pytest.raises(UsageError, match=r"cannot open|is being used"):
        FileNamespace(device)
    first.close()
    FileNamespace(device, read_only=True).close()
