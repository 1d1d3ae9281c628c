"""Bringing a controller up, and finding subsystems, as conversations without I/O.

Each is a generator: it yields a `Call`, is sent the answer (status code, result, data that was
read), and returns what was learned.  Whoever drives it owns the queue and the clock.  A refusal is
a PeerError or UsageError that says what was refused and by whom.
Source: NVM Express Base Specification 2.0, section 3.5 (initialization), 3.3.3 (Connect).
"""

from collections.abc import Generator
from dataclasses import dataclass

from hyades.common.errors import PeerError, UsageError
from hyades.common.nvme import commands
from hyades.common.nvme.identify import (
    ControllerInfo,
    DiscoveryEntry,
    NamespaceInfo,
    parse_active_list,
    parse_controller,
    parse_descriptors,
    parse_discovery_log,
    parse_namespace,
)
from hyades.common.nvme.layout import (
    DISCOVERY_ENTRY_BYTES,
    DISCOVERY_NQN,
    IDENTIFY_BYTES,
    Feature,
    LogPage,
    Property,
)
from hyades.common.nvme.status import StatusCode, describe

_ENABLE = 6 << 16 | 4 << 20 | 1  # CC: SQE 64 bytes, CQE 16 bytes, enabled
_SHUTDOWN = 1 << 14
_READY, _FATAL = 1, 2  # CSTS
_AUTHENTICATE = 2 | 4  # AUTHREQ of Connect's result: ATR, ASCR
_LOG_CHUNK = 64 * DISCOVERY_ENTRY_BYTES
_MAX_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class Call:
    """One command to be run: `source` travels in the capsule, `reads` bytes come back.

    `pause` asks the driver to let that many seconds pass first.
    """

    sqe: bytearray
    reads: int = 0
    source: bytes = b""
    pause: float = 0.0


Answer = tuple[int, int, bytes]  # status code, result, data
Conversation = Generator[Call, Answer, "Controller"]


@dataclass(frozen=True, slots=True)
class Controller:
    """What bringing up an admin queue told."""

    info: ControllerInfo
    cntlid: int
    max_depth: int  # entries of an I/O queue (CAP.MQES + 1)
    queues: int  # I/O queues granted


def connect_queue(want: commands.Connect) -> Generator[Call, Answer, int]:
    """Connect one queue and return the controller id."""
    sqe, data = commands.connect(want)
    code, result, _ = yield Call(sqe, source=data)
    if code:
        raise _refused_connect(want, code, result)
    if result >> 16 & _AUTHENTICATE:
        raise UsageError(
            f"{want.subnqn} wants in-band authentication, which is not supported here:"
            " allow this host without it, or use TLS with a pre-shared key"
        )
    return result & 0xFFFF


def bring_up(want: commands.Connect, queues: int) -> Conversation:
    """Connect the admin queue, enable the controller, identify it and ask for *queues* queues."""
    cntlid = yield from connect_queue(want)
    cap = yield from _property(Property.CAP, wide=True)
    yield from _succeed(commands.property_set(Property.CC, _ENABLE), "enabling the controller")
    yield from _until_ready(limit=(cap >> 24 & 0xFF) * 0.5 + 0.5)
    data = yield from _read(commands.identify(1), "Identify Controller")
    info = parse_controller(data)
    if info.cntlid != cntlid:
        raise PeerError(
            f"{want.subnqn}: controller {info.cntlid} answers on the connection of {cntlid}"
        )
    granted = 0
    if queues:
        ask = commands.set_features(Feature.QUEUES, (queues - 1) | (queues - 1) << 16)
        result = yield from _succeed(ask, "asking for I/O queues")
        granted = min(queues, (result & 0xFFFF) + 1, (result >> 16 & 0xFFFF) + 1)
    return Controller(info, cntlid, (cap & 0xFFFF) + 1, granted)


def read_namespaces() -> Generator[Call, Answer, list[int]]:
    """Return the ids of the active namespaces."""
    return parse_active_list((yield from _read(commands.identify(2), "the list of namespaces")))


def read_namespace(nsid: int) -> Generator[Call, Answer, NamespaceInfo]:
    """Return what one namespace is; UsageError where it is not active."""
    data = yield from _read(commands.identify(0, nsid), f"Identify Namespace {nsid}")
    if not any(data):
        raise UsageError(f"namespace {nsid} is not active on this controller: see its list")
    return parse_namespace(data)


