"""Views: the rows are what plain numpy and the compute host make, however they are asked for."""

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tests.reference.stage import (
    ASKED,
    EDGES,
    RANGE,
    VERTICES,
    WIDTH,
    W,
    X,
    awkward_volume,
    make_volume,
    needed_rows,
    read_view,
)

from hyades.common.checksum import crc32c
from hyades.common.layout import BLOCK
from hyades.common.quantize import decode_rows, encode_rows
from hyades.common.units import KIB, MIB
from hyades.common.views import SparseShape, page_crc
from hyades.common.viewspec import landing_rows, parse_head
from hyades.gpu_side.devices.cpu import single_threaded_torch
from hyades.gpu_side.models.ir import Conv, Linear
from hyades.gpu_side.scan import PassScan
from hyades.target_side.stage.options import StageOptions
from hyades.target_side.stage.viewpages import open_volume_view


@pytest.fixture(scope="module", params=["one page a range", "several", "float16"])
def volume(request):
    return awkward_volume(request.param)


def landed(volume, weights):
    """Return the message rows [V, sum of widths] as gpu_side lands them, block by block."""
    info = volume.object("features")
    shape, step = info.shape(), landing_rows(info.shape())
    parts = []
    with single_threaded_torch():
        for index in range(shape.ranges):
            first, last = index * RANGE, min((index + 1) * RANGE, VERTICES)
            x = torch.from_numpy(volume.read_rows("features", first, last).astype(np.float32))
            block = [land_block(x[at : at + step], weights) for at in range(0, len(x), step)]
            parts += block
    return np.concatenate(parts)


