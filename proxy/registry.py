"""URL scheme -> transport module: an explicit table, each module imported when first used.

A module has `open_url(url, *, create, writable)` and `probe()`: None where it can run here, else
the reason and the fix; where it has `detail()`, that is one more line for ``hyades doctor``, and
where it has `probe_url(url)`, that decides for one URL, whose options may need less.  Where targets
compute views, it has `open_view(url, request)` (views.py).
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from hyades.common.errors import BackendMissing, UsageError
from hyades.proxy.transport import Transport
from hyades.proxy.urls import Url

MODULES = {
    "file": "hyades.proxy.transports.file",
    "blk": "hyades.proxy.transports.blk",
    "gds": "hyades.proxy.transports.gds",
    "mem": "hyades.proxy.transports.mem",
    "null": "hyades.proxy.transports.null",
    "nvme+tcp": "hyades.proxy.transports.nvme_tcp",
    "nvme+rdma": "hyades.proxy.transports.nvme_rdma",
    "dma": "hyades.proxy.transports.nvme_dma",
    "spdk+tcp": "hyades.proxy.transports.spdk",
    "spdk+rdma": "hyades.proxy.transports.spdk",
    "spdk+pcie": "hyades.proxy.transports.spdk",
    "stripe": "hyades.proxy.transports.stripe",
}
OPAQUE = ("stripe",)  # written scheme:, not scheme://
FAULTY = "faulty+"  # prefix of any other scheme above
_FAULTY_MODULE = "hyades.proxy.transports.faulty"


@dataclass(frozen=True, slots=True)
class Probe:
    """What ``hyades doctor`` says about one scheme."""

    scheme: str
    problem: str | None  # None: it can run; else what is missing and how to get it
    detail: str  # how it will run here; may be empty


def schemes() -> list[str]:
    """Return every scheme that a URL may have."""
    return [*MODULES, *(FAULTY + name for name in MODULES if name not in OPAQUE)]


def open_transport(url: str | Url, *, create: bool = False, writable: bool = True) -> Transport:
    """Open the device that *url* (or a plain path) names.

    Raises UsageError for a URL that cannot be meant, BackendMissing where this machine lacks what
    the scheme needs.
    """
    parsed = url if isinstance(url, Url) else Url(url)
    module = find_module(parsed)
    transport: Transport = module.open_url(parsed, create=create, writable=writable)
    return transport


def probe_all() -> list[Probe]:
    """Return for every scheme whether it can run here, and how."""
    found = []
    for scheme, name in MODULES.items():
        module = import_module(name)
        problem = module.probe()
        detail = module.detail() if problem is None and hasattr(module, "detail") else ""
        found.append(Probe(scheme, problem, detail))
    return found


def find_module(url: Url) -> Any:
    """Return the module for *url*, which can run here; UsageError, BackendMissing."""
    module = module_of(url)
    problem = module.probe_url(url) if hasattr(module, "probe_url") else module.probe()
    if problem is not None:
        raise BackendMissing(f"{url}: {problem}")
    return module


def module_of(url: Url) -> Any:
    """Return the module for *url*, whether or not it can run here; UsageError where none is."""
    if url.scheme.startswith(FAULTY) and url.scheme.removeprefix(FAULTY) in MODULES:
        return import_module(_FAULTY_MODULE)
    if url.scheme not in MODULES:
        known = ", ".join(f"{name}:{'' if name in OPAQUE else '//'}" for name in MODULES)
        raise UsageError(f"{url}: no transport {url.scheme}://; there are {known} and plain paths")
    return import_module(MODULES[url.scheme])
