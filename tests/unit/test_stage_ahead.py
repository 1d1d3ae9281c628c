"""Read-ahead: bounded, sized to the reader, right for any order, and errors stay where they are."""

import random
import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import pytest

from hyades.common.errors import DataError
from hyades.target_side.stage.ahead import Ahead


class Manual(Executor):
    """Runs what was submitted when the test says so."""

    def __init__(self):
        self.waiting = []

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        self.waiting.append((future, fn, args))
        return future

    def run(self, most=1000):
        done = 0
        while self.waiting and done < most:
            future, fn, args = self.waiting.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            done += 1
            try:
                future.set_result(fn(*args))
            except DataError as error:
                future.set_exception(error)
        return done


class Maker:
    def __init__(self, bad=()):
        self.made, self.bad = [], set(bad)

    def __call__(self, index):
        self.made.append(index)
        if index in self.bad:
            raise DataError(f"page {index} is bad")
        return index * 10


def test_without_a_pool_nothing_is_made_ahead():
    maker = Maker()
    ahead = Ahead(maker, 9, None, 5)
    assert [ahead.get(i) for i in (0, 1, 7, 3, 3)] == [0, 10, 70, 30, 30]
    assert maker.made == [0, 1, 7, 3, 3]
    assert ahead.unasked == 0


def test_a_reader_that_waits_gets_a_deeper_window():
    maker, pool = Maker(), Manual()
    ahead = Ahead(maker, 100, pool, 8)
    depths = []
    for index in range(10):
        assert ahead.get(index) == index * 10  # nothing is ready: it makes each itself
        depths.append(ahead.depth)
    assert depths == [2, 4, 8, 8, 8, 8, 8, 8, 8, 8]
    assert ahead.unasked == 8
    assert maker.made == list(range(10))


def test_a_slow_reader_shrinks_it_to_one():
    maker, pool = Maker(), Manual()
    ahead = Ahead(maker, 400, pool, 16)
    for index in range(6):
        ahead.get(index)
    assert ahead.depth == 16
    for index in range(6, 300):
        pool.run()
        ahead.get(index)
    assert ahead.depth == 1
    assert ahead.unasked == 1
    assert sorted(maker.made) == list(range(300))  # none twice, none beyond the window


def test_back_pressure():
    maker, pool = Maker(), Manual()
    ahead = Ahead(maker, 1000, pool, 4)
    for index in range(3):
        ahead.get(index)
    pool.run()
    assert len(maker.made) <= 3 + 4
    before = len(maker.made)
    assert pool.run() == 0  # nobody asks, nothing happens
    assert len(maker.made) == before


def test_the_end_is_not_passed():
    maker, pool = Maker(), Manual()
    ahead = Ahead(maker, 5, pool, 8)
    for index in range(5):
        ahead.get(index)
        pool.run()
    assert sorted(maker.made) == [0, 1, 2, 3, 4]
    assert ahead.unasked == 0


def test_a_jump_forgets_the_window_and_starts_small():
    maker, pool = Maker(), Manual()
    ahead = Ahead(maker, 1000, pool, 8)
    for index in range(5):
        ahead.get(index)
    assert ahead.unasked == 8
    assert ahead.get(500) == 5000
    assert (ahead.depth, ahead.unasked) == (1, 1)
    pool.run()
    assert set(maker.made) == {*range(5), 500, 501}
    assert ahead.get(501) == 5010
    assert maker.made.count(501) == 1


def test_two_readers_side_by_side_make_nothing_twice():
    maker, pool = Maker(), Manual()
    ahead = Ahead(maker, 1000, pool, 16)
    for step in range(8):  # one reads 0 to 7, the other 8 to 15
        assert ahead.get(8 + step) == 10 * (8 + step)
        pool.run(1)
        assert ahead.get(step) == 10 * step
    pool.run()
    assert len(set(maker.made)) == len(maker.made)
    assert ahead.depth > 1


def test_a_page_left_out_does_not_end_the_window():
    maker, pool = Maker(), Manual()
    ahead = Ahead(maker, 1000, pool, 8)
    for index in range(0, 60, 3):
        ahead.get(index)
        pool.run()
    assert ahead.unasked <= 8
    assert len(set(maker.made)) == len(maker.made)


def test_forgotten_work_that_runs_still_counts():
    started, release = threading.Event(), threading.Event()

    def slow(index):
        if index == 1:
            started.set()
            assert release.wait(20)
        return index

    with ThreadPoolExecutor(1) as pool:
        ahead = Ahead(slow, 100, pool, 1)
        ahead.get(0)
        assert started.wait(20)
        ahead.get(50)
        assert ahead.unasked == 1  # the one that runs; so nothing new was begun
        assert not ahead._slots
        release.set()
    assert ahead.unasked == 0


def test_an_error_is_raised_where_it_belongs_and_nowhere_else():
    maker, pool = Maker(bad=[3]), Manual()
    ahead = Ahead(maker, 10, pool, 4)
    for index in (0, 1, 2):
        ahead.get(index)
        pool.run()
    with pytest.raises(DataError, match="page 3 is bad"):
        ahead.get(3)
    assert ahead.get(4) == 40
    maker.bad.clear()
    assert ahead.get(3) == 30  # asking again tries again


def test_an_error_that_nobody_meets_is_nobodys():
    maker, pool = Maker(bad=[2]), Manual()
    ahead = Ahead(maker, 10, pool, 4)
    ahead.get(0)
    ahead.get(1)
    pool.run()
    assert 2 in maker.made
    assert ahead.get(7) == 70
    assert ahead.unasked <= 4


@pytest.mark.parametrize("most", [0, 1, 3, 16])
def test_many_threads_in_any_order(most):
    lock, live, peak = threading.Lock(), set(), []

    def make(index):
        with lock:
            live.add(index)
            peak.append(ahead.unasked)
        return index * 10

    with ThreadPoolExecutor(3) as pool, ThreadPoolExecutor(4) as readers:
        ahead = Ahead(make, 300, pool, most)
        rng = random.Random(most)
        orders = [
            list(range(300)),
            list(range(0, 300, 2)),
            [rng.randrange(300) for _ in range(300)],
        ]
        jobs = [readers.submit(lambda o=order: [ahead.get(i) for i in o]) for order in orders]
        for job, order in zip(jobs, orders, strict=True):
            assert job.result(60) == [i * 10 for i in order]
        ahead.forget()
    assert max(peak) <= most
    assert ahead.unasked == 0
