"""Encodings of rows: every 16-bit value, exact bounds for int8, and nothing depends on blocks."""

from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from hyades.common.encodings import ENCODINGS, Counts, check_encoding, encoded_row_bytes
from hyades.common.errors import DataError, UsageError
from hyades.common.layout import int8_row
from hyades.common.quantize import check_rows, decode_rows, encode_rows

ALL = np.arange(1 << 16, dtype=np.uint16)
LARGEST = {"float16": np.float32(65504), "bfloat16": np.float32(3.3895313892515355e38)}
SIXTEEN = ["float16", "bfloat16"]


def from_16(codes, encoding):
    """Return 16-bit *codes* as float32 by numpy or torch."""
    if encoding == "float16":
        with np.errstate(invalid="ignore"):
            return codes.view(np.float16).astype(np.float32)
    return torch.from_numpy(codes.view(np.int16).copy()).view(torch.bfloat16).float().numpy()


def to_16(values, encoding):
    """Return what numpy or torch makes of float32 *values*, saturated afterwards."""
    if encoding == "float16":
        with np.errstate(over="ignore", invalid="ignore"):
            codes = values.astype(np.float16).view(np.uint16)
    else:
        codes = torch.from_numpy(values).bfloat16().view(torch.int16).numpy().view(np.uint16)
    over = np.isfinite(values) & ~np.isfinite(from_16(codes, encoding))
    return np.where(over, codes - 1, codes), int(over.sum())


def encode_16(values, encoding):
    data, counts = encode_rows(values.reshape(1, -1), encoding)
    return data.view(np.uint16)[0], counts


@pytest.mark.parametrize("encoding", SIXTEEN)
def test_every_16_bit_value_decodes_exactly_and_comes_back(encoding):
    expected = from_16(ALL, encoding)
    got = decode_rows(ALL.view(np.uint8).reshape(1, -1), encoding, len(ALL))[0]
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.isnan(got), ~numbers)
    assert np.array_equal(got[numbers].view(np.uint32), expected[numbers].view(np.uint32))
    back, counts = encode_16(got, encoding)
    quiet = np.uint16(0x200 if encoding == "float16" else 0x40)
    assert np.array_equal(back, np.where(numbers, ALL, ALL | quiet))  # NaN: sign, payload, quiet
    assert counts == Counts(1 << 16, 0, int((~np.isfinite(expected)).sum()))


@pytest.mark.parametrize("encoding", SIXTEEN)
def test_between_any_two_values_rounding_is_to_nearest_even(encoding):
    values = np.sort(from_16(ALL, encoding)[np.isfinite(from_16(ALL, encoding))])
    middle = ((values[1:].astype(np.float64) + values[:-1]) / 2).astype(np.float32)
    near = [np.nextafter(middle, np.float32(side * np.inf)) for side in (-1, 1)]
    for points in (middle, *near, values):
        expected, over = to_16(points, encoding)
        got, counts = encode_16(points, encoding)
        assert np.array_equal(got, expected)
        assert counts.saturated == over == 0


@pytest.mark.parametrize("encoding", SIXTEEN)
def test_random_bits_are_as_numpy_and_torch_have_them(encoding):
    bits = np.random.default_rng(3).integers(0, 1 << 32, 1 << 19, dtype=np.uint32)
    values = bits.view(np.float32)
    numbers = ~np.isnan(values)
    expected, over = to_16(values, encoding)
    got, counts = encode_16(values, encoding)
    assert np.array_equal(got[numbers], expected[numbers])
    assert np.all(np.isnan(from_16(got[~numbers], encoding)))
    assert np.array_equal(got >> 15, bits >> 31)
    assert counts == Counts(len(values), over, int((~np.isfinite(values)).sum()))
    assert over > (1000 if encoding == "float16" else 0)


