"""What a volume holds, as plain records for whoever prints them."""

from dataclasses import dataclass

from hyades.common.catalog import Kind, ObjectInfo
from hyades.common.layout import BLOCK
from hyades.common.volume import Volume


@dataclass(frozen=True, slots=True)
class ObjectLine:
    """One object of the working catalog."""

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]  # rows and columns; rows of a table; pages and bytes of opaque pages
    pages: int
    page_bytes: int
    nbytes: int  # on the device: pages with their padding, and the page table
    pieces: int  # extents of the pages: more than one means that space was fragmented
    attributes: dict[str, int | float | str]


def describe_volume(volume: Volume) -> list[ObjectLine]:
    """Return a line for each object of *volume*, by name; reads no page and no page table."""
    return [_line(info) for _, info in sorted(volume.catalog.objects.items())]


def _line(info: ObjectInfo) -> ObjectLine:
    second = {"rows": (info.width,), "table": (), "pages": (info.page_bytes,)}[info.kind]
    return ObjectLine(
        name=info.name,
        kind=info.kind,
        dtype=info.dtype,
        shape=(info.rows, *second),
        pages=info.pages,
        page_bytes=info.page_bytes,
        nbytes=info.nbytes + info.table_blocks * BLOCK,
        pieces=len(info.extents),
        attributes=dict(info.attributes),
    )
