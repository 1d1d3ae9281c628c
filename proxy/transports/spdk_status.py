"""What an NVMe status means for a request: an answer, or a command to give again."""

from typing import Any

from hyades.common.jit import jit
from hyades.common.layout import Status

AGAIN = 1  # besides the words of Status, which are 0 or negative

_OK, _IO, _NO_SPACE = int(Status.OK), int(Status.IO), int(Status.NO_SPACE)
_LOST, _INVALID = int(Status.LOST), int(Status.INVALID)
# status code types (NVM Express Base Specification 2.0, figure 93)
_GENERIC, _SPECIFIC, _MEDIA, _PATH = 0, 1, 2, 3


@jit
def outcome(status: Any) -> Any:
    """Return the Status word for an NVMe status field without its phase bit, or AGAIN.

    The field: SC in bits 0-7, SCT in 8-10, DNR in 14 (figures 94 to 98 for the codes).
    """
    code, kind, final = status & 0xFF, status >> 8 & 7, status >> 14 & 1
    if kind == _GENERIC:
        return _generic(code, final)
    if kind == _PATH:
        # internal error and persistent loss are the controller's last word only with DNR
        return _LOST if final and code in (0x00, 0x01) else AGAIN
    if (kind == _MEDIA and code == 0x86) or (kind == _SPECIFIC and code == 0x82):
        return _INVALID  # access denied, read-only range
    return _IO


@jit
def _generic(code: Any, final: Any) -> Any:
    if code == 0:
        return _OK
    if code in (0x07, 0x08):  # aborted: by request, or with its queue
        return AGAIN
    if code in (0x21, 0x22, 0x82):  # interrupted, transport error, namespace not ready
        return _IO if final else AGAIN
    if code in (0x01, 0x02, 0x0B, 0x20, 0x80):  # opcode, field, namespace, write protected, range
        return _INVALID
    if code == 0x81:  # capacity exceeded
        return _NO_SPACE
    return _IO
