"""Reading weights: .pt by torch's weights_only loader, .safetensors, and who takes which key."""

import pickle
import re
import struct
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from hyades.common.errors import DataError, UsageError
from hyades.gpu_side.models.rowops import ROUNDED, checked

# What torch.load raises on damaged files of either format, found by flipping bytes.
_DAMAGE = (
    RuntimeError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    MemoryError,
    struct.error,
    pickle.UnpicklingError,
)
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")
_NESTED = ("state_dict", "model_state_dict", "model")


def read_tensors(path: Path, prefix: str = "") -> tuple[dict[str, Tensor], list[str]]:
    """Return the tensors of a checkpoint by key, and notes on what was unwrapped.

    ``prefix`` keeps only keys that start with it, and strips it.  UsageError where the file is
    absent or no key has the prefix; DataError where it is damaged or holds anything but tensors.
    """
    if not path.is_file():
        raise UsageError(f"{path}: no such file; `weights` is taken relative to the model file")
    loaded = _safetensors(path) if path.suffix == ".safetensors" else _torch(path)
    notes: list[str] = []
    tensors = _tensors_only(loaded, path, notes)
    if any(tensor.dtype == torch.float64 for tensor in tensors.values()):
        notes.append(ROUNDED)
    if prefix:
        kept = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        if not kept:
            raise UsageError(f"{path}: no key starts with {prefix!r}; it has {shown(tensors)}")
        return kept, notes
    for wrapper in _WRAPPER_PREFIXES:
        if tensors and all(key.startswith(wrapper) for key in tensors):
            tensors = {key.removeprefix(wrapper): tensor for key, tensor in tensors.items()}
            notes.append(f"removed the prefix {wrapper!r} from every key")
    return tensors, notes


def _safetensors(path: Path) -> dict[str, Tensor]:
    try:
        result: dict[str, Tensor] = load_file(path)
        return result
    except (SafetensorError, ValueError, KeyError) as error:
        raise DataError(f"{path}: not a readable safetensors file: {_line(error)}") from error


def _torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript archives and old formats; they fail below
            return torch.load(path, map_location="cpu", weights_only=True)
    except _DAMAGE as error:
        found = re.search(r"GLOBAL (\S+) was not an allowed global", str(error))
        if found:
            raise DataError(
                f"{path}: holds a pickled {found[1]}, which could run code; only tensors are read: "
                "save model.state_dict() instead"
            ) from error
        raise DataError(f"{path}: not a readable PyTorch checkpoint: {_line(error)}") from error


def _line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def _tensors_only(loaded: Any, path: Path, notes: list[str]) -> dict[str, Tensor]:
    """Return the one dict of tensors in what was loaded, directly or one level down."""
    if isinstance(loaded, dict):
        for key in _NESTED:
            inner = loaded.get(key)
            if isinstance(inner, dict) and inner and isinstance(next(iter(inner.values())), Tensor):
                notes.append(f"took the entry {key!r} of the file")
                loaded = inner
                break
    if not isinstance(loaded, dict):
        raise DataError(f"{path}: holds a {type(loaded).__name__}, not a state_dict")
    if not loaded:
        raise DataError(f"{path}: holds no tensors")
    for key, value in loaded.items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise DataError(
                f"{path}: entry {key!r} is a {type(value).__name__}, not a tensor; "
                "save model.state_dict()"
            )
    return dict(loaded)


def shown(keys: Iterable[str], limit: int = 8) -> str:
    """Return keys for a message, the first few of many."""
    every = list(keys)
    rest = f" and {len(every) - limit} more" if len(every) > limit else ""
    return ", ".join(every[:limit]) + rest


class Weights:
    """A state dict that is consumed key by key, so that nothing in it is ignored by accident."""

    def __init__(self, tensors: dict[str, Tensor], origin: str) -> None:
        """Start with nothing taken; ``origin`` names the file in messages."""
        self.tensors = tensors
        self.origin = origin
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._wrong: list[str] = []

    def has(self, key: str) -> bool:
        """Say whether the state dict has ``key``."""
        return key in self.tensors

    def under(self, prefix: str) -> bool:
        """Say whether any key starts with ``prefix``."""
        return any(key.startswith(prefix) for key in self.tensors)

    def take(self, key: str, shape: Sequence[int | None]) -> Tensor:
        """Return a checked float32 copy; None in ``shape`` takes any length.

        A missing key or a wrong shape is reported by `finish` with all others, unless the shape is
        not known: then UsageError at once.  DataError for NaN and infinity.
        """
        tensor = self.tensors.get(key)
        if tensor is None:
            self._missing.append(key)
        else:
            self._taken.add(key)
            if len(tensor.shape) == len(shape) and all(
                want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
            ):
                return checked(tensor, f"{self.origin}: {key}")
            wanted = ", ".join("any" if want is None else str(want) for want in shape)
            self._wrong.append(f"{key} is {list(tensor.shape)}, not [{wanted}]")
        if None in shape:
            self._fail([])
        return torch.zeros([n for n in shape if n is not None])

    def maybe(
        self, key: str, shape: Sequence[int | None], wanted: bool | None = None
    ) -> Tensor | None:
        """`take` where the key is there or ``wanted``; None where it is absent and may be.

        ``wanted`` False leaves a key that is there untaken, for `finish` to report.
        """
        if wanted is False or (wanted is None and not self.has(key)):
            return None
        return self.take(key, shape)

    def ignore(self, key: str) -> None:
        """Mark a key that inference does not need."""
        self._taken.add(key)

    def finish(self) -> None:
        """Raise UsageError that lists every missing, unexpected and misshapen key."""
        self._fail([key for key in self.tensors if key not in self._taken])

    def _fail(self, unexpected: list[str]) -> None:
        problems = list(self._wrong)
        if self._missing:
            problems.append(f"missing {shown(self._missing)}")
        if unexpected:
            problems.append(f"unexpected {shown(unexpected)}")
        if problems:
            raise UsageError(
                f"{self.origin} does not fit the model: {'; '.join(problems)}; compare with "
                f"`hyades model describe {self.origin}`"
            )
