"""Members of .npz archives: in place where stored, else decompressed into a temporary file."""

import zipfile
import zlib
from pathlib import Path

import numpy as np

from hyades.common.errors import DataError, UsageError
from hyades.deploy.ingest.readers.npy import parse_npy
from hyades.deploy.ingest.readers.storage import FileBytes, StoredArray, check_file
from hyades.deploy.ingest.spill import SpillFile

_CHUNK = 1 << 20
_LOCAL_HEADER = 30  # bytes, of which name and extra field lengths are at 26 and 28


class Archive:
    """A .npz file."""

    def __init__(self, path: Path, scratch: Path) -> None:
        """Open the archive; members are decompressed into *scratch* when asked for."""
        self.path = path
        self._scratch = scratch
        check_file(path)
        try:
            with zipfile.ZipFile(path) as archive:
                self._members = {
                    info.filename.removesuffix(".npy"): info for info in archive.infolist()
                }
        except (zipfile.BadZipFile, OSError, ValueError) as error:
            raise DataError(f"{path}: no .npz archive, or truncated: {error}") from error

    @property
    def keys(self) -> list[str]:
        """Names of the arrays."""
        return list(self._members)

    def __contains__(self, key: str) -> bool:
        return key in self._members

    def array(self, key: str) -> StoredArray:
        """Return member *key*; UsageError lists what there is."""
        info = self._members.get(key)
        if info is None:
            raise UsageError(f"{self.path} has no array {key!r}; it has: {', '.join(self.keys)}")
        name = f"{self.path}[{key}]"
        if info.compress_type == zipfile.ZIP_STORED:
            file = FileBytes(self.path)
            head = np.empty(_LOCAL_HEADER, np.uint8)
            file.read(info.header_offset, head)
            if head[:4].tobytes() != b"PK\x03\x04":
                raise DataError(f"{name}: its header in the archive is damaged")
            lengths = head[26:30].view("<u2")
            start = info.header_offset + _LOCAL_HEADER + int(lengths.sum())
            if start + info.file_size > file.size:
                raise DataError(
                    f"{name}: truncated: it ends at byte {start + info.file_size:,}, the file has "
                    f"{file.size:,}"
                )
            return parse_npy(file, name, start, start + info.file_size)
        spill = self._decompress(info, name)
        return parse_npy(spill, name, 0, spill.size)

    def _decompress(self, info: zipfile.ZipInfo, name: str) -> SpillFile:
        spill = SpillFile(self._scratch)
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(info) as member:
                while data := member.read(_CHUNK):
                    spill.append(np.frombuffer(data, np.uint8))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as bad:
            spill.close()
            raise DataError(f"{name}: cannot be decompressed: {bad}") from bad
        except BaseException:
            spill.close()
            raise
        return spill
