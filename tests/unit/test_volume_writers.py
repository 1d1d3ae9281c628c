"""Two writers on one device that nothing locks: the second to commit is refused."""

from dataclasses import replace

import pytest

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK
from hyades.common.volume import Volume
from hyades.deploy.volumes import new_in_place
from hyades.proxy.registry import open_transport
from hyades.proxy.transport_blocks import TransportBlocks
from hyades.proxy.transports.mem import forget

URL = "mem://writers"


@pytest.fixture(autouse=True)
def _forget():
    yield
    forget("writers")


def blocks():
    return TransportBlocks(open_transport(URL, create=True), URL)


def test_the_second_to_commit_is_refused():
    Volume.create(blocks()).close()
    with Volume.open(blocks(), writable=True) as one, Volume.open(blocks(), writable=True) as two:
        one.catalog.attributes["who"] = "one"
        one.commit()
        assert two.foreign() == one.head
        two.catalog.attributes["who"] = "two"
        for text in ("generation 2 .* is there, not 1 of", "open it again"):
            with pytest.raises(UsageError, match=text):
                two.commit()
        assert one.foreign() is None
        one.catalog.attributes["again"] = "yes"
        one.commit()
    with Volume.open(blocks()) as volume:
        assert volume.catalog.attributes == {"who": "one", "again": "yes"}
        assert list(volume.verify()) == []


def test_of_two_equal_generations_one_is_refused():
    """They differ in what they hold."""
    with Volume.create(blocks()) as volume:
        other = replace(volume.head, catalog_crc=1)
        volume.blocks.write(1, other.pack())
        assert volume.foreign() == other
        with pytest.raises(UsageError, match=r"generation 1 of .* is there, not 1 of"):
            volume.commit()


def test_a_volume_that_was_replaced_is_not_erased():
    """An ingest that fails leaves alone what another one has made there meanwhile."""

    def make(who):
        with new_in_place(URL, 1 << 16, force=True) as volume:
            if who == "first":
                make("second")
            volume.catalog.attributes["who"] = who

    with pytest.raises(UsageError, match="another program has written"):
        make("first")
    with Volume.open(blocks()) as volume:
        assert volume.catalog.attributes == {"who": "second"}


def test_a_volume_of_our_own_that_fails_is_erased():
    with pytest.raises(ZeroDivisionError), new_in_place(URL, 1 << 16, force=True):
        raise ZeroDivisionError
    device = blocks()
    assert not any(device.read(0, device.nblocks))
    device.close()


def test_a_mirror_that_rots_stops_nobody():
    Volume.create(blocks()).close()
    with Volume.open(blocks(), writable=True) as volume:
        for lba in (0, 1):
            volume.blocks.write(lba, bytes(range(256)) * (BLOCK // 256))
            volume.commit()
            assert volume.foreign() is None
