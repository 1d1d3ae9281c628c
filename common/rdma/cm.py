"""Connections of RDMA: librdmacm through ctypes, as far as NVMe/RDMA needs it.

pyverbs 44 has a class for it (CMID) that cannot be used here: its calls wait without releasing the
interpreter's lock, and neither the descriptor of an event channel nor the status, peer and depths
of an event can be had.  So this is the connection part only.  The queue pair is made by pyverbs
(endpoint.py) and is not librdmacm's: the peer is told its number, and `attributes` says how it must
be set for each state.

Rules:
1. Nothing waits: the descriptor of a channel is readable when `take` has an event.
2. An event is copied and acknowledged at once; `Identifier.close` would wait for that.
3. Failures raise OSError with the errno of librdmacm.
Structures: rdma/rdma_cma.h and infiniband/verbs.h of rdma-core (their layout is the libraries' ABI,
RDMACM_1.0 and IBVERBS_1.1); sizes and offsets are asserted at import.
"""

import ctypes
import os
import socket
import struct
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from hyades.common.addresses import resolve
from hyades.common.rdma.library import manager

_TCP_PORTS = 0x0106  # RDMA_PS_TCP
_BACKLOG = 128


class Kind(IntEnum):
    """Types of events."""

    ADDRESS_RESOLVED = 0
    ADDRESS_ERROR = 1
    ROUTE_RESOLVED = 2
    ROUTE_ERROR = 3
    CONNECT_REQUEST = 4
    CONNECT_RESPONSE = 5
    CONNECT_ERROR = 6
    UNREACHABLE = 7
    REJECTED = 8
    ESTABLISHED = 9
    DISCONNECTED = 10
    DEVICE_REMOVAL = 11
    ADDRESS_CHANGE = 14
    TIMEWAIT_EXIT = 15


class _Parameters(Structure):
    _fields_ = (
        ("private_data", c_void_p), ("private_data_len", c_uint8),
        ("responder_resources", c_uint8), ("initiator_depth", c_uint8), ("flow_control", c_uint8),
        ("retry_count", c_uint8), ("rnr_retry_count", c_uint8), ("srq", c_uint8),
        ("qp_num", c_uint32),
    )  # fmt: skip


class _Event(Structure):
    _fields_ = (
        ("id", c_void_p), ("listen_id", c_void_p), ("event", c_int), ("status", c_int),
        ("conn", _Parameters), ("rest_of_union", c_uint8 * 32),
    )  # fmt: skip


class _Identifier(Structure):
    _fields_ = (
        ("verbs", c_void_p), ("channel", c_void_p), ("context", c_void_p), ("qp", c_void_p),
        ("source", c_uint8 * 128), ("destination", c_uint8 * 128),
    )  # fmt: skip


class _Channel(Structure):
    _fields_ = (("fd", c_int),)


class _Route(Structure):
    _fields_ = (
        ("dgid", c_uint64 * 2), ("flow_label", c_uint32), ("sgid_index", c_uint8),
        ("hop_limit", c_uint8), ("traffic_class", c_uint8),
    )  # fmt: skip


class _Handle(Structure):
    _fields_ = (
        ("grh", _Route), ("dlid", c_uint16), ("sl", c_uint8), ("src_path_bits", c_uint8),
        ("static_rate", c_uint8), ("is_global", c_uint8), ("port_num", c_uint8),
    )  # fmt: skip


