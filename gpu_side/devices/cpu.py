"""The CPU device: threads that run the scheduler and do the host's work it hands out in between.

Each worker is a Python thread that is inside nogil code or inside torch nearly all the time.  torch
runs with one thread a worker, so products of several chunks go on at once and never oversubscribe.
"""

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hyades.common.interrupts import undisturbed
from hyades.common.trace import Sink, Span
from hyades.gpu_side import words as W
from hyades.gpu_side.scan import PassScan
from hyades.gpu_side.scratch import scratch_of

Pulse = Callable[[], None]


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """Let a thread that comes out of nogil code wait 0.5 ms for the GIL, not Python's 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Let torch use one thread a caller inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def give_back_free_memory() -> None:
    """Give back what malloc keeps of what the workers had; the next pass has other sizes."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


class CpuDevice:
    """Runs passes on *workers* threads."""

    name = "cpu"

    def __init__(self, workers: int, sink: Sink, scratch: int = 0) -> None:
        """Take *scratch* bytes for the intermediate results of each worker."""
        self.workers = workers
        self.scratch = scratch
        self.sink = sink

    def run(self, scan: PassScan, pulse: Pulse, stop: Callable[[], None]) -> None:
        """Run a pass to its end; *pulse* is called several times a second, *stop* on failure."""
        self.run_workers(lambda worker: self._work(scan, worker), pulse, stop)

    def run_workers(
        self, work: Callable[[int], None], pulse: Pulse, stop: Callable[[], None]
    ) -> None:
        """Run ``work(worker)`` on every worker; raise the first exception after all have ended."""
        errors: list[BaseException] = []

        def guarded(worker: int) -> None:
            try:
                with torch.inference_mode(), scratch_of(self.scratch):
                    work(worker)
            except BaseException as error:  # handed to the caller below
                errors.append(error)
                stop()

        threads = [
            threading.Thread(target=guarded, args=(n,), name=f"hyades-worker-{n}", daemon=True)
            for n in range(self.workers)
        ]
        try:
            with undisturbed():  # all of them or none
                for thread in threads:
                    thread.start()
            while any(thread.is_alive() for thread in threads):
                threads[0].join(0.05) if threads[0].is_alive() else time.sleep(0.01)
                pulse()
        except BaseException:
            stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            raise
        give_back_free_memory()
        if errors:
            raise errors[0]

    def _work(self, scan: PassScan, worker: int) -> None:
        stage, emit, clock = scan.stage.index, self.sink.emit, time.perf_counter
        while True:
            begin = clock()
            word = scan.advance(worker)
            now = clock()
            emit(Span("scan", stage, worker, begin, now))
            action, value = word >> W.ACTION_SHIFT, word & ((1 << W.ACTION_SHIFT) - 1)
            if action == W.A_LAND:
                scan.land(value)
                emit(Span("land", stage, worker, now, clock()))
            elif action == W.A_FINALISE:
                scan.finalise(value)
                emit(Span("finalise", stage, worker, now, clock()))
            else:
                return
