"""The log's part of a scan, stepped by hand: what waits for room or for a slot, and the merge."""

import numpy as np
import pytest
import torch
from tests.reference.engine import error, full_batch, make_volume
from tests.reference.gnn import features, messy_graph, randomised
from tests.reference.scripted import (
    DEADLOCK,
    Script,
    capture,
    first_that,
    rows_written,
)

from hyades.common.layout import Op, Status
from hyades.gpu_side import merge as merging
from hyades.gpu_side import words as W

models = pytest.importorskip("torch_geometric.nn.models", reason="no torch_geometric")

VERTICES, WIDTH = 90, 20


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """Return a function from a kind of graph to its case and what PyG computes."""
    made = {}

    def case(kind):
        if kind not in made:
            made[kind] = make_logged(kind, tmp_path_factory.mktemp(kind))
        return made[kind]

    return case


def make_logged(kind, folder):
    """Wide rows fill pages of the log; local edges leave lanes whole, whose slots change hands."""
    width = 4000 if kind == "wide" else WIDTH
    x, (_, edges) = features(VERTICES, width), messy_graph(VERTICES, 700)
    if kind == "local":
        near = np.arange(VERTICES - 3)
        far = np.array([[0, 5, 80], [40, 88, 41]])
        edges = np.concatenate([np.array([near, near + 3]), np.array([near + 2, near]), far], 1)
    volume = make_volume(folder / "g.vol", edges, x, range_rows=8)
    module = randomised(models.GraphSAGE(width, 24, 1, aggr="max"))
    case = capture(pytest.MonkeyPatch(), volume, module, plan="log:3")
    whole = case.inputs.candidate.windows.whole
    assert whole.sum() > 3 if kind == "local" else whole.sum() < 3
    assert not whole.all()
    return case, full_batch(module, x, edges)


def merge(script, monkeypatch):
    """Finish the log and merge it, with the script as the proxy."""

    class Clock:
        @staticmethod
        def sleep(_seconds):
            script.collect()
            while script.pending:
                script.answer(0)

    with monkeypatch.context() as patch:
        patch.setattr(merging, "time", Clock)
        merging.finish_log(script.scan)
        merger = merging.LogMerge(script.scan)
        merger.workers = 1
        with torch.inference_mode():
            merger.work(0)
    script.drain()


@pytest.mark.parametrize("kind", ["wide", "local"])
def test_the_log_parks_and_resumes(logged, monkeypatch, kind):
    """Appends wait for room, and windows for their slot; bits do not depend on who waited."""
    case, expected = logged(kind)
    results, parks = set(), 0
    for seed in range(8):
        script = Script(case.with_buffers(2, 3, 2, 1).with_workers(1 + seed % 3))
        script.run_randomly(np.random.default_rng(seed))
        assert script.lasts() == [W.A_DONE] * len(script.workers)
        assert script.count(W.ST_PARKS) == script.count(W.ST_RESUMES)
        assert script.count(W.ST_PARKED_NOW) == 0
        windows = case.inputs.candidate.windows
        assert script.count(W.ST_LOGGED_ROWS) == windows.logged_rows.sum()
        parks += script.count(W.ST_PARKS)
        merge(script, monkeypatch)
        rows = rows_written(script)
        assert error(rows, expected) < 1e-6
        results.add(rows.tobytes())
    assert parks > 0
    assert len(results) == 1


def test_the_log_waits_for_room(logged, monkeypatch):
    """While no write of the log ends, items that need a page are parked, and nothing is lost."""
    case, expected = logged("wide")
    script = Script(case.with_buffers(16, 64, 16, 16).with_workers(2))
    while any(worker.ended < 0 for worker in script.workers):
        script.settle()
        if all(worker.ended >= 0 for worker in script.workers):
            break
        assert script.collect(), DEADLOCK
        script.answer(first_that(script.pending, lambda r: r["op"] == Op.READ))
    assert script.count(W.ST_PARKS) == script.count(W.ST_RESUMES) > 0
    script.drain()
    merge(script, monkeypatch)
    assert error(rows_written(script), expected) < 1e-6


def test_an_error_of_the_log_ends_every_worker(logged):
    case, _ = logged("wide")
    script = Script(case.with_buffers(2, 3, 2, 1).with_workers(2))
    failed = None
    while any(worker.ended < 0 for worker in script.workers):
        script.settle()
        if all(worker.ended >= 0 for worker in script.workers):
            break
        assert script.collect(), DEADLOCK
        write = first_that(script.pending, lambda r: r["op"] == Op.WRITE)
        if failed is None and script.pending[write]["op"] == Op.WRITE:
            failed = script.answer(write, Status.NO_SPACE)
        else:
            script.answer(0)
    if failed is None:
        pytest.fail("nothing was logged before the end")
    assert set(script.lasts()) <= {W.A_ABORT, W.A_DONE}
    assert script.w[W.C_ERROR] == Status.NO_SPACE
    assert script.w[W.C_ERROR_SLOT] == failed["slot"]
