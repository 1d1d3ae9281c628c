"""Which rows a sampled view has: by the rule's text over the edge list, whatever the volume."""

import random

import numpy as np
import pytest
from tests.reference.sampled import kept_edges
from tests.reference.stage import make_volume, needed_rows, random_edges

from hyades.common.errors import DataError, UsageError
from hyades.common.sampled_rows import mark_sampled
from hyades.common.viewspec import SampleSpec
from hyades.target_side.stage.meter import Meter
from hyades.target_side.stage.sample import Sample
from hyades.target_side.stage.source import Source

VERTICES = 333
EDGES = random_edges(VERTICES, 2500)
X = np.zeros((VERTICES, 3), np.float32)
VOLUMES = {
    "plain": {"range_rows": 32},
    "wide": {"range_rows": 512},
    "rcm": {"range_rows": 64, "reorder": "rcm"},
}


@pytest.fixture(scope="module", params=VOLUMES)
def volume(request):
    return make_volume(EDGES, X, **VOLUMES[request.param])


def sample_of(volume, spec):
    reads = []

    def read(info, page):
        reads.append((info.name, page))
        return volume.read_page(info, page)

    return Sample(Source("test", volume.catalog, read, Meter()), spec), reads


def found_by(volume, spec):
    sample, _ = sample_of(volume, spec)
    return [sample.ids(index).tolist() for index in range(volume.catalog.graph.chunks)]


@pytest.mark.parametrize("own", ["all", "loops", "none"])
@pytest.mark.parametrize("fanout", [1, 3, 10, 5000])
def test_the_rows_are_those_of_the_rule(volume, fanout, own):
    last = volume.catalog.graph.chunks
    for lanes in (((0, last),), ((0, 1),), ((last - 1, last), (0, 1))):
        spec = SampleSpec(fanout, 9, 2, lanes, own)
        assert found_by(volume, spec) == needed_rows(volume, EDGES, spec)


def test_it_depends_on_seed_and_layer(volume):
    last = volume.catalog.graph.chunks
    found = [
        found_by(volume, SampleSpec(1, seed, layer, ((0, last),), "none"))
        for seed, layer in ((0, 0), (1, 0), (0, 1), (0, 0))
    ]
    assert found[0] == found[3]
    assert found[0] != found[1]
    assert found[0] != found[2]


def test_sampling_leaves_out_what_the_rule_predicts():
    volume = make_volume(EDGES, X, range_rows=32)
    spec = SampleSpec(1, 0, 0, ((0, 11),), "none")
    kept = EDGES[:, kept_edges(EDGES, 1, 0, 0)]
    expected = len(np.unique(kept[0, kept[0] != kept[1]]))
    counts = sample_of(volume, spec)[0].counts()
    assert counts.dtype == np.uint32
    assert int(counts.sum()) == expected < VERTICES


def test_tiles_are_read_once_and_only_those_of_asked_lanes():
    volume = make_volume(EDGES, X, range_rows=32)
    sample, reads = sample_of(volume, SampleSpec(2, 0, 0, ((0, 11),), "none"))
    sample.counts()
    pages = volume.object("tiles").pages
    assert sorted(page for name, page in reads if name == "tiles") == list(range(pages))
    del reads[:]
    sample.counts()
    sample.ids(3)
    assert reads == []
    sample, reads = sample_of(volume, SampleSpec(2, 0, 0, ((0, 11),), "all"))
    del reads[:]
    sample.counts()
    assert reads == [], "every row is there anyway"


def test_a_page_without_an_asked_lane_is_not_read():
    # Every edge stays in its range, so each chunk's page has one lane.
    base = np.arange(300)
    edges = np.stack((base, base - base % 30 + (base + 7) % 30))
    volume = make_volume(edges, np.zeros((300, 2), np.float32), range_rows=32)
    sample, reads = sample_of(volume, SampleSpec(2, 0, 0, ((4, 5),), "none"))
    sample.counts()
    assert 1 <= len([page for name, page in reads if name == "tiles"]) < 4


