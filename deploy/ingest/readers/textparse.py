"""Compiled parsing of lines of numbers.

A block is whole lines, the last one ended by a newline.  Lines that begin with # or % are comments.
"""

import numpy as np
from numpy.typing import NDArray

from hyades.common.jit import jit

OK, NOT_A_NUMBER, NOT_WHOLE, TOO_LARGE, MISSING = 0, 1, 2, 3, 4
# Indices of `state`: what went wrong, where the field begins and ends, lines before it.
CODE, BEGIN, END, LINE = 0, 1, 2, 3
_NEWLINE, _SPACE, _TAB, _RETURN, _QUOTE = 10, 32, 9, 13, 34
_PLUS, _MINUS, _DOT, _ZERO, _NINE = 43, 45, 46, 48, 57
_LARGEST = 10**18


@jit
def _is_blank(byte: int) -> bool:
    return byte in (_SPACE, _TAB, _RETURN)


@jit
def _trim(data: NDArray[np.uint8], begin: int, end: int) -> tuple[int, int]:
    while begin < end and (_is_blank(data[begin]) or data[begin] == _QUOTE):
        begin += 1
    while end > begin and (_is_blank(data[end - 1]) or data[end - 1] == _QUOTE):
        end -= 1
    return begin, end


@jit
def _field_end(data: NDArray[np.uint8], at: int, delimiter: int) -> int:
    """Return where the field at *at* ends; delimiter 0 means any run of blanks."""
    while data[at] != _NEWLINE:
        if delimiter == 0:
            if _is_blank(data[at]):
                break
        elif data[at] == delimiter:
            break
        at += 1
    return at


@jit
def _line_start(data: NDArray[np.uint8], at: int) -> tuple[int, bool]:
    """Skip blanks; return (first byte, whether the line is a comment or empty)."""
    while _is_blank(data[at]):
        at += 1
    return at, data[at] in (_NEWLINE, 35, 37)


@jit
def _next_line(data: NDArray[np.uint8], at: int) -> int:
    while data[at] != _NEWLINE:
        at += 1
    return at + 1


@jit
def parse_integer(data: NDArray[np.uint8], begin: int, end: int) -> tuple[int, int]:
    """Return (value, code) of the whole number in data[begin:end]; "12.0" is one."""
    negative = begin < end and data[begin] == _MINUS
    if negative or (begin < end and data[begin] == _PLUS):
        begin += 1
    if begin == end or not _ZERO <= data[begin] <= _NINE:
        return 0, NOT_A_NUMBER
    value = 0
    while begin < end and _ZERO <= data[begin] <= _NINE:
        if value >= _LARGEST // 10:
            return 0, TOO_LARGE
        value = value * 10 + int(data[begin] - _ZERO)
        begin += 1
    if begin < end:
        if data[begin] != _DOT:
            return 0, NOT_A_NUMBER
        for i in range(begin + 1, end):
            if data[i] != _ZERO:
                return 0, NOT_WHOLE if _ZERO < data[i] <= _NINE else NOT_A_NUMBER
    return (-value if negative else value), OK


@jit
def _lower(byte: int) -> int:
    return byte | 32


@jit
def _is_word(data: NDArray[np.uint8], begin: int, end: int, a: int, b: int, c: int) -> bool:
    return (
        end - begin >= 3
        and _lower(data[begin]) == a
        and _lower(data[begin + 1]) == b
        and _lower(data[begin + 2]) == c
    )