def land_block(x, weights):
    out = np.zeros((len(x), sum(map(len, weights))), np.float32)
    at = 0
    for weight in weights:
        conv = Conv("c", WIDTH, len(weight), "sum", neighbour=Linear(torch.from_numpy(weight)))
        stride = -(-len(weight) // 16) * 16
        shape = SimpleNamespace(row_width=len(weight), project_first=True, message_stride=stride)
        inputs = SimpleNamespace(vertex_floats=SimpleNamespace(source=None), columns=None)
        scan = SimpleNamespace(shape=shape, conv=conv, inputs=inputs)
        message = torch.zeros(len(x), stride)
        PassScan._land_messages(scan, x, message, 0)  # type: ignore[arg-type]
        out[:, at : at + len(weight)] = message[:, : len(weight)].numpy()
        at += len(weight)
    return out


@pytest.mark.parametrize("encoding", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize("sample", [None, ASKED], ids=["dense", "sampled"])
@pytest.mark.parametrize("weights", [(), W], ids=["whole", "projected"])
def test_the_rows_are_those_of_the_compute_host(volume, encoding, sample, weights):
    stored = volume.read_rows("features").astype(np.float32)
    expected = landed(volume, weights) if weights else stored
    with_ids = [list(range(n)) for n in (512, 512, 258)]
    if sample is not None:
        with_ids = needed_rows(volume, EDGES, sample)
    take = [i * RANGE + local for i, ids in enumerate(with_ids) for local in ids]
    bits, counts = encode_rows(expected[take], encoding)
    view = open_volume_view(volume, "features", encoding=encoding, sample=sample, weights=weights)
    try:
        ids, rows = read_view(view)
        assert ids == with_ids
        assert rows.tobytes() == bits.tobytes()
        own = volume.object("features").dtype
        if encoding != own or weights:
            found = view.counts()["quantise"] if encoding != "float32" or not weights else None
            assert found is None or found.values == counts
        assert view.counts()["pages"].rows_out == len(take)
    finally:
        view.close()


def test_missing_rows_leave_the_bits_of_the_others(volume):
    """What is sampled beside the data and multiplied here is what would be multiplied there."""
    view = open_volume_view(volume, "features", sample=ASKED, encoding="float32")
    ids, rows = read_view(view)
    view.close()
    place = np.array([i * RANGE + local for i, own in enumerate(ids) for local in own])
    x = np.zeros((VERTICES, WIDTH), np.float32)
    x[place] = decode_rows(rows, "float32", WIDTH)
    step = landing_rows(volume.object("features").shape())
    blocks = []
    with single_threaded_torch():
        for first in range(0, VERTICES, RANGE):
            last = min(first + RANGE, VERTICES)
            blocks += [land_block(torch.from_numpy(x[at : min(at + step, last)]), W)
                       for at in range(first, last, step)]  # fmt: skip
    assert np.concatenate(blocks)[place].tobytes() == landed(volume, W)[place].tobytes()


def image(view):
    return bytes(view.read(0, view.nblocks))


@pytest.mark.parametrize("sample", [None, ASKED], ids=["dense", "sampled"])
def test_the_blocks_do_not_depend_on_how_they_are_made(volume, sample):
    options = [
        StageOptions(), StageOptions(threads=3, readers=3), StageOptions(threads=0, readers=0),
        StageOptions(memory=2 * MIB, threads=2),
    ]  # fmt: skip
    made = []
    for option in options:
        view = open_volume_view(
            volume, "features", encoding="int8", sample=sample, weights=W, page_size=64 * KIB,
            options=option if volume.object("features").pages > 3 or option.memory > 2 * MIB
            else StageOptions(memory=8 * MIB),
        )  # fmt: skip
        made.append(image(view))
        view.close()
    assert len(set(made)) == 1
    view = open_volume_view(
        volume, "features", encoding="int8", sample=sample, weights=W, page_size=64 * KIB,
        options=StageOptions(threads=2),
    )  # fmt: skip
    rng = random.Random(1)

    def read_some(seed):
        order = random.Random(seed)
        for _ in range(40):
            lba = order.randrange(view.nblocks)
            count = order.randrange(1, min(40, view.nblocks - lba) + 1)
            data = bytes(view.read(lba, count))
            if data != made[0][lba * BLOCK : (lba + count) * BLOCK]:
                return lba, count
        return None

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(read_some, [rng.random() for _ in range(3)])) == [None] * 3
    view.close()


def test_the_rows_do_not_depend_on_the_pages_of_source_or_view():
    rows = []
    for source in (64 * KIB, MIB):
        volume = make_volume(EDGES, X, page_size=source, range_rows=RANGE)
        for target in (64 * KIB, 256 * KIB, 4 * MIB):
            view = open_volume_view(
                volume, "features", encoding="bfloat16", sample=ASKED, page_size=target
            )
            rows.append(read_view(view)[1].tobytes())
            view.close()
    assert len(set(rows)) == 1


def test_a_view_says_what_it_is(volume):
    view = open_volume_view(volume, "features", encoding="float16", sample=ASKED, weights=W)
    head = parse_head(bytes(view.read(0, view.head.blocks)))
    assert head.spec == view.spec
    assert head.spec.volume == str(volume.uuid)
    assert head.spec.width == 19
    assert [width for width, _ in head.spec.projections] == [16, 3]
    assert isinstance(head.spec.shape(), SparseShape)
    assert head.counts.tolist() == [len(ids) for ids in needed_rows(volume, EDGES, ASKED)]
    assert head.nblocks == view.nblocks
    for number in range(view.shape.pages):
        assert crc32c(view.page(number)) == page_crc(number, head.spec.salt)
    view.close()


def test_sampled_pages_travel_only_as_far_as_they_are_used(volume):
    whole = open_volume_view(volume, "features", page_size=64 * KIB)
    sampled = open_volume_view(volume, "features", page_size=64 * KIB, sample=ASKED)
    shape = sampled.shape
    assert isinstance(shape, SparseShape)
    used = 0
    for index, count in enumerate(sampled.head.counts):
        for place in range(shape.used_pages(int(count))):
            used += len(sampled.page(index * shape.pages_per_range + place))
    share = int(sampled.head.counts.sum()) / VERTICES
    slack = BLOCK * (shape.ranges * 2)
    assert used <= share * whole.shape.pages * whole.shape.page_bytes + slack
    whole.close()
    sampled.close()
