"""Every binary layout of Hyades: sizes are asserted at import, all fields are little-endian.

Must stay in sync: the numba kernels read REQUEST as int64[n, 8] and TILE_HEADER / TILE_ENTRY by the
word offsets below (`TH_*`, `TE_*`); golden bytes in tests/golden hold the on-disk structures still.
"""

from enum import IntEnum, IntFlag

import numpy as np

BLOCK = 4096
FORMAT_VERSION = 1
SUPERBLOCK_MAGIC = b"HYADESV1"
TILE_MAGIC = 0x50595448  # "HTYP" little-endian
JOURNAL_MAGIC = b"HYJOURN1"
STRIPE_MAGIC = b"HYSTRIP1"

# One of two copies, in blocks 0 and 1; `crc` covers all bytes of the block before it and after it
# (the crc field itself counts as zero).
SUPERBLOCK = np.dtype(
    {
        "names": [
            "magic", "version", "block", "generation", "uuid",
            "catalog_lba", "catalog_bytes", "catalog_crc", "next_lba", "crc",
        ],
        "formats": ["S8", "<u4", "<u4", "<u8", "V16", "<u8", "<u8", "<u4", "<u8", "<u4"],
        "offsets": [0, 8, 12, 16, 24, 40, 48, 56, 64, 72],
        "itemsize": BLOCK,
    }
)  # fmt: skip

# Block 0 of each member of a stripe; blocks 1 to unit - 1 of a member are reserved.  `crc` covers
# the whole block, itself counted as zero.
STRIPE_LABEL = np.dtype(
    {
        "names": ["magic", "version", "block", "uuid", "index", "count", "unit", "crc"],
        "formats": ["S8", "<u4", "<u4", "V16", "<u4", "<u4", "<u8", "<u4"],
        "offsets": [0, 8, 12, 16, 32, 36, 40, 48],
        "itemsize": BLOCK,
    }
)  # fmt: skip

# Page table: one entry a page.
PAGE_ENTRY = np.dtype([("rows", "<u4"), ("crc", "<u4")])

# Tile page (DESIGN section 4): header, entries, then uint16 arrays at the header's byte offsets.
TILE_HEADER = np.dtype(
    [
        ("magic", "<u4"), ("version", "<u4"),
        ("chunk", "<u4"), ("page", "<u4"),
        ("tiles", "<u4"), ("segments", "<u4"),
        ("edges", "<u4"), ("destinations_at", "<u4"),
        ("ends_at", "<u4"), ("sources_at", "<u4"),
        ("reserved", "<u4", (6,)),
    ]
)  # fmt: skip
# One piece of the tile (chunk, lane).  `sequence` counts a lane's pieces over all chunks in chunk
# order from 0; `first_*` index the page's arrays; `ends` are relative to `first_edge`.
TILE_ENTRY = np.dtype(
    [
        ("lane", "<u4"), ("sequence", "<u4"),
        ("first_segment", "<u4"), ("first_edge", "<u4"),
        ("segments", "<u2"), ("flags", "<u2"), ("edges", "<u4"),
    ]
)  # fmt: skip
MAX_PIECE_EDGES = 65_535  # `ends` is uint16
MAX_RANGE_ROWS = 65_536  # local ids are uint16
# int32 word offsets of the same structures, for the kernels
TH_TILES, TH_DST, TH_ENDS, TH_SRC, TH_WORDS = 4, 7, 8, 9, 16
TE_LANE, TE_SEQ, TE_SEG0, TE_EDGE0, TE_SEGS_FLAGS, TE_EDGES, TE_WORDS = 0, 1, 2, 3, 4, 5, 6


class TileFlag(IntFlag):
    """Flags of a TILE_ENTRY."""

    SELF = 1  # first piece of the diagonal tile: the vertices' own rows are added before its edges


# Directory: one record a piece, in page order; the planner reads this and never the tiles.
DIRECTORY = np.dtype([("chunk", "<u4"), ("lane", "<u4"), ("segments", "<u4"), ("edges", "<u4")])


class Op(IntEnum):
    """What a request asks for."""

    READ = 1
    WRITE = 2
    FLUSH = 3


