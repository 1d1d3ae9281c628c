"""CRC32C (Castagnoli), the one checksum of the format."""

from typing import Any

import crc32c as _crc32c


def crc32c(data: Any, value: int = 0) -> int:
    """Return the CRC32C of *data* (contiguous buffer) continuing from *value*; releases the GIL."""
    return int(_crc32c.crc32c(data, value))


def hardware() -> bool:
    """Return whether the processor computes it."""
    return bool(_crc32c.hardware_based)
