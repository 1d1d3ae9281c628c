"""Refreshes that read a view of the features instead of the stored rows.

The view's blocks are computed by the target's stage and lie in memory here: no wire is between.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.reference.runs import WIDTH, pyg, refresh_rows, same_bits, three_layers, write_volume

import hyades
from hyades.common.errors import DataError, UsageError
from hyades.common.viewspec import SampleSpec, ViewHead, parse_head
from hyades.deploy import api, assemble
from hyades.gpu_side import price
from hyades.gpu_side.featureview import FeatureView, ViewChoice, resolve_view
from hyades.proxy.transport import Transport
from hyades.proxy.transports.mem import MemoryStore, MemTransport
from hyades.target_side.stage.options import StageOptions
from hyades.target_side.stage.viewpages import open_volume_view

PAGE = 64 << 10  # of the views: several pages of most ranges' size
BLOCKS = 4096


class MemoryViews:
    """Opens views as devices in memory; `device` is the port's second one."""

    device = 1

    def __init__(self, path: Path, transport: MemTransport) -> None:
        self.path, self.transport = path, transport
        self.heads: list[ViewHead] = []

    def open(self, view: FeatureView, seed: int, lanes: tuple[int, int]) -> ViewHead:
        sample = None
        if view.sampled:
            sample = SampleSpec(view.fanout, seed, view.layer, (lanes,), view.own)
        weights = [np.ascontiguousarray(weight.numpy()) for weight in view.weights]
        options = StageOptions(memory=256 << 20)
        with hyades.open(self.path) as handle:
            pages = open_volume_view(
                handle.volume, view.source, encoding=view.encoding, sample=sample, weights=weights,
                page_size=view.page_size, options=options,
            )  # fmt: skip
            try:
                data = np.frombuffer(pages.read(0, pages.nblocks), np.uint8)
            finally:
                pages.close()
        self.transport.store.data[: len(data)] = data  # nothing is in flight
        head = parse_head(data.tobytes())
        self.heads.append(head)
        return head


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a weighted graph with self loops, in chunks of 128."""
    return write_volume(tmp_path_factory.mktemp("views") / "graph.vol")


Run = Callable[..., tuple[NDArray[Any], api.RefreshResult, MemoryViews]]


@pytest.fixture
def run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that refreshes a model through a view of choice."""

    def go(
        model: torch.nn.Module, choice: ViewChoice, **options: Any
    ) -> tuple[NDArray[Any], api.RefreshResult, MemoryViews]:
        device = MemTransport(MemoryStore(BLOCKS))
        views = MemoryViews(path, device)
        inner_request, inner_run, inner_open = api.PlanRequest, api.Refresh, assemble.open_devices

        def request(*args: Any) -> Any:
            made = inner_request(*args)
            fanout = made.fanouts[0]
            view = resolve_view(choice, made.stages[0], made.features, fanout, PAGE)
            return replace(made, view=view)

        def opened(*urls: str) -> list[Transport]:
            devices: list[Transport] = [*inner_open(*urls), device]
            return devices

        copy = tmp_path / "copy.vol"
        copy.write_bytes(path.read_bytes())
        with monkeypatch.context() as patch:
            patch.setattr(api, "PlanRequest", request)
            patch.setattr(api, "Refresh", partial(inner_run, views=views))
            patch.setattr(assemble, "open_devices", opened)
            patch.setattr(assemble, "traffic_by_volume", lambda *_: [])
            with hyades.open(copy, writable=True) as handle:
                rows, result = refresh_rows(handle, model, "x", **options)
        assert views.heads
        return rows, result, views

    return go


