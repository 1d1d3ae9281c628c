"""The names and sizes of encoded rows, without the kernels that make them: see quantize.py."""

from dataclasses import dataclass
from typing import Literal, get_args

from hyades.common.errors import UsageError
from hyades.common.layout import int8_row

Encoding = Literal["float32", "float16", "bfloat16", "int8"]
ENCODINGS: tuple[Encoding, ...] = get_args(Encoding)


@dataclass(frozen=True, slots=True)
class Counts:
    """What an encoding met: values in all, beyond the type's range, NaN or infinite."""

    values: int = 0
    saturated: int = 0
    nonfinite: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.values + other.values,
            self.saturated + other.saturated,
            self.nonfinite + other.nonfinite,
        )


def check_encoding(name: str) -> Encoding:
    """Return *name* as an Encoding; UsageError lists those there are."""
    for encoding in ENCODINGS:
        if encoding == name:
            return encoding
    raise UsageError(f"no encoding {name!r}: use one of {', '.join(ENCODINGS)}")


def encoded_row_bytes(encoding: Encoding, width: int) -> int:
    """Return the bytes of a row of *width* values."""
    if encoding == "int8":
        return int8_row(width).itemsize
    return width * (4 if encoding == "float32" else 2)
