"""Edge lists and matrices as text, plain or gzipped: parsed in blocks, spooled as binary."""

import gzip
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import DataError, UsageError
from hyades.common.units import MIB
from hyades.deploy.ingest.readers import textparse
from hyades.deploy.ingest.readers.columns import find_column, find_pair
from hyades.deploy.ingest.readers.context import Context
from hyades.deploy.ingest.readers.edges import VectorEdges
from hyades.deploy.ingest.readers.npy import MAGIC, open_npy
from hyades.deploy.ingest.readers.storage import StoredArray, check_file, describe
from hyades.deploy.ingest.spill import SpillFile

_BLOCK = 4 * MIB
_LONGEST_LINE = 64 * MIB
_GZIP = b"\x1f\x8b"
_BLANKS = re.compile(r"[ \t]+")
_PROBLEM = {
    textparse.NOT_A_NUMBER: "is not a number",
    textparse.NOT_WHOLE: "is not a whole number",
    textparse.TOO_LARGE: "has more than 18 digits",
}


class _Lines:
    """The bytes of a text file in blocks of whole lines."""

    def __init__(self, path: Path, context: Context) -> None:
        self.path = path
        self._context = context
        check_file(path)
        self._size = path.stat().st_size

    def blocks(self) -> Iterator[bytes]:
        """Yield blocks, each ended by a newline; DataError for damaged gzip."""
        with self.path.open("rb") as raw:
            packed = raw.read(2) == _GZIP
            raw.seek(0)
            stream: Any = gzip.GzipFile(fileobj=raw) if packed else raw
            rest = b""
            while data := self._read(stream, raw):
                cut = data.rfind(b"\n") + 1
                if cut == 0:
                    rest += data
                    if len(rest) > _LONGEST_LINE:
                        raise DataError(f"{self.path}: no line ends in {len(rest):,} bytes: text?")
                    continue
                yield rest + data[:cut]
                rest = data[cut:]
                self._context.progress("reading text", raw.tell(), self._size, "B")
            if rest:
                yield rest + b"\n"
        self._context.progress("reading text", self._size, self._size, "B")

    def _read(self, stream: Any, raw: IO[bytes]) -> bytes:
        try:
            data: bytes = stream.read(_BLOCK)
            return data
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(
                f"{self.path}: truncated or damaged gzip near byte {raw.tell():,}: {error}"
            ) from error


@dataclass(frozen=True)
class _Style:
    """How the lines look: delimiter (0: blanks), the names in the header or none, first fields."""

    delimiter: int
    header: tuple[str, ...] | None
    width: int
    skip: int  # bytes up to the end of the header line
    skip_lines: int


def _sniff(block: bytes, path: Path) -> _Style | None:
    """Return the style of the first data line in *block*, or None if there is none."""
    if block.startswith(b"%%MatrixMarket"):
        raise UsageError(
            f"{path}: a Matrix Market file: convert it with scipy.io.mmread and scipy.sparse."
            "save_npz"
        )
    at = 3 if block.startswith(b"\xef\xbb\xbf") else 0
    lines = 0
    while at < len(block):
        end = block.index(b"\n", at)
        try:
            line = block[at:end].decode().strip()
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: line {lines + 1} is no text (UTF-8)") from error
        if line and line[0] not in "#%":
            break
        at, lines = end + 1, lines + 1
    else:
        return None
    delimiter = _delimiter(line)
    parts = line.split(delimiter) if delimiter else _BLANKS.split(line)
    fields = tuple(part.strip(' \t"') for part in parts)
    header = None if any(_is_number(field) for field in fields) else fields
    if header is None:
        return _Style(ord(delimiter or "\0"), None, len(fields), at, lines)
    return _Style(ord(delimiter or "\0"), header, len(fields), end + 1, lines + 1)


def _delimiter(line: str) -> str:
    """Return the character between the fields, "" for blanks."""
    for usual in ",;|":
        if usual in line:
            return usual
    found = re.search(r"[^\w.+\-\s\"']", line)
    return found[0] if found and ord(found[0]) < 128 else ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _problem(lines: _Lines, block: NDArray[np.uint8], state: NDArray[np.int64], before: int) -> str:
    where = f"{lines.path}: line {before + int(state[textparse.LINE]) + 1}"
    if state[textparse.CODE] == textparse.MISSING:
        return f"{where} has not as many columns as the first one, or lacks one that is needed"
    field = block[state[textparse.BEGIN] : state[textparse.END]][:40].tobytes().decode("latin-1")
    return f"{where}: {field!r} {_PROBLEM[int(state[textparse.CODE])]}"


