"""What makes two runs the same: model, options and plan, as one hash."""

import hashlib
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from torch import Tensor

from hyades.gpu_side.featureview import FeatureView
from hyades.gpu_side.plan import RunPlan
from hyades.gpu_side.topology import Windows


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        digest.update(str((tuple(value.shape), str(value.dtype))).encode())
        digest.update(np.ascontiguousarray(value.detach().numpy()).tobytes())
    elif is_dataclass(value):
        digest.update(type(value).__name__.encode())
        for entry in fields(value):
            digest.update(entry.name.encode())
            _feed(digest, getattr(value, entry.name))
    elif isinstance(value, (tuple, list)):
        digest.update(f"[{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif isinstance(value, dict):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    else:
        digest.update(repr(value).encode())


def fingerprint_run(
    plan: RunPlan, seed: int, fanouts: tuple[int, ...], view: FeatureView | None = None
) -> str:
    """Return a hex digest of everything that the bits of a run depend on, except the volume."""
    digest = hashlib.sha256(b"hyades-run-1")
    _feed(digest, (seed if any(fanouts) else 0, fanouts))
    if view is not None and view.rounds:
        _feed(digest, (view.encoding, view.columns is not None))
    for stage in plan.stages:
        _feed(digest, stage.stage)
        chosen = stage.chosen
        windows: Windows | None = chosen.windows
        placed = windows.length if windows else 0
        # Passes and resident give the same bits: a lane takes its pieces in the same order.
        _feed(
            digest,
            (chosen.project_first, placed, stage.output_itemsize, chosen.state_slots * placed),
        )
    return digest.hexdigest()
