"""One run of a peer system, as a script in the peers' own virtual environment.

usage: python peer_worker.py JOB.json

JOB: method, model ("sage" or "gcn"), graph (directory with indptr.npy, indices.npy, features.npy),
weights (.npz of weights.py), threads, batch, scratch (directory for files of layers), rows (.npy
with the vertices whose result is compared), sample (where their rows go), result (JSON to write).

Needs numpy and the system it runs; not Hyades.  The clock starts when the system is imported and
stops when the result of the last layer stands in memory or in its file; the sample is taken after.
"""

import importlib
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Job:
    """The job file's content, with the arrays that all methods begin with."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.method: str = spec["method"]
        self.gcn: bool = spec["model"] == "gcn"
        self.graph = Path(spec["graph"])
        self.threads: int = spec["threads"]
        self.batch: int = spec["batch"]
        self.scratch = Path(spec["scratch"])
        self.weights: dict[str, NDArray[np.float32]] = dict(np.load(spec["weights"]))
        self.layers = 1 + max(int(name.split(".")[0]) for name in self.weights)
        self.phases: dict[str, float] = {}
        self.notes: list[str] = []
        self.buffers: tuple[Any, ...] = ()  # arrays that a system borrows and must not lose
        self._last = time.monotonic()

    def mark(self, phase: str) -> None:
        """Add the time since the last mark to *phase*."""
        now = time.monotonic()
        self.phases[phase] = self.phases.get(phase, 0.0) + now - self._last
        self._last = now

    def weight(self, layer: int, part: str) -> Any:
        """Return a weight as a torch tensor."""
        import torch

        return torch.from_numpy(self.weights[f"{layer}.{part}"])

    def topology(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return indptr and indices (by destination) as int64, which both peers want."""
        indices = np.load(self.graph / "indices.npy").astype(np.int64)
        return np.load(self.graph / "indptr.npy"), indices

    def features(self, *, mapped: bool = False) -> Any:
        """Return the features as a torch tensor, read or mapped."""
        import torch

        # Mode 'c' because torch warns about read-only arrays; nothing is ever written.
        return torch.from_numpy(
            np.load(self.graph / "features.npy", mmap_mode="c" if mapped else None)
        )

    def layer_file(self, layer: int, rows: int, width: int) -> Any:
        """Return a new mapped file for the output of *layer*."""
        path = self.scratch / f"layer{layer}.npy"
        return np.lib.format.open_memmap(path, "w+", np.float32, (rows, width))


