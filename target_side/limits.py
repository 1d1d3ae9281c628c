"""What a target takes at most; whatever exceeds a limit is refused, and the log says which."""

from dataclasses import dataclass

from hyades.common.errors import UsageError
from hyades.common.units import KIB, MIB

_LONGEST = 1e6  # seconds


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts, bytes and seconds."""

    connections: int = 1024
    queues: int = 16  # I/O queues of a controller
    depth: int = 128  # entries of a queue (CAP.MQES + 1)
    max_transfer: int = MIB  # bytes of a command (MDTS)
    in_capsule: int = 8 * KIB  # bytes of data that may come along with a command
    max_data_pdu: int = MIB  # bytes of an H2CData (MAXH2CDATA)
    buffers: int = 256 * MIB  # bytes of all buffers that data is on its way in
    dma_buffer: int = MIB  # bytes of a piece of data in shared memory, at most
    handshake: float = 10.0  # seconds from accept to the end of Connect
    stall: float = 30.0  # seconds in which a peer that owes or is owed data must move some
    grace: float = 10.0  # seconds that a stop waits for what is in flight

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise UsageError(problem)


@dataclass(frozen=True, slots=True)
class ViewLimits:
    """Which views a host may ask for; `hosts` may, where it is not None."""

    count: int = 8  # of a controller, those that are being made included; 0: none
    request: int = 16 * MIB  # bytes of a request, its weights included
    hosts: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.count <= 1000:  # a list of namespaces has room for 1024
            raise UsageError(f"views {self.count}: from 0 to 1000")
        if self.request < 4 * KIB:
            raise UsageError(f"view-request {self.request}: at least 4KiB")

    def admits(self, hostnqn: str) -> bool:
        """Return whether this host may ask for views."""
        return self.count > 0 and (self.hosts is None or hostnqn in self.hosts)


def _problem(limits: Limits) -> str:
    transfer = limits.max_transfer
    if transfer < 8 * KIB or transfer & (transfer - 1) or transfer > 64 * MIB:
        return f"max-transfer {transfer}: a power of two from 8KiB to 64MiB"
    if limits.buffers < transfer:
        return f"buffers {limits.buffers}: at least max-transfer, {transfer}"
    if not 32 <= limits.depth <= 4096:
        return f"depth {limits.depth}: from 32, which every admin queue has, to 4096"
    if not 1 <= limits.queues <= 128:
        return f"queues {limits.queues}: from 1 to 128"
    if limits.connections < 1:
        return f"connections {limits.connections}: at least 1"
    if limits.in_capsule % 16 or not 1024 <= limits.in_capsule <= 256 * KIB:
        return f"in-capsule {limits.in_capsule}: a multiple of 16 from 1KiB to 256KiB"
    if limits.max_data_pdu % 4 or not 4 * KIB <= limits.max_data_pdu <= 64 * MIB:
        return f"max-data-pdu {limits.max_data_pdu}: a multiple of 4 from 4KiB to 64MiB"
    if limits.dma_buffer < 4 * KIB:
        return f"dma-buffer {limits.dma_buffer}: at least 4KiB"
    for name in ("handshake", "stall", "grace"):
        if not 0 < (seconds := getattr(limits, name)) <= _LONGEST:  # NaN is not, either
            return f"{name} {seconds:g}: more than 0 seconds, at most {_LONGEST:g}"
    return ""