@jit
def parse_float(data: NDArray[np.uint8], begin: int, end: int) -> tuple[float, int]:
    """Return (value, code) of the decimal number, inf or nan in data[begin:end]."""
    sign = 1.0
    if begin < end and (data[begin] == _MINUS or data[begin] == _PLUS):
        sign = -1.0 if data[begin] == _MINUS else 1.0
        begin += 1
    if _is_word(data, begin, end, 110, 97, 110) and end - begin == 3:
        return np.nan, OK
    if _is_word(data, begin, end, 105, 110, 102):
        return sign * np.inf, OK
    mantissa = 0
    exponent = 0
    digits = 0
    point = False
    while begin < end:
        byte = data[begin]
        if byte == _DOT and not point:
            point = True
        elif _ZERO <= byte <= _NINE:
            digits += 1
            if mantissa < _LARGEST // 10:
                mantissa = mantissa * 10 + int(byte - _ZERO)
                exponent -= 1 if point else 0
            else:
                exponent += 0 if point else 1
        else:
            break
        begin += 1
    if digits == 0:
        return 0.0, NOT_A_NUMBER
    if begin < end:
        if _lower(data[begin]) != 101:
            return 0.0, NOT_A_NUMBER
        power, code = parse_integer(data, begin + 1, end)
        if code != OK:
            return 0.0, NOT_A_NUMBER
        exponent += power
    # Past these the result is 0 or inf whatever the mantissa (an int64) says.
    exponent = max(min(exponent, 330), -350)
    if exponent < -300:
        return sign * (mantissa * 10.0**-300) * 10.0 ** (exponent + 300), OK
    if exponent < 0:
        return sign * (mantissa / 10.0**-exponent), OK
    return sign * (mantissa * 10.0**exponent), OK


@jit
def parse_edges(
    data: NDArray[np.uint8],
    delimiter: int,
    columns: NDArray[np.int64],  # [3]: source, destination, weight or -1
    source: NDArray[np.int64],
    destination: NDArray[np.int64],
    weight: NDArray[np.float32],
    state: NDArray[np.int64],
) -> int:
    """Parse a block of edges; return their number, or -1 with *state* saying what is wrong."""
    last = columns.max()
    at = 0
    line = 0
    count = 0
    while at < data.size:
        at, skip = _line_start(data, at)
        column = 0
        while not skip:
            end = _field_end(data, at, delimiter)
            a, b = _trim(data, at, end)
            code = OK
            if column == columns[0]:
                source[count], code = parse_integer(data, a, b)
            elif column == columns[1]:
                destination[count], code = parse_integer(data, a, b)
            elif column == columns[2]:
                weight[count], code = parse_float(data, a, b)
            if code == OK and column < last and data[end] == _NEWLINE:
                code = MISSING
            if code != OK:
                state[CODE], state[BEGIN], state[END], state[LINE] = code, a, b, line
                return -1
            if column >= last:
                count += 1
                break
            column += 1
            at = end + 1
            while delimiter == 0 and _is_blank(data[at]):
                at += 1
            if delimiter == 0 and data[at] == _NEWLINE:
                state[CODE], state[BEGIN], state[END], state[LINE] = MISSING, at, at, line
                return -1
        at = _next_line(data, at)
        line += 1
    return count


@jit
def parse_matrix(
    data: NDArray[np.uint8], delimiter: int, out: NDArray[np.float32], state: NDArray[np.int64]
) -> int:
    """Parse a block of rows into out [>= rows, width]; return rows, or -1 with *state* set."""
    width = out.shape[1]
    at = 0
    line = 0
    count = 0
    while at < data.size:
        at, skip = _line_start(data, at)
        column = 0
        while not skip:
            end = _field_end(data, at, delimiter)
            a, b = _trim(data, at, end)
            value, code = parse_float(data, a, b)
            if code == OK and column < width:
                out[count, column] = value
            column += 1
            at = end
            while delimiter == 0 and _is_blank(data[at]):
                at += 1
            done = data[at] == _NEWLINE
            if code == OK and ((done and column != width) or column > width):
                code = MISSING
            if code != OK:
                state[CODE], state[BEGIN], state[END], state[LINE] = code, a, b, line
                return -1
            if done:
                count += 1
                break
            if delimiter != 0:
                at += 1
        at = _next_line(data, at)
        line += 1
    return count
