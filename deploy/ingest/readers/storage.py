"""Arrays that lie in files, read in blocks with plain reads.

Not memory-mapped: a page of a mapped file counts as resident memory, and a truncated one ends the
process with SIGBUS instead of a message.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyades.common.blocks import as_bytes
from hyades.common.errors import DataError, UsageError
from hyades.common.units import format_size


class ByteSource(Protocol):
    """Bytes at offsets."""

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fill the contiguous array *out* with the bytes from offset *start*."""


class FileBytes:
    """A file of the user's, open for reading."""

    def __init__(self, path: Path) -> None:
        """Open *path*; UsageError when it is missing, a directory or unreadable, or empty."""
        self.path = path
        self._fd = -1
        self._fd = os.open(check_file(path), os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fill *out* from byte *start*; DataError where the file ends first."""
        view = as_bytes(out)
        while view:
            done = os.preadv(self._fd, [view], start)
            if done == 0:
                raise DataError(
                    f"{self.path}: ends at byte {start}, {len(view)} more were expected: truncated"
                )
            start += done
            view = view[done:]

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def check_file(path: Path) -> Path:
    """Return *path* if it is a readable, non-empty file; UsageError says what it is instead."""
    if path.is_dir():
        raise UsageError(f"{path} is a directory, not a file")
    if not path.exists():
        raise UsageError(f"{path}: no such file")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{path}: no permission to read it")
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty (0 bytes)")
    return path


@dataclass(frozen=True)
class StoredArray:
    """An array at *offset* of *data*; dimension 0 varies fastest if *fortran*."""

    data: ByteSource
    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    fortran: bool = False

    def elements(self, start: int, count: int) -> NDArray[Any]:
        """Return *count* elements from *start*, in the order in which they are stored."""
        out = np.empty(count, self.dtype)
        self.data.read(self.offset + start * self.dtype.itemsize, out)
        return out

    def rows(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows *start* to *stop* of a vector or matrix, as [n, ...]."""
        if len(self.shape) == 1:
            return self.elements(start, stop - start)
        height, width = self.shape
        if not self.fortran:
            return self.elements(start * width, (stop - start) * width).reshape(-1, width)
        columns = [self.elements(column * height + start, stop - start) for column in range(width)]
        return np.stack(columns, axis=1)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check_size(self, size: int) -> None:
        """Raise DataError unless the elements fit in a file of *size* bytes."""
        if self.offset + self.nbytes > size:
            raise DataError(
                f"{self.name}: truncated: {describe(self)} need {self.offset + self.nbytes:,} "
                f"bytes, the file has {size:,}"
            )


def describe(array: StoredArray) -> str:
    """Return shape and dtype for messages, as in ``"[10, 3] float32"``."""
    return f"[{', '.join(str(n) for n in array.shape)}] {array.dtype.name}"


def raw_array(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any]) -> StoredArray:
    """Return a headerless file as an array; DataError unless its size is exactly right."""
    file = FileBytes(path)
    array = StoredArray(file, str(path), 0, shape, dtype)
    array.check_size(file.size)
    if file.size != array.nbytes:
        raise DataError(
            f"{path}: {describe(array)} take {array.nbytes:,} bytes, the file has {file.size:,} "
            f"({format_size(file.size)}): shape or dtype is wrong"
        )
    return array
