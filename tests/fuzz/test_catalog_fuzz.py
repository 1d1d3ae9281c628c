"""Whatever a catalog with a right CRC says, opening and reading give data or a DataError."""

import copy
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hyades.common import superblock
from hyades.common.blocks import MemoryBlocks
from hyades.common.catalog import Extent, GraphInfo, RunInfo, parse_catalog
from hyades.common.checksum import crc32c
from hyades.common.describe import describe_volume
from hyades.common.errors import DataError
from hyades.common.layout import BLOCK
from hyades.common.units import round_up
from hyades.common.volume import Volume

CATALOG_AT, CATALOG_BLOCKS = 60, 40
ABSURD: list[Any] = [
    -1, 0, 1, 2, 3, 7, 4095, 4096, 4097, 65536, 1 << 20, 1 << 31, 1 << 32, (1 << 60) - 1, 1 << 60,
    (1 << 63) - 1, 1 << 64, 1 << 200, 0.5, 1e300, True, False, None, "", "x", "float32", "rows",
    "table", "pages", "directory", "float16", "int64", [], [[2, 1]], [[0, 2]], {}, {"x": 1},
    "\u0000",
]  # fmt: skip


def valid_volume() -> MemoryBlocks:
    blocks = MemoryBlocks()
    volume = Volume.create(blocks, 64 << 10)
    info = volume.allocate_rows("features", "float32", 250, 7, 100, seed=1, scale=0.5, note="n")
    for page in range(info.pages):
        start, stop = info.shape().page_rows(page)
        volume.write_page(info, page, np.ones((stop - start, 7), np.float32), stop - start)
    volume.write_table("order", np.arange(250))
    volume.write_page(volume.allocate_pages("tiles", 2, 2 * BLOCK), 1, b"tile", 3)
    volume.write_table("none", np.zeros(0, np.float32))
    volume.catalog.graph = GraphInfo(250, 10, 1, 100, 3)
    volume.catalog.runs["r"] = RunInfo("r", "running", "f", {"layer": "1"})
    volume.commit()
    blocks.grow(CATALOG_AT + CATALOG_BLOCKS)
    return blocks


