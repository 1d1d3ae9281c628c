"""The superblock and catalog as they lie on disk: a change here is a change of the format."""

from uuid import UUID

from hyades.common.catalog import (
    Catalog,
    Extent,
    GraphInfo,
    ObjectInfo,
    RunInfo,
    encode_catalog,
    parse_catalog,
)
from hyades.common.layout import BLOCK
from hyades.common.superblock import Superblock, unpack

HEAD = Superblock(
    generation=7,
    uuid=UUID("00112233-4455-6677-8899-aabbccddeeff"),
    catalog=Extent(1234, 2),
    catalog_bytes=5000,
    catalog_crc=0xDEADBEEF,
    next_lba=0x123456789,
)
BYTES = bytes.fromhex(
    "48 59 41 44 45 53 56 31 "  # magic
    "01 00 00 00 00 10 00 00 "  # version, block
    "07 00 00 00 00 00 00 00 "  # generation
    "00 11 22 33 44 55 66 77 "  # uuid
    "88 99 aa bb cc dd ee ff "  #
    "d2 04 00 00 00 00 00 00 "  # catalog_lba
    "88 13 00 00 00 00 00 00 "  # catalog_bytes
    "ef be ad de 00 00 00 00 "  # catalog_crc, padding
    "89 67 45 23 01 00 00 00 "  # next_lba
    "32 b1 5c 2f 00 00 00 00 "  # crc
)
CATALOG = Catalog(
    page_size=1 << 20,
    objects={
        "features": ObjectInfo(
            name="features", kind="rows", dtype="float32", rows=5000, width=16, range_rows=4096,
            rows_per_page=4096, page_bytes=262144, pages=2,
            extents=(Extent(3, 64), Extent(80, 64)), table=(Extent(67, 1),), table_crc=99,
            attributes={"source": "x.npy", "scale": 0.5, "seed": 3},
        )
    },
    graph=GraphInfo(5000, 9, 1, 4096, 2, weighted=True, reorder="rcm", span_before=7, span_after=5,
                    max_in_degree=4, undirected=True),
    runs={"r": RunInfo("r", "done", "abc", {"layers": "2"})},
    attributes={"created": "now"},
)  # fmt: skip
TEXT = (
    b'{"page_size":1048576,"objects":{"features":{"name":"features","kind":"rows","dtype":"'
    b'float32","rows":5000,"width":16,"range_rows":4096,"rows_per_page":4096,"page_bytes":2'
    b'62144,"pages":2,"extents":[[3,64],[80,64]],"table":[[67,1]],"table_crc":99,"attribute'
    b's":{"source":"x.npy","scale":0.5,"seed":3}}},"graph":{"vertices":5000,"edges":9,"loop'
    b's":1,"range_rows":4096,"chunks":2,"weighted":true,"reorder":"rcm","span_before":7,"sp'
    b'an_after":5,"max_in_degree":4,"features":"features","undirected":true},"runs":{"r":{"'
    b'name":"r","state":"done","fingerprint":"abc","notes":{"layers":"2"}}},"attributes":{"'
    b'created":"now"}}'
)


def test_superblock_bytes() -> None:
    assert HEAD.pack() == BYTES + bytes(BLOCK - len(BYTES))
    assert unpack(HEAD.pack()) == HEAD


def test_catalog_bytes() -> None:
    assert encode_catalog(CATALOG) == TEXT
    assert parse_catalog(TEXT, 200) == CATALOG
