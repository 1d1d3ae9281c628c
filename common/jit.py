"""The one decorator for code that runs on CPU threads and, re-targeted by numba-cuda, on a GPU.

Numba stamps a cached function with the mtime of its own file only, so editing an intrinsic or a
callee leaves its callers stale.  The cache directory is therefore keyed by a hash of all of them.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import config as _numba_config
from numba.extending import intrinsic as _numba_intrinsic

# Untyped on purpose: numba sets the settings at import, an intrinsic is called without the typing
# context that its Python function takes, and cfunc's options are in no signature.
config: Any = _numba_config
intrinsic: Any = _numba_intrinsic
_cfunc: Any = numba.cfunc
F = TypeVar("F", bound=Callable[..., Any])
_ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ("common/*.py", "gpu_side/**/*.py", "proxy/**/*.py", "deploy/ingest/**/*.py")
# kernels hold copies of their values
_CONSTANTS = ("layout.py", "words.py", "spdk_abi.py", "spdk_memory.py", "spdk_tables.py")


@cache
def cache_directory() -> Path | None:
    """Return where compiled kernels are kept, or None where no such place is writable."""
    digest = hashlib.sha256(f"{numba.__version__}".encode())
    for pattern in _SOURCES:
        for path in sorted(_ROOT.glob(pattern)):
            text = path.read_bytes()
            if b"jit" in text or b"intrinsic" in text or path.name in _CONSTANTS:
                digest.update(text)
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME")
    root = Path(base) if base else Path.home() / ".cache"
    folder = root / f"hyades-kernels-{digest.hexdigest()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK) else None


@contextmanager
def _cached_in(folder: Path) -> Iterator[None]:
    # The locator reads the setting when a function is decorated, so it need not stay changed.
    before = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        yield
    finally:
        config.CACHE_DIR = before


def jit(function: F) -> F:
    """Compile *function* for the target that calls it: nogil, no bounds checks, cached on disk."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    folder = cache_directory()
    if folder is None:
        return numba.njit(**options)(function)  # type: ignore[no-any-return]
    with _cached_in(folder):
        return numba.njit(cache=True, **options)(function)  # type: ignore[no-any-return]


def callback(signature: str) -> Callable[[F], Any]:
    """Compile a function for C code to call, with neither the GIL nor Python objects.

    *signature* is numba's; the result has its `address`.
    """
    folder = cache_directory()

    def compiled(function: F) -> Any:
        if folder is None:
            return _cfunc(signature, nopython=True)(function)
        with _cached_in(folder):
            return _cfunc(signature, nopython=True, cache=True)(function)

    return compiled
