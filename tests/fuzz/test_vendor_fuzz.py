"""Whatever a host sends as a request for a view, parsing gives what could be, or DataError."""

import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyades.common.checksum import crc32c
from hyades.common.errors import DataError, PeerError, UsageError
from hyades.common.nvme.commands import Command, build
from hyades.common.nvme.layout import VIEW_REQUEST, Vendor
from hyades.common.nvme.vendor import (
    ViewRequest,
    build_request,
    create_view,
    parse_answer,
    parse_part,
    parse_request,
)
from hyades.common.viewspec import SampleSpec

WEIGHTS = [np.arange(12, dtype=np.float32).reshape(4, 3), np.ones((2, 3), np.float32)]
CLEAN = build_request(ViewRequest("f", "int8", sample=SampleSpec(2, 1, 0, ((0, 4),))), WEIGHTS)


def sealed(data: bytearray) -> bytes:
    """Make the CRC fit, so that what is parsed is what is wrong."""
    data[20:24] = bytes(4)
    data[20:24] = crc32c(data).to_bytes(4, "little")
    return bytes(data)


def request_of(text: bytes, weights: bytes = b"") -> bytes:
    padded = text.ljust(-(-len(text) // 4) * 4, b"\0")
    head = VIEW_REQUEST.pack(b"HYVIEWRQ", 1, len(text), len(weights), 0)
    return sealed(bytearray(head + padded + weights))


def test_every_changed_bit_is_found() -> None:
    parse_request(CLEAN)
    for bit in range(8 * len(CLEAN)):
        data = bytearray(CLEAN)
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(DataError):
            parse_request(data)


def test_forged_requests() -> None:
    rng = random.Random(8)
    kept, refused = 0, list[bool]()
    for _ in range(4000):
        data = bytearray(CLEAN)
        for _ in range(rng.choice([1, 1, 2, 5])):
            data[rng.randrange(len(data))] = rng.choice([0, 1, 32, 48, 255, rng.randrange(256)])
        if rng.random() < 0.2:
            del data[rng.randrange(24, len(data)) :]
        try:
            what, weights = parse_request(sealed(data))
        except DataError as error:
            refused.append(str(error).startswith("view request: "))
            continue
        kept += 1
        assert tuple(w.shape for w in weights) == what.weights
    assert all(refused)
    assert len(refused) > 1000
    assert kept > 300


@given(st.binary(max_size=300), st.binary(max_size=64))
@settings(max_examples=200, deadline=None)
def test_any_text(text: bytes, weights: bytes) -> None:
    with pytest.raises(DataError):
        parse_request(text)
    with pytest.raises(DataError):  # no JSON of random bytes has a source
        parse_request(request_of(text, weights))


@pytest.mark.parametrize(
    "changed",
    [
        {"source": ""}, {"source": "x" * 201}, {"encoding": "float8"}, {"page_size": 4096},
        {"page_size": 1 << 30}, {"weights": [[0, 4]]}, {"weights": [[1 << 23, 1]]},
        {"weights": [[4, 3]]}, {"weights": [[1, 1]] * 65}, {"unknown": 1}, {"source": None},
        {"sample": {"fanout": 0, "seed": 1, "layer": 0, "lanes": [[0, 1]]}},
        {"sample": {"fanout": 1, "seed": -1, "layer": 0, "lanes": [[0, 1]]}},
        {"sample": {"fanout": 1, "seed": 1, "layer": 0, "lanes": []}},
        {"sample": {"fanout": 1, "seed": 1, "layer": 0, "lanes": [[0, 1]], "own": "some"}},
    ],
)  # fmt: skip
def test_values_that_cannot_be(changed: dict[str, object]) -> None:
    assert parse_request(request_of(b'{"source":"f"}'))[0] == ViewRequest("f")
    with pytest.raises(DataError):
        parse_request(request_of(msgspec.json.encode({"source": "f", **changed})))


def test_deep_json() -> None:
    with pytest.raises(DataError):
        parse_request(request_of(b"[" * 100_000))


@given(st.lists(st.integers(0, 0xFFFFFFFF), min_size=3, max_size=3), st.integers(0, 0xFFFFFFFF))
@settings(max_examples=200, deadline=None)
def test_any_part(dwords: list[int], sgl_bytes: int) -> None:
    sqe = build(Vendor.CREATE_VIEW, 1, *dwords)
    sqe[32:36] = sgl_bytes.to_bytes(4, "little")
    try:
        part = parse_part(Command(bytes(sqe)))
    except DataError:
        return
    assert 0 < part.nbytes == sgl_bytes
    assert part.offset + part.nbytes <= part.total


def test_parts_and_answers_that_cannot_be() -> None:
    for dwords in ((0, 0, 4), (2, 3, 4), (1, 0, 0)):
        with pytest.raises(DataError):
            parse_part(Command(bytes(build(Vendor.CREATE_VIEW, 1, *dwords))))
    for result in (0, 0xFFFFFFFF, 0xFFFFFFFE, 1 << 32):
        with pytest.raises(PeerError):
            parse_answer(result)
    assert parse_answer(4) == 4
    for bad in (np.ones(3, np.float32), np.ones((0, 3), np.float32)):
        with pytest.raises(UsageError):
            build_request(ViewRequest("x"), [bad])
    for data, most in ((bytes(6), 4), (bytes(8), 6)):
        with pytest.raises(UsageError):
            list(create_view(1, data, most))
