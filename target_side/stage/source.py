"""Pages of a volume as the stage reads them: through one callback, with errors that say where."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.catalog import Catalog, ObjectInfo
from hyades.common.encodings import Encoding
from hyades.common.errors import DataError, DeviceLost, HyadesError, UsageError
from hyades.target_side.stage.meter import Meter

# Returns the bytes of a page, checked against its page table, for any thread: PageStore.read_page.
PageReader = Callable[[ObjectInfo, int], Any]
Bytes = NDArray[np.uint8]
_ENCODINGS: dict[str, Encoding] = {"float32": "float32", "float16": "float16"}


@dataclass(frozen=True, slots=True)
class Source:
    """A volume to read: its catalog, and who reads its pages."""

    name: str  # path or URL, for messages
    catalog: Catalog
    read_page: PageReader
    meter: Meter

    def object(self, name: str, kind: str) -> ObjectInfo:
        """Return the object *name* of *kind*; UsageError where it is another or absent."""
        info = self.catalog.objects.get(name)
        if info is None or info.kind != kind:
            has = ", ".join(n for n, i in sorted(self.catalog.objects.items()) if i.kind == kind)
            raise UsageError(f"{self.name} has no object {name!r} of kind {kind!r}; it has: {has}")
        return info

    def read(self, info: ObjectInfo, page: int) -> Bytes:
        """Return the bytes [page_bytes] of *page*.

        An error keeps its type and gets a note; one that is none of ours becomes DeviceLost.
        """
        where = f"{self.name}: object {info.name!r} page {page} (LBA {info.lba(page)})"
        try:
            with self.meter.span("read"):
                data = np.frombuffer(self.read_page(info, page), np.uint8)
        except HyadesError as error:
            error.add_note(f"while the stage read {where}")
            raise
        except OSError as error:
            raise DeviceLost(f"{where}: {error}") from error
        if len(data) != info.page_bytes:
            raise DataError(f"{where}: {len(data)} bytes were read of {info.page_bytes}")
        return data

    def read_table(self, name: str) -> NDArray[Any]:
        """Return all records [rows] of a table."""
        info = self.object(name, "table")
        shape = info.shape()
        found = np.empty(info.rows, info.numpy_dtype)
        for page in range(info.pages):
            start, stop = shape.page_rows(page)
            data = self.read(info, page)[: (stop - start) * info.row_bytes]
            found[start:stop] = data.view(info.numpy_dtype)
        return found


def row_encoding(info: ObjectInfo) -> Encoding:
    """Return how the rows of *info* are stored; UsageError where no stage can decode them."""
    if info.kind != "rows" or info.dtype not in _ENCODINGS:
        raise UsageError(f"object {info.name!r} of {info.dtype} is no matrix of float32 or float16")
    return _ENCODINGS[info.dtype]
