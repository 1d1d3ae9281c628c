"""The .npy format: headers read from bytes, so that members of archives work as files do."""

from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from hyades.common.errors import DataError, UsageError
from hyades.deploy.ingest.readers.storage import ByteSource, FileBytes, StoredArray

MAGIC = b"\x93NUMPY"
_LONGEST_HEADER = 1 << 16


class _Cursor:
    """The file object that numpy's header parser wants."""

    def __init__(self, data: ByteSource, start: int, size: int) -> None:
        self._data = data
        self._at = start
        self._end = size

    def read(self, count: int = -1, /) -> bytes:
        left = self._end - self._at
        out = np.empty(left if count < 0 else min(count, left), np.uint8)
        self._data.read(self._at, out)
        self._at += len(out)
        return out.tobytes()

    def tell(self) -> int:
        return self._at


def starts_with_magic(data: ByteSource, start: int, size: int) -> bool:
    """Return whether a .npy begins at *start*."""
    head = np.empty(min(len(MAGIC), size - start), np.uint8)
    data.read(start, head)
    return head.tobytes() == MAGIC


def parse_npy(data: ByteSource, name: str, start: int, size: int) -> StoredArray:
    """Return the array whose .npy begins at *start* of *size* bytes; DataError for a bad one."""
    cursor = _Cursor(data, start, min(size, start + _LONGEST_HEADER))
    try:
        version = npy_format.read_magic(cursor)
        if version == (1, 0):
            shape, fortran, dtype = npy_format.read_array_header_1_0(cursor)
        elif version == (2, 0):
            shape, fortran, dtype = npy_format.read_array_header_2_0(cursor)
        else:
            raise DataError(f"{name}: .npy version {version} is unknown")
    except (ValueError, EOFError, SyntaxError, TokenError) as error:
        text = str(error).splitlines()[0] if str(error) else "cut short"
        raise DataError(f"{name}: unreadable .npy header: {text}") from error
    check_dtype(dtype, name)
    if any(length < 0 for length in shape):
        raise DataError(f"{name}: unreadable .npy header: shape {shape} has a negative length")
    array = StoredArray(data, name, cursor.tell(), tuple(shape), dtype, fortran)
    array.check_size(size)
    return array


def check_dtype(dtype: np.dtype[Any], name: str) -> None:
    """Raise for arrays of Python objects and of records."""
    if dtype.hasobject:
        raise DataError(
            f"{name}: an array of pickled Python objects, which is not read (it could run code): "
            "save it with a numeric dtype"
        )
    if dtype.names is not None or dtype.subdtype is not None:
        raise UsageError(f"{name}: an array of records {dtype}: save plain numbers")


def open_npy(path: Path) -> StoredArray:
    """Return the array in a .npy file; DataError when the magic is missing or it is cut short."""
    file = FileBytes(path)
    if not starts_with_magic(file, 0, file.size):
        raise DataError(f"{path}: no .npy header (it does not begin with \\x93NUMPY)")
    return parse_npy(file, str(path), 0, file.size)
