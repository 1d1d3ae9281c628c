"""The namespaces that one controller sees: those of its subsystem, and views that its host has got.

Rules:
1. `namespaces` is replaced as a whole and never changed, so that any thread may look into it; all
   else is called with the lock of the controllers held.  No sockets, no clock, nothing slow: views
   are made elsewhere (view_service.py) and closed by whoever takes `take_retired`.
2. A request comes in parts, in order, one request at a time; then it is *pending* under the id that
   its view will have, until `finish`.  What `clear` or a reset has forgotten, `finish` refuses.
3. In memory are one request that is arriving and those that are pending, each of both at most
   `ViewLimits.request` bytes together.
Source of the commands: hyades.common.nvme.vendor.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hyades.common.nvme.status import DNR, StatusCode
from hyades.common.nvme.vendor import Part
from hyades.target_side.limits import ViewLimits
from hyades.target_side.namespaces import Namespace


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A whole request for a view of the volume in namespace *source*, to be namespace *nsid*."""

    nsid: int
    source: int
    data: bytes


class HostViews:
    """See the module."""

    def __init__(self, fixed: Mapping[int, Namespace], limits: ViewLimits) -> None:
        """Show *fixed*, and up to `limits.count` views with ids above."""
        self.namespaces: Mapping[int, Namespace] = fixed
        self._fixed, self._limits = fixed, limits
        self._views: dict[int, Namespace] = {}
        self._pending: dict[int, Request] = {}
        self._retired: list[Namespace] = []
        self._arriving: tuple[int, int, bytearray] | None = None  # source, bytes in all, those here

    @property
    def last(self) -> int:
        """The highest id that there can be."""
        return max(self._fixed) + self._limits.count

    def check(self, source: int, part: Part) -> tuple[int, str]:
        """Return the status for a part that is to come, 0 where it may, and why not."""
        if source not in self._fixed:
            return StatusCode.INVALID_NAMESPACE | DNR, f"there is no namespace {source}"
        most = self._limits.request
        if part.total > most:
            return StatusCode.INVALID_FIELD | DNR, f"{part.total} bytes of request, at most {most}"
        if len(self._views) + len(self._pending) >= self._limits.count:
            text = f"{self._limits.count} views, the limit of a controller"
            return StatusCode.NAMESPACE_NO_IDENTIFIER | DNR, text
        pending = sum(len(request.data) for request in self._pending.values())
        if pending + part.total > most:
            return StatusCode.NAMESPACE_NO_CAPACITY, f"{pending} bytes of requests are pending"
        return 0, ""

    def take(self, source: int, part: Part, data: memoryview) -> Request | str | None:
        """Take a part that `check` let through; return the whole request, or what is wrong."""
        if part.offset == 0:
            self._arriving = (source, part.total, bytearray())
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            return f"a part at {part.offset} of a request that has not begun"
        begun, total, here = arriving
        if (begun, total, len(here)) != (source, part.total, part.offset):
            return f"a part at {part.offset} of {part.total} bytes after {len(here)} of {total}"
        here += data
        if len(here) < total:
            self._arriving = arriving
            return None
        first = max(self._fixed) + 1
        taken = self._views.keys() | self._pending.keys()
        nsid = next(n for n in range(first, self.last + 1) if n not in taken)
        request = self._pending[nsid] = Request(nsid, source, bytes(here))
        return request

    def finish(self, request: Request, view: Namespace | None) -> bool:
        """Show the view of a request, or forget it (None); return whether it was still wanted."""
        if self._pending.get(request.nsid) is not request:
            return False
        del self._pending[request.nsid]
        if view is not None:
            self._views[request.nsid] = view
            self._show()
        return True

    def delete(self, nsid: int) -> bool:
        """End a view; return whether there was one."""
        view = self._views.pop(nsid, None)
        if view is None:
            return False
        self._retired.append(view)
        self._show()
        return True

    def clear(self) -> None:
        """End all views, and forget every request."""
        self._retired += self._views.values()
        self._views.clear()
        self._pending.clear()
        self._arriving = None
        self._show()

    def take_retired(self) -> list[Namespace]:
        """Return and forget the views that are to be closed."""
        retired, self._retired = self._retired, []
        return retired

    def _show(self) -> None:
        self.namespaces = {**self._fixed, **dict(sorted(self._views.items()))}
