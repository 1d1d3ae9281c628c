"""Both ends of an NVMe/TCP queue, joined in memory: nothing here touches a socket."""

import numpy as np
import pytest

from hyades.common.nvme import commands
from hyades.common.nvme.host import HostQueue, State
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.pdu import Violation, feed
from hyades.common.nvme.status import StatusCode
from hyades.common.nvme.target import TargetQueue

DIGESTS = [(False, False), (True, False), (False, True), (True, True)]


def deliver(segments, queue, step=None):
    """Hand *segments* to the receiving *queue* in pieces of *step* bytes."""
    stream = b"".join(bytes(s) for s in segments)
    step = step or len(stream) or 1
    for at in range(0, len(stream), step):
        feed(queue, stream[at : at + step])


def joined(header=False, data=False, depth=8, **limits):
    """Return a host and a target queue after the handshake, in-capsule data off at the host."""
    host = HostQueue(depth, header_digest=header, data_digest=data)
    target = TargetQueue(depth=depth + 1, **limits)
    host.start()
    deliver(host.take_output(), target)
    deliver(target.take_output(), host)
    assert host.state is State.READY
    assert target.ready
    return host, target


def pattern(nbytes, seed=1):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


@pytest.mark.parametrize(("header", "data"), DIGESTS)
@pytest.mark.parametrize("step", [None, 1, 7, 4096])
def test_a_read_lands_where_it_belongs(header, data, step):
    host, target = joined(header, data)
    content, slot = pattern(10_000), np.zeros(10_000, np.uint8)
    cid = host.submit(commands.transfer(Opcode.READ, 1, 7, 3), into=slot.data)
    deliver(host.take_output(), target, step)
    ((command, capsule, intact),) = target.commands
    assert (command.opcode, command.slba, command.blocks) == (Opcode.READ, 7, 3)
    assert command.sgl_bytes == 10_000
    assert capsule is None
    assert intact
    target.send_data(command.cid, content.data, success=True)
    deliver(target.take_output(), host, step)
    assert host.completions == [(cid, 0, 0)]
    assert np.array_equal(slot, content)
    assert host.outstanding == 0
