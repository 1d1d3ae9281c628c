"""Views as a service: pace, memory, errors, threads, and what no view can be."""

import os
import random
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tests.reference.stage import (
    ASKED,
    VERTICES,
    WIDTH,
    W,
    awkward_volume,
    make_volume,
    read_view,
)

from hyades.common.errors import DataError, DeviceLost, UsageError
from hyades.common.units import KIB, MIB
from hyades.common.viewspec import SampleSpec
from hyades.target_side.stage.meter import Meter, SpanTimes
from hyades.target_side.stage.options import StageOptions
from hyades.target_side.stage.pipeline import Pipeline
from hyades.target_side.stage.quantise import Quantise
from hyades.target_side.stage.source import Source
from hyades.target_side.stage.stream import Stream
from hyades.target_side.stage.viewpages import ViewPages, make_spec, open_volume_view


@pytest.fixture(scope="module", params=["one page a range", "several", "float16"])
def volume(request):
    return awkward_volume(request.param)


def image(view):
    return bytes(view.read(0, view.nblocks))


class Counting:
    """A page reader that counts, and fails where it is told to."""

    def __init__(self, volume):
        self.volume, self.pages, self.errors = volume, [], {}
        self.affinity = set()
        self.lock = threading.Lock()

    def __call__(self, info, page):
        with self.lock:
            self.affinity.add(frozenset(os.sched_getaffinity(0)))
            if info.name == "features":
                self.pages.append(page)
        error = self.errors.get((info.name, page))
        if isinstance(error, BaseException):
            raise error
        data = self.volume.read_page(info, page)
        return data[:-1] if error == "short" else memoryview(data)


def long_volume(rows=8192, width=32, range_rows=512):
    x = np.random.default_rng(1).standard_normal((rows, width)).astype(np.float32)
    base = np.arange(rows)
    return make_volume(np.stack((base, (base + 1) % rows)), x, range_rows=range_rows)


def view_of(volume, reader, **options):
    stage = options.pop("stage", StageOptions())
    sink = options.pop("sink", None)
    spec = make_spec(volume.catalog, ("u", 1), "features", **options)
    return ViewPages(spec, volume.catalog, reader, name="test", options=stage, sink=sink)


def test_a_slow_reader_stops_the_stage():
    volume = long_volume()
    reader = Counting(volume)
    view = view_of(volume, reader, encoding="float16", stage=StageOptions(threads=2))
    for number in range(3):
        view.page(number)
    view.close()  # waits for what was begun
    plan = view.plan
    assert len(reader.pages) <= 3 + plan.ahead + plan.threads + plan.window
    assert len(set(reader.pages)) == len(reader.pages)


def test_a_small_memory_makes_a_small_stage():
    volume = long_volume()
    reader = Counting(volume)
    with pytest.raises(UsageError, match=r"takes at least .* of stage memory, not 64.0 KiB: raise"):
        view_of(volume, reader, stage=StageOptions(memory=64 * KIB))
    small = view_of(volume, reader, stage=StageOptions(memory=700 * KIB, threads=4))
    large = view_of(volume, reader, stage=StageOptions(memory=64 * MIB, threads=4))
    assert small.plan.threads < large.plan.threads == 4
    assert small.plan.window < large.plan.window
    assert small.plan.nbytes <= 700 * KIB
    assert image(small) == image(large)
    small.close()
    large.close()


@pytest.mark.parametrize("memory", [4 * MIB, 16 * MIB])
@pytest.mark.parametrize("projected", [False, True])
def test_memory_is_bounded(memory, projected):
    volume = long_volume(rows=40_000, width=64, range_rows=2048)
    weights = (np.ones((32, 64), np.float32),) if projected else ()
    options = StageOptions(memory=memory, threads=2)
    volume.page_table("features")
    view = open_volume_view(
        volume, "features", encoding="float16", weights=weights, options=options
    )  # fmt: skip
    view.page(0)  # imports, and pools that start their threads
    tracemalloc.start()
    try:
        for number in range(view.shape.pages):
            view.page(number)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        view.close()
    assert peak <= view.plan.nbytes + 128 * KIB <= memory + 128 * KIB
    assert peak > MIB, "something was measured"


@pytest.mark.parametrize("readers", [0, 2])
def test_errors_say_where_and_do_not_stay(readers):
    volume = long_volume()
    reader = Counting(volume)
    view = view_of(volume, reader, stage=StageOptions(readers=readers))
    good = bytes(view.page(4))
    other = view_of(volume, reader, stage=StageOptions(readers=readers))
    lba = volume.object("features").lba(5)
    where = rf"test: object 'features' page 5 \(LBA {lba}\)"
    reader.errors["features", 5] = DataError("CRC32C is wrong")
    for number in range(5):
        other.page(number)
    with pytest.raises(DataError, match="CRC32C is wrong") as caught:
        other.page(5)
    assert any(f"page 5 (LBA {lba})" in note for note in caught.value.__notes__)
    reader.errors["features", 5] = OSError(5, "Input/output error")
    with pytest.raises(DeviceLost, match=where + ".*Input/output error"):
        other.page(5)
    reader.errors["features", 5] = "short"
    with pytest.raises(DataError, match=where + r": 65535 bytes were read of 65536"):
        other.read(other.head.page_lba(5), 1)
    reader.errors.clear()
    assert bytes(other.page(4)) == good
    assert len(other.page(5)) == other.shape.page_bytes
    view.close()
    other.close()


