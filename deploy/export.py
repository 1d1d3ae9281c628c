"""Export of an output to .npy, .parquet or .safetensors, in the caller's vertex order.

Rows are streamed: memory stays near the given bound, and a reordered object that is larger costs
one more write and read of its bytes (see `original.Buckets`).  .npy and .safetensors hold plain
rows behind a header, so there the buckets are sorted in place in the file itself; for .parquet they
are a temporary file beside it.  The file appears under its name only when it is complete.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hyades.common.catalog import ObjectInfo
from hyades.common.errors import UsageError
from hyades.common.units import MIB, format_size
from hyades.common.volume import Volume
from hyades.deploy.original import (
    DEFAULT_MEMORY,
    ORIGINAL_IDS,
    Advance,
    Buckets,
    Rows,
    batches,
    find_rows,
    is_reordered,
    read_all,
    vertex_ids,
    write_at,
)

FORMATS = (".npy", ".parquet", ".safetensors")
_ROW_GROUP = 64 * MIB
_IDS_BLOCK = 1 << 20
_SAFETENSORS = {"float32": "F32", "float16": "F16", "float64": "F64"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    path: Path
    ids_path: Path | None  # beside a .npy of a relabelled graph: the user's id of each row
    rows: int
    width: int
    dtype: str
    nbytes: int


class Holder(Protocol):
    """What `hyades.open` returns: something that holds a volume."""

    @property
    def volume(self) -> Volume: ...


def export(
    volume: Volume | Holder,
    name: str,
    path: str | Path,
    *,
    force: bool = False,
    memory: int = DEFAULT_MEMORY,
    advance: Advance | None = None,
) -> Exported:
    """Write output *name* to *path*; the suffix chooses the format.

    Row i is original vertex i.  .parquet has the columns `id` (int64, the user's ids) and
    `embedding` (a fixed-size list); .safetensors has the tensor `embeddings`, and `ids` where
    vertices were relabelled; .npy then gets a second file ``*.ids.npy``.  *advance* is told the
    bytes moved, of `export_bytes` in all.  Raises UsageError for an unknown suffix, an existing
    file without *force*, or a full disk; nothing is left behind then.
    """
    volume = volume if isinstance(volume, Volume) else volume.volume
    path = Path(path)
    writers = dict(zip(FORMATS, (_write_npy, _write_parquet, _write_safetensors), strict=True))
    if path.suffix not in writers:
        raise UsageError(f"cannot export to {path.name!r}: use {', '.join(FORMATS)}")
    info = find_rows(volume, name)
    ids_path = None
    if path.suffix == ".npy" and ORIGINAL_IDS in volume.catalog.objects:
        ids_path = path.with_suffix(".ids.npy")
    for target in filter(None, (path, ids_path)):
        if target.exists() and not force:
            raise UsageError(f"{target} exists: add --force to replace it")
        if target.exists() and not (target.is_file() or target.is_dir()):
            raise UsageError(f"{target} is no regular file: name one to write to")
        if target.is_dir():
            raise UsageError(f"{target} is a directory")
    source = _Source(volume, info, memory, advance or (lambda _: None))
    with _whole_file(path) as partial:
        writers[path.suffix](source, partial)
        if ids_path is not None:
            with _whole_file(ids_path) as partial_ids:
                _write_ids_npy(source, partial_ids)
    nbytes = path.stat().st_size
    return Exported(path, ids_path, info.rows, info.width, info.dtype, nbytes)


def export_bytes(volume: Volume, name: str, memory: int = DEFAULT_MEMORY) -> int:
    """Return the bytes that `export` will report to its `advance`."""
    info = find_rows(volume, name)
    source = _Source(volume, info, memory, lambda _: None)
    return info.rows * info.row_bytes * (2 if source.window else 1)


@dataclass(frozen=True, slots=True)
class _Source:
    """Where the rows come from, and how much memory they may take on their way."""

    volume: Volume
    info: ObjectInfo
    memory: int
    advance: Advance

    @property
    def window(self) -> int:
        """Rows of a bucket, or 0 where no buckets are needed."""
        rows = max(1, self.memory // 3 // self.info.row_bytes)
        if not is_reordered(self.volume) or rows >= self.info.rows:
            return 0
        return rows

    @property
    def nbytes(self) -> int:
        return self.info.rows * self.info.row_bytes

    def blocks(self) -> Iterator[tuple[int, Rows]]:
        """Yield (first original vertex, rows) where no buckets are needed."""
        if is_reordered(self.volume):
            yield 0, read_all(self.volume, self.info, self.advance)
            return
        for start, rows in self.volume.iter_rows(self.info.name):
            yield start, rows
            self.advance(rows.nbytes)

    def bucketed(
        self, rows_file: int, base: int, folder: Path, use: Callable[[int, Rows], None]
    ) -> None:
        """Deal the rows into *rows_file* at *base* and call *use* with each sorted bucket."""
        with tempfile.TemporaryFile(dir=folder, prefix=".hyades-ids-") as ids:
            buckets = Buckets(self.volume, self.info, self.window, rows_file, ids.fileno(), base)
            buckets.fill(self.memory // 4, self.advance)
            for start, rows in buckets.sorted_blocks():
                use(start, rows)
                self.advance(rows.nbytes)


@contextmanager
def _whole_file(path: Path) -> Iterator[Path]:
    """Give a partial path that becomes *path* on success and vanishes on any failure."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        try:
            yield partial
            with partial.open("rb") as written:
                os.fsync(written.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            free = format_size(shutil.disk_usage(path.parent).free)
            raise UsageError(
                f"disk full while writing {path}: {free} free in {path.parent.resolve()}; "
                "nothing was left behind"
            ) from error
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from error


def _write_plain(source: _Source, partial: Path, header: bytes, gap: int = 0) -> None:
    """Write *header*, leave *gap* bytes, write all rows."""
    base = len(header) + gap
    with partial.open("w+b") as file:
        # A disk that is too small is found before the long part.
        os.posix_fallocate(file.fileno(), 0, base + source.nbytes)
        write_at(file.fileno(), np.frombuffer(header, np.uint8), 0)

        def place(start: int, rows: Rows) -> None:
            write_at(file.fileno(), rows, base + start * source.info.row_bytes)

        if source.window:
            source.bucketed(file.fileno(), base, partial.parent, place)
        else:
            for start, rows in source.blocks():
                place(start, rows)


def _npy_header(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    buffer = BytesIO()
    np.lib.format.write_array_header_1_0(
        buffer,
        {"descr": dtype.str, "fortran_order": False, "shape": shape},
    )
    return buffer.getvalue()


def _write_npy(source: _Source, partial: Path) -> None:
    info = source.info
    _write_plain(source, partial, _npy_header(info.numpy_dtype, (info.rows, info.width)))


def _write_ids_npy(source: _Source, partial: Path) -> None:
    with partial.open("wb") as file:
        file.write(_npy_header(np.dtype("<i8"), (source.info.rows,)))
        for ids in _id_blocks(source):
            file.write(ids.data)


def _id_blocks(source: _Source) -> Iterator[NDArray[np.int64]]:
    for start in range(0, source.info.rows, _IDS_BLOCK):
        stop = min(start + _IDS_BLOCK, source.info.rows)
        yield np.ascontiguousarray(vertex_ids(source.volume, start, stop))


def _write_safetensors(source: _Source, partial: Path) -> None:
    info = source.info
    # The ids come first: behind float16 rows of odd width they would not be aligned.
    ids_bytes = 8 * info.rows if ORIGINAL_IDS in source.volume.catalog.objects else 0
    header: dict[str, Any] = {
        "__metadata__": {"volume": source.volume.name, "object": info.name},
        "embeddings": {
            "dtype": _SAFETENSORS[info.dtype],
            "shape": [info.rows, info.width],
            "data_offsets": [ids_bytes, ids_bytes + source.nbytes],
        },
    }
    if ids_bytes:
        header["ids"] = {"dtype": "I64", "shape": [info.rows], "data_offsets": [0, ids_bytes]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    head = len(text).to_bytes(8, "little") + text
    _write_plain(source, partial, head, ids_bytes)
    if ids_bytes:
        with partial.open("r+b") as file:
            file.seek(len(head))
            for ids in _id_blocks(source):
                file.write(ids.data)


def _write_parquet(source: _Source, partial: Path) -> None:
    info = source.info
    value = pa.from_numpy_dtype(info.numpy_dtype)
    embedding = pa.list_(value, info.width)
    schema = pa.schema([("id", pa.int64()), ("embedding", embedding)])
    group_rows = max(1, min(_ROW_GROUP, source.memory // 4) // info.row_bytes)
    options: dict[str, Any] = {"use_dictionary": False, "write_statistics": ["id"]}
    with pq.ParquetWriter(partial, schema, compression="none", **options) as writer:

        def append(start: int, rows: Rows) -> None:
            for at in range(0, len(rows), group_rows):
                group = np.ascontiguousarray(rows[at : at + group_rows])
                ids = vertex_ids(source.volume, start + at, start + at + len(group))
                vectors = pa.FixedSizeListArray.from_arrays(
                    pa.array(group.reshape(-1)), type=embedding
                )
                writer.write_table(
                    pa.Table.from_arrays([pa.array(ids), vectors], schema=schema),
                    row_group_size=group_rows,
                )

        if source.window:
            with tempfile.TemporaryFile(dir=partial.parent, prefix=".hyades-rows-") as rows_file:
                source.bucketed(rows_file.fileno(), 0, partial.parent, append)
        else:
            for start, rows in _grouped(source, group_rows):
                append(start, rows)


def _grouped(source: _Source, group_rows: int) -> Iterator[tuple[int, Rows]]:
    """Join page-sized blocks, which would make row groups that are too small to read fast."""
    if is_reordered(source.volume):
        yield from source.blocks()
        return
    for start, rows in batches(source.volume, source.info, group_rows * source.info.row_bytes):
        yield start, rows
        source.advance(rows.nbytes)
