"""Holding back Ctrl-C and SIGTERM for a moment."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold signals back until the block has ended, for what must not stop half-way.

    Only handlers written in Python are held back, and only in the main thread, where they run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append((number, frame))

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):
            before[int(number)] = handler
    try:
        for number_ in before:
            signal.signal(number_, hold)
        yield
    finally:
        for number_, handler in before.items():
            signal.signal(number_, handler)
        for number_, frame in held:
            before[number_](number_, frame)
