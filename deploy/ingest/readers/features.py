"""Feature files: which reader takes them, and what to say when none does."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import DataError, UsageError
from hyades.deploy.ingest.readers.context import Context
from hyades.deploy.ingest.readers.memory import as_array
from hyades.deploy.ingest.readers.npy import parse_npy, starts_with_magic
from hyades.deploy.ingest.readers.npz import Archive
from hyades.deploy.ingest.readers.storage import FileBytes, StoredArray, describe, raw_array
from hyades.deploy.ingest.readers.tensors import load_saved
from hyades.deploy.ingest.readers.text import text_matrix
from hyades.deploy.ingest.sources import ArrayFeatures, FeatureSource

_USUAL_WIDTHS = (50, 64, 100, 128, 256, 300, 500, 512, 602, 768, 1024, 1433, 3703)


@dataclass(frozen=True)
class FeatureChoice:
    """What the user said about the feature file."""

    key: str | None = None
    shape: tuple[int, int] | None = None
    dtype: np.dtype[Any] | None = None


@dataclass(frozen=True)
class StoredFeatures:
    """A stored matrix, or a vector taken as one column."""

    array: StoredArray

    @property
    def name(self) -> str:
        """Path of the file."""
        return self.array.name

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.array.shape[0]

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.array.shape[1] if len(self.array.shape) == 2 else 1

    @property
    def dtype(self) -> np.dtype[Any]:
        """What the rows are."""
        return self.array.dtype

    def blocks(self, size: int) -> Iterator[NDArray[Any]]:
        """Yield all rows from the first as [n, width], at most *size* rows at a time."""
        for start in range(0, self.rows, size):
            rows = self.array.rows(start, min(start + size, self.rows))
            yield rows.reshape(len(rows), self.width)


def stored_features(array: StoredArray) -> StoredFeatures:
    """Return *array* as features; UsageError unless it is a vector or a matrix."""
    if len(array.shape) not in (1, 2):
        raise UsageError(f"{array.name}: {describe(array)} is no matrix [vertices, width]")
    return StoredFeatures(array)


def parse_shape(text: str) -> tuple[int, int]:
    """Return (rows, width) from ``"1000,128"`` or ``"1000x128"``; UsageError."""
    match = re.fullmatch(r"\s*\[?\(?\s*(\d+)\s*[,x ]\s*(\d+)\s*\)?\]?\s*", text)
    if match is None:
        raise UsageError(f"--feature-shape {text!r}: write ROWS,WIDTH as in 1000,128")
    return int(match[1]), int(match[2])


def open_features(
    path: Path, choice: FeatureChoice, context: Context, vertices: int | None
) -> FeatureSource:
    """Return the features in *path*; *vertices*, if known, only helps to explain a raw file."""
    if path.suffix == ".npz":
        return stored_features(_npz_member(Archive(path, context.scratch), choice.key))
    if path.suffix in (".parquet", ".pq"):
        from hyades.deploy.ingest.readers.parquet import parquet_features  # pyarrow is large

        return parquet_features(path, choice.key)
    if path.suffix in (".pt", ".pth"):
        return ArrayFeatures(as_array(_member(load_saved(path), choice.key, path), str(path)))
    if path.suffix in (".csv", ".tsv", ".txt", ".gz"):
        return stored_features(text_matrix(path, context))
    file = FileBytes(path)
    if choice.shape is None and starts_with_magic(file, 0, file.size):
        return stored_features(parse_npy(file, str(path), 0, file.size))
    if choice.shape is None:
        choice = _from_conf(path) or choice
    if choice.shape is None or choice.dtype is None:
        raise UsageError(_explain_raw(path, file.size, choice.dtype, vertices))
    return stored_features(raw_array(path, choice.shape, choice.dtype))


def _member(saved: Any, key: str | None, path: Path) -> Any:
    if not isinstance(saved, dict):
        return saved
    if (key or "x") in saved:
        return saved[key or "x"]
    keys = ", ".join(str(name) for name in saved)
    raise UsageError(f"{path}: which entry holds the features? Pass --feature-key: {keys}")


def _npz_member(archive: Archive, key: str | None) -> StoredArray:
    if key is not None:
        return archive.array(key)
    for usual in ("node_feat", "x", "features", "feat"):
        if usual in archive:
            return archive.array(usual)
    if len(archive.keys) == 1:
        return archive.array(archive.keys[0])
    raise UsageError(
        f"{archive.path}: which array holds the features? Pass --feature-key with one of: "
        f"{', '.join(archive.keys)}"
    )


def read_conf(folder: Path) -> dict[str, Any] | None:
    """Return conf.json of *folder* (DiskGNN, Ginex: shape and dtype of raw files), or None."""
    path = folder / "conf.json"
    if not path.is_file():
        return None
    try:
        conf = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise DataError(f"{path}: unreadable: {error}") from error
    if not isinstance(conf, dict):
        raise DataError(f"{path}: a JSON object was expected")
    return conf


def conf_shape(
    conf: dict[str, Any], kind: str, path: Path
) -> tuple[tuple[int, ...], np.dtype[Any]] | None:
    """Return (shape, dtype) that *conf* gives for *kind*, or None if it does not mention it."""
    shape, dtype = conf.get(f"{kind}_shape"), conf.get(f"{kind}_dtype")
    if shape is None or dtype is None:
        return None
    try:
        return tuple(int(n) for n in shape), np.dtype(dtype)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path.parent / 'conf.json'}: {kind}: {error}") from error


def _from_conf(path: Path) -> FeatureChoice | None:
    conf = read_conf(path.parent)
    found = conf_shape(conf, "features", path) if conf is not None else None
    if found is None or len(found[0]) != 2:
        return None
    return FeatureChoice(shape=(found[0][0], found[0][1]), dtype=found[1])


def _explain_raw(path: Path, size: int, dtype: np.dtype[Any] | None, vertices: int | None) -> str:
    """Return what to pass for a headerless file of *size* bytes."""
    kinds = [dtype] if dtype is not None else [np.dtype(name) for name in ("f4", "f2", "f8")]
    fits = []
    for kind in kinds:
        for width in _USUAL_WIDTHS if vertices is None else [size // (kind.itemsize * vertices)]:
            rows, rest = divmod(size, kind.itemsize * max(width, 1))
            if rest == 0 and width > 0 and vertices in (None, rows):
                fits.append(f"--feature-shape {rows},{width} --feature-dtype {kind.name}")
    text = (
        f"{path}: no .npy header (it does not begin with \\x93NUMPY), so it holds raw numbers: "
        "pass --feature-shape ROWS,WIDTH and --feature-dtype"
    )
    known = "" if vertices is None else f" for {vertices:,} vertices"
    if not fits:
        return f"{text}; its {size:,} bytes fit no whole number of columns{known}: truncated?"
    return f"{text}; its {size:,} bytes would fit{known}: {' or '.join(fits[:4])}"
