"""The request ring: order, fullness, wrap-around, many producers, STOP."""

import itertools
import threading
import time
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyades.common.errors import UsageError
from hyades.common.layout import REQUEST
from hyades.common.ring import (
    CONTROL_WORDS,
    FAILED,
    HEAD,
    STOP,
    TAIL,
    Ring,
    claim,
    load_word,
    publish,
    store_word,
)


def records(start, count, producer=0):
    """Return requests whose every field follows from their number."""
    batch = np.zeros(count, REQUEST)
    number = np.arange(start, start + count, dtype=np.uint64)
    batch["lba"] = number
    batch["offset"] = number * 4096
    batch["nbytes"], batch["slot"] = number % 1000 + 1, number % 77
    batch["op"], batch["flags"], batch["device"] = 1 + number % 3, number % 4, producer
    batch["crc"] = number * 2_654_435_761 % (1 << 32)
    batch["generation"], batch["object"] = number + 1, 9
    batch["page"], batch["cookie"] = number, number | np.uint64(1 << 63)
    return batch


def take(ring, most):
    """Pop up to *most* records; their sequence field is the ring's own and set to 0."""
    out = np.zeros(most, REQUEST)
    got = out[: ring.pop(out)]
    got["sequence"] = 0
    return got


def at_position(ring, position):
    """Make an empty ring look as if *position* records had gone through it."""
    ring.words[:, 0] = position + (np.arange(ring.capacity) - position) % ring.capacity
    ring.control[TAIL] = ring.control[HEAD] = position
    return ring


@pytest.mark.parametrize("capacity", [-2, 0, 1, 3, 6, 12])
def test_capacity_is_a_power_of_two(capacity):
    with pytest.raises(UsageError, match=f"ring capacity {capacity} is not a power of two"):
        Ring.create(capacity)


def test_records_come_out_as_they_went_in():
    ring = Ring.create(8)
    assert len(take(ring, 4)) == 0
    sent = records(0, 5)
    assert ring.push(sent) == 5
    assert np.array_equal(take(ring, 2), sent[:2])
    assert np.array_equal(take(ring, 9), sent[2:])
    assert len(take(ring, 4)) == 0


def test_records_are_the_words():
    ring = Ring.create(4)
    ring.push(records(3, 1))
    assert ring.records[0]["lba"] == 3
    assert ring.records[0]["cookie"] == (1 << 63) | 3
    assert ring.records["sequence"].tolist() == [1, 1, 2, 3]


def test_a_full_ring_takes_what_fits_and_overwrites_nothing():
    ring = Ring.create(4)
    assert ring.push(records(0, 7)) == 4
    assert ring.push(records(90, 1)) == 0
    assert take(ring, 1)["lba"].tolist() == [0]
    assert ring.push(records(4, 2)) == 1
    assert take(ring, 9)["lba"].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("position", [0, 5, (1 << 31) - 3, (1 << 32) - 3, (1 << 62) - 3])
def test_wrap_around(position):
    ring = at_position(Ring.create(4), position)
    assert len(take(ring, 1)) == 0
    for start in range(0, 30, 3):
        sent = records(start, 3)
        assert ring.push(sent) == 3
        assert np.array_equal(take(ring, 4), sent)
    assert ring.push(records(0, 5)) == 4


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([2, 4, 8]), st.lists(st.integers(-9, 9), max_size=60))
def test_it_is_a_bounded_queue(capacity, steps):
    """Positive steps push, the others pop; a deque says what must happen."""
    ring, model, number = Ring.create(capacity), deque(), 0
    for step in steps:
        if step > 0:
            fits = min(step, capacity - len(model))
            assert ring.push(records(number, step)) == fits
            model.extend(range(number, number + fits))
            number += fits
        else:
            expected = [model.popleft() for _ in range(min(-step, len(model)))]
            assert take(ring, max(-step, 1) if step else 0)["lba"].tolist() == expected


def test_the_consumer_waits_for_a_claimed_record():
    """A record that is claimed and not yet published holds back what came after it."""
    ring = Ring.create(4)
    words = ring.words.reshape(-1)
    first, second = claim(words, ring.control), claim(words, ring.control)
    assert (first, second) == (0, 1)
    publish(words, second)
    assert len(take(ring, 4)) == 0
    publish(words, first)
    assert len(take(ring, 4)) == 2


