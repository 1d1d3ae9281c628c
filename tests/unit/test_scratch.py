"""Scratch: blocks do not overlap, results have the same bits, and the planned size is enough."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.reference.runs import WIDTH, pyg, write_volume
from torch import Tensor

import hyades
from hyades.gpu_side.models.ir import (
    Activation,
    Affine,
    GraphLayerNorm,
    LayerNorm,
    Linear,
    MeanHeads,
    Normalize,
    RowOp,
)
from hyades.gpu_side.rowops import Moments, apply_row_op, apply_row_ops
from hyades.gpu_side.scratch import Scratch, scratch, scratch_of

ROWS, COLUMNS = 37, 24


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


OPS: list[RowOp] = [
    Linear(numbers(10, COLUMNS), numbers(10)), Linear(numbers(10, COLUMNS)),
    Affine(numbers(COLUMNS), numbers(COLUMNS)), Affine(numbers(COLUMNS), None),
    Affine(None, numbers(COLUMNS)), Affine(None, None), LayerNorm(numbers(COLUMNS), None, 1e-5),
    GraphLayerNorm(numbers(COLUMNS), numbers(COLUMNS), 1e-5), GraphLayerNorm(None, None, 1e-5),
    Normalize(), MeanHeads(4), Activation("prelu", {}, torch.tensor([0.2])),
    *[Activation(name) for name in ("relu", "elu", "tanh", "sigmoid", "gelu", "silu", "mish")],
    Activation("leaky_relu", {"negative_slope": 0.3}), Activation("gelu", {"approximate": "tanh"}),
]  # fmt: skip


def test_blocks_do_not_overlap_and_are_used_again() -> None:
    room = Scratch(4 * 100)
    first, second = room.take(3, 10), room.take(2, 7)
    first.fill_(1)
    second.fill_(2)
    assert float(first.sum()) == 30
    assert room.take(10, 10).shape == (10, 10)  # no room: from malloc
    room.clear()
    again = room.take(3, 10)
    assert again.data_ptr() == first.data_ptr()


def test_threads_without_scratch_use_malloc() -> None:
    with scratch_of(1 << 12):
        inner = scratch()
        assert inner.take(4, 4).data_ptr() != inner.take(4, 4).data_ptr()
    assert scratch() is not inner
    one, two = scratch().take(2, 2), scratch().take(2, 2)
    assert one.data_ptr() != two.data_ptr()


@pytest.mark.parametrize("op", OPS, ids=repr)
def test_an_operation_has_the_same_bits_wherever_its_result_lies(op: RowOp) -> None:
    moments = Moments(0.3, 1.7)
    x = numbers(ROWS, COLUMNS)
    wide = numbers(ROWS, 2 * COLUMNS)
    wide[:, :COLUMNS] = x
    expected = apply_row_op(op, x.clone(), moments).clone()
    with scratch_of(1 << 16):
        kept = x.clone()
        assert torch.equal(apply_row_op(op, kept, moments), expected)
        assert torch.equal(kept, x)  # not ours to overwrite
        assert torch.equal(apply_row_op(op, x.clone(), moments, owned=True), expected)
        slice_ = apply_row_op(op, wide[:, :COLUMNS], moments, owned=True)
        assert torch.allclose(slice_, expected, rtol=1e-5, atol=1e-6)  # other vector paths
    assert torch.equal(wide[:, COLUMNS:], numbers(ROWS, 2 * COLUMNS)[:, COLUMNS:])


def test_a_chain_does_not_touch_what_it_was_given() -> None:
    x = numbers(ROWS, COLUMNS)
    ops = (Affine(None, None), Activation("relu"), Affine(numbers(COLUMNS), None), Normalize())
    with scratch_of(1 << 16):
        kept = x.clone()
        y = apply_row_ops(ops, kept)
        assert torch.equal(kept, x)
    assert not torch.equal(y, x)


MODELS: dict[str, Any] = {
    "gcn": lambda: pyg.GCN(WIDTH, 48, 3, 8, norm="batch_norm"),
    "sage": lambda: pyg.GraphSAGE(WIDTH, 48, 2, 8, project=True, normalize=True),
    "max": lambda: pyg.GraphSAGE(WIDTH, 48, 2, 8, aggr="max", norm="layer_norm", act="gelu"),
    "gin": lambda: pyg.GIN(WIDTH, 48, 3, 8, norm="batch_norm", act="elu", jk="max"),
    "gat": lambda: pyg.GAT(WIDTH, 48, 2, 17, heads=3, residual=True, act_first=True),
    "norm": lambda: pyg.GCN(WIDTH, 31, 3, 8, norm=pyg.LayerNorm(31, mode="graph"), jk="cat"),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("plan", ["resident", "passes:3", "log:12"])
def test_the_planned_scratch_suffices(
    volume: Path, name: str, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing: list[tuple[int, int]] = []
    taken: list[int] = []
    take = Scratch.take

    def watched(self: Scratch, rows: int, columns: int) -> Tensor:
        block = take(self, rows, columns)
        begin = self._data.data_ptr()
        inside = begin <= block.data_ptr() < begin + 4 * len(self._data)
        if inside:
            taken.append(rows * columns)
        elif rows * columns and len(self._data):
            missing.append((rows, columns))
        return block

    monkeypatch.setattr(Scratch, "take", watched)
    torch.manual_seed(0)
    hyades.refresh(
        volume, MODELS[name]().eval(), out="x", plan=plan, memory="64MiB", threads=2, force=True
    )
    assert missing == []
    assert taken or name == "gcn"


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = write_volume(tmp_path_factory.mktemp("scratch") / "g.vol", dtype=np.float16)
    return path
