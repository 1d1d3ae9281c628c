"""Whatever bytes a page or head of a view has, parsing gives what could be, or DataError."""

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyades.common.checksum import crc32c
from hyades.common.errors import DataError
from hyades.common.layout import BLOCK, VIEW_HEAD
from hyades.common.views import (
    SparseShape,
    build_dense,
    build_sparse,
    dense_shape,
    join_sparse,
    page_crc,
    parse_dense,
    parse_sparse,
)
from hyades.common.viewspec import SampleSpec, ViewSpec, build_head, parse_head

SALT = 77
SHAPE = SparseShape(500, 12, 100, 30, BLOCK)
IDS = np.sort(np.random.default_rng(1).permutation(100)[:70]).astype(np.uint16)
ROWS = np.random.default_rng(2).integers(0, 256, (70, 12), np.uint8)
FULL = np.random.default_rng(3).integers(0, 256, (100, 12), np.uint8)
DENSE = dense_shape(500, 12, 100, 65536)
SPEC = ViewSpec(
    volume="x", generation=1, source="features", rows=500, width=6, range_rows=100, block_rows=50,
    page_size=65536, encoding="float16", sample=SampleSpec(5, 1, 0, ((0, 2), (3, 5))),
)  # fmt: skip


def reseal(data: bytearray, page: int) -> None:
    """Make the trailer fit the bytes before, so that what is parsed is what is wrong."""
    value = crc32c(data[:-4]) ^ page ^ SALT
    data[-4:] = value.to_bytes(4, "little")


def pages_of(index: int) -> list[bytearray]:
    first = index * SHAPE.pages_per_range
    return [bytearray(build_sparse(SHAPE, first + p, IDS, ROWS, SALT)) for p in range(3)]


def test_every_changed_bit_is_found() -> None:
    sparse, dense = pages_of(1)[0], bytearray(build_dense(DENSE, 2, FULL, SALT))
    for data, parse in ((sparse, lambda d: parse_sparse(SHAPE, 4, d, SALT)),
                        (dense, lambda d: parse_dense(DENSE, 2, d, SALT))):  # fmt: skip
        parse(data)
        for bit in range(0, 8 * len(data), 7):
            data[bit // 8] ^= 1 << bit % 8
            with pytest.raises(DataError):
                parse(data)
            data[bit // 8] ^= 1 << bit % 8


def test_forged_sparse_pages() -> None:
    rng = random.Random(5)
    clean = pages_of(1)
    refused: list[bool] = []
    kept = 0
    for _ in range(6000):
        place = rng.randrange(3)
        page = 4 + place
        data = bytearray(clean[place])
        for _ in range(rng.choice([1, 1, 2, 4])):
            at = rng.choice([rng.randrange(32), rng.randrange(32, 100), rng.randrange(len(data))])
            data[at] = rng.choice([0, 1, 255, rng.randrange(256)])
        if rng.random() < 0.9:
            reseal(data, page)
        if rng.random() < 0.2:
            del data[rng.randrange(len(data)) :]
        try:
            found = parse_sparse(SHAPE, page, bytes(data), SALT)
        except DataError as error:
            refused.append(str(error).partition(":")[0] == f"view page {page}")
            continue
        kept += 1
        assert len(found.ids) == len(found.rows) == SHAPE.page_count(page, found.total)
        assert np.all(np.diff(found.ids.astype(int)) > 0)
        assert found.ids.max(initial=0) < 100
    assert len(refused) > 2000
    assert all(refused)
    assert kept > 200


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=9000), st.integers(0, 19))
def test_any_bytes(data: bytes, page: int) -> None:
    for parse in (
        lambda: parse_sparse(SHAPE, page, data, SALT),
        lambda: parse_dense(DENSE, page % DENSE.pages, data, SALT),
        lambda: parse_head(data),
        lambda: join_sparse(SHAPE, page % 5, [data, data], SALT),
    ):
        with pytest.raises(DataError):
            parse()


