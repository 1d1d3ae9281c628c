"""What NVMe/RDMA adds to the structures of layout.py: private data of rdma_cm, keyed SGLs.

Source: NVM Express RDMA Transport Specification 1.0, sections 3.1 (queues), 3.2 (capsules) and the
figures of the RDMA_CM private data.  All are little-endian; sizes are asserted at import;
tests/golden/test_nvme_rdma_bytes.py holds the bytes still.
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from hyades.common.errors import PeerError

CM_REQUEST = Struct("<HHHHH22x")  # recfmt, qid, hrqsize, hsqsize (0-based), cntlid
CM_ACCEPT = Struct("<HH28x")  # recfmt, crqsize
CM_REJECT = Struct("<HH")  # recfmt, status
KEYED_SGL = Struct("<Q3sIB")  # address, length, key, type
MAX_LENGTH = (1 << 24) - 1  # bytes that one keyed descriptor can name
RESPONSE_BYTES = 16  # a response capsule is a CQE, and nothing else
KEYED, KEYED_INVALIDATE = 0x40, 0x4F  # the second asks for a SEND that invalidates the key

assert CM_REQUEST.size == 32
assert CM_ACCEPT.size == 32
assert CM_REJECT.size == 4
assert KEYED_SGL.size == 16


class Reject(IntEnum):
    """Status of a rejected connection."""

    INVALID_LENGTH = 1
    INVALID_RECORD_FORMAT = 2
    INVALID_QUEUE_ID = 3
    INVALID_SEND_SIZE = 4  # HSQSIZE
    INVALID_RECEIVE_SIZE = 5  # HRQSIZE
    NO_RESOURCES = 6
    INVALID_RESPONDER_RESOURCES = 7  # IRD
    INVALID_INITIATOR_DEPTH = 8  # ORD


class Rejected(PeerError):  # noqa: N818 - the name states the fact
    """A connection that was, or is to be, rejected with *status*."""

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class CmRequest:
    """Private data of a connection request; *sends* and *receives* count entries."""

    qid: int
    receives: int  # that the host provides for responses (HRQSIZE)
    sends: int  # commands that it may have out, plus one: the queue's entries (HSQSIZE + 1)
    cntlid: int = 0

    def pack(self) -> bytes:
        """Return the 32 bytes."""
        return CM_REQUEST.pack(0, self.qid, self.receives, self.sends - 1, self.cntlid)


def parse_request(data: bytes, *, depth: int) -> CmRequest:
    """Return what a host asks for, at most *depth* entries; Rejected says with which status.

    rdma_cm gives the whole room for private data, so what follows the 32 bytes is not looked at.
    """
    if len(data) < CM_REQUEST.size:
        raise Rejected(f"{len(data)} bytes of private data", Reject.INVALID_LENGTH)
    recfmt, qid, receives, sends, cntlid = CM_REQUEST.unpack_from(data)
    if recfmt:
        raise Rejected(f"record format {recfmt}", Reject.INVALID_RECORD_FORMAT)
    if not 1 <= sends < depth:
        text = f"queue {qid} of {sends + 1} entries, from 2 to {depth} are possible"
        raise Rejected(text, Reject.INVALID_SEND_SIZE)
    if not receives:
        raise Rejected(f"queue {qid} without receives", Reject.INVALID_RECEIVE_SIZE)
    return CmRequest(qid, receives, sends + 1, cntlid)


def pack_accept(receives: int) -> bytes:
    """Return the private data of an accepted connection: *receives* commands may be out."""
    return CM_ACCEPT.pack(0, receives)


def parse_accept(data: bytes) -> int:
    """Return how many commands the controller has receives for; PeerError."""
    if len(data) < CM_ACCEPT.size:
        raise PeerError(f"connection accepted with {len(data)} bytes of private data")
    recfmt, receives = CM_ACCEPT.unpack_from(data)
    if recfmt or not receives:
        raise PeerError(f"connection accepted with record format {recfmt}, {receives} receives")
    return int(receives)


def pack_reject(status: int) -> bytes:
    """Return the private data of a rejected connection."""
    return CM_REJECT.pack(0, status)


def parse_reject(data: bytes) -> Rejected:
    """Return the error that a rejection means; without private data it came from below NVMe."""
    if len(data) < CM_REJECT.size or not any(data[: CM_REJECT.size]):
        return Rejected("the connection was rejected: nothing listens there", 0)
    _, status = CM_REJECT.unpack_from(data)
    known = status in Reject._value2member_map_
    name = Reject(status).name.lower().replace("_", " ") if known else "unknown reason"
    return Rejected(f"the target rejected the connection: {name} ({status})", status)


def keyed_sgl(address: int, nbytes: int, key: int) -> bytes:
    """Return a keyed data block descriptor of *nbytes* at *address* of the host."""
    return KEYED_SGL.pack(address, nbytes.to_bytes(3, "little"), key, KEYED)


def parse_keyed(sqe: bytes, at: int) -> tuple[int, int, int]:
    """Return (address, bytes, key) of the keyed descriptor at byte *at*."""
    address, nbytes, key, _ = KEYED_SGL.unpack_from(sqe, at)
    return address, int.from_bytes(nbytes, "little"), key