def plain(
    path: Path, tmp_path: Path, model: torch.nn.Module, project: bool = False, **options: Any
) -> NDArray[Any]:
    """Return the rows without a view; with *project* the first layer multiplies as it lands."""
    copy = tmp_path / "plain.vol"
    copy.write_bytes(path.read_bytes())
    inner = price.product_orders
    with pytest.MonkeyPatch.context() as patch, hyades.open(copy, writable=True) as handle:
        if project:
            orders = lambda stage: (True,) if stage.index == 0 else inner(stage)  # noqa: E731
            patch.setattr(price, "product_orders", orders)
        return refresh_rows(handle, model, "x", **options)[0]


def rootless() -> torch.nn.Module:
    torch.manual_seed(5)
    return pyg.GraphSAGE(WIDTH, 32, 2, 16, root_weight=False).eval()


@pytest.mark.parametrize("kind", ["gcn", "sage", "gat", "gin"])
@pytest.mark.parametrize("project", [False, True])
def test_float32_views_change_no_bit(
    path: Path, tmp_path: Path, run: Run, kind: str, project: bool
) -> None:
    torch.manual_seed(6)
    model = pyg.GIN(WIDTH, 16, 2).eval() if kind == "gin" else three_layers(kind)
    rows, result, views = run(model, ViewChoice(project=project, encoding="float32"))
    assert same_bits(rows, plain(path, tmp_path, model, project))
    assert len(views.heads) == 1
    assert result.report.stages[0].bytes_read == result.report.stages[0].predicted_read


@pytest.mark.parametrize("plan", ["resident", "passes:4"])
@pytest.mark.parametrize("project", [False, True])
@pytest.mark.parametrize("kind", ["sage", "rootless", "gcn"])
def test_sampled_views_change_no_bit(
    path: Path, tmp_path: Path, run: Run, kind: str, project: bool, plan: str
) -> None:
    model = rootless() if kind == "rootless" else three_layers(kind)
    layers = 2 if kind == "rootless" else 3
    options = {"fanout": [2] * layers, "seed": 9, "plan": plan}
    rows, _, views = run(model, ViewChoice(sample=True, project=project), **options)
    assert same_bits(rows, plain(path, tmp_path, model, project, **options))
    assert len(views.heads) == (1 if plan == "resident" else 4)
    sent = [int(head.counts.sum()) for head in views.heads]
    if kind == "rootless" or plan != "resident":
        assert max(sent) < views.heads[0].spec.rows


@pytest.mark.parametrize(
    ("encoding", "most"), [("float16", 2e-3), ("bfloat16", 1e-2), ("int8", 2e-2)]
)
@pytest.mark.parametrize("project", [False, True])
def test_rounded_views_are_close(
    path: Path, tmp_path: Path, run: Run, encoding: Any, most: float, project: bool
) -> None:
    model = three_layers("sage")
    rows, _, _ = run(model, ViewChoice(project=project, encoding=encoding))
    exact = plain(path, tmp_path, model)
    error = float(np.linalg.norm(rows - exact) / np.linalg.norm(exact))
    assert 0 < error < most


def test_a_view_that_is_damaged_is_no_result(
    path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = MemoryViews.open

    def damaged(self: MemoryViews, view: FeatureView, seed: int, lanes: Any) -> ViewHead:
        head = inner(self, view, seed, lanes)
        self.transport.store.data[head.page_lba(3) * 4096 + 100] ^= 1
        return head

    monkeypatch.setattr(MemoryViews, "open", damaged)
    with pytest.raises(DataError, match="a view of the features, LBA"):
        run(three_layers("gcn"), ViewChoice(encoding="float16"))


def test_what_cannot_be_is_refused_with_a_reason(path: Path, run: Run) -> None:
    with pytest.raises(UsageError, match="no fanout"):
        run(three_layers("gcn"), ViewChoice(sample=True))
    with pytest.raises(UsageError, match="attention needs every row"):
        run(three_layers("gat"), ViewChoice(sample=True), fanout=[2, 2, 2])
    with pytest.raises(UsageError, match="max does not commute"):
        run(pyg.GraphSAGE(WIDTH, 16, 2, aggr="max").eval(), ViewChoice(project=True))
