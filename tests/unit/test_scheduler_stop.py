"""The scheduler stepped by hand: errors and STOP at every moment end every worker."""

import numpy as np
import pytest
from tests.reference.engine import make_volume
from tests.reference.gnn import features, messy_graph, randomised
from tests.reference.scripted import (
    DEADLOCK,
    FEW,
    ORDERS,
    Script,
    capture,
)

from hyades.common.layout import Status
from hyades.common.ring import FAILED, STOP
from hyades.gpu_side import words as W

models = pytest.importorskip("torch_geometric.nn.models", reason="no torch_geometric")


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """Return a pass over twelve chunks."""
    vertices, edges = messy_graph(90, 700)
    folder = tmp_path_factory.mktemp("scripted")
    volume = make_volume(folder / "g.vol", edges, features(vertices, 20), range_rows=8)
    module = randomised(models.GraphSAGE(20, 40, 1))
    return capture(pytest.MonkeyPatch(), volume, module, plan="resident")


def check_failed(script, status, slot):
    assert set(script.lasts()) <= {W.A_ABORT, W.A_DONE}
    assert script.w[W.C_ERROR] == status
    assert script.w[W.C_ERROR_SLOT] == slot


@pytest.mark.parametrize("order", ["first", "last"])
def test_an_error_of_any_request_ends_every_worker(case, order):
    case = case.with_buffers(*FEW).with_workers(2)
    whole = Script(case)
    whole.run(ORDERS[order])
    assert whole.answered > 30
    aborted = 0
    for failing in range(whole.answered):
        script = Script(case)
        request = None
        while any(worker.ended < 0 for worker in script.workers):
            script.settle()
            if all(worker.ended >= 0 for worker in script.workers):
                break
            assert script.collect(), DEADLOCK
            index = ORDERS[order](script.pending)
            if script.answered == failing:
                request = script.answer(index, Status.LOST)
            else:
                script.answer(index)
        while request is None and script.collect():  # a write after the workers have ended
            bad = script.answered == failing
            answer = script.answer(0, Status.LOST if bad else Status.OK)
            request = answer if bad else None
        assert not script.scan.drained() or script.w[W.C_ERROR] != 0
        check_failed(script, Status.LOST, int(request["slot"]))
        aborted += script.lasts() == [W.A_ABORT] * 2
    assert aborted > whole.answered / 2


@pytest.mark.parametrize("word", [STOP, FAILED])
def test_stop_at_any_moment_ends_every_worker_at_its_next_round(case, word):
    case = case.with_buffers(*FEW).with_workers(3)
    whole = Script(case)
    whole.run_randomly(np.random.default_rng(1))
    moments = whole.answered
    for moment in range(0, moments, 3):
        script = Script(case)
        rng = np.random.default_rng(1)
        while script.answered < moment and any(worker.ended < 0 for worker in script.workers):
            for worker in script.able():
                script.step(worker)
            for worker in script.busy():
                if rng.integers(2):
                    script.finish(worker)
            if script.collect():
                script.answer(int(rng.integers(len(script.pending))))
        script.ring.control[word] = 1
        for worker in script.busy():
            script.finish(worker)
        for worker in script.able():
            script.step(worker)
        assert all(worker.ended >= 0 for worker in script.workers)
        assert W.A_ABORT in script.lasts() or script.lasts() == [W.A_DONE] * 3


@pytest.mark.parametrize("word", [STOP, FAILED])
def test_advance_leaves_at_stop(case, word):
    script = Script(case.with_workers(1))
    script.ring.control[word] = 1
    assert script.scan.advance(0) >> W.ACTION_SHIFT == W.A_ABORT
    assert script.collect() == 0
