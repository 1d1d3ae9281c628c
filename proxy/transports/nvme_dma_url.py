"""The URL of a namespace that a target of this machine serves over shared memory:

``dma:///run/hyades.sock/nqn.2026-01.org.example:features?ns=1&queues=2&buffer=1MiB``.

The path is that of the target's socket, then the name of the subsystem, which begins with nqn.
Options: those of nvme+rdma:// (nvme_url.py), and buffer (1MiB, what one piece of a transfer has at
most; the target may take less), buffers (4, of a queue each way), zerocopy (0; 1: pages are moved
straight between the target and the slots, without buffers).
"""

from dataclasses import dataclass, fields

from hyades.common.errors import UsageError
from hyades.common.nvme.commands import check_nqn
from hyades.common.nvme.dma import LEAST_BUFFER, MOST_BUFFER, MOST_BUFFERS
from hyades.common.units import MIB, format_size
from hyades.proxy.transports.nvme_url import Address, Options, read_options
from hyades.proxy.urls import Url

_EXAMPLE = "dma:///run/hyades.sock/nqn.2026-01.org.example:features?ns=1"


@dataclass(frozen=True, slots=True)
class SocketPath(Address):
    """Where a target listens on this machine: `host` is a path."""

    def __str__(self) -> str:
        return self.host


@dataclass(frozen=True, slots=True, kw_only=True)
class DmaOptions(Options):
    """What a URL asks for; sizes in bytes."""

    buffer: int = MIB
    buffers: int = 4
    zerocopy: bool = False

    @property
    def scheme(self) -> str:
        """Return dma."""
        return "dma"


def parse(url: Url) -> DmaOptions:
    """Return what *url* says; UsageError where it cannot be meant."""
    path, slash, name = url.path.rpartition("/nqn.")
    if not slash or not path.startswith("/"):
        raise UsageError(f"{url}: write {_EXAMPLE}: the target's socket, then the subsystem")
    buffer, buffers = url.size("buffer", MIB), url.integer("buffers", 4, least=1)
    if not LEAST_BUFFER <= buffer <= MOST_BUFFER:
        raise UsageError(
            f"{url}: buffer is from {format_size(LEAST_BUFFER)} to {format_size(MOST_BUFFER)}"
        )
    if buffers > MOST_BUFFERS:
        raise UsageError(f"{url}: buffers is at most {MOST_BUFFERS}")
    zerocopy = url.flag("zerocopy", False)
    subnqn = check_nqn(f"nqn.{name}")
    base = read_options(url, "dma", (SocketPath(path, 0),), subnqn)
    known = {field.name: getattr(base, field.name) for field in fields(base)}
    return DmaOptions(**known, buffer=buffer, buffers=buffers, zerocopy=zerocopy)
