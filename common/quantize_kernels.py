"""The loops of `quantize`: rows are independent, so blocks and threads do not change a bit.

Conversions work on the bits of the floats; both branches of every choice are computed, which lets
LLVM turn a row into vector instructions.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from hyades.common.jit import intrinsic, jit

_FINITE = np.uint32(0x7F800000)  # magnitudes below are finite, above it are NaN
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_HALF_BIASES = np.uint32((127 - 15) << 23)
_HALF_SMALLEST = np.uint32(0x38800000)  # 2**-14, the smallest normal float16
_HALF_TOO_LARGE = np.uint32(0x477FF000)  # 65520, which rounds to 2**16
_BRAIN_TOO_LARGE = np.uint32(0x7F7F8000)  # rounds to 2**128
_TO_SUBNORMAL = np.float32(2.0**24)  # a subnormal float16 in units of its last bit
_FROM_SUBNORMAL = np.float32(2.0**-24)
_WHOLE_32 = np.float32(2.0**23)  # adding and taking it away rounds to an integer, ties to even
_WHOLE_64 = np.float64(1.5 * 2.0**52)
_SCALE_TAIL = np.uint32(0x7F)  # bits of a scale that are 0: 17 are left, 7 are for the code
_SCALE_TINY = np.float64(2.0**-132)  # up to here a scale has 17 bits anyway: units of 2**-149
INT8_LIMIT, INT8_LIMIT_FLAGGED = 127, 126
INT8_NAN = -128


@intrinsic
def _bits(typingctx: Any, value: Any) -> Any:  # noqa: ARG001
    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), code


@intrinsic
def _float(typingctx: Any, value: Any) -> Any:  # noqa: ARG001
    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), code


@jit
def _half_bits(bits: Any) -> Any:
    """Return the float16 nearest to a float32, both as bits; it saturates."""
    magnitude = bits & _MAGNITUDE
    small = np.uint32((_float(magnitude) * _TO_SUBNORMAL + _WHOLE_32) - _WHOLE_32)
    odd = (magnitude >> np.uint32(13)) & np.uint32(1)
    normal = (magnitude - _HALF_BIASES + np.uint32(0xFFF) + odd) >> np.uint32(13)
    quiet = np.uint32(0x7E00) | ((magnitude >> np.uint32(13)) & np.uint32(0x3FF))
    value = small if magnitude < _HALF_SMALLEST else normal
    value = np.uint32(0x7BFF) if magnitude >= _HALF_TOO_LARGE else value
    value = np.uint32(0x7C00) if magnitude == _FINITE else value
    value = quiet if magnitude > _FINITE else value
    return value | ((bits >> np.uint32(16)) & np.uint32(0x8000))


@jit
def encode_float16(rows: Any, out: Any, counts: Any) -> None:
    """Fill uint16 *out* from uint32 *rows* (bits); counts int64: saturated, not finite."""
    for row in range(rows.shape[0]):
        large = np.uint32(0)
        odd_ones = np.uint32(0)
        for column in range(rows.shape[1]):
            bits = rows[row, column]
            magnitude = bits & _MAGNITUDE
            odd_ones += np.uint32(magnitude >= _FINITE)
            large += np.uint32(magnitude >= _HALF_TOO_LARGE)
            out[row, column] = np.uint16(_half_bits(bits))
        counts[0] += np.int64(large) - np.int64(odd_ones)
        counts[1] += np.int64(odd_ones)


@jit
def decode_float16(data: Any, out: Any) -> None:
    """Fill float32 *out* from uint16 *data*; exact."""
    for row in range(data.shape[0]):
        for column in range(data.shape[1]):
            half = np.uint32(data[row, column])
            magnitude = half & np.uint32(0x7FFF)
            normal = (magnitude << np.uint32(13)) + _HALF_BIASES
            small = _bits(np.float32(np.int32(magnitude)) * _FROM_SUBNORMAL)
            value = small if magnitude < np.uint32(0x400) else normal
            special = (magnitude << np.uint32(13)) + _HALF_BIASES + _HALF_BIASES
            value = special if magnitude >= np.uint32(0x7C00) else value
            out[row, column] = _float(value | ((half & np.uint32(0x8000)) << np.uint32(16)))


@jit
def encode_bfloat16(rows: Any, out: Any, counts: Any) -> None:
    """Fill uint16 *out* from uint32 *rows* (bits); counts int64: saturated, not finite."""
    for row in range(rows.shape[0]):
        large = np.uint32(0)
        odd_ones = np.uint32(0)
        for column in range(rows.shape[1]):
            bits = rows[row, column]
            magnitude = bits & _MAGNITUDE
            odd_ones += np.uint32(magnitude >= _FINITE)
            large += np.uint32(magnitude >= _BRAIN_TOO_LARGE)
            odd = (magnitude >> np.uint32(16)) & np.uint32(1)
            value = (magnitude + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            value = np.uint32(0x7F7F) if magnitude >= _BRAIN_TOO_LARGE else value
            value = np.uint32(0x7F80) if magnitude == _FINITE else value
            quiet = np.uint32(0x7FC0) | (magnitude >> np.uint32(16))
            value = quiet if magnitude > _FINITE else value
            out[row, column] = np.uint16(value | ((bits >> np.uint32(16)) & np.uint32(0x8000)))
        counts[0] += np.int64(large) - np.int64(odd_ones)
        counts[1] += np.int64(odd_ones)


@jit
def decode_bfloat16(data: Any, out: Any) -> None:
    """Fill uint32 *out* (bits of float32) from uint16 *data*; exact."""
    for row in range(data.shape[0]):
        for column in range(data.shape[1]):
            out[row, column] = np.uint32(data[row, column]) << np.uint32(16)


@jit
def count_nonfinite(rows: Any) -> Any:
    """Return how many of uint32 *rows* (bits of float32) are NaN or infinite."""
    found = np.int64(0)
    for row in range(rows.shape[0]):
        odd_ones = np.uint32(0)
        for column in range(rows.shape[1]):
            odd_ones += np.uint32((rows[row, column] & _MAGNITUDE) >= _FINITE)
        found += np.int64(odd_ones)
    return found


@jit
def _scale(largest: Any, limit: Any) -> Any:
    """Return the scale of a row: largest / limit with 17 bits, so that code x scale is exact."""
    wide = np.float64(_float(largest)) / np.float64(limit)
    scale = np.float32(wide)
    bits = _bits(scale)
    if wide <= _SCALE_TINY:  # rounded up, or the largest value would not fit
        return bits + np.uint32(np.float64(scale) < wide)
    if np.float64(scale) > wide:
        bits -= np.uint32(1)
    return bits & ~_SCALE_TAIL


@jit
def encode_int8(rows: Any, out: Any, scales: Any, counts: Any) -> None:
    """Fill int8 *out* and the float32 bits *scales* [n] from float32 *rows*; see `quantize`."""
    width = rows.shape[1]
    for row in range(rows.shape[0]):
        largest = np.uint32(0)
        odd_ones = np.uint32(0)
        for column in range(width):
            magnitude = _bits(rows[row, column]) & _MAGNITUDE
            finite = magnitude < _FINITE
            odd_ones += np.uint32(not finite)
            largest = max(largest, magnitude if finite else np.uint32(0))
        counts[1] += np.int64(odd_ones)
        limit = INT8_LIMIT if odd_ones == 0 else INT8_LIMIT_FLAGGED
        bits = _scale(largest, limit)
        step = np.float64(_float(bits)) if bits != 0 else np.float64(1.0)
        for column in range(out.shape[1]):
            out[row, column] = 0
        if odd_ones == 0:
            for column in range(width):
                value = np.float64(rows[row, column]) / step
                out[row, column] = np.int8(np.int32((value + _WHOLE_64) - _WHOLE_64))
        else:
            bits |= np.uint32(0x80000000)
            for column in range(width):
                value = rows[row, column]
                if np.isnan(value):
                    out[row, column] = INT8_NAN
                elif np.isinf(value):
                    out[row, column] = INT8_LIMIT if value > 0 else -INT8_LIMIT
                else:
                    near = (np.float64(value) / step + _WHOLE_64) - _WHOLE_64
                    out[row, column] = np.int8(np.int32(near))
        scales[row] = bits


@jit
def decode_int8(codes: Any, scales: Any, out: Any) -> None:
    """Fill float32 *out* from int8 *codes* and float32 bits *scales* [n]; exact products."""
    width = out.shape[1]
    for row in range(out.shape[0]):
        bits = scales[row]
        scale = _float(bits & _MAGNITUDE)
        for column in range(width):
            out[row, column] = np.float32(codes[row, column]) * scale
        if bits > _MAGNITUDE:
            for column in range(width):
                code = codes[row, column]
                if code == INT8_NAN:
                    out[row, column] = np.float32(np.nan)
                elif code == INT8_LIMIT:
                    out[row, column] = np.float32(np.inf)
                elif code == -INT8_LIMIT:
                    out[row, column] = np.float32(-np.inf)