def without_loops(
    indptr: NDArray[np.int64], indices: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the graph without its self loops."""
    kept = indices != np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(kept)])
    return before[indptr], indices[kept]


def gcn_edges(
    indptr: NDArray[np.int64], indices: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """Return indptr, sources and weights of the graph with exactly one self loop a vertex.

    The weights are 1 / sqrt(d_source * d_destination), d the in-degree with the loop.
    """
    indptr, indices = without_loops(indptr, indices)
    indptr += np.arange(indptr.size)
    is_loop = np.zeros(int(indptr[-1]), np.bool_)
    is_loop[indptr[1:] - 1] = True
    sources = np.empty(is_loop.size, np.int64)
    sources[is_loop] = np.arange(indptr.size - 1)
    sources[~is_loop] = indices
    degrees = np.diff(indptr)
    factor = (1.0 / np.sqrt(degrees)).astype(np.float32)
    weights = np.repeat(factor, degrees)
    weights *= factor[sources]
    return indptr, sources, weights


# --- PyG -----------------------------------------------------------------------------------------


def pyg_model(job: Job) -> Any:
    """Return PyG's own GraphSAGE or GCN with the job's weights."""
    from torch_geometric.nn.models import GCN, GraphSAGE

    first, last = job.weights["0.neighbour"], job.weights[f"{job.layers - 1}.neighbour"]
    zoo = GCN if job.gcn else GraphSAGE
    model = zoo(first.shape[1], first.shape[0], job.layers, last.shape[0])
    state = {}
    for layer in range(job.layers):
        if job.gcn:
            state[f"convs.{layer}.lin.weight"] = job.weight(layer, "neighbour")
            state[f"convs.{layer}.bias"] = job.weight(layer, "bias")
        else:
            state[f"convs.{layer}.lin_l.weight"] = job.weight(layer, "neighbour")
            state[f"convs.{layer}.lin_l.bias"] = job.weight(layer, "bias")
            state[f"convs.{layer}.lin_r.weight"] = job.weight(layer, "root")
    model.load_state_dict(state)
    return model.eval()


def pyg_full(job: Job) -> Any:
    """PyG on the whole graph in memory, with the fastest adjacency that is installed."""
    import torch

    indptr, indices = job.topology()
    if job.gcn:
        # GCNConv adds a second loop to a vertex of a torch.sparse adjacency that has one already.
        indptr, indices = without_loops(indptr, indices)
    size = (indptr.size - 1, indptr.size - 1)
    rowptr, columns = torch.from_numpy(indptr), torch.from_numpy(indices)
    torch_sparse = None if job.method == "pyg-full-csr" else _optional("torch_sparse")
    if torch_sparse is not None:
        job.notes.append("torch_sparse.SparseTensor")
        adjacency = torch_sparse.SparseTensor(
            rowptr=rowptr, col=columns, sparse_sizes=size, is_sorted=True, trust_data=True
        )
    else:
        job.notes.append("torch.sparse CSR")
        adjacency = torch.sparse_csr_tensor(rowptr, columns, torch.ones(columns.numel()), size)
    job.mark("topology")
    model, x = pyg_model(job), job.features()
    job.mark("features")
    with torch.no_grad():
        x = model(x, adjacency)
    job.mark("forward")
    return x.numpy()


def pyg_inference(job: Job) -> Any:
    """PyG's own `inference()` over one-hop batches, as its documentation shows it."""
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import NeighborLoader

    if job.gcn:
        job.notes.append("wrong for GCN: degrees are those of each batch's subgraph")
    indptr, indices = job.topology()
    destinations = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    edges = torch.from_numpy(np.stack([indices, destinations]))
    del indices, destinations
    data = Data(x=job.features(mapped=True), edge_index=edges)
    job.mark("topology")
    loader = NeighborLoader(
        data, num_neighbors=[-1], batch_size=job.batch, shuffle=False, is_sorted=True
    )
    model = pyg_model(job)
    job.mark("loader")
    with torch.no_grad():
        x = model.inference(loader)
    job.mark("inference")
    return x.numpy()


# --- DGL -----------------------------------------------------------------------------------------


def dgl_graph(job: Job) -> Any:
    """Return the graph; for GCN with self loops and its weights as edge data."""
    import dgl
    import torch

    indptr, indices = job.topology()
    weights = None
    if job.gcn:
        indptr, indices, weights = gcn_edges(indptr, indices)
    none = torch.empty(0, dtype=torch.int64)
    job.buffers = (torch.from_numpy(indptr), torch.from_numpy(indices))
    graph = dgl.graph(("csc", (*job.buffers, none)), num_nodes=indptr.size - 1)
    if weights is not None:
        graph.edata["w"] = torch.from_numpy(weights)
    job.mark("topology")
    return graph


def dgl_convs(job: Job) -> list[Any]:
    """Return one DGL convolution a layer with the job's weights."""
    from dgl.nn import GraphConv, SAGEConv

    convs = []
    for layer in range(job.layers):
        after, before = job.weights[f"{layer}.neighbour"].shape
        if job.gcn:
            conv = GraphConv(before, after, norm="none")
            state = {"weight": job.weight(layer, "neighbour").T.contiguous()}
            state["bias"] = job.weight(layer, "bias")
        else:
            conv = SAGEConv(before, after, "mean")
            state = {"fc_neigh.weight": job.weight(layer, "neighbour")}
            state["fc_self.weight"] = job.weight(layer, "root")
            state["fc_self.bias"] = job.weight(layer, "bias")
        conv.load_state_dict(state)
        convs.append(conv.eval())
    return convs


def _edge_weight(graph: Any) -> dict[str, Any]:
    return {"edge_weight": graph.edata["w"]} if "w" in graph.edata else {}


def dgl_full(job: Job) -> Any:
    """DGL on the whole graph in memory."""
    import torch

    graph, convs, x = dgl_graph(job), dgl_convs(job), job.features()
    job.mark("features")
    with torch.no_grad():
        for layer, conv in enumerate(convs):
            x = conv(graph, x, **_edge_weight(graph))
            if layer + 1 < len(convs):
                x = x.relu_()
            job.mark(f"layer {layer}")
    return x.numpy()


def dgl_layerwise(job: Job) -> Any:
    """DGL layer by layer over batches of vertices; input and outputs are mapped files."""
    import dgl
    import torch

    graph, convs, x = dgl_graph(job), dgl_convs(job), job.features(mapped=True)
    sampler = dgl.dataloading.MultiLayerFullNeighborSampler(1)
    vertices = graph.num_nodes()
    with torch.no_grad():
        for layer, conv in enumerate(convs):
            out = job.layer_file(layer, vertices, job.weights[f"{layer}.bias"].size)
            y = torch.from_numpy(out)
            loader = dgl.dataloading.DataLoader(
                graph, torch.arange(vertices), sampler, batch_size=job.batch, shuffle=False,
                drop_last=False, num_workers=0,
            )  # fmt: skip
            for sources, destinations, (block,) in loader:
                rows = x[sources.long()]
                own = rows[: block.num_dst_nodes()]
                z = conv(block, (rows, own), **_edge_weight(block))
                y[destinations.long()] = z.relu_() if layer + 1 < len(convs) else z
            out.flush()
            x = y
            job.mark(f"layer {layer}")
    return x.numpy()


METHODS: dict[str, Callable[[Job], Any]] = {
    "pyg-full": pyg_full,
    "pyg-full-csr": pyg_full,
    "pyg-inference": pyg_inference,
    "dgl-full": dgl_full,
    "dgl-layerwise": dgl_layerwise,
}


def _optional(name: str) -> Any:
    """Return the module, or None where it is absent or a compiled part does not fit this torch."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError):
        return None


def _import_system(method: str) -> dict[str, str]:
    """Import what *method* runs and return the versions."""
    import torch

    versions = {"torch": str(torch.__version__)}
    if method.startswith("dgl"):
        os.environ["DGLBACKEND"] = "pytorch"
        import dgl
        import dgl.dataloading
        import dgl.nn

        versions["dgl"] = dgl.__version__
    else:
        import torch_geometric
        import torch_geometric.loader
        import torch_geometric.nn.models

        versions["torch_geometric"] = torch_geometric.__version__
        torch_sparse = _optional("torch_sparse")
        if torch_sparse is not None:
            versions["torch_sparse"] = torch_sparse.__version__
    return versions


def io_bytes() -> tuple[int, int]:
    """Return the bytes this process has read from and written to storage."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}
    return counts["read_bytes"], counts["write_bytes"] - counts["cancelled_write_bytes"]


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run the job and return what is to be written as its result."""
    versions = _import_system(spec["method"])
    import torch

    torch.set_num_threads(spec["threads"])
    read, written = io_bytes()
    started = time.monotonic()
    job = Job(spec)
    out = METHODS[job.method](job)
    seconds = time.monotonic() - started
    read_after, written_after = io_bytes()
    np.save(spec["sample"], out[np.load(spec["rows"])])
    return {
        "seconds": seconds,
        "read_bytes": read_after - read,
        "written_bytes": written_after - written,
        "phases": job.phases,
        "notes": job.notes,
        "versions": versions,
    }


if __name__ == "__main__":
    job_spec = json.loads(Path(sys.argv[1]).read_text())
    # Both peers warn about features of torch that they still use; those are not ours to mend.
    warnings.simplefilter("ignore")
    Path(job_spec["result"]).write_text(json.dumps(run(job_spec)))
