"""What the tests of the file transport share."""

import time

import numpy as np
import pytest

from hyades.common.layout import BLOCK, COMPLETION, REQUEST
from hyades.proxy.arena import allocate_arena
from hyades.proxy.transports import file as file_module
from hyades.proxy.transports.file import FileTransport

needs_uring = pytest.mark.skipif(
    "slower" in file_module.detail(), reason=f"no io_uring: {file_module.detail()}"
)
ENGINES = [pytest.param("io_uring", marks=needs_uring), "threads"]


def records(*rows):
    """Return REQUEST records from (op, lba, nblocks, block of the arena)."""
    out = np.zeros(len(rows), REQUEST)
    for i, (op, lba, nblocks, place) in enumerate(rows):
        out[i]["op"], out[i]["lba"], out[i]["nbytes"] = op, lba, nblocks * BLOCK
        out[i]["offset"], out[i]["cookie"] = place * BLOCK, i
    return out


def run(transport, requests):
    """Submit *requests*, return statuses and bytes by cookie."""
    assert transport.submit(requests) == len(requests)
    completions, found = np.zeros(64, COMPLETION), {}
    deadline = time.monotonic() + 20
    while len(found) < len(requests):
        for done in completions[: transport.poll(completions)]:
            found[int(done["cookie"])] = (int(done["status"]), int(done["nbytes"]))
        transport.wait(0.01)
        assert time.monotonic() < deadline
    return [found[i] for i in range(len(requests))]


def opened(path, **options):
    """Return a transport on *path* with an arena of 32 blocks."""
    transport = FileTransport(path, **options)
    arena = allocate_arena(32 * BLOCK)
    transport.register(arena)
    return transport, arena


def numbered_file(folder):
    """Return a file of 32 blocks whose uint32 words are numbered."""
    file = folder / "volume"
    file.write_bytes(np.arange(32 * BLOCK // 4, dtype=np.uint32).tobytes())
    return file