class Attributes(Structure):
    """struct ibv_qp_attr."""

    _fields_ = (
        ("qp_state", c_uint32), ("cur_qp_state", c_uint32), ("path_mtu", c_uint32),
        ("path_mig_state", c_uint32), ("qkey", c_uint32), ("rq_psn", c_uint32),
        ("sq_psn", c_uint32), ("dest_qp_num", c_uint32), ("qp_access_flags", c_uint32),
        ("cap", c_uint32 * 5), ("ah_attr", _Handle), ("alt_ah_attr", _Handle),
        ("pkey_index", c_uint16), ("alt_pkey_index", c_uint16), ("en_sqd_async_notify", c_uint8),
        ("sq_draining", c_uint8), ("max_rd_atomic", c_uint8), ("max_dest_rd_atomic", c_uint8),
        ("min_rnr_timer", c_uint8), ("port_num", c_uint8), ("timeout", c_uint8),
        ("retry_cnt", c_uint8), ("rnr_retry", c_uint8), ("alt_port_num", c_uint8),
        ("alt_timeout", c_uint8), ("rate_limit", c_uint32),
    )  # fmt: skip


assert ctypes.sizeof(_Parameters) == 24
assert ctypes.sizeof(_Event) == 80
assert ctypes.sizeof(Attributes) == 144
assert _Identifier.source.offset == 32
assert Attributes.ah_attr.offset == 56
assert Attributes.port_num.offset == 129


@dataclass(frozen=True, slots=True)
class Event:
    """What happened to the identifier *key*; for a request, *listener* is who listens."""

    kind: int
    key: int
    listener: int
    status: int
    private: bytes
    responder_resources: int  # reads that the peer lets us have out are `initiator_depth`
    initiator_depth: int


class Channel:
    """Where events of identifiers arrive."""

    def __init__(self) -> None:
        pointer: Any = _call("rdma_create_event_channel", restype=POINTER(_Channel))
        if not pointer:
            raise _error("rdma_create_event_channel")
        self._pointer = pointer
        self.fd = int(pointer.contents.fd)
        os.set_blocking(self.fd, False)

    def take(self) -> Event | None:
        """Return the next event, None where there is none."""
        pointer = POINTER(_Event)()
        if _call("rdma_get_cm_event", self._pointer, byref(pointer)):
            error = _error("rdma_get_cm_event")
            if isinstance(error, BlockingIOError):
                return None
            raise error
        raw, conn = pointer.contents, pointer.contents.conn
        private = b""
        if conn.private_data and raw.event in (
            Kind.CONNECT_REQUEST, Kind.CONNECT_RESPONSE, Kind.REJECTED, Kind.ESTABLISHED
        ):  # fmt: skip
            private = ctypes.string_at(conn.private_data, conn.private_data_len)
        found = Event(
            raw.event, raw.id, raw.listen_id or 0, raw.status, private, conn.responder_resources,
            conn.initiator_depth,
        )  # fmt: skip
        _call("rdma_ack_cm_event", pointer)
        return found

    def close(self) -> None:
        """Free it, after the identifiers that it serves."""
        _call("rdma_destroy_event_channel", self._pointer, restype=None)


