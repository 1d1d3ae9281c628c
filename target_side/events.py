"""What a target reports: typed events, and the sink that writes them as lines.

Events are rare ones, of connections and errors; what happens with every command is counted
(counters.py) and not reported.
"""

import json
import threading
import time
from typing import Protocol, TextIO

import msgspec

# Why a queue ends in order.
BY_HOST = "closed by the host"
WITH_ADMIN_QUEUE = "the controller's admin queue is gone"
AT_STOP = "the target stops"
_ORDERLY = frozenset((BY_HOST, WITH_ADMIN_QUEUE, AT_STOP))


class Listening(msgspec.Struct, frozen=True, tag=True):
    """The target accepts connections."""

    address: str
    nqn: str
    namespaces: list[str]


class Metrics(msgspec.Struct, frozen=True, tag=True):
    """Metrics can be had there."""

    url: str


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """A connection has become a queue."""

    peer: str
    host: str
    subsystem: str
    controller: int
    queue: int
    depth: int
    digests: int
    tls: bool


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A connection or a Connect was refused."""

    peer: str
    reason: str


class Closed(msgspec.Struct, frozen=True, tag=True):
    """A connection is over."""

    peer: str
    controller: int
    queue: int
    reason: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A command has failed for a reason that lies here: a medium, or space."""

    peer: str
    command: str
    namespace: str
    lba: int
    blocks: int
    status: str


class ViewOpened(msgspec.Struct, frozen=True, tag=True):
    """A host has got the view that it asked for; *memory* is what its stage may use."""

    host: str
    controller: int
    namespace: int
    view: str
    blocks: int
    memory: int


class ViewRefused(msgspec.Struct, frozen=True, tag=True):
    """A host has not got the view that it asked for."""

    host: str
    controller: int
    status: str
    reason: str


class ViewFailed(msgspec.Struct, frozen=True, tag=True):
    """A part of a view could not be computed."""

    view: str
    reason: str


class ViewClosed(msgspec.Struct, frozen=True, tag=True):
    """A view that a host had asked for is gone."""

    view: str


class Expired(msgspec.Struct, frozen=True, tag=True):
    """A host was silent for longer than its keep-alive timeout."""

    host: str
    controller: int
    seconds: float


class Stopping(msgspec.Struct, frozen=True, tag=True):
    """The target takes no more connections, and waits for what is in flight."""

    connections: int


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The target has ended; *cut* connections had commands in flight."""

    cut: int


Event = (
    Listening | Metrics | Accepted | Refused | Closed | Failed | Expired | Stopping | Stopped
    | ViewOpened | ViewRefused | ViewFailed | ViewClosed
)  # fmt: skip


class Sink(Protocol):
    """Takes events from any thread; must be quick and must not raise."""

    def emit(self, event: Event) -> None:
        """Take one event."""
        ...


class NullSink:
    """Forgets every event."""

    def emit(self, event: Event) -> None:
        """Forget it."""


class LineSink:
    """Writes each event as one line, as JSON or as text.

    Text is for people: of a host that comes and goes in order it has the admin queue alone.
    """

    def __init__(self, stream: TextIO, *, as_json: bool) -> None:
        self._stream: TextIO | None = stream
        self._as_json = as_json
        self._lock = threading.Lock()

    def emit(self, event: Event) -> None:
        """Write it; a stream that is gone is no reason to stop serving."""
        if not self._as_json and _is_minor(event):
            return
        fields = msgspec.to_builtins(event)
        name = fields.pop("type")
        now = time.time()
        if self._as_json:
            line = json.dumps({"time": round(now, 3), "event": name.lower(), **fields})
        else:
            stamp = time.strftime("%H:%M:%S", time.localtime(now))
            rest = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
            line = f"{stamp} {name.lower()} {rest}"
        with self._lock:
            if self._stream is None:
                return
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                self._stream = None


def _is_minor(event: Event) -> bool:
    """Return whether *event* is of an I/O queue that does what its admin queue tells already."""
    if isinstance(event, Closed):
        return event.queue > 0 and event.reason in _ORDERLY
    return isinstance(event, Accepted) and event.queue > 0


def _quoted(value: object) -> str:
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    return json.dumps(text) if " " in text or not text else text
