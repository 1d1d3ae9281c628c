"""Pages and head of a view as they travel: a change here is a change of the format."""

import numpy as np

from hyades.common.checksum import crc32c
from hyades.common.layout import BLOCK
from hyades.common.quantize import encode_rows
from hyades.common.views import (
    SparseShape,
    build_dense,
    build_sparse,
    dense_shape,
    page_crc,
    parse_dense,
    parse_sparse,
)
from hyades.common.viewspec import SampleSpec, ViewSpec, build_head, parse_head

SALT = 0x1234
ROWS = np.arange(12, dtype=np.uint8).reshape(3, 4)
DENSE_END = bytes.fromhex("00 00 00 00 14 67 99 92")
SPARSE = bytes.fromhex(
    "48 59 56 50 01 00 00 00 "  # magic, version
    "05 00 00 00 02 00 00 00 "  # page, range
    "02 00 00 00 01 00 00 00 "  # first, count
    "03 00 00 00 04 00 00 00 "  # total, row_bytes
    "09 00 00 00 00 00 00 00 "  # ids
    "00 00 00 00 00 00 00 00 "
    "00 00 00 00 00 00 00 00 "
    "00 00 00 00 00 00 00 00 "
    "08 09 0a 0b "  # rows
)
SPEC = ViewSpec(
    volume="00112233-4455-6677-8899-aabbccddeeff", generation=7, source="features", rows=200,
    width=2, range_rows=64, block_rows=64, page_size=65536, encoding="float16",
    sample=SampleSpec(10, 3, 1, ((0, 2), (3, 4)), "loops"), projections=((2, 99),),
)  # fmt: skip
TEXT = (
    b'{"volume":"00112233-4455-6677-8899-aabbccddeeff","generation":7,"source":"features",'
    b'"rows":200,"width":2,"range_rows":64,"block_rows":64,"page_size":65536,"encoding":"float16",'
    b'"sample":{"fanout":10,"seed":3,"layer":1,"lanes":[[0,2],[3,4]],"own":"loops"},'
    b'"projections":[[2,99]]}'
)
HEAD = bytes.fromhex(
    "48 59 56 49 45 57 56 31 01 00 00 00 00 10 00 00 "  # magic, version, block
    "15 01 00 00 04 00 00 00 01 00 00 00 "  # spec_bytes, counts, blocks
)


def test_dense_page() -> None:
    shape = dense_shape(11, 4, 6, 65536)
    assert (shape.rows_per_page, shape.page_bytes) == (6, BLOCK)
    page = build_dense(dense_shape(9, 4, 6, 65536), 1, ROWS, SALT)
    assert page[:12].tobytes() == ROWS.tobytes()
    assert not page[12:-4].any()
    assert page[-8:].tobytes() == DENSE_END
    assert int.from_bytes(page[-4:].tobytes(), "little") == crc32c(page[:-4]) ^ 1 ^ SALT
    assert parse_dense(dense_shape(9, 4, 6, 65536), 1, page, SALT).tolist() == ROWS.tolist()


def test_sparse_page() -> None:
    shape = SparseShape(100, 4, 10, 2, BLOCK)
    ids = np.array([1, 4, 9], np.uint16)
    page = build_sparse(shape, 11, ids, ROWS, SALT)
    expected = SPARSE.replace(bytes([5, 0, 0, 0, 2]), bytes([11, 0, 0, 0, 2]), 1)
    assert len(page) == BLOCK
    assert page[:68].tobytes() == expected
    assert not page[68:-4].any()
    assert int.from_bytes(page[-4:].tobytes(), "little") == crc32c(page[:-4]) ^ 11 ^ SALT
    parsed = parse_sparse(shape, 11, page, SALT)
    assert (parsed.first, parsed.total) == (2, 3)
    assert parsed.ids.tolist() == [9]
    assert parsed.rows.tolist() == [[8, 9, 10, 11]]


def test_the_crc_of_a_whole_page_is_known_beforehand() -> None:
    page = build_dense(dense_shape(9, 4, 6, 65536), 1, ROWS, SALT)
    assert crc32c(page) == page_crc(1, SALT) == 0xEF8C5ABD
    assert page_crc(0, 0) == 0x48674BC7


def test_head() -> None:
    counts = np.array([5, 64, 0, 8], np.uint32)
    head = build_head(SPEC, counts)
    assert len(head) == BLOCK
    assert head[:28] == HEAD
    assert int.from_bytes(head[28:32], "little") == crc32c(head[:28] + bytes(4) + head[32:])
    assert head[64 : 64 + len(TEXT) + 16] == TEXT + counts.tobytes()
    parsed = parse_head(head)
    assert parsed.spec == SPEC
    assert parsed.counts.tolist() == counts.tolist()
    assert parsed.page_lba(2) == 3
    assert SPEC.salt == crc32c(TEXT)


def test_int8_row() -> None:
    data, _ = encode_rows(np.array([[1, -0.5, 0.25, 0, 127 / 128]], np.float32), "int8")
    assert data.tobytes() == bytes.fromhex("7f c0 20 00 7e 00 00 00 00 02 01 3c")
