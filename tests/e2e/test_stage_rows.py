"""The rows that a sampled view holds are all that a sampled refresh needs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.reference.engine import make_volume, rows_of, same_bits
from tests.reference.gnn import messy_graph, randomised

import hyades
from hyades.common.viewspec import SampleSpec
from hyades.target_side.stage.meter import Meter
from hyades.target_side.stage.sample import Sample
from hyades.target_side.stage.source import Source

pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")

VERTICES, _EDGES = messy_graph(90, 400, seed=6)
EDGES = _EDGES.numpy()
X = np.random.default_rng(3).standard_normal((VERTICES, 6)).astype(np.float32)
SEED = 11


def sampled_rows(path: Path, spec: SampleSpec) -> NDArray[np.int64]:
    """Return the original indices of the rows that a view of *spec* holds."""
    with hyades.open(path) as handle:
        volume = handle.volume
        sample = Sample(Source("test", volume.catalog, volume.read_page, Meter()), spec)
        graph = volume.catalog.graph
        assert graph is not None
        rows = [sample.ids(i).astype(np.int64) + i * graph.range_rows for i in range(graph.chunks)]
        order = np.arange(VERTICES)
        if "order" in volume.catalog.objects:
            order = volume.read_table("order").astype(np.int64)
    return order[np.concatenate(rows)]


@pytest.mark.parametrize(("fanout", "options"), [(1, {}), (3, {"reorder": "rcm"})], ids=str)
def test_other_rows_can_be_anything(
    tmp_path: Path, fanout: int, options: dict[str, Any]
) -> None:  # fmt: skip
    whole = make_volume(tmp_path / "whole.vol", EDGES, X, **options)
    held = sampled_rows(whole, SampleSpec(fanout, SEED, 0, ((0, 6),), "loops"))
    assert len(held) < VERTICES
    holed = np.full_like(X, np.nan)
    holed[held] = X[held]
    part = make_volume(tmp_path / "part.vol", EDGES, holed, allow_nonfinite=True, **options)
    module = randomised(pyg.SAGEConv(6, 5, aggr="mean", root_weight=False, bias=False))
    expected, found = (rows_of(path, module, fanout=[fanout], seed=SEED) for path in (whole, part))
    assert np.all(np.isfinite(expected))
    assert same_bits(found, expected)


def test_without_them_every_vertex_that_takes_from_others_differs(tmp_path: Path) -> None:
    whole = make_volume(tmp_path / "whole.vol", EDGES, X)
    held = sampled_rows(whole, SampleSpec(1, SEED, 0, ((0, 6),), "loops"))
    holed = X.copy()
    holed[held] = np.nan
    part = make_volume(tmp_path / "part.vol", EDGES, holed, allow_nonfinite=True)
    kept = rows_of(part, pyg.SAGEConv(6, 5, aggr="sum", root_weight=False), fanout=[1], seed=SEED)
    degrees = np.bincount(EDGES[1], minlength=VERTICES)
    assert np.array_equal(np.isnan(kept).any(axis=1), degrees > 0)
