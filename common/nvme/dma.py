"""What NVMe over shared memory adds to the structures of layout.py: messages, header, words.

The two sides are processes of one machine.  A queue is a socket (AF_UNIX, SOCK_SEQPACKET) and one
memory file that the host makes (`Shape` says where things lie in it):

    words | submission ring | completion ring | buffers to the host | buffers to the target

A buffer has a fixed size and room for a header before it: each piece of a transfer (a chunk) has
one that says which packet it is of (the position of the command in the submission ring, counted
from 0 for ever), how many bytes the tensor has, which chunk this is, and how many bytes it has.
All are little-endian; sizes are asserted at import; tests/golden/test_nvme_dma_bytes.py holds the
bytes still.

Messages: Hello ->, <- Welcome with two eventfds (the target's, the host's) or a refusal, Memory
with its memory file ->, <- Ready.  Later at any time: Arena with a memory file ->.
"""

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct

from hyades.common.errors import PeerError
from hyades.common.nvme.layout import SQE_BYTES
from hyades.common.units import round_up

MAGIC = b"HYDM"
VERSION = 1
HEADER = Struct("<QQQQ")  # packet, tensor bytes, chunk, chunk bytes
HELLO = Struct("<4sIIIIII")  # magic, kind, version, entries, buffers, bytes of one, flags
WELCOME = Struct("<4sIIII")  # magic, kind, status, bytes of a chunk, reserved; text on refusal
ARENA = Struct("<4sI4xQQ4x")  # magic, kind, offset in the file, bytes
PLAIN = Struct("<4sI")  # Memory and Ready: magic, kind
MESSAGE = 512  # bytes that a message has at most
CQE_BYTES = 16
PAGE = 4096
SLOTS = 0x00  # SGL: data block, at an offset of the arena
LEAST_BUFFER, MOST_BUFFER = 4096, 64 << 20
MOST_BUFFERS = 64  # each way
MOST_ENTRIES = 4096

assert HEADER.size == 32
assert HELLO.size == 28
assert WELCOME.size == 20
assert ARENA.size == 32
assert PLAIN.size == 8

_LINE = 16  # int64 words between two: neighbours never share a cache line
# Written by the host: counts of commands, completions taken, buffers filled and emptied.
SQ_TAIL, CQ_HEAD, OUT_FILLED, IN_EMPTIED, HOST_SLEEPS = range(0, 5 * _LINE, _LINE)
# Written by the target.
CQ_TAIL, IN_FILLED, OUT_EMPTIED, TARGET_SLEEPS = range(5 * _LINE, 9 * _LINE, _LINE)
WORDS = PAGE // 8
assert TARGET_SLEEPS < WORDS


class Kind(IntEnum):
    """Kinds of messages."""

    HELLO = 1
    WELCOME = 2
    MEMORY = 3
    READY = 4
    ARENA = 5


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of one queue: *buffers* each way, of *buffer_bytes*."""

    entries: int  # of both rings; one less may be out
    buffers: int
    buffer_bytes: int

    @property
    def submission(self) -> int:
        """Byte at which the submission ring begins."""
        return PAGE

    @property
    def completion(self) -> int:
        """Byte at which the completion ring begins."""
        return PAGE + self.entries * SQE_BYTES

    @property
    def stride(self) -> int:
        """Bytes from one buffer to the next: a page whose end is the header, then the data."""
        return PAGE + round_up(self.buffer_bytes, PAGE)

    @property
    def nbytes(self) -> int:
        """Bytes of the memory file."""
        return self.first(outward=True) + self.buffers * self.stride

    def first(self, *, outward: bool) -> int:
        """Return the byte at which the buffers to the host, or to the target, begin."""
        begin = round_up(self.completion + self.entries * CQE_BYTES, PAGE)
        return begin + (self.buffers * self.stride if outward else 0)


@dataclass(frozen=True, slots=True)
class Hello:
    """What the host asks for."""

    shape: Shape
    direct: bool  # slots of an arena will be named

    def pack(self) -> bytes:
        """Return the message."""
        s = self.shape
        return HELLO.pack(
            MAGIC, Kind.HELLO, VERSION, s.entries, s.buffers, s.buffer_bytes, int(self.direct)
        )


def parse_hello(data: bytes) -> Hello:
    """Return what a host asks for; PeerError where no target could do that."""
    _check(data, Kind.HELLO, HELLO)
    _, _, version, entries, buffers, nbytes, flags = HELLO.unpack(data)
    if version != VERSION:
        raise PeerError(f"version {version} of the queues, {VERSION} is spoken here")
    if not 2 <= entries <= MOST_ENTRIES:
        raise PeerError(f"rings of {entries} entries, from 2 to {MOST_ENTRIES} are possible")
    if not 1 <= buffers <= MOST_BUFFERS or not LEAST_BUFFER <= nbytes <= MOST_BUFFER:
        raise PeerError(
            f"{buffers} buffers of {nbytes} bytes, from 1 to {MOST_BUFFERS} of {LEAST_BUFFER} to"
            f" {MOST_BUFFER} are possible"
        )
    if flags > 1:
        raise PeerError(f"flags {flags:#x}")
    return Hello(Shape(entries, buffers, nbytes), bool(flags))


def pack_welcome(chunk_bytes: int) -> bytes:
    """Return the answer to a Hello: a chunk has at most *chunk_bytes*."""
    return WELCOME.pack(MAGIC, Kind.WELCOME, 0, chunk_bytes, 0)


def pack_refusal(text: str) -> bytes:
    """Return the answer that says why not."""
    room = MESSAGE - WELCOME.size
    return WELCOME.pack(MAGIC, Kind.WELCOME, 1, 0, 0) + text.encode(errors="replace")[:room]


def parse_welcome(data: bytes, shape: Shape) -> int:
    """Return how many bytes a chunk has at most; PeerError where the target refused."""
    if len(data) < WELCOME.size or data[:8] != PLAIN.pack(MAGIC, Kind.WELCOME):
        raise PeerError(f"the target answered with {len(data)} bytes that are no Welcome")
    _, _, status, chunk_bytes, _ = WELCOME.unpack_from(data)
    if status:
        text = data[WELCOME.size :].decode(errors="replace")
        raise PeerError(f"the target refused the connection: {text}")
    if not 1 <= chunk_bytes <= shape.buffer_bytes:
        raise PeerError(f"chunks of {chunk_bytes} bytes in buffers of {shape.buffer_bytes}")
    return int(chunk_bytes)


def pack_plain(kind: Kind) -> bytes:
    """Return a message that says no more than its kind."""
    return PLAIN.pack(MAGIC, kind)


def check_plain(data: bytes, kind: Kind) -> None:
    """Check such a message; PeerError."""
    _check(data, kind, PLAIN)


def pack_arena(offset: int, nbytes: int) -> bytes:
    """Return the message that goes with the memory file of an arena."""
    return ARENA.pack(MAGIC, Kind.ARENA, offset, nbytes)


def parse_arena(data: bytes) -> tuple[int, int]:
    """Return (offset, bytes) of an arena in its memory file; PeerError."""
    _check(data, Kind.ARENA, ARENA)
    _, _, offset, nbytes = ARENA.unpack(data)
    if offset % PAGE or not nbytes:
        raise PeerError(f"an arena of {nbytes} bytes at byte {offset} of its file")
    return offset, nbytes


def _check(data: bytes, kind: Kind, structure: Struct) -> None:
    if len(data) != structure.size or data[:8] != PLAIN.pack(MAGIC, kind):
        raise PeerError(f"{len(data)} bytes that are no {kind.name.lower()} message")
