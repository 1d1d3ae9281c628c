"""The same weights for every system, from a seed: .npz for the peers, a PyG state dict for us."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from hyades.common.errors import UsageError

Kind = Literal["sage", "gcn"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A stack of layers with ReLU between them; `widths` are input, hidden (all equal), output.

    `root`: SAGE has weights for a vertex's own row.
    """

    kind: Kind
    widths: tuple[int, ...]
    seed: int = 0
    root: bool = True

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or len(set(self.widths[1:-1])) > 1:
            raise UsageError(f"widths {self.widths}: give input, equal hidden widths, output")

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.widths) - 1

    @property
    def title(self) -> str:
        """What a table calls it, as in ``"SAGE 128-128-128"``."""
        return f"{self.kind.upper()} {'-'.join(str(width) for width in self.widths)}"


def make_weights(spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    """Return ``"0.neighbour"`` [out, in], ``"0.root"`` likewise (SAGE) and ``"0.bias"`` [out]..."""
    rng = np.random.default_rng([spec.seed, 5])
    weights: dict[str, NDArray[np.float32]] = {}
    for layer, (before, after) in enumerate(zip(spec.widths, spec.widths[1:], strict=False)):
        scale = np.float32(1 / np.sqrt(before))
        weights[f"{layer}.neighbour"] = scale * rng.standard_normal((after, before), np.float32)
        if spec.kind == "sage" and spec.root:
            weights[f"{layer}.root"] = scale * rng.standard_normal((after, before), np.float32)
        weights[f"{layer}.bias"] = np.float32(0.1) * rng.standard_normal(after, np.float32)
    return weights


_KEYS = {
    "sage": {"neighbour": "lin_l.weight", "root": "lin_r.weight", "bias": "lin_l.bias"},
    "gcn": {"neighbour": "lin.weight", "bias": "bias"},
}


def pyg_state(spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    """Return the weights under the names of PyG's GraphSAGE or GCN."""
    state = {}
    for name, value in make_weights(spec).items():
        layer, part = name.split(".")
        state[f"convs.{layer}.{_KEYS[spec.kind][part]}"] = value
    return state


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Where the weights of a model lie."""

    npz: Path  # for the peers
    model: Path  # the model file that `hyades refresh --model` takes


def write_weights(spec: ModelSpec, directory: Path) -> WeightFiles:
    """Write the weights for the peers and, with a model file, for Hyades."""
    directory.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = make_weights(spec)
    files = WeightFiles(directory / "weights.npz", directory / "model.toml")
    np.savez(files.npz, **arrays)
    save_file(pyg_state(spec), directory / "weights.safetensors")
    # What the keys tell (channels, layers) is left out; PyG asks that `jk` be said.
    files.model.write_text(
        f'class = "{"GraphSAGE" if spec.kind == "sage" else "GCN"}"\n'
        'weights = "weights.safetensors"\n\n'
        '[kwargs]\nact = "relu"\njk = "none"\n'
    )
    return files
