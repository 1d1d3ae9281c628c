"""Small volumes and models for tests that run a whole refresh in this process."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import hyades
from hyades.common.errors import UsageError
from hyades.deploy import assemble
from hyades.deploy.api import RefreshResult, VolumeHandle, explain
from hyades.deploy.ingest import ingest
from hyades.proxy.transport import Transport
from hyades.proxy.transports.faulty import FaultPlan, FaultyTransport

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")

Place = TypeVar("Place", Path, str)  # a file or a URL
VERTICES, EDGES, WIDTH, RANGE = 6000, 40_000, 24, 128


def write_volume(
    path: Place, *, vertices: int = VERTICES, edges: int = EDGES, dtype: Any = np.float32,
    **options: Any,
) -> Place:  # fmt: skip
    """Ingest a weighted graph with locality, self loops and duplicates, in chunks of RANGE."""
    random = np.random.default_rng(0)
    source = random.integers(0, vertices, edges)
    target = np.clip(source + random.normal(0, vertices / 8, edges).astype(int), 0, vertices - 1)
    features = random.normal(size=(vertices, WIDTH)).astype(dtype)
    weights = random.random(edges).astype(np.float32)
    pairs = np.stack([source, target])
    ingest(path, edges=pairs, features=features, weights=weights, range_rows=RANGE, **options)
    return path


def three_layers(kind: str, width: int = WIDTH) -> torch.nn.Module:
    """Return a model in evaluation mode with fixed weights; "norm" has a global LayerNorm."""
    torch.manual_seed(3)
    if kind == "gat":
        return pyg.GAT(width, 16, 3, 8, heads=2).eval()
    if kind == "sage":
        return pyg.GraphSAGE(width, 32, 3, 16).eval()
    norm = pyg.LayerNorm(32, mode="graph") if kind == "norm" else None
    jump = "cat" if kind == "norm" else None
    return pyg.GCN(width, 32, 3, 16, norm=norm, jk=jump).eval()


def bits(rows: NDArray[Any]) -> NDArray[Any]:
    """Return rows as integers, so that equality is about bits."""
    return rows.view(np.uint32 if rows.dtype == np.float32 else np.uint16)


def same_bits(left: NDArray[Any], right: NDArray[Any]) -> bool:
    """Say whether two matrices have the same shape, type and bits."""
    return left.dtype == right.dtype and np.array_equal(bits(left), bits(right))


def refresh_rows(
    volume: VolumeHandle, model: torch.nn.Module, out: str, **options: Any
) -> tuple[NDArray[Any], RefreshResult]:
    """Refresh and return the rows and the result."""
    result = hyades.refresh(volume, model, out=out, **{"threads": 2, **options})
    return volume.read(out), result


def own_threads() -> list[str]:
    """Return the names of threads of Hyades that still run, after giving them a moment."""
    deadline = time.monotonic() + 2
    while True:
        names = [t.name for t in threading.enumerate() if t.name.startswith("hyades")]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.01)


class Faults:
    """Wraps the devices that a refresh opens into faulty ones; `plan` makes their FaultPlan."""

    def __init__(self, plan: Callable[[], FaultPlan]) -> None:
        self.plan = plan
        self.devices: list[FaultyTransport] = []

    def injected(self, kind: str) -> int:
        """Return how often a kind of fault was injected."""
        return sum(d.stats()["injected"][kind] for d in self.devices)


@contextmanager
def faulty_devices(plan: Callable[[], FaultPlan]) -> Iterator[Faults]:
    """Let refreshes inside the block work on faulty devices."""
    faults = Faults(plan)
    inner = assemble.open_devices

    def opened(*urls: str) -> list[Transport]:
        devices = [FaultyTransport(device, faults.plan()) for device in inner(*urls)]
        faults.devices += devices
        return list(devices)

    assemble.open_devices = opened
    try:
        yield faults
    finally:
        assemble.open_devices = inner


def least_memory(volume: VolumeHandle, model: torch.nn.Module, **options: Any) -> int:
    """Return the smallest budget in bytes that has a plan, to 16 KiB: hidden rows get no place."""
    step, low, high = 16 << 10, 0, 1 << 14
    while high - low > 1:
        middle = (low + high) // 2
        try:
            explain(volume, model, memory=middle * step, **{"threads": 2, **options})
            high = middle
        except UsageError:
            low = middle
    return high * step
