"""The resident loop on CPU threads: what a GPU will run, with a host thread that answers asks."""

import threading
import time

import numpy as np
import pytest
from tests.reference.engine import make_volume, refresh, same_bits
from tests.reference.gnn import features, messy_graph, randomised

from hyades.common.errors import DeviceLost, UsageError
from hyades.common.layout import Op
from hyades.common.ring import STOP, Ring, store_word
from hyades.deploy import assemble
from hyades.gpu_side import refresh as engine
from hyades.gpu_side import words as W
from hyades.gpu_side.devices.cpu import CpuDevice
from hyades.gpu_side.resident import (
    MAILBOX_WORDS,
    Mailbox,
    await_answer,
    post_ask,
    run_resident,
    serve,
)
from hyades.gpu_side.scan import PassScan
from hyades.proxy.transports.faulty import Fault, FaultPlan, FaultyTransport

models = pytest.importorskip("torch_geometric.nn.models", reason="no torch_geometric")


class ResidentThreads(CpuDevice):
    """Each worker is a thread that stays in compiled code; one more thread is their host."""

    served: list[list[int]]

    def run(self, scan, pulse, stop):
        mailbox = Mailbox.create(self.workers)

        def work(index):
            if index < self.workers:
                run_resident(index, mailbox.words, *scan.arguments)
            else:
                self.served.append(serve(scan, mailbox, self.workers))

        CpuDevice(self.workers + 1, self.sink).run_workers(work, pulse, stop)


@pytest.fixture
def resident(monkeypatch):
    """Return a switch that makes refreshes resident, and gives the workers' last actions."""
    served = []
    monkeypatch.setattr(ResidentThreads, "served", served, raising=False)

    def switch():
        monkeypatch.setattr(engine, "CpuDevice", ResidentThreads)
        return served

    return switch


@pytest.fixture(scope="module")
def volume(tmp_path_factory):
    vertices, edges = messy_graph(150, 900)
    return make_volume(tmp_path_factory.mktemp("resident") / "g.vol", edges, features(vertices, 24))


def module_of(name):
    if name == "gat":
        return randomised(models.GAT(24, 16, 2, 8, heads=2))
    aggregate = {"aggr": "max"} if name == "sage-max" else {}
    kind = models.GCN if name == "gcn" else models.GraphSAGE
    return randomised(kind(24, 16, 2, 40, **aggregate))


@pytest.mark.parametrize("plan", ["resident", "passes:3", "log:2"])
@pytest.mark.parametrize("name", ["gcn", "sage-max", "gat"])
def test_same_bits_as_threads_that_leave(volume, resident, name, plan):
    module = module_of(name)
    expected, _ = refresh(volume, module, plan=plan)
    served = resident()
    for threads in (1, 3):
        got, report = refresh(volume, module, plan=plan, threads=threads)
        assert same_bits(got, expected)
        assert [stage.plan for stage in report.stages] == [plan] * 2
        assert served.pop() == [W.A_DONE] * threads
    assert served


def test_sampled(volume, resident):
    module = module_of("gcn")
    expected, _ = refresh(volume, module, fanout=(3, 2), seed=5)
    resident()
    assert same_bits(refresh(volume, module, fanout=(3, 2), seed=5)[0], expected)


@pytest.mark.parametrize("op", [Op.READ, Op.WRITE])
def test_a_failed_request_ends_every_worker(volume, resident, monkeypatch, op):
    served = resident()
    open_devices = assemble.open_devices

    def faulty(*args, **options):
        inner = open_devices(*args, **options)
        return [FaultyTransport(inner[0], FaultPlan([Fault("io", op=op)])), *inner[1:]]

    monkeypatch.setattr(assemble, "open_devices", faulty)
    with pytest.raises((DeviceLost, UsageError), match="status IO after retries"):
        refresh(volume, module_of("gcn"), threads=3)
    # Writes may fail after the last worker has ended.
    assert served[-1] == [W.A_ABORT] * 3 or op == Op.WRITE


@pytest.mark.parametrize("part", ["land_rows", "finalise_rows"])
def test_a_host_that_fails_ends_every_worker(volume, resident, monkeypatch, part):
    served = resident()

    def broken(*_):
        raise MemoryError("no room for a chunk")

    monkeypatch.setattr(PassScan, part, broken)
    before = threading.active_count()
    with pytest.raises(MemoryError, match="no room for a chunk"):
        refresh(volume, module_of("gcn"), threads=3)
    assert threading.active_count() == before
    assert served == []


# --- the words


def test_asks_come_once_and_whole():
    box = Mailbox.create(3)
    assert list(box.asks()) == []
    post_ask(box.words, 2, 1, 4095, (W.A_FINALISE << W.ACTION_SHIFT) | 0xFFFFFFFF)
    [ask] = box.asks()
    assert (ask.worker, ask.turn, ask.action, ask.value, ask.slot, ask.is_last) == (
        2, 1, W.A_FINALISE, 0xFFFFFFFF, 4095, False,
    )  # fmt: skip
    assert list(box.asks()) == []
    # The same words again are another ask: its turn differs.
    post_ask(box.words, 2, 2, 4095, (W.A_FINALISE << W.ACTION_SHIFT) | 0xFFFFFFFF)
    post_ask(box.words, 0, 1, 0, W.A_DONE << W.ACTION_SHIFT)
    assert [(ask.worker, ask.turn, ask.is_last) for ask in box.asks()] == [
        (0, 1, True),
        (2, 2, False),
    ]


def test_turns_wrap():
    box = Mailbox.create(1)
    for turn in (0x7FFE, 0x7FFF, 0, 1):
        post_ask(box.words, 0, turn, 0, (W.A_LAND << W.ACTION_SHIFT) | 7)
        [ask] = box.asks()
        assert (ask.turn, ask.value) == (turn, 7)
        box.answer(ask)
        assert box.words[MAILBOX_WORDS // 2] == turn


def waiting(words, control, mail):
    """Start a worker that waits for turn 5; return a function that joins it."""
    geometry = np.zeros(W.G_COUNT, np.int64)
    geometry[W.G_W_STATS] = W.CONTROL
    result = []
    thread = threading.Thread(
        target=lambda: result.append(await_answer(mail, 0, 5, geometry, words, control)),
        daemon=True,
    )
    thread.start()

    def join():
        thread.join(10)
        assert not thread.is_alive(), "the worker waits for ever"
        return result[0]

    return join


@pytest.mark.parametrize("way", ["answer", "stop", "error"])
def test_a_wait_ends_by_answer_stop_or_error(way):
    words = np.zeros(W.CONTROL + W.STATS_WORDS, np.int64)
    control, box = Ring.create(2).control, Mailbox.create(1)
    join = waiting(words, control, box.words)
    store_word(box.words, MAILBOX_WORDS // 2, 4)  # an older answer is none
    time.sleep(0.02)
    if way == "answer":
        store_word(box.words, MAILBOX_WORDS // 2, 5)
    elif way == "stop":
        store_word(control, STOP, 1)
    else:
        store_word(words, W.C_ERROR, -1)
    assert join() == (1 if way == "answer" else 0)
    assert words[W.CONTROL + W.ST_IDLE] > 0
    assert words[W.CONTROL + W.ST_IDLE_TICKS] > 0
