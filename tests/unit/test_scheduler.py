"""The scheduler stepped by hand: orders of arrival, errors, STOP, reused slots, parked items."""

import numba
import numpy as np
import pytest
from tests.reference.engine import make_volume, rows_of
from tests.reference.gnn import features, messy_graph, randomised
from tests.reference.scripted import (
    FEW,
    LEAST,
    MANY,
    ORDERS,
    Script,
    capture,
    check_counts,
    check_rows,
    first_that,
)

from hyades.common.atomics import atomic_cas
from hyades.common.layout import Op, Status
from hyades.gpu_side import scheduler
from hyades.gpu_side import words as W
from hyades.gpu_side.requests import has_landed

models = pytest.importorskip("torch_geometric.nn.models", reason="no torch_geometric")

VERTICES, WIDTH = 90, 20
KINDS = {
    "sum": (lambda: models.GraphSAGE(WIDTH, 40, 1), {}),
    "max": (lambda: models.GraphSAGE(WIDTH, 24, 1, aggr="max"), {}),
    "attention": (lambda: models.GAT(WIDTH, 16, 1, heads=2), {}),
    "sampled": (lambda: models.GCN(WIDTH, 40, 1), {"fanout": (3,), "seed": 4}),
}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Return a volume of 12 chunks, its features and its edges."""
    vertices, edges = messy_graph(VERTICES, 700)
    x = features(vertices, WIDTH)
    path = make_volume(tmp_path_factory.mktemp("scripted") / "g.vol", edges, x, range_rows=8)
    return path, x, edges


@pytest.fixture(scope="module")
def cases(graph):
    """Return a function from a kind of layer to its case and the bytes it must give."""
    made = {}
    patch = pytest.MonkeyPatch()

    def case(kind):
        if kind not in made:
            build, options = KINDS[kind]
            module = randomised(build())
            captured = capture(patch, graph[0], module, plan="resident", **options)
            rows = rows_of(graph[0], module, plan="resident", **options)
            made[kind] = captured, rows
        return made[kind]

    return case


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("buffers", [LEAST, FEW, MANY], ids=["least", "few", "many"])
def test_any_order_of_arrival(cases, order, buffers):
    for kind, workers in (("sum", 1), ("sum", 3), ("attention", 2), ("max", 2), ("sampled", 2)):
        case, rows = cases(kind)
        script = Script(case.with_buffers(*buffers).with_workers(workers))
        script.run(ORDERS[order])
        check_counts(script)
        check_rows(script, rows)


@pytest.mark.parametrize("seed", range(12))
def test_any_interleaving_by_chance(cases, seed):
    rng = np.random.default_rng(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    case, rows = cases(kind)
    buffers = [int(rng.integers(1, 5)) for _ in range(4)]
    script = Script(case.with_buffers(*buffers).with_workers(1 + seed % 4))
    script.run_randomly(rng)
    check_counts(script)
    check_rows(script, rows)


def test_advance_itself(cases):
    """All is answered before each call, so `advance` never has to wait."""
    case, rows = cases("sum")
    script = Script(case.with_buffers(*MANY).with_workers(1))
    [worker] = script.workers
    assert script.step(worker)
    while True:
        script.drain()
        word = script.scan.advance(0)
        worker.action, worker.value = word >> W.ACTION_SHIFT, word & 0xFFFFFFFF
        if worker.action == W.A_DONE:
            break
        script.finish(worker)
    worker.ended = worker.action
    script.drain()
    check_counts(script)
    check_rows(script, rows)
    assert script.count(W.ST_IDLE) == 0
    assert script.count(W.ST_BUSY_TICKS) > 0
    assert script.count(W.ST_POSTED) == script.answered - case.inputs.target.shape.pages


# --- one worker stops in the middle of an item


def claim(script, worker):
    """Claim the next item for a worker that then does nothing."""
    arguments = script.scan.arguments
    stats = script.g[W.G_W_STATS] + worker * W.STATS_WORDS
    g, w, s, words, ready = (arguments[i] for i in (0, 1, 2, 5, 7))
    return int(scheduler._claim_next(g, w, s, words, ready, stats))


def run_item(script, worker, item):
    """Run a claimed item; return whether it ran."""
    g, w, s, floats, shorts, words, factors, ready, _, ring, control, slope = script.scan.arguments
    return scheduler._run_item(
        g, w, s, floats, shorts, words, factors, ring, control, ready, worker, item >> 20,
        item & 0xFFFFF, slope,
    )  # fmt: skip


def quiet(script, *workers):
    """Let *workers* do what they can, answering everything, until nothing moves."""
    moved = True
    while moved:
        moved = False
        for number in workers:
            worker = script.workers[number]
            if worker.action >= 0:
                script.finish(worker)
                moved = True
            elif worker.ended < 0:
                moved |= script.step(worker)
        if script.collect():
            script.drain()
            moved = True


def land_all(script):
    """Post and answer everything and land all chunks, running no item."""
    worker = script.workers[0]
    assert script.step(worker)
    script.drain()
    for position in range(script.case.inputs.topology.chunks):
        worker.action, worker.value = W.A_LAND, position
        script.w[W.C_NEXT_LAND] = position + 1
        script.finish(worker)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return a case of five chunks and the rows it must give."""
    vertices, edges = messy_graph(40, 160)
    folder = tmp_path_factory.mktemp("small")
    volume = make_volume(folder / "g.vol", edges, features(vertices, WIDTH), range_rows=8)
    module = randomised(models.GraphSAGE(WIDTH, 24, 1))
    case = capture(pytest.MonkeyPatch(), volume, module, plan="resident")
    return case.with_buffers(*MANY), rows_of(volume, module, plan="resident")


