"""Compile, or load from the cache, every kernel that a run needs, before its clocks start.

Compiling holds a few hundred MiB for a while: inside a run that would count against the user's
budget, and inside the first stage's time.
"""

from typing import Any

import numba
import numpy as np

from hyades.gpu_side import issue, log, merge, outputs, scheduler
from hyades.gpu_side import words as W


def _compile(function: Any, *arguments: Any) -> None:
    function.compile(tuple(numba.typeof(a) for a in arguments))


def compile_kernels() -> None:
    """Compile the entries of the scheduler, the log and the merge."""
    words = np.zeros(W.CONTROL, np.int64)
    floats, shorts = np.zeros(1, np.float32), np.zeros(1, np.uint16)
    ints, crcs = np.zeros(1, np.int32), np.zeros(1, np.uint32)
    g = w = s = ready = ring = control = words
    _compile(
        scheduler.advance, 0, g, w, s, floats, shorts, ints, floats, ready, crcs, ring, control,
        np.float32(0),
    )  # fmt: skip
    _compile(scheduler.landed, g, w, s, 0)
    _compile(outputs.hold_output, g, w)
    _compile(outputs.take_credit, w)
    _compile(outputs.finalised, g, w, s, ready, ring, control, 0, 0)
    _compile(outputs.post_output, g, w, s, ready, ring, control, 0, 0)
    _compile(issue.issue, g, w, s, ready, crcs, ring, control)
    _compile(log.finish, g, w, s, ready, ring, control)
    merge.compile_kernels(_compile, words, floats, ints)
