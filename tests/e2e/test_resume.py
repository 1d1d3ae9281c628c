"""A run that is cut off anywhere and continued has the bits of one that was not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.reference.engine import make_volume, rows_of, same_bits
from tests.reference.gnn import randomised
from tests.reference.zoo import make

import hyades
from hyades.common.errors import UsageError

VERTICES, WIDTH = 12_000, 24
# Moments over all rows, hidden rows with several readers, scores, sampled weights, maxima.
MODELS: dict[str, tuple[str, dict[str, Any], list[int] | None]] = {
    "norms and jumps": ("GCN", {"norm": "layer_norm", "jk": "cat", "num_layers": 3}, None),
    "attention": ("GAT", {"heads": 4, "num_layers": 3, "norm": "layer_norm"}, None),
    "sampled weights": ("GCN", {"num_layers": 3}, [3, -1, 2]),
    "maxima": ("GraphSAGE", {"aggr": "max", "jk": "max", "num_layers": 3}, None),
}
PLANS = ("resident", "passes:5", "log:3")


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    source = rng.integers(0, VERTICES, 60_000)
    target = (source + rng.integers(-900, 900, len(source))) % VERTICES
    x = rng.standard_normal((VERTICES, WIDTH), np.float32)
    weights = rng.random(len(source), np.float32)
    path = tmp_path_factory.mktemp("resume") / "g.vol"
    edges = np.stack([source, target])
    return make_volume(path, edges, x, weights, range_rows=256, reorder="rcm")


class Cut(Exception):  # noqa: N818 - it is what a user's interrupt would be
    """Stops a run from its progress callback."""


def cut_at(call: int) -> Callable[..., None]:
    """Return a progress callback that stops the run at its call number *call*."""
    calls = 0

    def progress(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise Cut

    return progress


def least_memory(volume: Path, module: Any, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        rows_of(volume, module, memory="1MiB", **options)
    return str(caught.value).partition("--memory ")[2].partition(" ")[0]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", PLANS)
def test_cut_and_continued(volume: Path, name: str, plan: str) -> None:
    """With the least memory, so that hidden rows are on the volume, or in part."""
    cls, kwargs, fanout = MODELS[name]
    module = randomised(make(cls, kwargs, WIDTH))
    options: dict[str, Any] = {"plan": plan, "fanout": fanout, "threads": 2}
    options["memory"] = least_memory(volume, module, **options)
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    expected = rows_of(volume, module, progress=count, **options)
    # How often it calls depends on the machine: early enough to come.
    cuts = np.random.default_rng(len(name)).integers(1, max(2, 2 * calls // 3), 3)
    with hyades.open(volume, writable=True) as handle:
        given = {**options, "out": "cut", "checkpoint_seconds": 0.0}
        resume = False
        for cut in (*cuts.tolist(), 0):
            again = {"resume": True} if resume else {"force": True}
            try:
                hyades.refresh(handle, module, progress=cut_at(cut), **again, **given)
            except Cut:
                resume = True
                continue
            break
        assert resume, "it was cut off"
        assert same_bits(handle.read("cut"), expected)
        assert list(handle.volume.verify(["output/cut"])) == []
        assert not any(key.startswith("running/") for key in handle.catalog.objects)