def test_pages_in_the_wrong_place() -> None:
    pages = pages_of(1)
    joined = join_sparse(SHAPE, 1, pages, SALT)
    assert np.concatenate([page.ids for page in joined]).tolist() == IDS.tolist()
    assert np.concatenate([page.rows for page in joined]).tolist() == ROWS.tolist()
    for wrong in ([pages[1], pages[0], pages[2]], pages[:2], pages[:1], [pages[0], pages[2]]):
        with pytest.raises(DataError):
            join_sparse(SHAPE, 1, wrong, SALT)
    with pytest.raises(DataError, match="view page 10"):
        join_sparse(SHAPE, 2, [*pages_of(2)[:2], pages[2]], SALT)
    with pytest.raises(DataError, match="CRC32C"):
        parse_sparse(SHAPE, 4, pages[0], SALT + 1)  # of another view


def test_pages_that_do_not_belong_together() -> None:
    first = pages_of(1)[0]
    for ids, rows in ((IDS[5:], ROWS[5:]), (np.roll(IDS, 40), ROWS)):
        other = build_sparse(SHAPE, 5, ids, rows, SALT)
        with pytest.raises(DataError, match=r"view page 5"):
            join_sparse(SHAPE, 1, [first, other, pages_of(1)[2]], SALT)


def test_only_the_used_blocks_need_to_be_there() -> None:
    shape = SparseShape(500, 400, 100, 50, 6 * BLOCK)
    rows = np.ones((70, 400), np.uint8)
    pages = [build_sparse(shape, p, IDS, rows, SALT) for p in range(2)]
    assert [len(page) for page in pages] == [shape.used_bytes(50), shape.used_bytes(20)]
    assert len(pages[1]) < len(pages[0]) <= shape.page_bytes
    longer = np.concatenate((pages[1], np.zeros(2 * BLOCK, np.uint8)))
    assert parse_sparse(shape, 1, longer, SALT).ids.tolist() == IDS[50:].tolist()
    assert crc32c(pages[1]) == page_crc(1, SALT)
    empty = build_sparse(shape, 1, IDS[:50], rows[:50], SALT)
    assert len(empty) == BLOCK
    assert len(parse_sparse(shape, 1, empty, SALT).ids) == 0


def put_spec(text: bytes, counts: int = 5) -> bytes:
    """Return a head with *text* as its spec and a right CRC."""
    head = np.zeros(1, VIEW_HEAD)
    nbytes = -(-(64 + len(text) + 4 * counts) // BLOCK) * BLOCK
    head[0] = (b"HYVIEWV1", 1, BLOCK, len(text), counts, nbytes // BLOCK, 0, b"")
    body = text + bytes(nbytes - 64 - len(text))
    head["crc"] = crc32c(body, crc32c(head.tobytes()))
    return head.tobytes() + body


def test_forged_heads() -> None:
    good = build_head(SPEC, np.full(5, 9, np.uint32))
    nbytes = int(np.frombuffer(good, VIEW_HEAD, 1)["spec_bytes"][0])
    tree = json.loads(good[64 : 64 + nbytes])
    assert parse_head(put_spec(json.dumps(tree).encode())).spec == SPEC
    absurd = [-1, 0, 1, 2, 1 << 16, 1 << 23, 1 << 48, 1 << 64, 0.5, None, "", "int8", [], [[1, 0]],
              [[0, 9]], {}, True, [[0, 1 << 32]], "none"]  # fmt: skip
    rng = random.Random(4)
    refused = kept = 0
    for _ in range(3000):
        changed = json.loads(json.dumps(tree))
        part = changed["sample"] if rng.random() < 0.4 and changed["sample"] else changed
        part[rng.choice(list(part))] = rng.choice(absurd)
        try:
            head = parse_head(put_spec(json.dumps(changed).encode(), rng.choice([0, 5])))
        except DataError:
            refused += 1
            continue
        kept += 1
        assert head.nblocks > head.blocks
    assert refused > 1000
    assert kept > 20
    for at in range(0, len(good), 5):
        data = bytearray(good)
        data[at] ^= 0x10
        with pytest.raises(DataError):
            parse_head(bytes(data))
