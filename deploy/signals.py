"""Signals that end a command: the first unwinds it, those that follow at once are not needed.

Unwinding stops the workers, the proxy and the devices, in this order, and forgets what was not
committed.  A second Ctrl-C in the middle of that would leave threads behind that still write.
"""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

PATIENCE = 5.0  # seconds after which a further signal counts again: unwinding may hang, too


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated as Ctrl-C."""


def terminate(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001 - a handler's form
    """Raise Terminated; the command line's handler of SIGTERM."""
    raise Terminated


@contextmanager
def one_signal_at_a_time(patience: float = PATIENCE) -> Iterator[None]:
    """Ignore Ctrl-C and SIGTERM for *patience* seconds after one of them was raised.

    Handlers of others are left alone, and so is everything outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    raised = -patience

    def guard(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        now = time.monotonic()
        if now - raised >= patience:
            raised = now
            before[signal.Signals(number)](number, frame)

    known = (signal.default_int_handler, terminate)
    before: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler) and handler in known:
            before[number] = handler
    try:
        for number in before:
            signal.signal(number, guard)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