def put_catalog(blocks: MemoryBlocks, text: bytes) -> None:
    """Make *text* the catalog, with CRCs that are right."""
    data = text + bytes(round_up(len(text), BLOCK) - len(text))
    assert len(data) <= CATALOG_BLOCKS * BLOCK
    blocks.write(CATALOG_AT, data)
    _, head = superblock.newest(blocks)
    head = replace(
        head,
        catalog=Extent(CATALOG_AT, len(data) // BLOCK),
        catalog_bytes=len(text),
        catalog_crc=crc32c(data),
        next_lba=blocks.nblocks,
    )
    blocks.write(0, head.pack())
    blocks.write(1, head.pack())


def places(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in *tree*."""
    found = [path] if path else []
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in items:
        if isinstance(value, dict | list):
            found += places(value, (*path, key))
        else:
            found.append((*path, key))
    return found


def mutate_tree(tree: Any, rng: random.Random) -> bytes:
    """Change, delete, copy or rename one to three values."""
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        *path, last = rng.choice(places(tree))
        parent = tree
        for key in path:
            parent = parent[key]
        how = rng.random()
        if how < 0.1:
            del parent[last]
        elif how < 0.2 and isinstance(parent, dict):
            key = rng.choice(["x", "rows", "name", "lba", "order"])
            parent[key] = copy.deepcopy(parent[last])
        elif how < 0.5 and type(parent[last]) is int:
            parent[last] += rng.choice([-100, -8, -2, -1, 1, 2, 3, 8, 100])
        else:
            parent[last] = copy.deepcopy(rng.choice(ABSURD))
    return json.dumps(tree).encode()


def mutate_bytes(text: bytes, rng: random.Random) -> bytes:
    """Flip, delete, insert or repeat some bytes."""
    data = bytearray(text)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(data))
        how = rng.random()
        if how < 0.4:
            data[at] = rng.randrange(256)
        elif how < 0.6:
            data[at] = rng.choice(b'0123456789-"{}[],:e.')
        elif how < 0.7:
            del data[at : at + rng.randrange(1, 30)]
        elif how < 0.9:
            data[at:at] = data[at : at + rng.randrange(1, 30)]
        else:
            data[at:at] = rng.randbytes(rng.randrange(1, 8))
    return bytes(data) or b"x"


def use(volume: Volume) -> int:
    """Read everything in *volume*; return how many reads gave data."""
    good, errors = 0, {}
    describe_volume(volume)
    for name, info in volume.catalog.objects.items():
        for page in range(info.pages):
            assert 2 <= info.lba(page) <= volume.blocks.nblocks - info.page_blocks
        try:
            if info.kind == "pages":
                volume.read_page(info, info.pages - 1)
            else:
                assert volume.read_rows(name).nbytes <= volume.blocks.nblocks * BLOCK
            good += 1
        except DataError as error:
            errors[name] = str(error)
    assert all(repr(name) in text for name, text in errors.items())
    assert all(finding.text for finding in volume.verify())
    return good


def test_thousands_of_mutated_catalogs() -> None:
    blocks = valid_volume()
    text = parse_text(blocks)
    tree = json.loads(text)
    put_catalog(blocks, json.dumps(tree).encode())
    assert use(Volume.open(blocks)) == 4
    rng = random.Random(11)
    opened = read = 0
    refused: list[str] = []
    for number in range(5000):
        mutant = mutate_tree(tree, rng) if number % 2 else mutate_bytes(text, rng)
        put_catalog(blocks, mutant)
        try:
            volume = Volume.open(blocks)
        except DataError as error:
            refused.append(str(error))
            continue
        opened += 1
        read += use(volume)
    where = f"mem:: catalog of generation 2 (LBA {CATALOG_AT}): "
    assert [text for text in refused if not text.startswith(where)] == []
    assert len(refused) > 1000
    assert opened > 100
    assert read > 100


def parse_text(blocks: MemoryBlocks) -> bytes:
    """Return the catalog of *blocks* as it is stored."""
    _, head = superblock.newest(blocks)
    return bytes(blocks.read(head.catalog.lba, head.catalog.nblocks)[: head.catalog_bytes])


def test_nesting_is_bounded() -> None:
    blocks = valid_volume()
    put_catalog(blocks, b'{"page_size":' + b"[" * 100_000)
    with pytest.raises(DataError, match="not a catalog"):
        Volume.open(blocks)


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("page_size",), 100_000, "page size 100000 is not a power of two"),
        (("page_size",), 0, "page size 0 is not a power of two"),
        (("objects", "order", "name"), "other", "'order': it calls itself 'other'"),
        (("objects", "order", "dtype"), "float8", "unknown dtype 'float8'"),
        (("objects", "order", "width"), 2, "do not fit a 'table' object"),
        (("objects", "order", "rows"), -1, "Expected `int` >= 0"),
        (("objects", "order", "rows"), 5000, "5000 rows make 10 pages, not 1"),
        (("objects", "order", "page_bytes"), 5000, "pages of 5000 bytes"),
        (("objects", "order", "page_bytes"), 0, "pages of 0 bytes"),
        (("objects", "features", "dtype"), "directory", "records of 'directory' in a 'rows'"),
        (("objects", "features", "range_rows"), 0, "is 0"),
        (("objects", "features", "width"), 1 << 40, "do not fit in a page"),
        (("objects", "features", "extents"), [[3, 2]], "do not hold 3 pages of 1 blocks"),
        (("objects", "tiles", "extents"), [[20, 3], [30, 1]], "not a whole number of pages"),
        (("objects", "features", "table"), [[50, 2]], "does not have 1 blocks"),
        (("objects", "features", "table"), [[50, 1], [51, 0]], "page table is empty"),
        (("objects", "features", "extents"), [[1, 3]], "at LBA 1 overlaps the superblocks"),
        (("objects", "features", "extents"), [[60, 3]], "overlaps"),
        (("objects", "features", "extents"), [[98, 3]], "at LBA 101, outside the volume of 100"),
        (("graph", "chunks"), 4, "250 vertices in ranges of 100 rows do not make 4 chunks"),
        (("graph", "range_rows"), 0, "in ranges of 0 rows"),
        (("runs", "r", "name"), "q", "run 'r' calls itself 'q'"),
        (("runs", "r", "state"), "odd", "Invalid enum value 'odd'"),
        (("surprise",), 1, "unknown field `surprise`"),
    ],
)  # fmt: skip
def test_absurd_values_are_named(path: tuple[str, ...], value: Any, text: str) -> None:
    blocks = valid_volume()
    tree = parent = json.loads(parse_text(blocks))
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    put_catalog(blocks, json.dumps(tree).encode())
    with pytest.raises(DataError) as caught:
        Volume.open(blocks)
    assert text in str(caught.value)


def test_two_objects_in_one_place() -> None:
    blocks = valid_volume()
    tree = json.loads(parse_text(blocks))
    tree["objects"]["twin"] = {**tree["objects"]["order"], "name": "twin"}
    put_catalog(blocks, json.dumps(tree).encode())
    with pytest.raises(DataError, match=r"object 'twin' at LBA .* overlaps object 'order', which"):
        Volume.open(blocks)


def test_parsing_alone_refuses_what_is_not_json() -> None:
    for text in (b"", b"\xff\xfe", b"null", b"[]", b'{"page_size":1048576} trailing'):
        with pytest.raises(DataError, match="not a catalog"):
            parse_catalog(text, 100)