def test_what_cannot_be_sampled_is_refused():
    volume = make_volume(EDGES, X, range_rows=32)
    for lanes in (((0, 12),), ((3, 3),), ((4, 2),)):
        with pytest.raises(UsageError, match=r"lanes .* are asked for, there are 11"):
            sample_of(volume, SampleSpec(2, 0, 0, lanes))
    volume.catalog.graph = None
    with pytest.raises(UsageError, match="no graph"):
        sample_of(volume, SampleSpec(2, 0, 0, ((0, 1),)))


@pytest.mark.parametrize("name", ["page_pieces", "chunk_pages", "directory", "in_degrees"])
def test_tables_that_contradict_each_other(name):
    volume = make_volume(EDGES, X, range_rows=32)
    table = volume.read_table(name)
    volume.remove(name)
    volume.write_table(name, table[:-1])
    volume.commit()
    with pytest.raises(DataError, match=r"contradict|tables of"):
        sample_of(volume, SampleSpec(2, 0, 0, ((0, 1),)))


def test_a_wrong_tile_page_is_named():
    volume = make_volume(EDGES, X, range_rows=32)

    def read(info, page):
        data = np.array(volume.read_page(info, page))
        if info.name == "tiles" and page == 2:
            data[8] ^= 1  # its chunk
        return data

    sample = Sample(
        Source("test", volume.catalog, read, Meter()), SampleSpec(2, 0, 0, ((0, 11),), "none")
    )
    with pytest.raises(DataError, match=r"test: object 'tiles' page 2 \(LBA \d+\): .*no tile page"):
        sample.counts()


def test_forged_tile_pages_never_reach_outside():
    """Any words in a tile page: rows of the chunk are marked, or the page is refused."""
    volume = make_volume(EDGES, X, range_rows=64)
    info = volume.object("tiles")
    asked = np.ones(6, np.bool_)
    tables = (
        np.zeros(0, np.int64),
        volume.read_table("in_degrees").astype(np.uint32),
        volume.read_table("self_loops").astype(np.uint32),
    )
    rng = random.Random(3)
    refused = marked = 0
    for number in range(4000):
        chunk = number % 6
        page = np.array(volume.read_page(info, chunk)).view(np.uint32)
        ranks = np.array(volume.read_page(volume.object("ranks"), chunk)).view(np.uint32)
        used = int(page[9]) // 4 + int(page[6]) // 2
        for _ in range(rng.choice([1, 1, 3])):
            at = rng.choice([rng.randrange(16), rng.randrange(16, 52), rng.randrange(used)])
            page[at] = rng.choice(
                [0, 1, 63, 64, 1 << 16, 1 << 31, (1 << 32) - 1, rng.randrange(99)]
            )
        if number % 3 == 0:
            ranks[rng.randrange(400)] = rng.choice([3, 9, 1 << 16, rng.getrandbits(32)])
        needed = np.zeros(64 + 1, np.bool_)
        try:
            mark_sampled(page, ranks, chunk, 64, asked, tables, (2, 0, 0), needed[:64])
        except DataError:
            refused += 1
            continue
        marked += int(needed.any())
        assert not needed[64]
        assert not needed[min(64, VERTICES - 64 * chunk) :].any()
    assert refused > 500
    assert marked > 500


def test_a_rank_beyond_the_degree_is_refused():
    """The permutation of [0, degree) need not come back from outside: it would run for ever."""
    volume = make_volume(EDGES, X, range_rows=64)

    def read(info, page):
        data = np.array(volume.read_page(info, page))
        if info.name == "ranks":
            data.view(np.uint32)[5] = 1 << 30
        return data

    spec = SampleSpec(1, 0, 0, ((0, 6),), "none")
    sample = Sample(Source("test", volume.catalog, read, Meter()), spec)
    with pytest.raises(DataError, match="the rank of an edge is not below its destination's"):
        sample.counts()
