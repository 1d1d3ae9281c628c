"""Asking for a view and reading its head, driven by a peer that follows a script."""

import numpy as np
import pytest
from tests.reference.view_host import HALF, SAMPLE, W, made_here, write_volume

from hyades.common.errors import DataError, HyadesError, PeerError, UsageError
from hyades.common.layout import BLOCK
from hyades.common.nvme import bringup
from hyades.common.nvme.bringup import ViewDeferred, ViewRefused
from hyades.common.nvme.commands import Command
from hyades.common.nvme.identify import NamespaceInfo
from hyades.common.nvme.layout import Opcode, Vendor
from hyades.common.nvme.status import DNR, StatusCode
from hyades.common.nvme.vendor import ViewRequest, build_request
from hyades.common.units import KIB, MIB

REQUEST = build_request(HALF, (W,))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_volume(tmp_path_factory.mktemp("views") / "g.vol")


def drive(conversation, answer):
    """Run *conversation*, whose calls *answer* answers, and return what it returns."""
    call = next(conversation)
    while True:
        try:
            call = conversation.send(answer(call))
        except StopIteration as end:
            return end.value


class Maker:
    """Takes the parts of a request; *damaged* are the numbers of those that arrive damaged."""

    def __init__(self, result=7, damaged=()):
        self.data, self.largest, self.turns = bytearray(), 0, 0
        self.result, self.damaged = result, set(damaged)

    def __call__(self, call):
        command = Command(bytes(call.sqe))
        assert (command.opcode, command.nsid) == (Vendor.CREATE_VIEW, 3)
        assert call.slow
        assert not call.reads
        dwords, offset, total = command.dwords[:3]
        assert (4 * dwords, 4 * offset) == (len(call.source), len(self.data))
        self.turns += 1
        if self.turns in self.damaged:
            return StatusCode.TRANSIENT_TRANSPORT, 0, b""
        self.largest = max(self.largest, len(call.source))
        self.data += call.source
        return 0, self.result if len(self.data) == 4 * total else 0, b""


@pytest.mark.parametrize("part", [64, 8 * KIB, MIB])
def test_a_request_goes_in_parts(part):
    maker = Maker()
    assert drive(bringup.open_view(3, REQUEST, part), maker) == 7
    assert maker.data == REQUEST
    assert maker.largest == min(part, len(REQUEST))


def test_sixteen_mebibytes():
    weights = np.zeros((1024, 4095), np.float32)
    data = build_request(ViewRequest("features"), (weights,))
    assert 16 * MIB - 16 * KIB < len(data) <= 16 * MIB
    maker = Maker()
    assert drive(bringup.open_view(3, data, 256 * KIB), maker) == 7
    assert maker.data == data
    assert maker.turns == 64


def test_a_part_that_was_damaged_on_the_way_is_sent_again():
    maker = Maker(damaged=(1, 3, 4))
    assert drive(bringup.open_view(3, REQUEST, 1024), maker) == 7
    assert maker.data == REQUEST
    with pytest.raises(PeerError, match="transient transport"):
        drive(bringup.open_view(3, REQUEST, 1024), Maker(damaged=(2, 3, 4)))


@pytest.mark.parametrize("result", [0, 0xFFFFFFFF, 0xFFFFFFFE])
def test_ids_that_no_namespace_has(result):
    with pytest.raises(PeerError, match="a view with namespace id"):
        drive(bringup.open_view(3, REQUEST, MIB), Maker(result))


@pytest.mark.parametrize(
    ("code", "kind", "fix"),
    [
        (StatusCode.INVALID_OPCODE | DNR, ViewRefused, "it has no views"),
        (StatusCode.OPERATION_DENIED | DNR, ViewRefused, "--view-host on the target"),
        (StatusCode.INVALID_NAMESPACE | DNR, ViewRefused, r"see \?ns=N"),
        (StatusCode.INVALID_FIELD | DNR, ViewRefused, "its log says why"),
        (StatusCode.NAMESPACE_NO_IDENTIFIER | DNR, ViewRefused, "raise --views on the target"),
        (StatusCode.READ_ERROR, ViewRefused, "damaged, or none"),
        (StatusCode.NAMESPACE_NO_CAPACITY, ViewDeferred, "raise --stage-memory"),
        (StatusCode.NAMESPACE_NO_CAPACITY | DNR, ViewRefused, "raise --stage-memory"),
        (StatusCode.ABORTED_QUEUE_DELETED, PeerError, "aborted"),
        (StatusCode.INTERNAL, PeerError, "internal"),
        (0x7FF, PeerError, "SCT 0x7 SC 0xff"),
    ],
)
@pytest.mark.parametrize("part", [MIB, 1024])
def test_refusals_say_what_to_change(code, kind, fix, part):
    conversation = bringup.open_view(3, REQUEST, part)
    next(conversation)
    with pytest.raises(HyadesError, match=rf"no view of namespace 3: .*{fix}") as caught:
        conversation.send((code, 0, b""))
    assert type(caught.value) is kind
    assert issubclass(ViewDeferred, ViewRefused)
    assert issubclass(ViewRefused, UsageError)