@pytest.mark.parametrize("encoding", SIXTEEN)
def test_saturation_begins_where_rounding_would_give_infinity(encoding):
    largest = LARGEST[encoding]
    first = np.float32(65520 if encoding == "float16" else 2.0**128 - 2.0**119)
    values = np.array([largest, np.nextafter(first, np.float32(0)), first, -first, np.inf])
    values = values.astype(np.float32)
    data, counts = encode_rows(values.reshape(1, -1), encoding)
    got = decode_rows(data, encoding, 5)[0]
    assert got.tolist() == [largest, largest, largest, -largest, np.inf]
    assert counts == Counts(5, 2, 1)


def plain_int8(row):
    """Return codes and scale of one row, by the text of the module, with exact fractions."""
    finite = [Fraction(float(x)) for x in row if np.isfinite(x)]
    flagged = len(finite) < len(row)
    largest = max((abs(x) for x in finite), default=Fraction(0))
    exact = largest / (126 if flagged else 127)
    unit = Fraction(2) ** -149
    units = exact / unit
    if units <= 1 << 17:
        scale = -(-units.numerator // units.denominator) * unit
    elif units < 1 << 23:
        scale = (units.numerator // units.denominator // 128 * 128) * unit
    else:
        power = Fraction(2) ** (len(bin(units.numerator // units.denominator)) - 2 - 17)
        scale = (units / power).numerator // (units / power).denominator * power * unit
    codes = []
    for x in row:
        if np.isnan(x):
            codes.append(-128)
        elif np.isinf(x):
            codes.append(127 if x > 0 else -127)
        else:
            codes.append(round(Fraction(float(x)) / scale) if scale else 0)
    return codes, np.copysign(np.float32(float(scale)), -1 if flagged else 1)


ANY = st.floats(width=32)
USUAL = st.floats(-4, 4, width=32)


@settings(max_examples=150, deadline=None)
@given(st.lists(ANY, min_size=1, max_size=9) | st.lists(USUAL, min_size=1, max_size=9))
def test_int8_is_what_its_text_says(row):
    row = np.array(row, np.float32)
    data, counts = encode_rows(row.reshape(1, -1), "int8")
    check_rows(data, "int8", len(row))
    record = data.reshape(-1).view(int8_row(len(row)))[0]
    codes, scale = plain_int8(row)
    assert record["codes"].tolist() == codes
    assert record["scale"].tobytes() == scale.tobytes()
    assert counts == Counts(len(row), 0, int((~np.isfinite(row)).sum()))
    back = decode_rows(data, "int8", len(row))[0]
    for before, after in zip(row, back, strict=True):
        if np.isfinite(before):
            off = abs(Fraction(float(before)) - Fraction(float(after)))
            assert off <= Fraction(abs(float(scale))) / 2
        else:
            assert np.array_equal(before, after, equal_nan=True)


@pytest.mark.parametrize("units", [1, 126, 127, 128, 1 << 17, 3 << 17, 1 << 22, (1 << 23) - 128])
@pytest.mark.parametrize("steps", [-1, 0, 1])
def test_int8_scales_of_tiny_rows_are_cut_not_rounded(units, steps):
    """Where floats have fewer bits than a scale may keep, the quotient rounds to a cut one."""
    row = np.array([np.ldexp(np.float64(127 * units), -149), 0], np.float32)
    row[0] = (row[:1].view(np.uint32) + np.uint32(steps & 0xFFFFFFFF)).view(np.float32)[0]
    data, _ = encode_rows(row.reshape(1, 2), "int8")
    record = data.reshape(-1).view(int8_row(2))[0]
    codes, scale = plain_int8(row)
    assert record["scale"].tobytes() == scale.tobytes()
    assert record["codes"].tolist() == codes


@pytest.mark.parametrize("power", [-149, -148, -140, -133, -127, -126, -119, -20, 0, 100, 127])
def test_int8_holds_its_bound_at_every_magnitude(power):
    rng = np.random.default_rng(power + 200)
    rows = np.ldexp(rng.uniform(-1, 1, (400, 33)), power + 1).astype(np.float32)
    rows = np.clip(rows, -np.finfo(np.float32).max, np.finfo(np.float32).max)
    data, counts = encode_rows(rows, "int8")
    scales = data.view(np.float32)[:, -1].astype(np.float64)
    off = np.abs(rows.astype(np.float64) - decode_rows(data, "int8", 33))
    assert np.all(off <= scales[:, None] / 2)
    assert counts == Counts(rows.size, 0, 0)


def test_the_largest_float_survives_int8():
    top = np.finfo(np.float32).max
    rows = np.array([[top, -top, 1], [np.inf, top, np.nan]], np.float32)
    back = decode_rows(encode_rows(rows, "int8")[0], "int8", 3)
    assert np.all(np.isfinite(back[0]))
    assert back[1, 0] == np.inf
    assert np.isfinite(back[1, 1])
    assert np.isnan(back[1, 2])


@pytest.mark.parametrize("encoding", ENCODINGS)
@settings(max_examples=25, deadline=None)
@given(arrays(np.float32, array_shapes(min_dims=2, max_dims=2, max_side=12), elements=ANY))
def test_rows_do_not_depend_on_their_neighbours(encoding, rows):
    whole, counts = encode_rows(rows, encoding)
    parts = [encode_rows(row.reshape(1, -1), encoding) for row in rows]
    assert whole.tobytes() == b"".join(part.tobytes() for part, _ in parts)
    assert counts == sum((part for _, part in parts), Counts())
    decoded = decode_rows(whole, encoding, rows.shape[1])
    alone = [decode_rows(part, encoding, rows.shape[1]) for part, _ in parts]
    assert decoded.tobytes() == b"".join(part.tobytes() for part in alone)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_threads_and_blocks_make_the_same_bits(encoding):
    rng = np.random.default_rng(1)
    rows = (rng.standard_normal((999, 37)) * 1e4).astype(np.float32)
    rows[rng.random(rows.shape) < 0.01] = np.nan
    whole, counts = encode_rows(rows, encoding)
    for size, threads in ((1, 1), (64, 4), (500, 3)):
        blocks = [rows[first : first + size] for first in range(0, len(rows), size)]
        with ThreadPoolExecutor(threads) as pool:
            parts = list(pool.map(lambda block: encode_rows(block, encoding), blocks))
        assert b"".join(part.tobytes() for part, _ in parts) == whole.tobytes()
        assert sum((part for _, part in parts), Counts()) == counts


def test_float32_is_bit_for_bit():
    bits = np.random.default_rng(2).integers(0, 1 << 32, (50, 7), dtype=np.uint32)
    data, counts = encode_rows(bits.view(np.float32), "float32")
    assert data.tobytes() == bits.tobytes()
    assert decode_rows(data, "float32", 7).tobytes() == bits.tobytes()
    assert counts.nonfinite == int((~np.isfinite(bits.view(np.float32))).sum())


def test_row_bytes():
    sizes = {name: [encoded_row_bytes(name, width) for width in (1, 4, 5)] for name in ENCODINGS}
    assert sizes == {
        "float32": [4, 16, 20], "float16": [2, 8, 10], "bfloat16": [2, 8, 10], "int8": [8, 8, 12]
    }  # fmt: skip


def test_what_does_not_fit_is_refused():
    rows = np.zeros((2, 5), np.float32)
    with pytest.raises(UsageError, match="no encoding 'float8': use one of float32"):
        check_encoding("float8")
    assert check_encoding("int8") == "int8"
    with pytest.raises(UsageError, match=r"5 x int8 are contiguous bytes \(2, 12\)"):
        encode_rows(rows, "int8", np.zeros((2, 11), np.uint8))
    with pytest.raises(UsageError, match=r"cannot take 2 x 5 values"):
        decode_rows(np.zeros((2, 10), np.uint8), "float16", 5, np.zeros((1, 5), np.float32))


def test_an_int8_row_that_nothing_makes_is_refused():
    good, _ = encode_rows(np.ones((2, 5), np.float32), "int8")
    padded, infinite = good.copy(), good.copy()
    padded[1, 6] = 1
    infinite.view(np.float32)[0, -1] = np.inf
    check_rows(good, "int8", 5)
    for bad in (padded, infinite):
        with pytest.raises(DataError, match="an int8 row has"):
            check_rows(bad, "int8", 5)
