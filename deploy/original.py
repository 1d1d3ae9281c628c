"""Rows of an object in the caller's own vertex order, within bounded memory.

A volume keeps rows in its own order (`order[new] = original`).  To bring back an object that is
larger than memory, its rows are first dealt into buckets of consecutive original vertices, in the
order in which they stand in the volume, and then each bucket is sorted in memory: two sequential
passes over the data whatever the permutation is.
"""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hyades.common.blocks import as_bytes
from hyades.common.catalog import ObjectInfo
from hyades.common.errors import DataError, UsageError
from hyades.common.units import MIB
from hyades.common.volume import Volume

Rows = NDArray[Any]
Advance = Callable[[int], None]  # is told how many bytes of rows were moved since the last call

DEFAULT_MEMORY = 256 * MIB
ORDER, ORIGINAL_IDS = "order", "original_ids"


def find_rows(volume: Volume, name: str) -> ObjectInfo:
    """Return the object that a user means by *name*: ``output/NAME`` or a full object name."""
    objects = volume.catalog.objects
    info = objects.get(f"output/{name}") or objects.get(name)
    if info is not None and info.kind == "rows":
        return info
    have = [key.removeprefix("output/") for key, value in objects.items() if value.kind == "rows"]
    run = volume.catalog.runs.get(name)
    if run is not None and run.state != "done":
        raise UsageError(
            f"run {name!r} in {volume.name} is not finished: "
            f"continue it with hyades refresh --resume --out {name}"
        )
    what = f"no output {name!r}" if info is None else f"{name!r} is a {info.kind} object, no output"
    raise UsageError(f"{what} in {volume.name}; it has: {', '.join(sorted(have)) or 'nothing'}")


def vertex_ids(volume: Volume, start: int, stop: int) -> NDArray[np.int64]:
    """Return the user's ids of the original vertices [start, stop): int64 [n]."""
    if ORIGINAL_IDS not in volume.catalog.objects:
        return np.arange(start, stop, dtype=np.int64)
    return _slice(volume, ORIGINAL_IDS, start, stop)


def read_original(volume: Volume, name: str, rows: ArrayLike | slice | None = None) -> Rows:
    """Return rows of *name* in original order: [n, width] in the object's dtype.

    *rows* are the user's vertex ids (integers, any order, repeats allowed) or a slice of the
    original vertex order; None means all.  Raises UsageError for ids that are not in the graph.
    """
    info = find_rows(volume, name)
    if rows is None or (isinstance(rows, slice) and rows == slice(None)):
        return read_all(volume, info, lambda _: None)
    if isinstance(rows, slice):
        originals = np.arange(*rows.indices(info.rows), dtype=np.int64)
    else:
        originals = _originals_of_ids(volume, info, np.asarray(rows))
    return _gather(volume, info, _positions(volume, originals))


def read_all(volume: Volume, info: ObjectInfo, advance: Advance) -> Rows:
    """Return all rows of *info* [rows, width] in original order, in memory."""
    result = np.empty((info.rows, info.width), info.numpy_dtype)
    seen = np.zeros(info.rows, np.bool_)
    for start, block in volume.iter_rows(info.name):
        originals = _originals(volume, info, start, start + len(block))
        result[originals] = block
        seen[originals] = True
        advance(block.nbytes)
    _check_permutation(volume, seen)
    return result