def interleavings(counts):
    """Yield every order of the steps of several actors, as actor numbers."""
    if not any(counts):
        yield ()
        return
    for actor, left in enumerate(counts):
        if left:
            rest = (*counts[:actor], left - 1, *counts[actor + 1 :])
            for tail in interleavings(rest):
                yield (actor, *tail)


class Producer:
    """Claims, then publishes, in separate steps; a claim may find the ring full."""

    def __init__(self, ring, name):
        self.ring, self.name = ring, name
        self.words = ring.words.reshape(-1)
        self.position = -1
        self.sent = 0
        self.claimed = []

    def step(self):
        if self.position < 0:
            self.position = int(claim(self.words, self.ring.control))
            if self.position >= 0:
                self.claimed.append((self.position, self.name, self.sent))
        else:
            base = (self.position % self.ring.capacity) * 8
            self.words[base + 1], self.words[base + 2] = self.name, self.sent
            publish(self.words, self.position)
            self.sent += 1
            self.position = -1


@pytest.mark.parametrize("start", [0, 3])
def test_every_interleaving_of_two_producers_and_a_consumer(start):
    """Nothing is lost or doubled; records come in claim order, so in each producer's order."""
    for order in interleavings((4, 4, 3)):
        ring = at_position(Ring.create(2), start)
        producers = [Producer(ring, 7), Producer(ring, 8)]
        seen = []
        for actor in (*order, 0, 0, 1, 1, 2, 0, 0, 1, 1, 2):  # what is left afterwards
            if actor < 2:
                producers[actor].step()
            else:
                seen += [(int(r["lba"]), int(r["offset"])) for r in take(ring, 9)]
        seen += [(int(r["lba"]), int(r["offset"])) for r in take(ring, 9)]
        claimed = sorted(itertools.chain.from_iterable(p.claimed for p in producers))
        published = [(name, n) for _, name, n in claimed if n < producers[name - 7].sent]
        assert seen == published[: len(seen)]
        held = [position for p in producers for position, _, n in p.claimed if n >= p.sent]
        assert len(seen) >= sum(p < min(held, default=1 << 62) for p, _, _ in claimed)


def test_many_producers():
    ring = Ring.create(32)
    producers, each = 4, 3000
    errors = []

    def produce(name):
        sent, deadline = 0, time.monotonic() + 60
        while sent < each:
            pushed = ring.push(records(sent, min(7, each - sent), name))
            sent += pushed
            if not pushed:
                if time.monotonic() > deadline:
                    errors.append(f"producer {name} is stuck at {sent}")
                    return
                time.sleep(0)

    threads = [threading.Thread(target=produce, args=(n,), daemon=True) for n in range(producers)]
    for thread in threads:
        thread.start()
    got, deadline = [], time.monotonic() + 60
    while sum(map(len, got)) < producers * each and time.monotonic() < deadline:
        batch = take(ring, 11)
        got.append(batch) if len(batch) else time.sleep(0)
    for thread in threads:
        thread.join(1)
    assert not errors
    everything = np.concatenate(got)
    assert len(everything) == producers * each
    for name in range(producers):
        own = everything[everything["device"] == name]
        assert np.array_equal(own, records(0, each, name)), "torn, lost or out of order"
    assert len(take(ring, 1)) == 0


def test_stop_and_failed_are_words_of_their_own():
    ring = Ring.create(2)
    assert [int(load_word(ring.control, word)) for word in (STOP, FAILED)] == [0, 0]
    ring.push(records(0, 2))
    ring.stop()
    assert [int(load_word(ring.control, word)) for word in (STOP, FAILED)] == [1, 0]
    store_word(ring.control, FAILED, 3)
    assert int(load_word(ring.control, FAILED)) == 3
    # A stopped ring still holds what was posted: who drains it decides.
    assert len(take(ring, 4)) == 2


def test_control_words_never_share_a_cache_line_pair():
    places = sorted((TAIL, HEAD, STOP, FAILED))
    assert min(np.diff([*places, CONTROL_WORDS])) * 8 >= 128


def test_a_loop_that_waits_for_room_leaves_at_stop():
    ring = Ring.create(2)
    ring.push(records(0, 2))
    left = threading.Event()

    def producer():
        while not ring.push(records(2, 1)):
            if load_word(ring.control, STOP):
                left.set()
                return
            time.sleep(0)

    thread = threading.Thread(target=producer, daemon=True)
    thread.start()
    time.sleep(0.02)
    assert not left.is_set()
    ring.stop()
    assert left.wait(10)
    thread.join(1)
