"""Requests for views as they travel: a change here is a change of the protocol."""

import numpy as np

from hyades.common.checksum import crc32c
from hyades.common.nvme.commands import Command
from hyades.common.nvme.vendor import (
    Part,
    ViewRequest,
    build_request,
    create_view,
    delete_view,
    parse_part,
    parse_request,
)
from hyades.common.viewspec import SampleSpec

WEIGHT = np.array([[1.0, -2.0], [0.5, 0.0], [3.0, 4.0]], np.float32)
WHAT = ViewRequest("features", "float16", 65536, SampleSpec(10, 3, 1, ((0, 2),), "loops"))
TEXT = (
    b'{"source":"features","encoding":"float16","page_size":65536,'
    b'"sample":{"fanout":10,"seed":3,"layer":1,"lanes":[[0,2]],"own":"loops"},"weights":[[3,2]]}'
)
HEAD = bytes.fromhex("48 59 56 49 45 57 52 51 01 00 00 00 96 00 00 00 18 00 00 00 ")
FLOATS = bytes.fromhex(
    "00 00 80 3f 00 00 00 c0 00 00 00 3f 00 00 00 00 00 00 40 40 00 00 80 40"
)  # fmt: skip
CREATE = bytes.fromhex(
    "c1 40 00 00 07 00 00 00" + "00" * 32 + "10 00 00 00 10 00 00 00 33 00 00 00" + "00" * 12
)
DELETE = bytes.fromhex("c0 40 00 00 09 00 00 00" + "00" * 56)


def test_request() -> None:
    data = build_request(WHAT, [WEIGHT])
    assert data[:20] == HEAD
    assert data[24 : 24 + len(TEXT)] == TEXT
    assert data[24 + len(TEXT) :] == bytes(-len(TEXT) % 4) + FLOATS
    whole = bytearray(data)
    whole[20:24] = bytes(4)
    assert int.from_bytes(data[20:24], "little") == crc32c(whole)
    what, weights = parse_request(data)
    assert (what.sample, what.weights) == (WHAT.sample, ((3, 2),))
    assert [w.tolist() for w in weights] == [WEIGHT.tolist()]


def test_the_least_request() -> None:
    data = build_request(ViewRequest("x"))
    text = b'{"source":"x","encoding":"float32","page_size":1048576,"sample":null,"weights":[]}\0\0'
    assert data[24:] == text
    assert parse_request(data) == (ViewRequest("x"), [])


def test_commands() -> None:
    data = bytes(range(204))
    parts = list(create_view(7, data, 64))
    assert [bytes(part) for _, part in parts] == [data[at : at + 64] for at in range(0, 204, 64)]
    assert bytes(parts[1][0]) == CREATE
    parts[1][0][32:36] = (64).to_bytes(4, "little")
    assert parse_part(Command(bytes(parts[1][0]))) == Part(64, 64, 204)
    assert bytes(delete_view(9)) == DELETE