class Identifier:
    """One end of a connection, or a listener."""

    def __init__(self, channel: Channel, *, key: int = 0) -> None:
        """Make one, or take over the one that a CONNECT_REQUEST brought (*key*)."""
        if not key:
            pointer = c_void_p()
            kind = c_int(_TCP_PORTS)
            _check("rdma_create_id", channel._pointer, byref(pointer), None, kind)
            assert pointer.value
            key = pointer.value
        self.key = key
        self._raw = _Identifier.from_address(key)

    @property
    def device(self) -> str:
        """Name of the RDMA device, once the address is bound or resolved to one."""
        if not self._raw.verbs:
            return ""
        # struct ibv_context begins with a pointer to its struct ibv_device.
        device = c_void_p.from_address(self._raw.verbs)
        library = ctypes.CDLL("libibverbs.so.1")
        library.ibv_get_device_name.restype = c_char_p
        library.ibv_get_device_name.argtypes = [c_void_p]
        return (library.ibv_get_device_name(device) or b"").decode()

    @property
    def local(self) -> tuple[str, int]:
        """Address of this side."""
        return _parse_address(bytes(self._raw.source))

    @property
    def peer(self) -> tuple[str, int]:
        """Address of the other side."""
        return _parse_address(bytes(self._raw.destination))

    def bind(self, address: bytes) -> None:
        """Take a local address."""
        _check("rdma_bind_addr", self._key, address)

    def listen(self) -> None:
        """Let connections come."""
        _check("rdma_listen", self._key, _BACKLOG)

    def resolve_address(self, address: bytes, seconds: float) -> None:
        """Find the device that leads there: ADDRESS_RESOLVED follows."""
        _check("rdma_resolve_addr", self._key, None, address, int(seconds * 1000))

    def resolve_route(self, seconds: float) -> None:
        """Find the way: ROUTE_RESOLVED follows."""
        _check("rdma_resolve_route", self._key, int(seconds * 1000))

    def connect(self, qp_num: int, private: bytes, reads: int) -> None:
        """Ask for a connection: CONNECT_RESPONSE follows; *reads* each way may be out at once."""
        _check("rdma_connect", self._key, byref(_parameters(qp_num, private, reads, reads)))

    def establish(self) -> None:
        """Say that the queue pair is ready, after CONNECT_RESPONSE."""
        _check("rdma_establish", self._key)

    def accept(self, qp_num: int, private: bytes, *, serve: int, have: int) -> None:
        """Take a connection: the peer may have *serve* reads out, this side *have*."""
        _check("rdma_accept", self._key, byref(_parameters(qp_num, private, serve, have)))

    def reject(self, private: bytes) -> None:
        """Refuse a connection."""
        _check("rdma_reject", self._key, private, c_uint8(len(private)))

    def attributes(self, state: int) -> tuple[Attributes, int]:
        """Return how the queue pair is set for *state*, and the mask of what is meant."""
        found, mask = Attributes(qp_state=state), c_int()
        _check("rdma_init_qp_attr", self._key, byref(found), byref(mask))
        return found, mask.value

    def disconnect(self) -> None:
        """End the connection; one that is over already is fine."""
        _call("rdma_disconnect", self._key)

    def close(self) -> None:
        """Free it; its events must have been taken."""
        if self.key:
            _call("rdma_destroy_id", self._key)
            self.key = 0

    @property
    def _key(self) -> c_void_p:
        return c_void_p(self.key)


def socket_address(host: str, port: int) -> bytes:
    """Return the sockaddr of *host*; OSError where it has none."""
    family, _, _, _, where = resolve(host, port)[0]
    head = struct.pack("=H", family) + struct.pack("!H", port)
    raw = socket.inet_pton(family, str(where[0]).partition("%")[0])
    if family == socket.AF_INET:
        return head + raw + bytes(8)
    return head + bytes(4) + raw + struct.pack("=I", int(where[3]) if len(where) > 3 else 0)


def _parse_address(raw: bytes) -> tuple[str, int]:
    (family,), (port,) = struct.unpack("=H", raw[:2]), struct.unpack("!H", raw[2:4])
    if family == socket.AF_INET:
        return socket.inet_ntop(family, raw[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, raw[8:24]), port
    return "", 0


def _parameters(qp_num: int, private: bytes, serve: int, have: int) -> _Parameters:
    buffer = ctypes.create_string_buffer(private, len(private))
    found = _Parameters(
        private_data=ctypes.cast(buffer, c_void_p), private_data_len=len(private),
        responder_resources=serve, initiator_depth=have, flow_control=1, retry_count=7,
        rnr_retry_count=7, qp_num=qp_num,
    )  # fmt: skip
    found.buffer = buffer  # type: ignore[attr-defined]  # kept as long as the structure
    return found


def _call(name: str, *arguments: object, restype: Any = c_int) -> Any:
    function = getattr(manager(), name)
    function.restype = restype
    return function(*arguments)


def _check(name: str, *arguments: object) -> None:
    if _call(name, *arguments):
        raise _error(name)


def _error(name: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{name}: {os.strerror(number)}")
