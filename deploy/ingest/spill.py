"""Temporary files beside the volume: unlinked from birth, so nothing is left however a run ends."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from hyades.common.blocks import as_bytes
from hyades.common.errors import UsageError
from hyades.common.units import format_size


class SpillFile:
    """A nameless file that grows at its end and is read anywhere."""

    def __init__(self, folder: Path) -> None:
        """Create the file in *folder*; UsageError where that cannot be done."""
        self._folder = folder
        try:
            self._file = tempfile.TemporaryFile(dir=folder, prefix=".hyades-", buffering=0)  # noqa: SIM115
        except OSError as error:
            raise UsageError(
                f"cannot make a temporary file in {folder}: {error.strerror}"
            ) from error
        self.size = 0

    def append(self, data: NDArray[Any]) -> None:
        """Write a contiguous array at the end; UsageError when the disk is full."""
        self.write(self.size, data)

    def write(self, start: int, data: NDArray[Any]) -> None:
        """Write a contiguous array at offset *start*; UsageError when the disk is full."""
        view = as_bytes(data)
        while view:
            try:
                done = os.pwrite(self._file.fileno(), view, start)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise UsageError(
                    f"no space left in {self._folder} for temporary files (this one has "
                    f"{format_size(self.size)}): free some, or name another folder"
                ) from error
            start += done
            self.size = max(self.size, start)
            view = view[done:]

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Fill the contiguous array *out* with the bytes from offset *start*."""
        view = as_bytes(out)
        while view:
            done = os.preadv(self._file.fileno(), [view], start)
            if done == 0:
                raise EOFError(f"a temporary file in {self._folder} ends at byte {start}")
            start += done
            view = view[done:]

    def read_all(self, dtype: DTypeLike) -> NDArray[Any]:
        """Return the whole file as a vector."""
        kind: np.dtype[Any] = np.dtype(dtype)
        out = np.empty(self.size // kind.itemsize, kind)
        self.read(0, out)
        return out

    def close(self) -> None:
        """Give the space back."""
        self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            self.close()