def read_uuid(nsid: int) -> Generator[Call, Answer, bytes]:
    """Return the UUID of a namespace, b"" where the controller does not tell one."""
    code, _, data = yield Call(commands.identify(3, nsid), reads=IDENTIFY_BYTES)
    return b"" if code else parse_descriptors(data)


def read_discovery_log() -> Generator[Call, Answer, list[DiscoveryEntry]]:
    """Return the subsystems that a discovery controller knows, from one generation of its log."""
    for _ in range(8):
        head = yield from _read_log(0, DISCOVERY_ENTRY_BYTES)
        generation, count = _log_head(head)
        body, at = bytearray(head), DISCOVERY_ENTRY_BYTES
        end = DISCOVERY_ENTRY_BYTES * (1 + count)
        while at < end:
            step = min(_LOG_CHUNK, end - at)
            body += yield from _read_log(at, step)
            at += step
        again = yield from _read_log(0, DISCOVERY_ENTRY_BYTES)
        if _log_head(again)[0] == generation:
            return parse_discovery_log(bytes(body))[1]
    raise PeerError("the discovery log changes faster than it can be read")


def shut_down() -> Generator[Call, Answer, None]:
    """Tell the controller that this host is leaving."""
    yield Call(commands.property_set(Property.CC, _ENABLE | _SHUTDOWN))


def _property(offset: Property, *, wide: bool = False) -> Generator[Call, Answer, int]:
    get = commands.property_get(offset, wide=wide)
    return (yield from _succeed(get, f"reading property {offset.name}"))


def _until_ready(limit: float) -> Generator[Call, Answer, None]:
    pause, waited = 0.0, 0.0
    while True:
        code, status, _ = yield Call(commands.property_get(Property.CSTS), pause=pause)
        if code:
            raise PeerError(f"reading property CSTS was refused: {describe(code)}")
        if status & _FATAL:
            raise PeerError(f"the controller reports a fatal status: CSTS {status:#x}")
        if status & _READY:
            return
        if waited > limit:
            raise PeerError(f"the controller is not ready after {waited:.1f} s")
        pause = min(0.1, 2 * pause + 0.005)
        waited += pause


def _succeed(sqe: bytearray, what: str) -> Generator[Call, Answer, int]:
    code, result, _ = yield Call(sqe)
    if code:
        raise PeerError(f"{what} was refused: {describe(code)}")
    return result


def _read(sqe: bytearray, what: str) -> Generator[Call, Answer, bytes]:
    code, _, data = yield Call(sqe, reads=IDENTIFY_BYTES)
    if code:
        kind = UsageError if code & 0x7FF == StatusCode.INVALID_NAMESPACE else PeerError
        raise kind(f"{what} was refused: {describe(code)}")
    return data


def _read_log(offset: int, nbytes: int) -> Generator[Call, Answer, bytes]:
    sqe = commands.get_log(LogPage.DISCOVERY, nbytes, offset, nsid=0)
    code, _, data = yield Call(sqe, reads=nbytes)
    if code:
        raise PeerError(f"reading the discovery log was refused: {describe(code)}")
    return data


def _log_head(data: bytes) -> tuple[int, int]:
    generation = int.from_bytes(data[:8], "little")
    count = int.from_bytes(data[8:16], "little")
    if count > _MAX_ENTRIES:
        raise PeerError(f"the discovery log has {count} entries")
    return generation, count


def _refused_connect(want: commands.Connect, code: int, result: int) -> Exception:
    what = f"{want.subnqn} refused queue {want.qid} of host {want.hostnqn}: {describe(code)}"
    plain = code & 0x7FF
    if plain == StatusCode.CONNECT_INVALID:
        at, in_data = result & 0xFFFF, result >> 16 & 1
        field = _CONNECT_FIELDS.get(
            (in_data, at), f"byte {at} of the {'data' if in_data else 'command'}"
        )
        return UsageError(f"{what}: it does not accept {field}")
    if plain == StatusCode.CONNECT_INVALID_HOST:
        return UsageError(f"{what}: the target's list of allowed hosts does not have this host")
    return PeerError(what)


_CONNECT_FIELDS = {
    (1, 256): f"the subsystem's name (is it one of those that {DISCOVERY_NQN} lists?)",
    (1, 512): "the host's name",
    (1, 0): "the host id",
    (1, 16): "the controller id",
    (0, 42): "the queue id",
    (0, 44): "the queue's depth",
}
