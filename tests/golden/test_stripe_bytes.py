"""The label of a stripe's member as it lies on disk: a change here is a change of the format."""

from uuid import UUID

import pytest

from hyades.common.errors import DataError
from hyades.common.layout import BLOCK
from hyades.common.stripe import StripeLabel, order_members, unpack

SET = UUID("00112233-4455-6677-8899-aabbccddeeff")
LABEL = StripeLabel(SET, index=2, count=3, unit=1 << 20)
BYTES = bytes.fromhex(
    "48 59 53 54 52 49 50 31 "  # magic
    "01 00 00 00 00 10 00 00 "  # version, block
    "00 11 22 33 44 55 66 77 "  # uuid
    "88 99 aa bb cc dd ee ff "  #
    "02 00 00 00 03 00 00 00 "  # index, count
    "00 00 10 00 00 00 00 00 "  # unit
    "6b 03 0e 8d "  # crc
)


def test_label_bytes() -> None:
    assert LABEL.pack() == BYTES + bytes(BLOCK - len(BYTES))
    assert unpack(LABEL.pack()) == LABEL


def test_damage_is_told() -> None:
    data = bytearray(LABEL.pack())
    assert "no label" in str(unpack(bytes(BLOCK)))
    data[100] ^= 1
    assert "CRC32C" in str(unpack(data))
    data[0] ^= 1
    assert "no member of a stripe" in str(unpack(data))


@pytest.mark.parametrize(
    ("label", "words"),
    [
        (StripeLabel(SET, 3, 3, 4096), "member 3 of 3"),
        (StripeLabel(SET, 0, 65, 4096), "member 0 of 65"),
        (StripeLabel(SET, 0, 1, 5000), "a unit of 5000 bytes"),
        (StripeLabel(SET, 0, 1, 0), "a unit of 0 bytes"),
        (StripeLabel(SET, 0, 1, 4096, version=2), "version 2"),
        (StripeLabel(SET, 0, 1, 4096, block=512), "blocks of 512"),
    ],
)
def test_impossible_labels(label: StripeLabel, words: str) -> None:
    assert words in str(unpack(label.pack()))


def member(index: int, count: int = 3, unit: int = 4096, uuid: UUID = SET) -> StripeLabel:
    return StripeLabel(uuid, index, count, unit)


def test_members_in_any_order() -> None:
    assert order_members(["a", "b", "c"], [member(2), member(0), member(1)]) == [1, 2, 0]


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([member(0), "is blank, it has no label", member(1)], "^b is blank.*ingest"),
        ([member(0), member(0), member(1)], "^b and a are both member 0 of stripe .*leave it out"),
        ([member(0), member(2)], "^a belongs to a stripe of 3 members, 2 are named: member 1 is"),
        ([member(0, 2), member(1, 2), member(1, 2)], "^c and b are both member 1"),
        ([member(0), member(1), member(2, uuid=UUID(int=1))], "^c belongs to stripe 0{8}-.*name"),
        ([member(0), member(1, unit=8192), member(2)], "^b says 3 members with units of 8192"),
        ([member(0), member(1, 4), member(2)], "^b says 4 members"),
    ],
)
def test_what_makes_no_set(labels: list[StripeLabel | str], words: str) -> None:
    with pytest.raises(DataError, match=words):
        order_members("abc"[: len(labels)], labels)
