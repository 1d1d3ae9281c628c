"""The io_uring rings themselves: registration, limits, wrapping."""

import errno

import numpy as np
import pytest
from tests.reference.files import needs_uring, numbered_file, opened, records, run

from hyades.common.layout import BLOCK, Op, Status
from hyades.proxy.arena import allocate_arena
from hyades.proxy.transports import uring
from hyades.proxy.transports.file import FileTransport


@pytest.fixture
def path(tmp_path):
    return numbered_file(tmp_path)


@needs_uring
def test_pinning_refused_is_visible_and_harmless(path):
    file = path.with_name("mapped")
    file.write_bytes(bytes(32 * BLOCK))
    arena = np.memmap(file, np.uint8, "r+")  # memory of a file cannot be registered
    transport = FileTransport(path, engine="io_uring")
    transport.register(np.asarray(arena))
    line = transport.describe()
    if "not registered" not in line:
        transport.close()
        pytest.skip("this kernel registers memory of a file")
    assert "EOPNOTSUPP" in line or "EFAULT" in line
    assert run(transport, records((Op.READ, 4, 4, 0)))[0][0] == Status.OK
    assert arena[: 4 * BLOCK].tobytes() == path.read_bytes()[4 * BLOCK : 8 * BLOCK]
    transport.close()


@needs_uring
def test_memlock_limit_is_named():
    rings = uring.open_rings(2, -1)
    libc = uring._libc
    real = libc.syscall

    class Libc:
        @staticmethod
        def syscall(number, *args):
            import ctypes

            ctypes.set_errno(errno.ENOMEM)
            return -1

    uring._libc = Libc
    try:
        uring.pin(rings, allocate_arena(BLOCK))
    finally:
        uring._libc = libc
    assert real is libc.syscall
    assert rings.pinned == 0
    assert "ulimit -l" in rings.pin_problem
    rings.close()


@needs_uring
def test_a_request_that_leaves_the_registered_start(path, monkeypatch):
    """Only the start of an arena is registered; here it looks as if that were two blocks."""
    monkeypatch.setattr(uring, "_PIN_LIMIT", 2 * BLOCK)
    rings = uring.open_rings(2, -1)
    uring.pin(rings, allocate_arena(5 * BLOCK))
    assert rings.pinned == 2 * BLOCK
    geometry, indices, sqes = rings.geometry, rings.indices, rings.sqes
    prepare = uring.prepare.py_func
    for offset, nbytes, op in [
        (0, 2 * BLOCK, 4), (2 * BLOCK, BLOCK, 22), (BLOCK, 2 * BLOCK, 22), (BLOCK, BLOCK, 4),
    ]:  # fmt: skip
        row = int(indices[geometry[uring.G_SQ_TAIL]]) & 1
        monkeypatch.setattr(uring, "st_release", lambda a, i, v: a.__setitem__(i, v))
        prepare(geometry, indices, sqes, 1, 0, 0, nbytes, rings.pinned, offset, 9)
        assert int(sqes[row, 0]) & 0xFF == op
        assert int(sqes[row, 5]) == 0  # the one registered buffer
    rings.close()


@needs_uring
def test_ring_indices_wrap(path):
    """More requests than a 2-entry ring has places, many times around."""
    transport, arena = opened(path, engine="io_uring", depth=2)
    content = path.read_bytes()
    for round_ in range(200):
        lba = round_ % 31
        assert run(transport, records((Op.READ, lba, 1, 0), (Op.READ, lba + 1, 1, 1)))
        assert arena[: 2 * BLOCK].tobytes() == content[lba * BLOCK : (lba + 2) * BLOCK]
    assert transport.stats()["requests"] == 400
    transport.close()
