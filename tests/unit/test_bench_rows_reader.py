"""What a reader of `hyades bench transports` asks for."""

from pathlib import Path

import numpy as np
import pytest
from tests.reference.view_host import HALF, SAMPLE, W, X, made_here, write_volume

from hyades.common.errors import DeviceLost
from hyades.common.layout import BLOCK, Op, Status
from hyades.common.nvme.vendor import ViewRequest
from hyades.common.units import KIB, MIB
from hyades.common.views import parse_dense, parse_sparse
from hyades.common.viewspec import parse_head
from hyades.deploy.bench.rows_reader import read_pieces, view_pieces
from hyades.proxy.transport import Limits


class Recorder:
    """A device that takes a few requests at a time, and completes the last of them first."""

    def __init__(self, status: Status = Status.OK, most: int = 64 * KIB) -> None:
        self.limits = Limits(most, 3, BLOCK)
        self.asked: list[tuple[int, int]] = []
        self.under_way: list[tuple[int, int]] = []  # cookie, offset
        self.status, self.arena = status, np.zeros(0, np.uint8)

    def register(self, arena):
        self.arena = arena

    def submit(self, requests):
        taken = requests[: self.limits.max_inflight - len(self.under_way)]
        for request in taken:
            assert request["op"] == Op.READ
            place = int(request["offset"])
            assert place + int(request["nbytes"]) <= len(self.arena)
            assert place not in [offset for _, offset in self.under_way], "a slot that is in use"
            self.asked.append((int(request["lba"]), int(request["nbytes"])))
            self.under_way.append((int(request["cookie"]), place))
        return len(taken)

    def poll(self, completions):
        if not self.under_way:
            return 0
        cookie, _ = self.under_way.pop()
        completions["cookie"][0], completions["status"][0] = cookie, self.status
        return 1

    def wait(self, timeout):
        raise AssertionError("nothing to wait for")

    def stats(self):
        return {"describe": "a recorder"}


def test_pieces_are_cut_to_what_a_request_may_have():
    device = Recorder()
    pieces = np.array([(5, 150 * KIB), (100, 4 * KIB), (200, 64 * KIB)], np.int64)
    assert read_pieces(device, pieces, 8) > 0
    assert sorted(device.asked) == [
        (5, 64 * KIB), (21, 64 * KIB), (37, 22 * KIB), (100, 4 * KIB), (200, 64 * KIB),
    ]  # fmt: skip
    assert len(device.arena) == 3 * 64 * KIB  # no deeper than the device is


def test_a_request_has_at_most_a_mebibyte():
    device = Recorder(most=8 * MIB)
    read_pieces(device, np.array([(0, 3 * MIB)], np.int64), 2)
    assert sorted(device.asked) == [(0, MIB), (256, MIB), (512, MIB)]


def test_a_read_that_fails_is_told():
    with pytest.raises(DeviceLost, match="a recorder: a read ended with IO"):
        read_pieces(Recorder(Status.IO), np.array([(0, BLOCK)], np.int64), 1)


def test_nothing_to_read():
    assert read_pieces(Recorder(), np.zeros((0, 2), np.int64), 4) >= 0


@pytest.mark.parametrize(
    ("what", "weights"),
    [
        (HALF, ()),
        (ViewRequest("features", "int8", 64 * KIB, SAMPLE), ()),
        (ViewRequest("features", "float32", 64 * KIB, SAMPLE), (W,)),
    ],
)
def test_pieces_hold_every_row_and_nothing_else(what, weights, tmp_path: Path):
    data = made_here(write_volume(tmp_path / "g.vol"), what, weights)
    head = parse_head(data)
    pieces, rows = view_pieces(head)
    shape, salt = head.spec.shape(), head.spec.salt
    found = 0
    for lba, nbytes in pieces.tolist():
        page = (lba - head.blocks) // (shape.page_bytes // BLOCK)
        part = np.frombuffer(data, np.uint8)[lba * BLOCK :][:nbytes]
        if what.sample is None:
            found += len(parse_dense(shape, page, part, salt))
        else:
            found += len(parse_sparse(shape, page, part, salt).rows)
    assert found == rows
    assert rows == (len(X) if what.sample is None else int(head.counts.sum()))
    if what.sample is not None:
        assert 0 < rows < len(X)
