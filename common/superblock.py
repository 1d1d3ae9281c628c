"""The two superblock copies: which one is the volume's last committed state.

A commit writes the copy that was not opened, then mirrors it to the other one.  So after a commit
both copies say the same and one of them may rot; a crash in between leaves one whole copy.
"""

from dataclasses import dataclass
from uuid import UUID

import numpy as np

from hyades.common.blocks import BlockDevice
from hyades.common.catalog import FIRST_LBA, Extent
from hyades.common.checksum import crc32c
from hyades.common.errors import DataError, DeviceLost
from hyades.common.layout import BLOCK, FORMAT_VERSION, STRIPE_MAGIC, SUPERBLOCK, SUPERBLOCK_MAGIC

MAX_CATALOG = 1 << 28
_MAX_GENERATION = 1 << 62
_CRC_AT = 72


@dataclass(frozen=True, slots=True)
class Superblock:
    """Where the catalog of one generation lies."""

    generation: int
    uuid: UUID
    catalog: Extent
    catalog_bytes: int
    catalog_crc: int  # of the catalog's whole blocks, zero padding included
    next_lba: int  # first block after everything that is in use
    version: int = FORMAT_VERSION
    block: int = BLOCK

    def pack(self) -> bytes:
        """Return the block to write."""
        record = np.zeros(1, SUPERBLOCK)
        record["magic"], record["version"], record["block"] = (
            SUPERBLOCK_MAGIC,
            self.version,
            self.block,
        )
        record["generation"], record["uuid"] = self.generation, np.void(self.uuid.bytes)
        record["catalog_lba"], record["catalog_bytes"] = self.catalog.lba, self.catalog_bytes
        record["catalog_crc"], record["next_lba"] = self.catalog_crc, self.next_lba
        record["crc"] = crc32c(record)
        return record.tobytes()


def is_superblock(data: bytes | bytearray) -> bool:
    """Say whether a block begins like a superblock, whole or not."""
    return bytes(data[: len(SUPERBLOCK_MAGIC)]) == SUPERBLOCK_MAGIC


def unpack(data: bytes | bytearray) -> Superblock | str:
    """Return the superblock in *data*, or why it is none; only magic and CRC are judged here."""
    record = np.frombuffer(data, SUPERBLOCK)[0]
    magic = bytes(data[: len(SUPERBLOCK_MAGIC)])
    if not any(data):
        return "is empty"
    if magic == STRIPE_MAGIC:
        return "belongs to a stripe: name all its members, stripe:URL,URL"
    if magic != SUPERBLOCK_MAGIC:
        return f"starts with {magic!r}, not {SUPERBLOCK_MAGIC!r}"
    blank = bytearray(data)
    blank[_CRC_AT : _CRC_AT + 4] = bytes(4)
    found, said = crc32c(blank), int(record["crc"])
    if found != said:
        return f"CRC32C is {found:#010x}, the block says {said:#010x}"
    nbytes = int(record["catalog_bytes"])
    return Superblock(
        generation=int(record["generation"]),
        uuid=UUID(bytes=record["uuid"].tobytes()),
        catalog=Extent(int(record["catalog_lba"]), -(-nbytes // BLOCK)),
        catalog_bytes=nbytes,
        catalog_crc=int(record["catalog_crc"]),
        next_lba=int(record["next_lba"]),
        version=int(record["version"]),
        block=int(record["block"]),
    )


def read_copies(blocks: BlockDevice) -> list[Superblock | str]:
    """Return both copies, or for each why it is none."""
    return [_read_copy(blocks, copy) for copy in range(2)]


class _Unreadable(str):
    """Why a copy cannot be read; `error` is what the device said."""

    __slots__ = ("error",)
    error: DeviceLost


def _read_copy(blocks: BlockDevice, copy: int) -> Superblock | str:
    try:
        return unpack(blocks.read(copy, 1))
    except DeviceLost as error:  # a bad sector: the other copy is there for this
        why = _Unreadable(f"cannot be read: {error}")
        why.error = error
        return why


def newest(blocks: BlockDevice) -> tuple[int, Superblock]:
    """Return the newest whole copy and its number; DataError says for each copy why not.

    DeviceLost where none can be read: that says nothing about what is there.
    """
    name = blocks.name
    if blocks.nblocks < FIRST_LBA + 1:
        raise DataError(f"{name} is not a volume: it has {blocks.nblocks} blocks of {BLOCK} bytes")
    copies = read_copies(blocks)
    whole = [
        (copy.generation, -slot) for slot, copy in enumerate(copies) if not isinstance(copy, str)
    ]
    if not whole:
        unread = [copy.error for copy in copies if isinstance(copy, _Unreadable)]
        if len(unread) == len(copies):
            raise unread[0]
        reasons = "; ".join(f"superblock copy {i} (LBA {i}) {why}" for i, why in enumerate(copies))
        raise DataError(f"{name} is not a volume, or its superblocks are damaged: {reasons}")
    slot = -max(whole)[1]
    chosen = copies[slot]
    assert not isinstance(chosen, str)
    problem = _problem(chosen, blocks.nblocks)
    if problem:
        raise DataError(f"{name}: superblock copy {slot} (LBA {slot}): {problem}")
    return slot, chosen


def _problem(found: Superblock, nblocks: int) -> str | None:
    """Return why a whole superblock cannot be used, or None."""
    if found.version != FORMAT_VERSION:
        return (
            f"format version {found.version}, this Hyades reads version {FORMAT_VERSION}: "
            "upgrade Hyades"
        )
    if found.block != BLOCK:
        return f"blocks of {found.block} bytes, this Hyades reads blocks of {BLOCK}"
    if not 0 < found.generation < _MAX_GENERATION:
        return f"generation {found.generation} is impossible"
    if found.next_lba > nblocks:
        return (
            f"the volume needs {found.next_lba * BLOCK} bytes, the device has {nblocks * BLOCK}: "
            "it is truncated"
        )
    catalog = found.catalog
    if not 0 < found.catalog_bytes <= MAX_CATALOG:
        return f"a catalog of {found.catalog_bytes} bytes is impossible"
    if catalog.lba < FIRST_LBA or catalog.end > found.next_lba:
        return f"the catalog at LBA {catalog.lba} ({catalog.nblocks} blocks) is outside the volume"
    return None