@dataclass(slots=True)
class Buckets:
    """Rows dealt by original vertex: bucket b holds vertices [b * window, (b + 1) * window).

    `rows_file` keeps a bucket's rows from byte `base + b * window * row_bytes` on, in volume order;
    `ids_file` keeps their place in the bucket (uint32).  Both are plain file descriptors.
    """

    volume: Volume
    info: ObjectInfo
    window: int
    rows_file: int
    ids_file: int
    base: int = 0

    def fill(self, batch_bytes: int, advance: Advance) -> None:
        """Deal all rows, read in batches of about *batch_bytes*."""
        filled = np.zeros(-(-self.info.rows // self.window), np.int64)
        for start, batch in batches(self.volume, self.info, batch_bytes):
            originals = _originals(self.volume, self.info, start, start + len(batch))
            bucket, place = np.divmod(originals, self.window)
            by_bucket = np.argsort(bucket, kind="stable")
            batch = batch[by_bucket]
            place = place[by_bucket].astype(np.uint32)
            counts = np.bincount(bucket, minlength=len(filled))
            ends = np.cumsum(counts)
            for index in np.flatnonzero(counts):
                piece = slice(ends[index] - counts[index], ends[index])
                at = int(index * self.window + filled[index])
                _check_permutation(self.volume, filled[index] + counts[index] <= self.window)
                write_at(self.rows_file, batch[piece], self.base + at * self.info.row_bytes)
                write_at(self.ids_file, place[piece], at * place.itemsize)
            filled += counts
            advance(batch.nbytes)

    def sorted_blocks(self) -> Iterator[tuple[int, Rows]]:
        """Yield (first original vertex, its bucket's rows in original order)."""
        for start in range(0, self.info.rows, self.window):
            count = min(self.window, self.info.rows - start)
            rows = np.empty((count, self.info.width), self.info.numpy_dtype)
            place = np.empty(count, np.uint32)
            read_at(self.rows_file, rows, self.base + start * self.info.row_bytes)
            read_at(self.ids_file, place, start * place.itemsize)
            _check_permutation(self.volume, np.bincount(place, minlength=count) == 1)
            block = np.empty_like(rows)
            block[place] = rows
            yield start, block


def batches(volume: Volume, info: ObjectInfo, nbytes: int) -> Iterator[tuple[int, Rows]]:
    """Yield (first row, rows) in volume order, whole pages joined up to about *nbytes*."""
    first, size = 0, 0
    held: list[Rows] = []
    for start, block in volume.iter_rows(info.name):
        if held and size + block.nbytes > nbytes:
            yield first, np.concatenate(held)
            held, size = [], 0
        if not held:
            first = start
        held.append(block)
        size += block.nbytes
    if held:
        yield first, np.concatenate(held)


def is_reordered(volume: Volume) -> bool:
    """Tell whether rows stand in the volume in another order than the user's."""
    return ORDER in volume.catalog.objects


def write_at(file: int, data: Rows, offset: int) -> None:
    """Write all of *data* at *offset*."""
    view = as_bytes(np.ascontiguousarray(data))
    while view:
        done = os.pwrite(file, view, offset)
        view, offset = view[done:], offset + done


def read_at(file: int, data: Rows, offset: int) -> None:
    """Fill *data* from *offset*; raise DataError at the end of the file."""
    view = as_bytes(data)
    while view:
        done = os.preadv(file, [view], offset)
        if done == 0:
            raise DataError(f"temporary file ends at byte {offset}, {len(view)} bytes too early")
        view, offset = view[done:], offset + done


def _originals(volume: Volume, info: ObjectInfo, start: int, stop: int) -> NDArray[np.int64]:
    if not is_reordered(volume):
        return np.arange(start, stop, dtype=np.int64)
    originals = _slice(volume, ORDER, start, stop)
    if originals.size and not 0 <= originals.min() <= originals.max() < info.rows:
        raise DataError(f"{volume.name}: object {ORDER!r} names vertices that do not exist")
    return originals


def _check_permutation(volume: Volume, good: Any) -> None:
    if not np.all(good):
        raise DataError(f"{volume.name}: object {ORDER!r} is not a permutation of the vertices")


def _slice(volume: Volume, table: str, start: int, stop: int) -> NDArray[np.int64]:
    return volume.read_rows(table, start, stop).reshape(-1).astype(np.int64, copy=False)


def _table_pages(volume: Volume, table: str) -> Iterator[tuple[int, NDArray[np.int64]]]:
    info = volume.object(table)
    for start in range(0, info.rows, info.rows_per_page):
        yield start, _slice(volume, table, start, min(start + info.rows_per_page, info.rows))


def _find(
    volume: Volume, table: str, wanted: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return where each wanted value stands in *table*, and whether it is there at all."""
    sorted_wanted, back = np.unique(wanted, return_inverse=True)
    place = np.zeros(len(sorted_wanted), np.int64)
    found = np.zeros(len(sorted_wanted), np.bool_)
    for start, values in _table_pages(volume, table):
        at = np.minimum(np.searchsorted(sorted_wanted, values), len(sorted_wanted) - 1)
        hit = np.flatnonzero(sorted_wanted[at] == values)
        place[at[hit]] = start + hit
        found[at[hit]] = True
    return place[back], found[back]


def _originals_of_ids(volume: Volume, info: ObjectInfo, ids: Rows) -> NDArray[np.int64]:
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        if ids.size or ids.ndim != 1:  # an empty list is float64
            raise UsageError(f"rows must be a list of vertex ids, not {ids.dtype} {ids.shape}")
        return np.empty(0, np.int64)
    ids = ids.astype(np.int64)
    if ORIGINAL_IDS in volume.catalog.objects:
        originals, known = _find(volume, ORIGINAL_IDS, ids)
    else:
        originals, known = ids, (ids >= 0) & (ids < info.rows)
    if not known.all():
        strange = ", ".join(map(str, ids[~known][:5]))
        raise UsageError(
            f"{np.count_nonzero(~known)} of the {len(ids)} vertex ids are not in {volume.name} "
            f"({info.rows} vertices): {strange}"
        )
    return originals


def _positions(volume: Volume, originals: NDArray[np.int64]) -> NDArray[np.int64]:
    if not is_reordered(volume) or originals.size == 0:
        return originals
    positions, found = _find(volume, ORDER, originals)
    _check_permutation(volume, found)
    return positions


def _gather(volume: Volume, info: ObjectInfo, positions: NDArray[np.int64]) -> Rows:
    result = np.empty((len(positions), info.width), info.numpy_dtype)
    shape = info.shape()
    index, local = np.divmod(positions, shape.range_rows)
    pages = index * shape.pages_per_range + local // shape.rows_per_page
    by_page = np.argsort(pages, kind="stable")
    cuts = np.flatnonzero(np.diff(pages[by_page])) + 1
    for piece in np.split(by_page, cuts):
        if piece.size:
            start, stop = shape.page_rows(int(pages[piece[0]]))
            result[piece] = volume.read_rows(info.name, start, stop)[positions[piece] - start]
    return result
