"""Finding the RDMA libraries of this machine: pyverbs for verbs, librdmacm for connections.

Debian installs pyverbs for its own Python 3.11, outside of a virtual environment; here is the one
place that looks there.  PyPI's pyverbs is built against rdma-core's headers and works as well.
"""

import ctypes
import ctypes.util
import importlib
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from hyades.common.errors import BackendMissing

_DEBIAN = "/usr/lib/python3/dist-packages"
_DEVICES = Path("/sys/class/infiniband")
_MANAGER = Path("/dev/infiniband/rdma_cm")
_MODULES = ("addr", "cq", "device", "enums", "fork", "mr", "pd", "pyverbs_error", "qp", "wr")
_INSTALL = "apt-get install python3-pyverbs ibverbs-providers rdma-core"
_SOFT = "modprobe -a rdma_rxe rdma_ucm && rdma link add rxe0 type rxe netdev eth0"


@cache
def verbs() -> Any:
    """Return the modules of pyverbs as attributes (`verbs().qp.QP`); BackendMissing."""
    try:
        found = SimpleNamespace(**{name: _import(f"pyverbs.{name}") for name in _MODULES})
    except ImportError as error:
        raise BackendMissing(f"pyverbs cannot be imported ({error}): {_INSTALL}") from error
    # Before Linux 5.12 a fork parts this process from the pages that a device knows, unless
    # libibverbs keeps them from the child.  Elsewhere this does nothing.
    found.fork.fork_init()
    return found


def failures() -> tuple[type[Exception], ...]:
    """Return what a call of pyverbs raises where it fails."""
    return (verbs().pyverbs_error.PyverbsError,)


@cache
def manager() -> ctypes.CDLL:
    """Return librdmacm; BackendMissing."""
    try:
        return ctypes.CDLL(ctypes.util.find_library("rdmacm") or "librdmacm.so.1", use_errno=True)
    except OSError as error:
        raise BackendMissing(f"librdmacm cannot be loaded ({error}): {_INSTALL}") from error


def devices() -> list[str]:
    """Return the names of the RDMA devices."""
    return sorted(path.name for path in _DEVICES.iterdir()) if _DEVICES.is_dir() else []


def probe() -> str | None:
    """Return what keeps RDMA from working here and how to get it, or None."""
    try:
        verbs()
        manager()
    except BackendMissing as missing:
        return str(missing)
    if not devices():
        return (
            "no RDMA device in /sys/class/infiniband: an RDMA adapter with its driver, or the"
            f" kernel's software device: {_SOFT}"
        )
    if not _MANAGER.exists():
        return f"no {_MANAGER}: modprobe rdma_ucm"
    return None


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError:
        if not (Path(_DEBIAN) / "pyverbs").is_dir():
            raise
    # Last, so that nothing else there hides a package of this environment; and not for longer than
    # the import takes, since every import looks there.
    sys.path.append(_DEBIAN)
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(_DEBIAN)
