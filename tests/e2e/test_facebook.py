"""Trained checkpoints of a public graph, refreshed from a volume, against PyG's stored outputs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.reference.engine import refresh, same_bits
from torch import nn

from hyades.common.errors import UsageError
from hyades.deploy.api import explain
from hyades.gpu_side import price as planner

NAMES = ("gcn", "graphsage", "gin", "gat")
PLANS: dict[str, dict[str, Any]] = {
    "ample": {"memory": "512MiB"},
    "resident": {"plan": "resident"},
    "3 passes": {"plan": "passes:3"},
    "22 passes": {"plan": "passes:22"},
    "log 1": {"plan": "log:1"},
    "log 5": {"plan": "log:5"},
}
Volumes = Callable[[str], Path]
Models = Callable[[str], tuple[nn.Module, Any]]


def check(name: str, got: Any, expected: Any) -> None:
    difference = got.astype(np.float64) - expected
    assert np.abs(difference).max() <= 1e-4
    relative = np.linalg.norm(difference) / np.linalg.norm(expected)
    assert relative <= (1e-5 if name == "gat" else 1e-6)


def least_memory(volume: Path, module: nn.Module, threads: int) -> str:
    """Return the budget that the planner names when it is given too little."""
    with pytest.raises(UsageError) as caught:
        explain(volume, module, memory="1MiB", threads=threads)
    found = re.search(r"--memory (\d+MiB)", str(caught.value))
    assert found is not None
    return found[1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_for_one_to_three_threads(
    facebook_volume: Volumes, facebook_model: Models, name: str, plan: str
) -> None:
    """Within the bounds of the reference, and the same bits for every number of threads."""
    module, expected = facebook_model(name)
    results = [
        refresh(facebook_volume("none"), module, threads=threads, **PLANS[plan])
        for threads in (1, 2, 3)
    ]
    check(name, results[0][0], expected)
    for rows, report in results[1:]:
        assert [s.plan for s in report.stages] == [s.plan for s in results[0][1].stages]
        assert same_bits(rows, results[0][0])


@pytest.mark.parametrize("reorder", ["rcm", "hyades"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plan", ["ample", "3 passes", "log 1"])
def test_reordered(
    facebook_volume: Volumes, facebook_model: Models, name: str, plan: str, reorder: str
) -> None:
    module, expected = facebook_model(name)
    rows, _ = refresh(facebook_volume(reorder), module, threads=2, **PLANS[plan])
    check(name, rows, expected)


@pytest.mark.parametrize("name", NAMES)
def test_passes_have_the_bits_of_one_pass(
    facebook_volume: Volumes, facebook_model: Models, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane takes its pieces in the same order whether its group is scanned alone or not."""
    monkeypatch.setattr(planner, "product_orders", lambda stage: (True,))  # passes choose the other
    module, _ = facebook_model(name)
    one, several = (
        refresh(facebook_volume("none"), module, plan=plan)[0] for plan in ("resident", "passes:4")
    )
    assert same_bits(one, several)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("threads", [1, 3])
def test_the_least_memory_that_is_named_does(
    facebook_volume: Volumes, facebook_model: Models, name: str, threads: int
) -> None:
    module, expected = facebook_model(name)
    memory = least_memory(facebook_volume("none"), module, threads)
    rows, report = refresh(facebook_volume("none"), module, threads=threads, memory=memory)
    check(name, rows, expected)
    assert report.stages[0].passes > 1, "the states of the first layer do not fit"
