"""Small graphs and modules with random weights, for tests of models."""

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

Graph = tuple[int, Tensor]  # vertices, edge_index int64 [2, E]


def messy_graph(vertices: int = 23, edges: int = 90, seed: int = 0) -> Graph:
    """Return a graph with self loops (some double), duplicate edges, and isolated vertices."""
    generator = torch.Generator().manual_seed(seed)
    body = torch.randint(0, max(vertices - 3, 1), (2, edges), generator=generator)
    loops = torch.tensor([[1, 1, 2], [1, 1, 2]])
    return vertices, torch.cat([body, body[:, :9], loops], dim=1)


@st.composite
def graphs(draw: Callable[..., int], most: int = 9) -> Graph:
    """Any graph of one to ``most`` vertices, with and without edges."""
    vertices = draw(st.integers(1, most))
    ends = st.integers(0, vertices - 1)
    pairs = draw(st.lists(st.tuples(ends, ends), max_size=4 * vertices))
    return vertices, torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T.contiguous()


def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Give every parameter and statistic a value that is not its initial one; eval mode."""
    generator = torch.Generator().manual_seed(seed)

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=generator, dtype=torch.float32)

    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.2 * noise(parameter)
        for name, buffer in module.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(noise(buffer))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + noise(buffer).abs())
            elif name.endswith("eps"):
                buffer.copy_(noise(buffer))
    return module.eval()


def features(vertices: int, width: int, seed: int = 1) -> Tensor:
    """Return float32 [vertices, width]."""
    return torch.randn(vertices, width, generator=torch.Generator().manual_seed(seed))


def difference(got: Tensor, expected: Tensor) -> float:
    """Return the relative Frobenius difference, absolute below 1; NaN where either has NaN."""
    assert got.shape == expected.shape
    return float((got - expected).norm() / expected.norm().clamp(min=1.0))
