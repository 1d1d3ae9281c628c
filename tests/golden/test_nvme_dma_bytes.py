"""The bytes of NVMe over shared memory: two releases that meet must agree on them."""

from hyades.common.nvme import dma
from hyades.common.nvme.dma import HEADER, Hello, Kind, Shape

SHAPE = Shape(entries=33, buffers=4, buffer_bytes=1 << 20)


def test_messages():
    assert Hello(SHAPE, direct=True).pack().hex() == (
        "4859444d" "01000000" "01000000" "21000000" "04000000" "00001000" "01000000"
    )  # fmt: skip
    assert dma.pack_welcome(65536).hex() == "4859444d02000000000000000000010000000000"
    assert dma.pack_refusal("no").hex() == (
        "4859444d" "02000000" "01000000" "00000000" "00000000" "6e6f"
    )  # fmt: skip
    assert dma.pack_plain(Kind.MEMORY).hex() == "4859444d03000000"
    assert dma.pack_plain(Kind.READY).hex() == "4859444d04000000"
    assert dma.pack_arena(1 << 21, 1 << 30).hex() == (
        "4859444d" "05000000" "00000000" "0000200000000000" "0000004000000000" "00000000"
    )  # fmt: skip


def test_the_header_of_a_chunk():
    assert HEADER.pack(7, 1 << 20, 2, 4096).hex() == (
        "0700000000000000" "0000100000000000" "0200000000000000" "0010000000000000"
    )  # fmt: skip


def test_where_things_lie():
    assert (SHAPE.submission, SHAPE.completion) == (4096, 4096 + 33 * 64)
    assert SHAPE.first(outward=False) == 8192
    assert SHAPE.stride == 4096 + (1 << 20)
    assert SHAPE.first(outward=True) == 8192 + 4 * SHAPE.stride
    assert SHAPE.nbytes == 8192 + 8 * SHAPE.stride
    assert Shape(2, 1, 5001).stride == 4096 + 8192
    words = (
        dma.SQ_TAIL, dma.CQ_HEAD, dma.OUT_FILLED, dma.IN_EMPTIED, dma.HOST_SLEEPS,
        dma.CQ_TAIL, dma.IN_FILLED, dma.OUT_EMPTIED, dma.TARGET_SLEEPS,
    )  # fmt: skip
    assert words == tuple(range(0, 9 * 16, 16))
