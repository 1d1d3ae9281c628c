"""Which edges a sampled refresh must use, by the rule's text, and PyG over exactly those edges."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from hyades.common.sampling import permute, sample_key
from hyades.gpu_side.devices.cpu import single_threaded_torch

Ints = NDArray[np.int64]


def edge_ranks(edges: Ints) -> tuple[Ints, Ints]:
    """Return each edge's rank in its in-list (input order, loops last), and the list's length."""
    vertices = int(edges.max(initial=0)) + 1
    in_lists: list[list[int]] = [[] for _ in range(vertices)]
    for loops in (False, True):
        for index, (source, destination) in enumerate(edges.T.tolist()):
            if (source == destination) == loops:
                in_lists[destination].append(index)
    ranks, degrees = np.zeros((2, edges.shape[1]), np.int64)
    for in_list in in_lists:
        for rank, index in enumerate(in_list):
            ranks[index], degrees[index] = rank, len(in_list)
    return ranks, degrees


def kept_edges(edges: Ints, fanout: int, seed: int, layer: int) -> NDArray[np.bool_]:
    """Return which edges [2, E] (original ids) a layer keeps."""
    kept = np.ones(edges.shape[1], bool)
    if fanout < 0:
        return kept
    ranks, degrees = edge_ranks(edges)
    for index, destination in enumerate(edges[1].tolist()):
        key = np.uint64(sample_key(seed, layer, destination))
        kept[index] = int(permute(key, int(ranks[index]), int(degrees[index]))) < fanout
    return kept


def sampled_batch(
    module: nn.Module, features: Any, edges: Ints, weights: Any, fanout: tuple[int, ...], seed: int
) -> NDArray[Any]:
    """Return what PyG computes in float64 where layer i sees only the edges that it keeps."""
    convs: list[Any] = [*getattr(module, "convs", [module])]
    handles = []
    for layer, (conv, k) in enumerate(zip(convs, fanout, strict=True)):
        kept = kept_edges(edges, k, seed, layer)
        index = torch.as_tensor(np.ascontiguousarray(edges[:, kept]))
        weight = None if weights is None else torch.as_tensor(weights[kept]).double()

        def swap(
            _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
            index: Any = index, weight: Any = weight,
        ) -> Any:  # fmt: skip
            if weight is not None:
                kwargs = {**kwargs, "edge_weight": weight}
            return (args[0], index), kwargs

        handles.append(conv.register_forward_pre_hook(swap, with_kwargs=True))
    try:
        with single_threaded_torch(), torch.no_grad():
            everything = torch.as_tensor(np.ascontiguousarray(edges))
            x = torch.as_tensor(np.asarray(features)).double()
            result: NDArray[Any] = module.double()(x, everything).numpy()
    finally:
        module.float()
        for handle in handles:
            handle.remove()
    return result
