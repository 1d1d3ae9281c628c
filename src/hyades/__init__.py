"""Hyades refreshes the embeddings of every vertex of a graph that does not fit in memory."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyades.deploy.api import RefreshResult, VolumeHandle, open, refresh

__all__ = ["RefreshResult", "VolumeHandle", "open", "refresh"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Resolved on first use: `import hyades` must not cost an import of torch and numba.
    if name in __all__:
        from hyades.deploy import api

        return getattr(api, name)
    raise AttributeError(f"module 'hyades' has no attribute {name!r}")
