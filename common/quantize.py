"""Rows of float32 as float16, bfloat16 or int8 with a scale a row, and back.

Rules, the same for every host, thread count and division into blocks:
1. Rounding is to nearest, ties to even. A finite value that would round to infinity becomes the
   largest finite value of its sign and counts as saturated.
2. NaN stays NaN and infinity stays infinity; both count as not finite. A NaN keeps its sign and the
   first bits of its payload in the 16-bit types, nothing but being one in int8.
3. Decoding is exact: one float32 for every stored value, by no rounding operation.

An int8 row (`layout.int8_row`) is d codes, zeros up to a multiple of 4 bytes, and a float32 scale;
a value is code x scale. The scale is the row's largest finite magnitude / 127, cut to 17 bits so
that the product needs no rounding: |x - x'| <= scale / 2 holds exactly. (A scale up to 2**-132 is
rounded up to a unit of 2**-149 instead: floats have no more bits there.) Nothing saturates. A row
with a value that is not finite is flagged by the sign bit of its scale: there 127 and -127 stand
for the infinities, -128 for NaN, and the finite values use 126 and below. Zero loses its sign.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common import quantize_kernels as kernels
from hyades.common.encodings import Counts, Encoding, encoded_row_bytes
from hyades.common.errors import DataError, UsageError

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def encode_rows(rows: Floats, encoding: Encoding, out: Bytes | None = None) -> tuple[Bytes, Counts]:
    """Return float32 *rows* [n, d] as bytes [n, row_bytes], in *out* where given, and counts.

    *out* is contiguous and aligned to 4 bytes.
    """
    rows = np.ascontiguousarray(rows, np.float32)
    count, width = rows.shape
    if out is None:
        out = np.empty((count, encoded_row_bytes(encoding, width)), np.uint8)
    _check(out, count, encoding, width)
    found = np.zeros(2, np.int64)
    bits = rows.view(np.uint32)
    if encoding == "float32":
        out.view(np.float32)[...] = rows
        found[1] = kernels.count_nonfinite(bits)
    elif encoding == "float16":
        kernels.encode_float16(bits, out.view(np.uint16), found)
    elif encoding == "bfloat16":
        kernels.encode_bfloat16(bits, out.view(np.uint16), found)
    else:
        kernels.encode_int8(rows, *_int8_parts(out), found)
    return out, Counts(rows.size, int(found[0]), int(found[1]))


def decode_rows(data: Bytes, encoding: Encoding, width: int, out: Floats | None = None) -> Floats:
    """Return bytes [n, row_bytes] as float32 [n, width], in *out* (contiguous) where given."""
    _check(data, len(data), encoding, width)
    if out is None:
        out = np.empty((len(data), width), np.float32)
    if out.shape != (len(data), width) or not out.flags.c_contiguous:
        raise UsageError(f"rows of shape {out.shape} cannot take {len(data)} x {width} values")
    _DECODERS[encoding](data, out)
    return out


def check_rows(data: Bytes, encoding: Encoding, width: int) -> None:
    """Raise DataError where bytes [n, row_bytes] are none that `encode_rows` makes.

    Every pattern of the float types is one; an int8 row has a finite scale and zeros as padding.
    """
    _check(data, len(data), encoding, width)
    if encoding != "int8":
        return
    codes, scales = _int8_parts(data)
    magnitudes = scales & np.uint32(0x7FFFFFFF)
    if np.any(magnitudes >= 0x7F800000) or np.any(codes[:, width:]):
        raise DataError("an int8 row has a scale that is not finite, or padding that is not zero")


def _decode_float32(data: Bytes, out: Floats) -> None:
    out[...] = data.view(np.float32)


def _decode_float16(data: Bytes, out: Floats) -> None:
    kernels.decode_float16(data.view(np.uint16), out)


def _decode_bfloat16(data: Bytes, out: Floats) -> None:
    kernels.decode_bfloat16(data.view(np.uint16), out.view(np.uint32))


def _decode_int8(data: Bytes, out: Floats) -> None:
    kernels.decode_int8(*_int8_parts(data), out)


_DECODERS: dict[Encoding, Callable[[Bytes, Floats], None]] = {
    "float32": _decode_float32, "float16": _decode_float16,
    "bfloat16": _decode_bfloat16, "int8": _decode_int8,
}  # fmt: skip


def _int8_parts(data: Bytes) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return codes with padding int8 [n, row_bytes - 4] and scales as bits uint32 [n]."""
    return data[:, :-4].view(np.int8), data.view(np.uint32)[:, -1]


def _check(data: Bytes, count: int, encoding: Encoding, width: int) -> None:
    expected = (count, encoded_row_bytes(encoding, width))
    if data.dtype != np.uint8 or data.shape != expected or not data.flags.c_contiguous:
        raise UsageError(
            f"rows of {width} x {encoding} are contiguous bytes {expected}, "
            f"not {data.dtype} {data.shape}"
        )
