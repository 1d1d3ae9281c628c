"""Byte sizes: parsing what users type and printing what they read."""

import re

from hyades.common.errors import UsageError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
_SCALE = {
    "": 1, "b": 1,
    "k": KIB, "kib": KIB, "kb": 1000,
    "m": MIB, "mib": MIB, "mb": 1000**2,
    "g": GIB, "gib": GIB, "gb": 1000**3,
    "t": 1 << 40, "tib": 1 << 40, "tb": 1000**4,
}  # fmt: skip
_TOO_MUCH = float(1 << 63)
_SIZE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*")


def parse_size(text: str | int) -> int:
    """Return the bytes meant by ``"1GiB"``, ``"512M"`` or ``1048576``; raise UsageError."""
    if isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    if match is None or match[2].lower() not in _SCALE:
        raise UsageError(f"cannot read {text!r} as a size: write for example 512MiB or 2GiB")
    nbytes = float(match[1]) * _SCALE[match[2].lower()]
    if nbytes >= _TOO_MUCH:
        raise UsageError(f"{text} is more than any file can hold")
    return int(nbytes)


def format_size(nbytes: float) -> str:
    """Return *nbytes* with the binary unit that keeps it readable, as in ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def round_up(value: int, multiple: int) -> int:
    """Return *value* rounded up to the next multiple of *multiple*."""
    return -(-value // multiple) * multiple
