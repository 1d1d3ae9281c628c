"""From sorted records to tile pages, and from there into the volume."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyades.common.layout import DIRECTORY, TILE_ENTRY
from hyades.common.volume import Volume
from hyades.deploy.ingest import kernels
from hyades.deploy.ingest.buckets import KeySpace, Load
from hyades.deploy.ingest.progress import Progress
from hyades.deploy.ingest.spill import SpillFile

_COPY_BYTES = 4 << 20


@dataclass
class _Stream:
    """Pages of one object, kept in a temporary file until their number is known."""

    name: str
    file: SpillFile


class TileWriter:
    """Packs loads, which come in key order, into pages of tiles, ranks and weights.

    A page that is not full at the end of a load stays open, so the pages do not depend on how the
    edges were divided into loads.
    """

    def __init__(self, keys: KeySpace, width: int, page_bytes: int, folder: Path) -> None:
        """Prepare for records of *width* words; temporary files go to *folder*."""
        self._keys = keys
        self._page = np.empty(page_bytes // 4, np.uint32)
        self._ranks = np.empty(page_bytes // 4, np.uint32)
        weighted = width > kernels.WEIGHT
        self._weights = np.empty(page_bytes // 4 if weighted else 0, np.uint32)
        self._scratch = np.empty((3, page_bytes // 4), np.uint16)
        most = page_bytes // TILE_ENTRY.itemsize
        self._entries = np.empty((most, 4), np.int64)
        self._directory = np.empty((most, 4), np.uint32)
        self._sequences = np.zeros(keys.chunks, np.uint32)
        self._carry = np.empty((0, width), np.uint32)
        self._diagonal_done = False
        names = ["tiles", "ranks", "weights"] if weighted else ["tiles", "ranks"]
        self._streams = [_Stream(name, SpillFile(folder)) for name in names]
        self._pieces = SpillFile(folder)
        self.chunk_pages = np.zeros(keys.chunks + 1, np.int64)
        self._page_pieces = [0]
        self.pages = 0

    def add(self, load: Load) -> None:
        """Sort and pack the records of *load*, which it may overwrite."""
        vertices, shift = self._keys.vertices, self._keys.shift
        first, last = load.low // vertices, (load.high - 1) // vertices
        records, starts = self._by_chunk(load.records, first, last)
        longest = int(np.diff(starts).max())
        keys = np.empty((2, longest), np.int64)
        order = np.empty((2, longest), np.uint32)
        for chunk in range(first, last + 1):
            part = slice(starts[chunk - first], starts[chunk - first + 1])
            # Grouped records lie in a copy, so the sorted ones can go where they came from.
            out = load.records[part] if records is not load.records else np.empty_like(records)
            kernels.sort_chunk(records[part], shift, vertices, keys, order, out)
            if len(self._carry):
                out = np.concatenate((self._carry, out))
            self._pack(out, chunk, final=(chunk + 1) * vertices <= load.high)

    def _by_chunk(
        self, records: NDArray[np.uint32], first: int, last: int
    ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
        starts = np.zeros(last - first + 2, np.int64)
        if first == last:
            starts[1] = len(records)
            return records, starts
        kernels.count_chunks(records, self._keys.shift, first, starts[1:])
        np.cumsum(starts, out=starts)
        grouped = np.empty_like(records)
        kernels.scatter_chunks(records, self._keys.shift, first, starts[:-1].copy(), grouped)
        return grouped, starts

    def _pack(self, records: NDArray[np.uint32], chunk: int, *, final: bool) -> None:
        start = 0
        while start < len(records) or (final and not self._diagonal_done):
            start, self._diagonal_done, tiles, closed = kernels.pack_page(
                records, start, final, chunk, self._diagonal_done, self._keys.shift, self.pages,
                self._sequences, self._scratch, self._entries,
                self._page, self._ranks, self._weights, self._directory,
            )  # fmt: skip
            if not closed:
                break
            for stream, data in zip(self._streams, self._buffers(), strict=True):
                stream.file.append(data)
            self._pieces.append(self._directory[:tiles])
            self._page_pieces.append(self._page_pieces[-1] + tiles)
            self.pages += 1
        self._carry = records[start:].copy()
        if final:
            self.chunk_pages[chunk + 1] = self.pages
            self._diagonal_done = False

    def _buffers(self) -> list[NDArray[np.uint32]]:
        return [self._page, self._ranks, self._weights][: len(self._streams)]

    def store(self, volume: Volume, progress: Progress) -> None:
        """Write the pages and the directory to *volume*."""
        page_bytes = self._page.nbytes
        total = self.pages * page_bytes * len(self._streams)
        done = 0
        for stream in self._streams:
            info = volume.allocate_pages(stream.name, self.pages, page_bytes)
            several = max(_COPY_BYTES // page_bytes, 1)
            buffer = np.empty((several, page_bytes), np.uint8)
            for first in range(0, self.pages, several):
                part = buffer[: min(several, self.pages - first)]
                stream.file.read(first * page_bytes, part)
                for at, data in enumerate(part):
                    volume.write_page(info, first + at, data, 1)
                done += part.nbytes
                progress("writing topology", done, total, "B")
            stream.file.close()
        volume.write_table("directory", self._pieces.read_all(DIRECTORY))
        self._pieces.close()
        volume.write_table("chunk_pages", self.chunk_pages)
        volume.write_table("page_pieces", np.array(self._page_pieces, np.int64))

    def close(self) -> None:
        """Give the temporary files back."""
        for stream in self._streams:
            stream.file.close()
        self._pieces.close()
