"""Status codes of completions, as numbers SCT << 8 | SC, with DNR (do not retry) in bit 14.

In a completion the code stands from bit 1 on, above the phase bit.
Source: NVM Express Base Specification 2.0, figures 'Status Code' to 'Fabrics Command Status'.
"""

from enum import IntEnum

from hyades.common.layout import Status

DNR = 1 << 14
_CODE = 0x7FF


class StatusCode(IntEnum):
    """What a controller answers."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    COMMAND_ID_CONFLICT = 0x003
    TRANSFER_ERROR = 0x004
    INTERNAL = 0x006
    ABORTED = 0x007
    ABORTED_QUEUE_DELETED = 0x008
    INVALID_NAMESPACE = 0x00B
    SEQUENCE_ERROR = 0x00C
    INVALID_SGL_SEGMENT = 0x00D
    SGL_LENGTH_INVALID = 0x00F
    SGL_TYPE_INVALID = 0x011
    OPERATION_DENIED = 0x015
    INVALID_OFFSET = 0x016
    KEEP_ALIVE_INVALID = 0x01A
    WRITE_PROTECTED = 0x020
    TRANSIENT_TRANSPORT = 0x022  # a data digest was wrong: send it again
    NOT_READY = 0x082  # namespace
    LBA_OUT_OF_RANGE = 0x080
    CAPACITY_EXCEEDED = 0x081
    INVALID_QUEUE_ID = 0x101
    ASYNC_EVENT_LIMIT = 0x105
    INVALID_LOG_PAGE = 0x109
    FEATURE_NOT_SAVEABLE = 0x10D
    FEATURE_NOT_CHANGEABLE = 0x10E
    NAMESPACE_NO_CAPACITY = 0x115
    NAMESPACE_NO_IDENTIFIER = 0x116  # too many
    CONNECT_INCOMPATIBLE = 0x180
    CONNECT_BUSY = 0x181
    CONNECT_INVALID = 0x182  # result: where the bad parameter stands
    CONNECT_RESTART_DISCOVERY = 0x183
    CONNECT_INVALID_HOST = 0x184
    WRITE_FAULT = 0x280
    READ_ERROR = 0x281  # unrecovered
    PATH_ERROR = 0x300


_TRANSPORT = {
    StatusCode.SUCCESS: Status.OK,
    StatusCode.INVALID_OPCODE: Status.INVALID,
    StatusCode.INVALID_FIELD: Status.INVALID,
    StatusCode.INVALID_NAMESPACE: Status.INVALID,
    StatusCode.OPERATION_DENIED: Status.INVALID,
    StatusCode.WRITE_PROTECTED: Status.INVALID,
    StatusCode.LBA_OUT_OF_RANGE: Status.INVALID,
    StatusCode.CAPACITY_EXCEEDED: Status.NO_SPACE,
    StatusCode.NAMESPACE_NO_CAPACITY: Status.NO_SPACE,
    StatusCode.NAMESPACE_NO_IDENTIFIER: Status.NO_SPACE,
}
# The connection or controller went away under the command: it may be sent again on another path.
_PATH_LOST = {StatusCode.ABORTED, StatusCode.ABORTED_QUEUE_DELETED}


def to_transport(code: int) -> Status:
    """Return the completion status of hyades/proxy/transport.py for an NVMe status code."""
    return _TRANSPORT.get(StatusCode(code & _CODE), Status.IO) if known(code) else Status.IO


def lost_path(code: int) -> bool:
    """Return whether *code* says that the path, not the command, failed."""
    return code & _CODE in _PATH_LOST or code & 0x700 == StatusCode.PATH_ERROR


def known(code: int) -> bool:
    """Return whether *code* is one of StatusCode."""
    return code & _CODE in StatusCode._value2member_map_


def describe(code: int) -> str:
    """Return the code's name and numbers, for messages."""
    kind, number = code >> 8 & 7, code & 0xFF
    name = StatusCode(code & _CODE).name.lower().replace("_", " ") if known(code) else "status"
    return f"{name} (SCT {kind:#x} SC {number:#04x}{', do not retry' if code & DNR else ''})"
