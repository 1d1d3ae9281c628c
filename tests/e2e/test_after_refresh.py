"""What a refresh leaves in the volume: sound pages, the outputs asked for, and nothing else."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.reference.engine import error, full_batch, make_volume, refresh, same_bits
from tests.reference.gnn import messy_graph, randomised
from tests.reference.zoo import make

import hyades
from hyades.common.errors import UsageError
from hyades.deploy.ingest import ingest

VERTICES, EDGES = messy_graph(300, 2000)
PLANS = ("resident", "passes:3", "log:1")
# Hidden rows, logs and moments all go through the volume where memory is short.
DEEP = {"num_layers": 3, "norm": "layer_norm", "jk": "cat"}


def features(width: int = 5) -> Any:
    return np.random.default_rng(width).standard_normal((VERTICES, width)).astype(np.float32)


@pytest.fixture
def volume(tmp_path: Path) -> Path:
    return make_volume(tmp_path / "g.vol", EDGES, features(), reorder="rcm")


def objects(path: Path) -> set[str]:
    with hyades.open(path) as handle:
        return set(handle.catalog.objects)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("memory", ["512MiB", "least"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_every_page_is_sound(volume: Path, plan: str, memory: str, dtype: str) -> None:
    """Checksums of outputs were made on the way out; reading all of them back agrees."""
    before = objects(volume)
    module = randomised(make("GraphSAGE", DEEP))
    given: dict[str, Any] = {"plan": plan, "dtype": dtype, "memory": memory}
    if memory == "least":
        with pytest.raises(UsageError) as caught:
            refresh(volume, module, **{**given, "memory": "1MiB"})
        given["memory"] = str(caught.value).partition("--memory ")[2].partition(" ")[0]
    rows, _ = refresh(volume, module, **given)
    assert rows.dtype == dtype
    with hyades.open(volume) as handle:
        assert list(handle.volume.verify()) == []
        assert set(handle.catalog.objects) == before | {"output/test"}
        assert handle.catalog.runs["test"].state == "done"
        assert same_bits(handle.read("test"), rows)
        chosen = [4, 299, 4, 0]
        assert same_bits(handle.read("test", chosen), rows[chosen])
        assert same_bits(handle.read("test", slice(7, 90, 3)), rows[7:90:3])


def test_outputs_live_side_by_side(volume: Path) -> None:
    gcn, gat = (randomised(make(cls, {})) for cls in ("GCN", "GAT"))
    with hyades.open(volume, writable=True) as handle:
        hyades.refresh(handle, gcn, out="gcn", plan="log:1")
        hyades.refresh(handle, gat, out="gat", plan="passes:2")
        hyades.refresh(handle, gcn, out="gcn again")
        with pytest.raises(UsageError, match="--force"):
            hyades.refresh(handle, gcn, out="gcn")
        first, gat_rows = handle.read("gcn"), handle.read("gat")
        hyades.refresh(handle, gat, out="gcn again", force=True)
        assert same_bits(handle.read("gcn"), first)
        assert error(handle.read("gcn again"), gat_rows.astype(np.float64)) <= 2e-6
        assert list(handle.volume.verify()) == []
    assert error(first, full_batch(gcn, features(), EDGES)) <= 2e-6


def test_space_is_used_again(volume: Path) -> None:
    """While it runs a log may stand at the end of the file, but runs do not pile up."""
    module = randomised(make("GraphSAGE", DEEP))
    sizes: list[int] = []

    def turn(plan: str) -> int:
        sizes.clear()
        refresh(volume, module, plan=plan, progress=lambda *_: sizes.append(volume.stat().st_size))
        return max(*sizes, volume.stat().st_size)

    first = max(turn(plan) for plan in PLANS)
    assert max(turn(plan) for plan in PLANS * 3) <= 1.05 * first


def test_a_path_is_opened_and_closed(volume: Path) -> None:
    module = randomised(make("GCN", {}))
    result = hyades.refresh(volume, module, out="a", threads=2)
    assert result.out == "a"
    with hyades.open(volume) as reader:
        hyades.refresh(reader, module, out="reader's")
        assert same_bits(reader.read("reader's"), reader.read("a"))
    with hyades.open(volume, writable=True), pytest.raises(UsageError):
        hyades.refresh(volume, module, out="b")
    hyades.refresh(str(volume), module, out="b")
    assert {"output/a", "output/b"} <= objects(volume)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"out": "a/b"}, "slashes"), ({"out": ""}, "slashes"),
        ({"threads": 0}, "threads"), ({"dtype": "int8"}, "float32 or float16"),
        ({"plan": "pass"}, "--plan"), ({"memory": "1KiB"}, "at least --memory"),
        ({"resume": True}, "resume"), ({"seed": -1}, "--seed"),
    ],
    ids=str,
)  # fmt: skip
def test_refusals_change_nothing(volume: Path, options: dict[str, Any], text: str) -> None:
    before = volume.read_bytes()
    with pytest.raises(UsageError, match=text):
        hyades.refresh(volume, make("GCN", {}), **{"out": "x", **options})
    assert volume.read_bytes() == before


def test_a_volume_without_features_or_graph(tmp_path: Path) -> None:
    path = tmp_path / "topology.vol"
    ingest(path, edges=EDGES.numpy(), edge_layout="source-target")
    with pytest.raises(UsageError, match="no features"):
        hyades.refresh(path, make("GCN", {}), out="x")
