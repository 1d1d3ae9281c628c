"""check_graph: a model and a graph that do not fit are refused before work."""

from dataclasses import replace

import pytest
import torch

from hyades.common.catalog import GraphInfo
from hyades.common.errors import UsageError
from hyades.gpu_side.models import Model, check_graph
from hyades.gpu_side.models.ir import Affine, Attention, Conv, Linear

GRAPH = GraphInfo(vertices=4, edges=3, loops=0, range_rows=4, chunks=1)
GCN = Conv("convs.0 (GCNConv)", 5, 3, "sum", neighbour=Linear(torch.ones(3, 5)), norm="gcn")
LAST = Conv("convs.1 (GCNConv)", 3, 3, "sum", neighbour=Linear(torch.ones(3, 3)))


def test_fits() -> None:
    check_graph(Model((GCN, LAST)), GRAPH, 5)
    check_graph(Model((GCN, LAST), "cat", (Linear(torch.ones(2, 6)),)), GRAPH, 5)
    check_graph(Model((GCN, LAST), "max", (Linear(torch.ones(2, 3)),)), GRAPH, 5)


@pytest.mark.parametrize(
    ("model", "width", "text"),
    [
        (Model((GCN,)), 6, "takes 5 channels, but 'features' of this volume has 6"),
        (Model(()), 5, "no layers"),
        (Model((GCN, GCN)), 5, "takes 5 channels, but .* gives 3"),
        (Model((GCN,), None, (Linear(torch.ones(2, 4)),)), 5, "the final layer: Linear takes 4"),
        (Model((GCN, replace(LAST, neighbour=Linear(torch.ones(2, 3)), out_channels=2)), "max"), 5,
         "jk='max' needs layers of one width"),
        (Model((replace(GCN, root=Linear(torch.ones(2, 5))),)), 5, "root gives 2 channels"),
        (Model((replace(GCN, post=(Affine(None, torch.ones(4)),)),)), 5, "Affine takes 4"),
        (Model((replace(GCN, out_channels=4),)), 5, "gives 3 channels, not 4"),
        (Model((replace(GCN, attention=Attention(2, torch.ones(2, 2), torch.ones(2, 2), 0.2)),)), 5,
         "attention does not fit 3"),
    ],
)  # fmt: skip
def test_refused(model: Model, width: int, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        check_graph(model, GRAPH, width)


def test_empty_graph() -> None:
    with pytest.raises(UsageError, match="no vertices"):
        check_graph(
            Model((GCN,)), GraphInfo(vertices=0, edges=0, loops=0, range_rows=1, chunks=0), 5
        )
