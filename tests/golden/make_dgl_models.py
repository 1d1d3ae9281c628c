"""Write dgl_models.safetensors: layers of real DGL with their inputs and outputs.

Run where DGL can be imported (it is no dependency of Hyades and of its tests):
    pip install --no-deps dgl==1.1.3; DGLBACKEND=pytorch python tests/golden/make_dgl_models.py
"""

import os
from collections.abc import Callable
from pathlib import Path

os.environ["DGLBACKEND"] = "pytorch"

import dgl
import dgl.nn.pytorch as dglnn
import torch
from safetensors.torch import save_file
from torch import nn

LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"graph_{norm}": lambda norm=norm: dglnn.GraphConv(6, 4, norm, allow_zero_in_degree=True)
        for norm in ("both", "right", "left", "none")
    },
    "graph_wide": lambda: dglnn.GraphConv(
        6, 9, activation=nn.functional.relu, allow_zero_in_degree=True
    ),
    "graph_no_weight": lambda: dglnn.GraphConv(6, 6, weight=False, allow_zero_in_degree=True),
    "graph_no_bias": lambda: dglnn.GraphConv(6, 4, bias=False, allow_zero_in_degree=True),
    "sage_mean": lambda: dglnn.SAGEConv(6, 4, "mean"),
    "sage_mean_wide": lambda: dglnn.SAGEConv(6, 9, "mean", activation=torch.tanh),
    "sage_gcn": lambda: dglnn.SAGEConv(6, 4, "gcn"),
    "sage_gcn_wide": lambda: dglnn.SAGEConv(6, 9, "gcn", bias=False),
    "sage_pool": lambda: dglnn.SAGEConv(6, 4, "pool"),
    "sage_norm": lambda: dglnn.SAGEConv(
        6, 4, "mean", bias=False, norm=nn.LayerNorm(4), activation=nn.functional.elu
    ),
    "gin_sum": lambda: dglnn.GINConv(nn.Linear(6, 4), "sum", 0.3, activation=torch.relu),
    "gin_mean": lambda: dglnn.GINConv(
        nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4)),
        "mean",
        -0.2,
        learn_eps=True,
    ),
    "gin_max": lambda: dglnn.GINConv(nn.Linear(6, 4, bias=False), "max"),
    "gat": lambda: dglnn.GATConv(6, 4, 3, allow_zero_in_degree=True),
    "gat_residual": lambda: dglnn.GATConv(
        6, 4, 3, residual=True, negative_slope=0.05, allow_zero_in_degree=True
    ),
    "gat_identity": lambda: dglnn.GATConv(
        6, 2, 3, residual=True, activation=nn.functional.elu, allow_zero_in_degree=True
    ),
    "gat_no_bias": lambda: dglnn.GATConv(6, 4, 3, bias=False, allow_zero_in_degree=True),
}


def main() -> None:
    torch.manual_seed(3)
    edges = torch.randint(0, 12, (2, 40))
    edges = torch.cat([edges, edges[:, :5], torch.tensor([[1, 1, 2], [1, 1, 2]])], 1)
    graph = dgl.graph((edges[0], edges[1]), num_nodes=15)
    x = torch.randn(15, 6)
    tensors = {"edge_index": edges, "x": x}
    for name, make in LAYERS.items():
        layer = make()
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
            for key, buffer in layer.named_buffers():
                if key.endswith("running_mean"):
                    buffer.normal_()
                elif key.endswith("running_var"):
                    buffer.uniform_(0.5, 2.0)
            output = layer.eval()(graph, x)
        for key, value in layer.state_dict().items():
            tensors[f"{name}/{key}"] = value.detach().clone()
        tensors[f"{name}/OUTPUT"] = output.clone()
    path = Path(__file__).with_name("dgl_models.safetensors")
    save_file(tensors, path, {"dgl": dgl.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
