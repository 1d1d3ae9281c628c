"""The structures of NVMe over Fabrics and NVMe/TCP that cross the wire; all are little-endian.

Sources: NVM Express Base Specification 2.0 (SQE, CQE, Connect, properties, Identify) and NVM
Express TCP Transport Specification 1.0 (PDUs, section 3.6).  Sizes are asserted at import;
tests/golden/test_nvme_bytes.py holds the bytes still.
"""

from enum import IntEnum, IntFlag
from struct import Struct

DISCOVERY_NQN = "nqn.2014-08.org.nvmexpress.discovery"
MAX_NQN = 223


class PduType(IntEnum):
    """TCP transport, figure 'PDU types'."""

    IC_REQ = 0x00
    IC_RESP = 0x01
    H2C_TERM = 0x02
    C2H_TERM = 0x03
    CAPSULE_CMD = 0x04
    CAPSULE_RESP = 0x05
    H2C_DATA = 0x06
    C2H_DATA = 0x07
    R2T = 0x09


class PduFlag(IntFlag):
    """Flags of the common header; LAST and SUCCESS belong to data PDUs."""

    HDGST = 1
    DDGST = 2
    LAST = 4
    SUCCESS = 8


class Fatal(IntEnum):
    """Fatal error status (FES) of a TermReq."""

    HEADER_FIELD = 1  # FEI: byte offset of the field
    SEQUENCE = 2
    HEADER_DIGEST = 3  # FEI: the digest that came
    OUT_OF_RANGE = 4  # of the data of a command or R2T
    LIMIT_EXCEEDED = 5  # R2T or data transfer limit
    UNSUPPORTED = 6  # FEI: byte offset of the parameter


class Opcode(IntEnum):
    """NVM commands, on an I/O queue."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02
    WRITE_ZEROES = 0x08
    DATASET_MANAGEMENT = 0x09


class Admin(IntEnum):
    """Admin commands."""

    GET_LOG = 0x02
    IDENTIFY = 0x06
    ABORT = 0x08
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT = 0x0C
    KEEP_ALIVE = 0x18


FABRICS = 0x7F  # opcode of every Fabrics command; byte 4 of the SQE says which


class Fabrics(IntEnum):
    """Fabrics command types."""

    PROPERTY_SET = 0
    CONNECT = 1
    PROPERTY_GET = 4


class Property(IntEnum):
    """Offsets of controller properties."""

    CAP = 0x00
    VS = 0x08
    CC = 0x14
    CSTS = 0x1C


class Feature(IntEnum):
    """Feature identifiers."""

    ARBITRATION = 0x01
    POWER = 0x02
    TEMPERATURE = 0x04
    ERROR_RECOVERY = 0x05
    WRITE_CACHE = 0x06
    QUEUES = 0x07
    ASYNC_EVENTS = 0x0B
    KEEP_ALIVE = 0x0F
    HOST_ID = 0x81


class LogPage(IntEnum):
    """Log page identifiers."""

    SUPPORTED = 0x00
    ERRORS = 0x01
    HEALTH = 0x02
    FIRMWARE = 0x03
    CHANGED_NAMESPACES = 0x04
    EFFECTS = 0x05
    DISCOVERY = 0x70


class Vendor(IntEnum):
    """Vendor-specific admin commands; bits 0 and 1 say which way data goes.  See vendor.py."""

    DELETE_VIEW = 0xC0
    CREATE_VIEW = 0xC1


class Sgl(IntEnum):
    """Byte 15 of an SGL descriptor: type and subtype."""

    IN_CAPSULE = 0x01  # data block, offset
    TRANSPORT = 0x5A  # transport data block: the data travels in PDUs of its own
    KEYED = 0x40  # keyed data block (RDMA)


COMMON_HEADER = Struct("<BBBBI")  # type, flags, hlen, pdo, plen
IC_BODY = Struct("<HBBI112x")  # pfv, hpda/cpda, digests, maxr2t/maxh2cdata
DATA_BODY = Struct("<HHIII")  # cccid, ttag, datao/r2to, datal/r2tl, reserved
TERM_BODY = Struct("<HI10x")  # fes, fei
# opcode, flags, cid, nsid (its first byte: fctype), then the SGL at 24 and CDW10 to CDW15 at 40
SQE = Struct("<BBHI16xQI3xB6I")
CQE = Struct("<QHHHH")  # result, sqhd, sqid, cid, status (phase bit 0, code from bit 1)
SGL_DESCRIPTOR = Struct("<QI3xB")  # address or offset, length, type
CONNECT_TAIL = Struct("<HHHBxI")  # SQE 40: recfmt, qid, sqsize (0-based), cattr, kato in ms
CONNECT_HEAD = Struct("<16sH238x")  # of the 1024 bytes of data: host id, controller id
PROPERTY_TAIL = Struct("<B3xIQ")  # SQE 40: attrib (size), offset, value

# Before a request for a view: magic, version, bytes of JSON, bytes of weights, CRC32C of the whole
# with 0 in its place; the JSON follows, zeros up to a multiple of 4, and the weights.
VIEW_REQUEST = Struct("<8s4I")

HEADER_BYTES = 24  # of every PDU but ICReq, ICResp (128) and CapsuleCmd (72)
IC_BYTES = 128
COMMAND_BYTES = 72
SQE_BYTES = 64
DIGEST_BYTES = 4
MAX_TERM_BYTES = 152  # header and at most 128 bytes of the offending PDU
CONNECT_BYTES = 1024
IDENTIFY_BYTES = 4096
DISCOVERY_ENTRY_BYTES = 1024
ANY_CONTROLLER = 0xFFFF
ALL_NAMESPACES = 0xFFFFFFFF

SQE_CID, SQE_NSID, SQE_FCTYPE, SQE_SGL, SQE_DW10 = 2, 4, 4, 24, 40
CATTR_NO_FLOW_CONTROL = 4

assert COMMON_HEADER.size == 8
assert COMMON_HEADER.size + IC_BODY.size == IC_BYTES
assert COMMON_HEADER.size + DATA_BODY.size == HEADER_BYTES
assert COMMON_HEADER.size + TERM_BODY.size == HEADER_BYTES
assert COMMON_HEADER.size + CQE.size == HEADER_BYTES
assert SQE.size == SQE_BYTES
assert COMMON_HEADER.size + SQE.size == COMMAND_BYTES
assert SGL_DESCRIPTOR.size == 16
assert CONNECT_TAIL.size == 12
assert CONNECT_HEAD.size == 256
assert PROPERTY_TAIL.size == 16
assert VIEW_REQUEST.size == 24
