"""Volumes from arrays and refreshes over them, for end-to-end tests."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import hyades
from hyades.deploy.ingest import ingest
from hyades.deploy.report.model import Report
from hyades.gpu_side.devices.cpu import single_threaded_torch

MEMORY = "512MiB"  # ample for every graph of the tests


def make_volume(
    path: Path, edges: Any, features: Any, weights: Any = None, *, range_rows: int = 16,
    **options: Any,
) -> Path:  # fmt: skip
    """Ingest edges [2, E] and features [V, F] (arrays or tensors) with small ranges."""
    ingest(
        path, edges=np.asarray(edges), features=np.asarray(features),
        weights=None if weights is None else np.asarray(weights), range_rows=range_rows,
        edge_layout="source-target", **options,
    )  # fmt: skip
    return path


def refresh(volume: Path, model: Any, **options: Any) -> tuple[NDArray[Any], Report]:
    """Refresh; return the rows [V, D] in original order and the report."""
    given = {"memory": MEMORY, "threads": 2, "force": True, **options}
    with hyades.open(volume, writable=True) as handle:
        result = hyades.refresh(handle, model, out="test", **given)
        rows = handle.read("test")
    check_report(result.report)
    return rows, result.report


def rows_of(volume: Path, model: Any, **options: Any) -> NDArray[Any]:
    """Refresh; return the rows [V, D] in original order."""
    return refresh(volume, model, **options)[0]


def check_report(report: Report) -> None:
    """Assert that every stage moved exactly the bytes that the planner predicted."""
    for stage in report.stages:
        predicted = (stage.predicted_read, stage.predicted_written)
        assert (stage.bytes_read, stage.bytes_written) == predicted, stage


def full_batch(
    module: nn.Module, features: Any, edges: Any, weights: Any = None, *,
    dtype: torch.dtype = torch.float64,
) -> NDArray[Any]:  # fmt: skip
    """Return what PyG computes over the whole graph at once; *module* is left in float32."""
    x = torch.as_tensor(np.asarray(features)).to(dtype)
    extra: tuple[Tensor, ...] = ()
    if weights is not None:
        extra = (torch.as_tensor(np.asarray(weights)).to(dtype),)
    index = torch.as_tensor(np.ascontiguousarray(edges), dtype=torch.int64)
    try:
        # Of several loops at a vertex PyG keeps the last; with more threads, any.
        with single_threaded_torch(), torch.no_grad():
            result: NDArray[Any] = module.to(dtype)(x, index, *extra).numpy()
    finally:
        module.float()
    return result


def error(got: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the relative Frobenius difference (absolute below a norm of 1)."""
    assert got.shape == expected.shape
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    got, expected = np.nan_to_num(got.astype(np.float64)), np.nan_to_num(expected)
    return float(np.linalg.norm(got - expected)) / max(float(np.linalg.norm(expected)), 1.0)


def same_bits(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Say whether two arrays are equal bit by bit."""
    return left.dtype == right.dtype and left.tobytes() == right.tobytes()
