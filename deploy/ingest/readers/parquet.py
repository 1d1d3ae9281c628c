"""Parquet: edge tables and feature tables, read batch by batch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hyades.common.errors import DataError, UsageError
from hyades.deploy.ingest.readers.columns import find_column, find_pair
from hyades.deploy.ingest.readers.edges import to_ids
from hyades.deploy.ingest.readers.storage import check_file
from hyades.deploy.ingest.sources import EdgeBlock, to_float32


def _open(path: Path) -> pq.ParquetFile:
    check_file(path)
    try:
        return pq.ParquetFile(path, memory_map=False, pre_buffer=False, buffer_size=1 << 20)
    except (pa.ArrowInvalid, OSError) as error:
        text = str(error).splitlines()[0]
        raise DataError(f"{path}: no parquet file, or truncated: {text}") from error


def _batches(path: Path, columns: Sequence[str], size: int) -> Iterator[pa.RecordBatch]:
    file = _open(path)
    try:
        yield from file.iter_batches(batch_size=size, columns=list(columns), use_threads=False)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path}: damaged: {str(error).splitlines()[0]}") from error
    finally:
        file.close()


def _numbers(path: Path, batch: pa.RecordBatch, column: str, start: int) -> NDArray[Any]:
    values = batch.column(column)
    if values.null_count:
        row = start + int(np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{path}: column {column!r} is null in row {row}")
    array: NDArray[Any] = values.to_numpy(zero_copy_only=False)
    return array


def _check_numeric(schema: pa.Schema, column: str, path: Path, *, whole: bool) -> None:
    kind = schema.field(column).type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return
    if not whole and pa.types.is_boolean(kind):
        return
    what = "ids must be integers" if whole else "numbers are needed"
    raise UsageError(f"{path}: column {column!r} holds {kind}: {what}")


@dataclass(frozen=True)
class ParquetEdges:
    """Two columns of ids, perhaps one of weights."""

    path: Path
    columns: tuple[str, ...]
    edges: int
    vertices: int | None = None

    @property
    def name(self) -> str:
        """Path of the file."""
        return str(self.path)

    @property
    def weighted(self) -> bool:
        """Whether there is a column of weights."""
        return len(self.columns) == 3

    def blocks(self, size: int) -> Iterator[EdgeBlock]:
        """Yield all edges from the first, at most *size* at a time."""
        start = 0
        for batch in _batches(self.path, self.columns, size):
            values = [_numbers(self.path, batch, column, start) for column in self.columns]
            weight = to_float32(values[2]) if self.weighted else None
            source = to_ids(values[0], self.name, start)
            yield EdgeBlock(source, to_ids(values[1], self.name, start), weight)
            start += batch.num_rows


def parquet_edges(
    path: Path, columns: tuple[str, str] | None, weights: str | None
) -> tuple[ParquetEdges, tuple[str, ...]]:
    """Return the edges in a parquet file, and notes; columns as for text."""
    with _open(path) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
    names = schema.names
    chosen = [names[at] for at in find_pair(names, len(names), columns, str(path))]
    for name in chosen:
        _check_numeric(schema, name, path, whole=True)
    if weights is not None:
        chosen.append(names[find_column(names, len(names), weights, str(path))])
        _check_numeric(schema, chosen[-1], path, whole=False)
    rest = [name for name in names if name not in chosen]
    notes = (f"{path}: columns {', '.join(rest)} are ignored",) if rest else ()
    return ParquetEdges(path, tuple(chosen), rows), notes


@dataclass(frozen=True)
class ParquetFeatures:
    """A column of lists of one length, or several columns of numbers."""

    path: Path
    columns: tuple[str, ...]
    rows: int
    width: int
    dtype: np.dtype[Any]

    @property
    def name(self) -> str:
        """Path of the file."""
        return str(self.path)

    def blocks(self, size: int) -> Iterator[NDArray[Any]]:
        """Yield all rows from the first as [n, width], at most *size* rows at a time."""
        start = 0
        for batch in _batches(self.path, self.columns, size):
            if pa.types.is_list(batch.schema.types[0]) or _is_fixed(batch.schema.types[0]):
                yield self._lists(batch.column(0), start)
            else:
                values = [_numbers(self.path, batch, column, start) for column in self.columns]
                yield np.stack(values, axis=1)
            start += batch.num_rows

    def _lists(self, column: pa.Array, start: int) -> NDArray[Any]:
        flat = column.flatten()
        lengths = column.value_lengths().to_numpy(zero_copy_only=False)
        wrong = np.flatnonzero(lengths != self.width)
        if column.null_count or flat.null_count or wrong.size:
            row = start + (int(wrong[0]) if wrong.size else 0)
            raise DataError(
                f"{self.path}: column {self.columns[0]!r}: row {row} or one after it is null or "
                f"not {self.width} numbers"
            )
        array: NDArray[Any] = flat.to_numpy(zero_copy_only=False)
        return array.reshape(len(column), self.width)


def _is_fixed(kind: pa.DataType) -> bool:
    return bool(pa.types.is_fixed_size_list(kind))


def parquet_features(path: Path, key: str | None) -> ParquetFeatures:
    """Return the features in a parquet file: column(s) *key*, else what can only be meant."""
    with _open(path) as file:
        schema, rows = file.schema_arrow, file.metadata.num_rows
        names = tuple(key.split(",")) if key is not None else _feature_columns(schema, path)
        for name in names:
            find_column(schema.names, 0, name, str(path))
        kind = schema.field(names[0]).type
        if len(names) == 1 and (_is_fixed(kind) or pa.types.is_list(kind)):
            width = kind.list_size if _is_fixed(kind) else _first_length(file, names[0])
            return ParquetFeatures(path, names, rows, width, _dtype(kind.value_type, path))
    for name in names:
        _check_numeric(schema, name, path, whole=False)
    kinds = [_dtype(schema.field(name).type, path) for name in names]
    return ParquetFeatures(path, names, rows, len(names), np.result_type(*kinds))


def _dtype(kind: pa.DataType, path: Path) -> np.dtype[Any]:
    try:
        dtype: np.dtype[Any] = np.dtype(kind.to_pandas_dtype())
    except (NotImplementedError, TypeError) as error:
        raise UsageError(f"{path}: {kind} is no number") from error
    return dtype


def _first_length(file: pq.ParquetFile, column: str) -> int:
    for batch in file.iter_batches(batch_size=1, columns=[column], use_threads=False):
        return len(batch.column(0)[0])
    return 0


def _feature_columns(schema: pa.Schema, path: Path) -> tuple[str, ...]:
    lists = [f.name for f in schema if _is_fixed(f.type) or pa.types.is_list(f.type)]
    numbers = [f.name for f in schema if pa.types.is_floating(f.type)]
    if len(lists) == 1:
        return (lists[0],)
    if not lists and numbers:
        return tuple(numbers)
    raise UsageError(
        f"{path}: which columns hold the features? Pass --feature-key NAME[,NAME...]; it has "
        f"{', '.join(schema.names)}"
    )