class RequestFlag(IntFlag):
    """Modifiers of a request."""

    CHECK_CRC = 1  # READ: compare with `crc` when it lands; one retry, then Status.CRC
    MAKE_CRC = 2  # WRITE: compute the CRC32C before submitting and hand it back in the completion


class Status(IntEnum):
    """Completion status words; a ready word holds a negative one when its request failed."""

    OK = 0
    IO = -1  # the device reported an error
    SHORT = -2  # fewer bytes than asked for, after retries
    CRC = -3  # the page's checksum differs from its page table, after one retry
    NO_SPACE = -4  # ENOSPC
    CANCELLED = -5  # the transport was closed first
    LOST = -6  # the path or device is gone, after retries
    INVALID = -7  # outside the device, misaligned, or unknown op
    TIMEOUT = -8


# One request: a ring slot, and the record that transports take.  `sequence` belongs to the ring.
REQUEST = np.dtype(
    [
        ("sequence", "<i8"),  # word 0
        ("lba", "<u8"),  # word 1: in blocks of 4096
        ("offset", "<u8"),  # word 2: byte offset of the data in the arena
        ("nbytes", "<u4"), ("slot", "<u4"),  # word 3: ready-table index = low 32 bits of cookie
        ("op", "u1"), ("flags", "u1"), ("device", "<u2"), ("crc", "<u4"),  # word 4
        ("generation", "<u4"), ("object", "<u4"),  # word 5
        ("page", "<u8"),  # word 6: for messages only
        ("cookie", "<u8"),  # word 7: returned untouched by a transport
    ]
)  # fmt: skip
RQ_SEQ, RQ_LBA, RQ_OFFSET, RQ_LEN_SLOT, RQ_OP, RQ_GEN_OBJ, RQ_PAGE, RQ_COOKIE = range(8)

COMPLETION = np.dtype(
    [("cookie", "<u8"), ("status", "<i4"), ("nbytes", "<u4"), ("crc", "<u4"), ("reserved", "<u4")]
)

# Head of a view: HEAD, the spec as JSON, then uint32 counts of rows by range (sparse views); zeros
# up to whole blocks.  `crc` covers all of it, itself counted as zero.
VIEW_MAGIC = b"HYVIEWV1"
VIEW_HEAD = np.dtype(
    [
        ("magic", "S8"), ("version", "<u4"), ("block", "<u4"),
        ("spec_bytes", "<u4"), ("counts", "<u4"),
        ("blocks", "<u4"),  # of the head: page 0 begins after them
        ("crc", "<u4"), ("reserved", "V32"),
    ]
)  # fmt: skip
# A page of a view ends with VIEW_TRAILER, at the end of the page's used blocks.  A sparse page
# begins with VIEW_PAGE; uint16 local ids follow, then rows at a multiple of 64 (views.py).
VIEW_PAGE_MAGIC = 0x50565948  # "HYVP" little-endian
VIEW_PAGE = np.dtype(
    [
        ("magic", "<u4"), ("version", "<u4"),
        ("page", "<u4"), ("range", "<u4"),
        ("first", "<u4"), ("count", "<u4"),  # of the range's rows, by place among them
        ("total", "<u4"), ("row_bytes", "<u4"),  # total: rows of the range
    ]
)  # fmt: skip
VIEW_TRAILER = np.dtype("<u4")


def int8_row(width: int) -> np.dtype[np.void]:
    """Return a row of *width* int8 codes, zeros up to a multiple of 4 bytes, and its scale."""
    at = -(-width // 4) * 4
    return np.dtype(
        {
            "names": ["codes", "scale"],
            "formats": [("i1", (width,)), "<f4"],
            "offsets": [0, at],
            "itemsize": at + 4,
        }
    )


assert SUPERBLOCK.itemsize == BLOCK
assert STRIPE_LABEL.itemsize == BLOCK
assert PAGE_ENTRY.itemsize == 8
assert TILE_HEADER.itemsize == 64
assert TILE_ENTRY.itemsize == 24
assert DIRECTORY.itemsize == 16
assert REQUEST.itemsize == 64
assert COMPLETION.itemsize == 24
assert [int8_row(width).itemsize for width in (1, 4, 5)] == [8, 8, 12]
assert VIEW_HEAD.itemsize == 64
assert VIEW_PAGE.itemsize == 32
assert VIEW_TRAILER.itemsize == 4
