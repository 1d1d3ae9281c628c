"""Signals that end a command: the first unwinds, and nothing stops a commit half-way."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from hyades.common.blocks import MemoryBlocks
from hyades.common.interrupts import undisturbed
from hyades.common.volume import Volume
from hyades.deploy.signals import Terminated, one_signal_at_a_time, terminate


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """The handlers that the command line has, for the time of a test."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, terminate)
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def send_twice(first: int, second: int, steps: list[str]) -> None:
    """Send a signal, and another one while the first unwinds."""
    try:
        send(first)
    finally:
        send(second)
        steps.append("unwound")


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_unwinds_and_the_next_is_ignored(second: int) -> None:
    steps: list[str] = []
    with pytest.raises(KeyboardInterrupt), one_signal_at_a_time():
        send_twice(signal.SIGINT, second, steps)
    assert steps == ["unwound"]
    with pytest.raises(KeyboardInterrupt):  # as before
        send(signal.SIGINT)


def test_after_a_while_signals_count_again() -> None:
    with pytest.raises(Terminated), one_signal_at_a_time(patience=0.0):
        send_twice(signal.SIGINT, signal.SIGTERM, [])


def test_handlers_of_others_are_left_alone() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    with one_signal_at_a_time():
        send(signal.SIGINT)
        send(signal.SIGINT)
    assert seen == [2, 2]


def test_other_threads_touch_no_handler() -> None:
    found: list[Any] = []

    def look() -> None:
        with one_signal_at_a_time(), undisturbed():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_signal_is_held_back_until_the_block_ends() -> None:
    steps = []

    def go_on() -> None:
        with undisturbed():
            send(signal.SIGTERM)
            steps.append("went on")
        steps.append("never")

    with pytest.raises(Terminated):
        go_on()
    assert steps == ["went on"]


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with undisturbed():
        send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN


class Interrupting(MemoryBlocks):
    """Gets a Ctrl-C at every write and flush."""

    armed = False

    def write(self, lba: int, data: Any) -> None:
        super().write(lba, data)
        self.strike()

    def flush(self) -> None:
        super().flush()
        self.strike()

    def strike(self) -> None:
        if self.armed:
            send(signal.SIGINT)


def test_ctrl_c_does_not_break_a_commit() -> None:
    blocks = Interrupting(64)
    volume = Volume.create(blocks)
    for round_ in range(3):
        blocks.armed = True
        volume.catalog.attributes["round"] = str(round_)
        with pytest.raises(KeyboardInterrupt):
            volume.commit()
        blocks.armed = False
        assert volume.generation == 2 + round_
        assert Volume.open(blocks).catalog.attributes == {"round": str(round_)}