class Blocks:
    """Answers reads from *data*, a namespace of *block* bytes a block."""

    def __init__(self, data, block=BLOCK):
        self.data, self.block, self.sizes = data, block, []

    @property
    def info(self):
        return NamespaceInfo(len(self.data) // self.block, self.block)

    def __call__(self, call):
        command = Command(bytes(call.sqe))
        assert (command.opcode, command.nsid) == (Opcode.READ, 5)
        low, high, count = command.dwords[:3]
        at, nbytes = (high << 32 | low) * self.block, ((count & 0xFFFF) + 1) * self.block
        assert nbytes == call.reads
        assert not call.slow
        self.sizes.append(nbytes)
        return 0, 0, bytes(self.data[at : at + nbytes])


@pytest.mark.parametrize("block", [512, 4096])
@pytest.mark.parametrize(("lba", "count", "most"), [(0, 1, 4096), (3, 9, 3 * BLOCK), (2, 0, BLOCK)])
def test_blocks(block, lba, count, most):
    data = np.random.default_rng(0).bytes(16 * BLOCK)
    blocks = Blocks(data, block)
    got = drive(bringup.read_blocks(5, blocks.info, lba, count, most), blocks) if count else b""
    assert got == data[lba * BLOCK : (lba + count) * BLOCK]
    assert all(size <= most for size in blocks.sizes)


def test_blocks_that_cannot_be_read():
    conversation = bringup.read_blocks(5, NamespaceInfo(9, 512), 1, 1, BLOCK)
    next(conversation)
    with pytest.raises(PeerError, match="reading LBA 8 of namespace 5 failed: read error"):
        conversation.send((StatusCode.READ_ERROR, 0, bytes(BLOCK)))


def read_head(data, request, block=BLOCK, most=2 * BLOCK):
    blocks = Blocks(data, block)
    return drive(bringup.read_view_head(5, blocks.info, request, most), blocks)


@pytest.mark.parametrize("block", [512, 4096])
@pytest.mark.parametrize(
    "what", [HALF, ViewRequest("features", "int8", 64 * KIB, SAMPLE)], ids=["dense", "sampled"]
)
def test_a_head(path, what, block):
    data = made_here(path, what, (W,))
    head = read_head(data, build_request(what, (W,)), block)
    assert head.nblocks * BLOCK == len(data)
    assert (head.spec.encoding, head.spec.sample) == (what.encoding, what.sample)


def test_a_head_that_is_damaged_or_cut(path):
    good, request = made_here(path, HALF), build_request(HALF)
    for at in (0, 9, 20, 100, BLOCK - 1):
        bad = bytearray(good)
        bad[at] ^= 1
        with pytest.raises(DataError):
            read_head(bad, request)
    for data in (good[: -8 * BLOCK], b""):
        with pytest.raises(DataError, match="its head says at least"):
            read_head(data, request)
    with pytest.raises(DataError, match="not a view"):
        read_head(bytes(16 * BLOCK), request)
    with pytest.raises(DataError, match="blocks of 8192 bytes"):
        drive(bringup.read_view_head(5, NamespaceInfo(9, 8192), request, BLOCK), Blocks(good))


@pytest.mark.parametrize(
    ("what", "weights"),
    [
        (ViewRequest("features", "int8"), ()),
        (ViewRequest("features", "float16", 64 * KIB), ()),
        (ViewRequest("features", "float16", sample=SAMPLE), ()),
        (HALF, (W,)),
        (ViewRequest("other", "float16"), ()),
    ],
)
def test_a_view_of_something_else_than_was_asked_for(path, what, weights):
    with pytest.raises(PeerError, match="a view was asked for with"):
        read_head(made_here(path, HALF), build_request(what, weights))
