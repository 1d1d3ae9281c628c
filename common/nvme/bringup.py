"""Bringing a controller up, and finding subsystems, as conversations without I/O.

Each is a generator: it yields a `Call`, is sent the answer (status code, result, data that was
read), and returns what was learned.  Whoever drives it owns the queue and the clock.  A refusal is
a PeerError or UsageError that says what was refused and by whom.
Source: NVM Express Base Specification 2.0, section 3.5 (initialization), 3.3.3 (Connect).
"""

from collections.abc import Generator
from dataclasses import dataclass, replace

from hyades.common.errors import DataError, PeerError, UsageError
from hyades.common.layout import BLOCK
from hyades.common.nvme import commands, vendor
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
    Opcode,
    Property,
)
from hyades.common.nvme.status import DNR, StatusCode, describe
from hyades.common.viewspec import ViewHead, head_blocks, parse_head

_ENABLE = 6 << 16 | 4 << 20 | 1  # CC: SQE 64 bytes, CQE 16 bytes, enabled
_SHUTDOWN = 1 << 14
_READY, _FATAL = 1, 2  # CSTS
_AUTHENTICATE = 2 | 4  # AUTHREQ of Connect's result: ATR, ASCR
_LOG_CHUNK = 64 * DISCOVERY_ENTRY_BYTES
_MAX_ENTRIES = 4096
_TRIES = 3  # of a command whose data was damaged on the way


@dataclass(frozen=True, slots=True)
class Call:
    """One command to be run: `source` goes along with it, `reads` bytes come back.

    `pause` asks the driver to let that many seconds pass first.  A `slow` one may take as long as
    the controller likes: it is waited for while keep-alives are answered.
    """

    sqe: bytearray
    reads: int = 0
    source: bytes = b""
    pause: float = 0.0
    slow: bool = False


Answer = tuple[int, int, bytes]  # status code, result, data
Conversation = Generator[Call, Answer, "Controller"]


@dataclass(frozen=True, slots=True)
class Controller:
    """What bringing up an admin queue told."""

    info: ControllerInfo
    cntlid: int
    max_depth: int  # entries of an I/O queue (CAP.MQES + 1)
    queues: int  # I/O queues granted


class ViewRefused(UsageError):  # noqa: N818
    """A target does not make a view for this host; asking again does not help."""


class ViewDeferred(ViewRefused):
    """A target does not make a view now: others have what it takes."""


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


def open_view(nsid: int, request: bytes, part: int) -> Generator[Call, Answer, int]:
    """Ask for a view of the volume in namespace *nsid*; return the id of the view's namespace.

    *request* goes in parts of at most *part* bytes, a multiple of 4; the last one is answered when
    the view can be read.  ViewRefused says why not, and what to change.
    """
    result = 0
    for sqe, data in vendor.create_view(nsid, request, part):
        code, result, _ = yield from _persist(Call(sqe, source=bytes(data), slow=True))
        if code:
            raise _refused_view(nsid, code)
    return vendor.parse_answer(result)


def read_blocks(
    nsid: int, info: NamespaceInfo, lba: int, count: int, most: int
) -> Generator[Call, Answer, bytes]:
    """Return *count* blocks of 4096 bytes from *lba* on, on an I/O queue, *most* bytes a command.

    *most* is a multiple of 4096, *info* that of the namespace, whose own blocks may be smaller.
    """
    ratio, data = BLOCK // info.block_bytes, bytearray()
    while len(data) < count * BLOCK:
        nbytes = min(most, count * BLOCK - len(data))
        at = (lba * BLOCK + len(data)) // info.block_bytes
        sqe = commands.transfer(Opcode.READ, nsid, at, nbytes // BLOCK * ratio)
        code, _, part = yield from _persist(Call(sqe, reads=nbytes))
        if code:
            raise PeerError(f"reading LBA {at} of namespace {nsid} failed: {describe(code)}")
        data += part
    return bytes(data)


def read_view_head(
    nsid: int, info: NamespaceInfo, request: bytes, most: int
) -> Generator[Call, Answer, ViewHead]:
    """Return the head of the view in namespace *nsid*, on an I/O queue.

    DataError where it is damaged, PeerError where it is not what *request* asked for.
    """
    _check_view_blocks(nsid, info, 1)
    first = yield from read_blocks(nsid, info, 0, 1, most)
    count = head_blocks(first)
    _check_view_blocks(nsid, info, count)
    rest = yield from read_blocks(nsid, info, 1, count - 1, most)
    head = parse_head(first + rest)
    _check_view_blocks(nsid, info, head.nblocks)
    vendor.check_answered(head.spec, request)
    return head


def _check_view_blocks(nsid: int, info: NamespaceInfo, needed: int) -> None:
    has = info.blocks * info.block_bytes // BLOCK
    if has < needed or info.block_bytes > BLOCK:
        raise DataError(
            f"the view in namespace {nsid} has {info.blocks} blocks of {info.block_bytes} bytes,"
            f" its head says at least {needed} of {BLOCK}"
        )


def _persist(call: Call) -> Generator[Call, Answer, Answer]:
    """Run *call*, and again where a data digest was wrong."""
    tries = 0
    while True:
        answer = yield replace(call, sqe=bytearray(call.sqe))
        tries += 1
        if answer[0] & ~DNR != StatusCode.TRANSIENT_TRANSPORT or tries == _TRIES:
            return answer


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


def _refused_view(nsid: int, code: int) -> Exception:
    what = f"the target makes no view of namespace {nsid}: {describe(code)}"
    plain = code & 0x7FF
    if plain == StatusCode.NAMESPACE_NO_CAPACITY:
        kind = ViewRefused if code & DNR else ViewDeferred
        return kind(
            f"{what}: too little memory for it: raise --stage-memory on the target, or ask for"
            " fewer views at a time"
        )
    fix = _VIEW_REFUSALS.get(plain)
    return PeerError(what) if fix is None else ViewRefused(f"{what}: {fix}")


_VIEW_REFUSALS: dict[int, str] = {
    StatusCode.INVALID_OPCODE: "it has no views: serve the volume with hyades serve, or read it"
    " without --stage",
    StatusCode.OPERATION_DENIED: "this host may not ask: name it with --view-host on the target,"
    " and let --views be more than 0",
    StatusCode.INVALID_NAMESPACE: "there is no volume for this host: see ?ns=N",
    StatusCode.INVALID_FIELD: "it cannot meet the request; its log says why (viewrefused)",
    StatusCode.NAMESPACE_NO_IDENTIFIER: "too many views: raise --views on the target",
    StatusCode.READ_ERROR: "the volume there is damaged, or none; its log says what (viewrefused)",
}
_CONNECT_FIELDS = {
    (1, 256): f"the subsystem's name (is it one of those that {DISCOVERY_NQN} lists?)",
    (1, 512): "the host's name",
    (1, 0): "the host id",
    (1, 16): "the controller id",
    (0, 42): "the queue id",
    (0, 44): "the queue's depth",
}
