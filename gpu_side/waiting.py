"""How a worker waits: a little longer each round, and never past a stop."""

from typing import Any

from hyades.common import ring
from hyades.common.atomics import doze, give_way, ld_acquire, ld_acquire_sys, pause
from hyades.common.jit import jit
from hyades.gpu_side import words as W

_SPINS = 64


@jit
def back_off(idle: Any) -> None:
    """Wait a moment, longer the more rounds in a row were idle."""
    if idle < _SPINS:
        pause(50)
    elif idle < 2 * _SPINS:
        give_way(500)
    else:
        doze(50_000)


@jit
def stopped(w: Any, control: Any) -> Any:
    """Say whether every loop must leave."""
    return (
        ld_acquire(w, W.C_ERROR) != 0
        or ld_acquire_sys(control, ring.STOP) != 0
        or ld_acquire_sys(control, ring.FAILED) != 0
    )
