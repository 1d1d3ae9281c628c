"""The views of `hyades serve`: those that it opens, and what hosts may ask for."""

from collections.abc import Mapping, Sequence

from hyades.common.errors import UsageError
from hyades.common.nvme.commands import check_nqn
from hyades.common.units import parse_size
from hyades.target_side.events import Sink
from hyades.target_side.limits import ViewLimits
from hyades.target_side.namespaces import Namespace
from hyades.target_side.stage.options import StageOptions
from hyades.target_side.view_service import ViewService, parse_view


def build_views(
    sink: Sink, *, memory: str, threads: int, cores: str, count: int, hosts: Sequence[str]
) -> ViewService:
    """Return who makes views, with the settings `--stage-...`, `--views` and `--view-host`."""
    options = StageOptions(
        memory=parse_size(memory), threads=threads, cores=parse_cores(cores) if cores else None
    )
    allowed = frozenset(check_nqn(host) for host in hosts) if hosts else None
    return ViewService(options, ViewLimits(count=count, hosts=allowed), sink)


def open_views(
    service: ViewService, texts: Sequence[str], namespaces: Mapping[int, Namespace]
) -> dict[int, Namespace]:
    """Return *namespaces* and, with the ids that follow, the views that *texts* write."""
    opened = dict(namespaces)
    try:
        for text in texts:
            nsid, what = parse_view(text)
            if nsid not in namespaces:
                raise UsageError(f"--view {text}: there is no --namespace number {nsid}")
            opened[len(opened) + 1] = service.open_static(opened[nsid], what)
    except BaseException:
        for nsid in opened.keys() - namespaces.keys():
            opened[nsid].close()
        raise
    return opened


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the numbers of ``0,2-3``; UsageError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.partition("-")
        ends = (first, last if dash else first)
        if not all(end.strip().isdecimal() and len(end) < 6 for end in ends):
            raise UsageError(f"--stage-cores {text}: write numbers, such as 0,2-3")
        found |= set(range(int(ends[0]), int(ends[1]) + 1))
    return tuple(sorted(found))
