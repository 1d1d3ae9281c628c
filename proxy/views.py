"""Opening a view: the target that has a volume computes it, this host reads its blocks.

The request is built by hyades.common.nvme.vendor; each connection of the transport asks for a view
of its own (transports/nvme_session.py).  A target computes views for who speaks to it by NVMe over
Fabrics and through Hyades' own initiators.
"""

from typing import Any

from hyades.common.errors import UsageError
from hyades.proxy.registry import FAULTY, find_module, module_of
from hyades.proxy.transport import ViewTransport
from hyades.proxy.urls import Url

_LOCAL = (
    "{scheme} is a device of this machine: nothing computes there; serve the volume where it lies"
    " (hyades serve --namespace FILE,ro --listen HOST:PORT) and name it nvme+tcp://, or leave"
    " --stage out"
)
_REASONS = {
    "stripe": "a stripe lies on several devices, and a target computes from a whole volume: put the"
    " volume on one device of one target, or leave --stage out",
    "spdk+tcp": "SPDK sends no commands of other vendors for us: write nvme+tcp:// for a view of"
    " the same target",
    "spdk+rdma": "SPDK sends no commands of other vendors for us: write nvme+rdma:// for a view of"
    " the same target",
}


def open_view(url: str | Url, request: bytes) -> ViewTransport:
    """Open the view that *request* asks for of the volume at *url*, for reading.

    It returns when the view can be read: a sampled one when the target has looked at all tiles.
    UsageError where there are no views (ViewRefused: where this target makes none), PeerError,
    DataError for a damaged head, BackendMissing.
    """
    parsed = url if isinstance(url, Url) else Url(url)
    module: Any = find_module(parsed)  # what is missing here is told first
    reason = why_no_views(parsed)
    if reason is not None:
        raise UsageError(f"{parsed}: {reason}")
    view: ViewTransport = module.open_view(parsed, request)
    return view


def why_no_views(url: str | Url) -> str | None:
    """Return why no view of the volume at *url* can be asked for, and what to do, or None.

    Nothing is connected: the target may still refuse.
    """
    parsed = url if isinstance(url, Url) else Url(url)
    inner = parsed.scheme.removeprefix(FAULTY)
    module: Any = module_of(Url(f"{inner}://{parsed.path}"))
    if not hasattr(module, "open_view"):
        return _REASONS.get(inner, _LOCAL.format(scheme=f"{inner}://"))
    problem: str | None = module.probe()
    return problem
