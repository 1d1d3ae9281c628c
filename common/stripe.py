"""The label of a stripe's member, and which members make a whole set.

Logical block L of a set lies at unit L // U: member unit % N, the member's unit unit // N + 1.  The
first unit of each member is reserved; its first block is the label.  proxy/transports/stripe.py
moves blocks; it and this module must agree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

import numpy as np

from hyades.common.checksum import crc32c
from hyades.common.errors import DataError
from hyades.common.layout import BLOCK, FORMAT_VERSION, STRIPE_LABEL, STRIPE_MAGIC
from hyades.common.units import MIB

DEFAULT_UNIT = MIB
MAX_UNIT = 1 << 30
MAX_MEMBERS = 64
_CRC_AT = STRIPE_LABEL.fields["crc"][1]  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class StripeLabel:
    """What a member says about itself and its set; unit in bytes."""

    uuid: UUID
    index: int
    count: int
    unit: int
    version: int = FORMAT_VERSION
    block: int = BLOCK

    def pack(self) -> bytes:
        """Return the block to write."""
        record = np.zeros(1, STRIPE_LABEL)
        record["magic"], record["version"], record["block"] = STRIPE_MAGIC, self.version, self.block
        record["uuid"] = np.void(self.uuid.bytes)
        record["index"], record["count"], record["unit"] = self.index, self.count, self.unit
        record["crc"] = crc32c(record)
        return record.tobytes()


def unpack(data: bytes | bytearray) -> StripeLabel | str:
    """Return the label in the block *data*, or why there is none that can be used."""
    if not any(data):
        return "is blank, it has no label"
    if bytes(data[: len(STRIPE_MAGIC)]) != STRIPE_MAGIC:
        return "has no label: it is no member of a stripe"
    record = np.frombuffer(data, STRIPE_LABEL)[0]
    blank = bytearray(data)
    blank[_CRC_AT : _CRC_AT + 4] = bytes(4)
    found, said = crc32c(blank), int(record["crc"])
    if found != said:
        return f"has a damaged label: its CRC32C is {found:#010x}, the block says {said:#010x}"
    label = StripeLabel(
        UUID(bytes=record["uuid"].tobytes()), int(record["index"]), int(record["count"]),
        int(record["unit"]), int(record["version"]), int(record["block"]),
    )  # fmt: skip
    return _problem(label) or label


def _problem(label: StripeLabel) -> str | None:
    """Return why a whole label cannot be used, or None."""
    if label.version != FORMAT_VERSION:
        return (
            f"has a label of version {label.version}, this Hyades reads version {FORMAT_VERSION}:"
            " upgrade Hyades"
        )
    if label.block != BLOCK:
        return f"has blocks of {label.block} bytes, this Hyades reads blocks of {BLOCK}"
    if not 0 <= label.index < label.count <= MAX_MEMBERS:
        return f"has an impossible label: member {label.index} of {label.count}"
    if label.unit % BLOCK or not BLOCK <= label.unit <= MAX_UNIT:
        return f"has an impossible label: a unit of {label.unit} bytes"
    return None


def order_members(names: Sequence[str], labels: Sequence[StripeLabel | str]) -> list[int]:
    """Return the members' places in *names* in the order of the set.

    DataError names the member that does not fit and what to do.
    """
    whole: list[StripeLabel] = []
    for name, label in zip(names, labels, strict=True):
        if isinstance(label, str):
            raise DataError(
                f"{name} {label}; name the members that `hyades ingest --stripe` wrote, or ingest"
                " again"
            )
        whole.append(label)
    first = whole[0]
    for name, label in zip(names[1:], whole[1:], strict=True):
        if label.uuid != first.uuid:
            raise DataError(
                f"{name} belongs to stripe {label.uuid}, {names[0]} to stripe {first.uuid}: name"
                " the members of one"
            )
        if (label.count, label.unit) != (first.count, first.unit):
            raise DataError(
                f"{name} says {label.count} members with units of {label.unit} bytes, {names[0]}"
                f" says {first.count} with {first.unit}: one of the labels is wrong, ingest again"
            )
    found: dict[int, int] = {}
    for place, label in enumerate(whole):
        if label.index in found:
            raise DataError(
                f"{names[place]} and {names[found[label.index]]} are both member {label.index} of"
                f" stripe {first.uuid}: one is a copy, or named twice; leave it out"
            )
        found[label.index] = place
    if len(whole) != first.count:
        missing = ", ".join(str(i) for i in range(first.count) if i not in found)
        raise DataError(
            f"{names[0]} belongs to a stripe of {first.count} members, {len(whole)} are named:"
            f" member {missing} is missing"
        )
    return [found[index] for index in range(first.count)]