def test_a_view_is_closed_while_others_read():
    volume = long_volume()
    whole = view_of(volume, Counting(volume), encoding="int8")
    pages = [bytes(whole.page(number)) for number in range(whole.shape.pages)]
    whole.close()
    view = view_of(volume, Counting(volume), encoding="int8", stage=StageOptions(threads=2))
    begun = threading.Barrier(4)

    def read_until_closed(seed):
        order, read = random.Random(seed), 0
        begun.wait(20)
        while True:
            number = order.randrange(len(pages)) if seed else read % len(pages)
            try:
                found = bytes(view.page(number))
            except UsageError as error:
                return read, str(error)
            assert found == pages[number]
            read += 1

    with ThreadPoolExecutor(3) as pool:
        jobs = [pool.submit(read_until_closed, seed) for seed in range(3)]
        begun.wait(20)
        while view.counts().get("pages", None) is None:
            threading.Event().wait(0.001)
        view.close()
        assert {job.result(60)[1] for job in jobs} == {"view of 'features' is closed"}
    view.close()


def test_threads_run_where_they_are_pinned():
    core = max(os.sched_getaffinity(0))
    volume = long_volume()
    reader = Counting(volume)
    view = view_of(volume, reader, stage=StageOptions(threads=1, readers=1, cores=(core,)))
    reader.affinity.clear()
    for number in range(8):
        view.page(number)
    view.close()
    assert frozenset({core}) in reader.affinity
    assert os.sched_getaffinity(0) != {core} or len(os.sched_getaffinity(0)) == 1
    with pytest.raises(UsageError, match=r"stage cores \(4095,\): this process may use"):
        StageOptions(cores=(4095,))
    with pytest.raises(UsageError, match="stage cores"):
        StageOptions(cores=())
    with pytest.raises(UsageError, match="a stage of -1 threads"):
        StageOptions(threads=-1)


def test_every_operator_tells_its_time_and_what_it_moved(volume):
    times = SpanTimes()
    view = open_volume_view(
        volume, "features", encoding="int8", sample=ASKED, weights=W, sink=times
    )  # fmt: skip
    read_view(view)
    view.close()
    names = {"read", "wait", "sample", "decode", "project", "quantise", "pages"}
    assert set(times.seconds) == names
    assert all(seconds > 0 for seconds in times.seconds.values())
    counts, rows = view.counts(), int(view.head.counts.sum())
    assert counts["sample"].rows_out == counts["quantise"].rows_in == rows
    assert counts["quantise"].bytes_in == rows * 19 * 4
    assert counts["quantise"].bytes_out == rows * 24
    assert counts["stream"].rows_in <= VERTICES


def test_pages_without_a_wanted_row_are_not_read():
    volume = long_volume(rows=4096, width=256, range_rows=512)  # 8 pages a range
    reader = Counting(volume)
    spec = SampleSpec(1, 0, 0, ((0, 1),), "none")  # edges come from the next lower vertex
    view = view_of(volume, reader, sample=spec, stage=StageOptions(readers=0))
    ids, _ = read_view(view)
    view.close()
    assert [len(own) for own in ids] == [511, 0, 0, 0, 0, 0, 0, 1]
    last = volume.object("features").pages - 1
    assert sorted(set(reader.pages)) == [
        *range(volume.object("features").shape().pages_per_range),
        last,
    ]


def test_what_no_view_can_be_is_refused(volume):
    catalog, identity = volume.catalog, ("u", 1)
    for wrong, text in (
        ({"source": "tiles"}, "no matrix 'tiles'"),
        ({"source": "none"}, "no matrix 'none'"),
        ({"weights": (np.ones((3, 4), np.float32),)}, "weights .3, 4. for rows of 50 values"),
        ({"page_size": 100}, "page size 100"),
        ({"sample": SampleSpec(1, 0, 0, ((0, 9),))}, "lanes"),
    ):
        with pytest.raises(UsageError, match=text):
            make_spec(catalog, identity, **{"source": "features", **wrong})
    spec = make_spec(catalog, identity, "features", weights=W)
    for weights in ((), W[:1], (W[0] + 1, W[1])):
        with pytest.raises(UsageError, match="the view asked for is"):
            ViewPages(spec, catalog, volume.read_page, weights=weights)
    negative = SampleSpec(0, -1, 0, ((0, 1),))
    with pytest.raises(UsageError, match="no such view can be"):
        ViewPages(
            make_spec(catalog, identity, "features", sample=negative), catalog, volume.read_page
        )
    view = open_volume_view(volume, "features")
    for lba, count in ((-1, 1), (0, view.nblocks + 1), (view.nblocks, 1), (0, -1)):
        with pytest.raises(UsageError, match="is outside its"):
            view.read(lba, count)
    with pytest.raises(UsageError, match="has no page"):
        view.page(view.shape.pages)
    assert len(view.read(view.nblocks, 0)) == 0
    view.close()


def test_a_pipeline_has_an_order(volume):
    meter = Meter()
    source = Source("test", volume.catalog, volume.read_page, meter)
    stream, quantise = Stream(source, "features"), Quantise("int8", meter)
    rows = Pipeline([stream, quantise], "int8", WIDTH).run_range(2)
    assert (rows.index, rows.ids, rows.data.shape) == (2, None, (258, 56))
    for ops in ([], [quantise], [quantise, stream], [stream, stream]):
        with pytest.raises(UsageError, match=r"a pipeline of .*: begin with stream"):
            Pipeline(ops, "int8", WIDTH)
    with pytest.raises(UsageError, match="the pipeline gives 50 x int8, the view has 50 x float16"):
        Pipeline([stream, quantise], "float16", WIDTH).run_range(0)