def _styled(lines: _Lines) -> tuple[_Style, Iterator[tuple[int, NDArray[np.uint8]]]]:
    """Return the style, and (lines before, bytes) of every block after the header."""
    blocks = lines.blocks()
    before = 0
    for first in blocks:
        style = _sniff(first, lines.path)
        if style is not None:
            break
        before += first.count(b"\n")
    else:
        raise DataError(f"{lines.path} holds no lines but comments")

    def rest() -> Iterator[tuple[int, NDArray[np.uint8]]]:
        count = before + style.skip_lines
        for block in chain([first[style.skip :]], blocks):
            yield count, np.frombuffer(block, np.uint8)
            count += block.count(b"\n")

    return style, rest()


def text_edges(
    path: Path, columns: tuple[str, str] | None, weights: str | None, context: Context
) -> tuple[VectorEdges, tuple[str, ...]]:
    """Return the edges in a text file, spooled, and notes.

    *columns* and *weights* are names in the header or numbers from 0; without them the columns
    with usual names (src, dst; source, target; ...) or else the first two.
    """
    lines = _Lines(path, context)
    style, blocks = _styled(lines)
    pair = find_pair(style.header, style.width, columns, str(path))
    third = -1 if weights is None else find_column(style.header, style.width, weights, str(path))
    wanted = np.array([*pair, third], np.int64)
    state = np.zeros(4, np.int64)
    spools = [SpillFile(context.scratch) for _ in range(2 if third < 0 else 3)]
    try:
        for before, block in blocks:
            most = int(np.count_nonzero(block == ord("\n")))
            source, destination = np.empty(most, np.int64), np.empty(most, np.int64)
            weight = np.empty(most, np.float32)
            count = textparse.parse_edges(
                block, style.delimiter, wanted, source, destination, weight, state
            )
            if count < 0:
                raise DataError(_problem(lines, block, state, before))
            found: tuple[NDArray[Any], ...] = (source, destination, weight)
            for spool, values in zip(spools, found, strict=False):
                spool.append(values[:count])
    except BaseException:
        for spool in spools:
            spool.close()
        raise
    edges = spools[0].size // 8
    arrays = [
        StoredArray(spool, str(path), 0, (edges,), np.dtype(kind))
        for spool, kind in zip(spools, ("<i8", "<i8", "<f4"), strict=False)
    ]
    notes: tuple[str, ...] = ()
    if style.width > len(arrays):
        notes = (
            f"{path}: {style.width} columns, of which {style.width - len(arrays)} are ignored "
            "(--edge-weights NAME or NUMBER takes one as weights)",
        )
    return VectorEdges(arrays[0], arrays[1], arrays[2] if third >= 0 else None), notes


def text_matrix(path: Path, context: Context) -> StoredArray:
    """Return rows of numbers in a text file as a float32 matrix, spooled."""
    lines = _Lines(path, context)
    style, blocks = _styled(lines)
    state = np.zeros(4, np.int64)
    spool = SpillFile(context.scratch)
    try:
        for before, block in blocks:
            most = int(np.count_nonzero(block == ord("\n")))
            out = np.empty((most, style.width), np.float32)
            count = textparse.parse_matrix(block, style.delimiter, out, state)
            if count < 0:
                raise DataError(_problem(lines, block, state, before))
            spool.append(out[:count])
    except BaseException:
        spool.close()
        raise
    shape = (spool.size // (4 * style.width), style.width)
    return StoredArray(spool, str(path), 0, shape, np.dtype("<f4"))


def open_ids(path: Path, context: Context) -> StoredArray:
    """Return a vector of ids: .npy, or text with one a line."""
    with check_file(path).open("rb") as file:
        if file.read(len(MAGIC)) == MAGIC:
            array = open_npy(path)
            if len(array.shape) == 1:
                return array
            raise UsageError(f"{path}: {describe(array)} is no vector of ids")
    lines = _Lines(path, context)
    style, blocks = _styled(lines)
    state, spool = np.zeros(4, np.int64), SpillFile(context.scratch)
    for before, block in blocks:
        most = int(np.count_nonzero(block == ord("\n")))
        ids, none = np.empty(most, np.int64), np.empty(0, np.int64)
        count = textparse.parse_edges(
            block, style.delimiter, np.array([0, -1, -1]), ids, none, none.view("f4"), state
        )
        if count < 0:
            raise DataError(_problem(lines, block, state, before))
        spool.append(ids[:count])
    return StoredArray(spool, str(path), 0, (spool.size // 8,), np.dtype("<i8"))