def test_a_worker_that_stops_inside_any_item(small):
    """For every item: the others park what needs it, do the rest, and end after it has run."""
    case, rows = small
    items = len(case.inputs.topology.directory)
    most_parked = 0
    for before in range(items):
        script = Script(case.with_workers(2))
        land_all(script)
        for _ in range(before):
            assert run_item(script, 0, claim(script, 0)) == 1
        item = claim(script, 0)
        assert item >= 0
        quiet(script, 1)
        parked = script.count(W.ST_PARKED_NOW)
        most_parked = max(most_parked, parked)
        assert script.count(W.ST_ITEMS) + parked + 1 == items
        assert script.workers[1].ended < 0
        assert run_item(script, 0, item) == 1
        quiet(script, 0, 1)
        check_counts(script)
        check_rows(script, rows)
    assert most_parked >= 4


@pytest.mark.parametrize("first", [0, 1])
def test_two_workers_that_stop_inside_any_two_items(small, first):
    """Neighbouring items are held; whichever goes on first, the lanes keep their order."""
    case, rows = small
    for before in range(len(case.inputs.topology.directory) - 1):
        script = Script(case.with_workers(3))
        land_all(script)
        for _ in range(before):
            assert run_item(script, 0, claim(script, 0)) == 1
        held = [claim(script, 0), claim(script, 1)]
        quiet(script, 2)
        order = [held[first], held[1 - first]]
        waits = [item for item in order if run_item(script, 0, item) == 0]
        quiet(script, 2)
        assert all(run_item(script, 0, item) == 1 for item in waits)
        quiet(script, 0, 1, 2)
        check_counts(script)
        check_rows(script, rows)


def test_parked_items_are_bounded(tmp_path):
    """A worker that holds PARKED_MAX parked items claims no more, and goes on once they can run."""
    chunks = W.PARKED_MAX + 16
    edges = np.array([np.arange(1, 2 * chunks), np.zeros(2 * chunks - 1, np.int64)])
    x = features(2 * chunks, 4)
    volume = make_volume(tmp_path / "star.vol", edges, x, range_rows=2)
    module = randomised(models.GraphSAGE(4, 4, 1))
    case = capture(pytest.MonkeyPatch(), volume, module, plan="resident").with_workers(2)
    script = Script(case.with_buffers(128, 128, 128, 128))
    land_all(script)
    item = claim(script, 0)  # the first piece of lane 0, which every other chunk adds to
    quiet(script, 1)
    assert script.scan.stats()[1, W.ST_PARKED_NOW] == W.PARKED_MAX
    assert run_item(script, 0, item) == 1
    quiet(script, 0, 1)
    check_counts(script)
    assert script.count(W.ST_PARKS) >= W.PARKED_MAX
    check_rows(script, rows_of(volume, module, plan="resident"))


# --- slots that are used again


def test_a_stale_reader_of_a_reused_slot_cannot_claim(cases):
    """With one tile slot, every tile's slot is the next one's: claims of past tiles all fail."""
    case, _ = cases("sum")
    script = Script(case.with_buffers(1, 1, 1, 16).with_workers(1))
    g, w, s = script.scan.arguments[:3]
    words, ready = script.scan.arguments[5], script.port.ready
    at = int(g[W.G_W_TILE_CLAIM])
    seen, checked = set(), 0
    while script.workers[0].ended < 0:
        script.settle()
        if script.collect():
            script.answer(0)
        now = int(w[at])
        seen.add(now >> 20)
        for old in seen - {now >> 20}:
            assert scheduler._claim_item(g, w, words, old) == -1
            assert scheduler._tile_ready(g, w, s, ready, old) == 2
            checked += 1
        assert int(w[at]) == now
    script.drain()
    check_counts(script)
    assert len(seen) == case.inputs.topology.pages
    assert checked > len(seen)


def test_a_claim_word_read_before_reuse_cannot_be_swapped(cases):
    """The reader got as far as the word of tile 0; tile 1 has the slot when it swaps."""
    case, rows = cases("sum")
    script = Script(case.with_buffers(1, 1, 1, 16).with_workers(2))
    at = int(script.g[W.G_W_TILE_CLAIM])
    stale = int(script.w[at])
    while int(script.w[at]) >> 20 == stale >> 20:
        script.settle()
        script.collect()
        script.answer(0)
    now = int(script.w[at])
    assert swap(script.w, at, stale, stale + 1) == now
    assert int(script.w[at]) == now
    script.run()
    check_counts(script)
    check_rows(script, rows)


@numba.njit
def swap(words, at, expected, desired):
    return atomic_cas(words, at, expected, desired)


def test_an_older_generation_has_not_landed():
    w, ready = np.zeros(W.CONTROL, np.int64), np.zeros(4, np.int64)
    for word, landed in ((0, 0), (6, 0), (7, 1), (8, 0)):
        ready[2] = word
        assert has_landed(w, ready, 2, 7) == landed
    assert w[W.C_ERROR] == 0
    ready[2] = int(Status.CRC)
    assert has_landed(w, ready, 2, 7) == 0
    assert (w[W.C_ERROR], w[W.C_ERROR_SLOT]) == (Status.CRC, 2)
    ready[3] = int(Status.IO)  # the first error is kept
    assert has_landed(w, ready, 3, 7) == 0
    assert (w[W.C_ERROR], w[W.C_ERROR_SLOT]) == (Status.CRC, 2)


def test_items_wait_for_their_rows(cases):
    """Tile pages that land before their chunk are one miss, and nothing of them runs."""
    case, rows = cases("sum")
    script = Script(case.with_buffers(*MANY).with_workers(1))
    [worker] = script.workers
    script.step(worker)
    script.collect()
    for _ in range(case.inputs.topology.pages):
        script.answer(first_that(script.pending, lambda r: r["object"] == 1))
    assert all(request["object"] == 0 for request in script.pending)
    for _ in range(5):
        assert not script.step(worker)
    assert script.count(W.ST_ITEMS) == 0
    assert script.count(W.ST_MISSES) == 1
    script.run()
    check_counts(script)
    check_rows(script, rows)


def test_a_lane_waits_for_an_output_slot(cases):
    """With one output slot, the next lane is finalised only after the last one's pages are out."""
    case, rows = cases("sum")
    script = Script(case.with_buffers(16, 64, 16, 1).with_workers(2))
    finished = 0
    while any(worker.ended < 0 for worker in script.workers):
        script.settle()
        script.collect()
        reads = [i for i, request in enumerate(script.pending) if request["op"] == Op.READ]
        if reads:
            script.answer(reads[0])
            continue
        assert len(script.finalised) == min(finished + 1, 12)
        while script.pending:
            script.answer(0)
        finished += 1
    script.drain()
    check_counts(script)
    check_rows(script, rows)
