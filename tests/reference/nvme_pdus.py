"""What the tests of the NVMe/TCP core share: streams in memory, PDUs by hand, a small executor."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from hyades.common.checksum import crc32c
from hyades.common.nvme.commands import Command
from hyades.common.nvme.host import HostQueue, State
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.pdu import Violation, feed
from hyades.common.nvme.status import StatusCode
from hyades.common.nvme.target import TargetQueue

BLOCK = 512  # logical block of `Disk`
IC_REQ, IC_RESP, H2C_TERM, C2H_TERM, COMMAND, RESPONSE, H2C, C2H, R2T = 0, 1, 2, 3, 4, 5, 6, 7, 9
HEADER = {IC_REQ: 128, IC_RESP: 128, COMMAND: 72}  # lengths other than 24
HDGST, DDGST, LAST, SUCCESS = 1, 2, 4, 8


def pdu(
    kind: int, body: bytes = b"", data: bytes = b"", *, flags: int = 0, digests: int = 0,
    align: int = 4, **wrong: int,
) -> bytes:  # fmt: skip
    """Return a PDU made without the code under test; *wrong* overrides hlen, pdo or plen."""
    hlen = HEADER.get(kind, 24)
    base = hlen + 4 * (digests & 1)
    pdo = -(-base // align) * align if data else 0
    plen = (pdo or base) + len(data) + (4 if data and digests & 2 else 0)
    flags |= (digests & 1) | (digests & 2 if data else 0)
    common = bytes((kind, flags, wrong.get("hlen", hlen), wrong.get("pdo", pdo)))
    head = (common + wrong.get("plen", plen).to_bytes(4, "little") + body).ljust(hlen, b"\0")
    if digests & 1:
        head += crc32c(head).to_bytes(4, "little")
    tail = crc32c(data).to_bytes(4, "little") if data and digests & 2 else b""
    return head.ljust(pdo, b"\0") + data + tail


def words(*pairs: tuple[int, int]) -> bytes:
    """Return (value, bytes of width) in order, little-endian."""
    return b"".join(value.to_bytes(width, "little") for value, width in pairs)


def data_body(cid: int, tag: int, offset: int, nbytes: int) -> bytes:
    """Return what follows the common header of H2CData, C2HData and R2T."""
    return words((cid, 2), (tag, 2), (offset, 4), (nbytes, 4), (0, 4))


def answer_body(cid: int, status: int = 0, result: int = 0, head: int = 0) -> bytes:
    """Return what follows the common header of CapsuleResp."""
    return words((result, 8), (head, 2), (1, 2), (cid, 2), (status << 1, 2))


def sqe(opcode: int, cid: int, nbytes: int = 0, *, sgl: int = 0x5A, at: int = 0, **f: int) -> bytes:
    """Return a submission queue entry."""
    head = words((opcode, 1), (0x40, 1), (cid, 2), (f.get("nsid", 1), 4), (0, 16), (at, 8))
    tail = words((f.get("slba", 0), 8), (f.get("blocks", 1) - 1, 2))
    return (head + words((nbytes, 4), (0, 3), (sgl, 1)) + tail).ljust(64, b"\0")


def lay(total: int, *fields: tuple[int, bytes | tuple[int, int]]) -> bytes:
    """Return *total* zero bytes with each (offset, bytes or (value, width)) of *fields* put in."""
    data = bytearray(total)
    for at, value in fields:
        raw = value if isinstance(value, bytes) else value[0].to_bytes(value[1], "little")
        assert at + len(raw) <= total
        assert not any(data[at : at + len(raw)]), f"two fields at {at}"
        data[at : at + len(raw)] = raw
    return bytes(data)


def ic(kind: int, *, pfv: int = 0, pda: int = 0, digests: int = 0, last: int = 0) -> bytes:
    """Return ICReq or ICResp; *last* is MAXR2T or MAXH2CDATA."""
    return pdu(kind, words((pfv, 2), (pda, 1), (digests, 1), (last, 4)))


def joined_stream(segments: Iterable[Any]) -> bytes:
    """Return the bytes of *segments*."""
    return b"".join(bytes(segment) for segment in segments)


def deliver(segments: Iterable[Any], queue: Any, step: int | None = None) -> None:
    """Hand *segments* to the receiving *queue* in pieces of *step* bytes."""
    stream = joined_stream(segments)
    step = step or len(stream) or 1
    for at in range(0, len(stream), step):
        feed(queue, stream[at : at + step])


def joined(
    header: bool = False, data: bool = False, depth: int = 8, **limits: Any
) -> tuple[HostQueue, TargetQueue]:
    """Return a host and a target queue after the handshake, in-capsule data off at the host."""
    host = HostQueue(depth, header_digest=header, data_digest=data)
    target = TargetQueue(depth=depth + 1, **limits)
    host.start()
    deliver(host.take_output(), target)
    deliver(target.take_output(), host)
    assert host.state is State.READY
    assert target.ready
    return host, target


def fatal_of(queue: Any, stream: bytes, step: int | None = None) -> Violation:
    """Return the Violation that *stream* raises at *queue*."""
    try:
        deliver([stream], queue, step)
    except Violation as violation:
        return violation
    raise AssertionError("no violation")


def pattern(nbytes: int, seed: int = 1) -> Any:
    """Return random bytes as uint8."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Disk:
    """A namespace in memory, and the executor that answers a target queue from it."""

    def __init__(self, queue: TargetQueue, blocks: int = 64, *, success: bool = True) -> None:
        """Answer *queue*; reads complete with their data where *success*."""
        self.queue, self.success = queue, success
        self.content = bytearray(blocks * BLOCK)
        self.writes: dict[int, tuple[int, bytearray]] = {}  # whose data is due: place, memory

    def run(self) -> None:
        """Execute what has arrived."""
        queue = self.queue
        commands, queue.commands = queue.commands, []
        for command, data, intact in commands:
            self.start(command, data, intact)
        arrived, queue.arrived = queue.arrived, []
        for cid, intact in arrived:
            at, room = self.writes.pop(cid)
            if intact:
                self.content[at : at + len(room)] = room
            queue.complete(cid, 0 if intact else StatusCode.TRANSIENT_TRANSPORT)

    def room(self, nbytes: int) -> bytearray:
        """Return memory for a write's data."""
        return bytearray(nbytes)

    def start(self, command: Command, data: memoryview | None, intact: bool) -> None:
        """Answer one command, or ask for its data."""
        queue, cid = self.queue, command.cid
        at, nbytes = command.slba * BLOCK, command.blocks * BLOCK
        if command.opcode not in (Opcode.READ, Opcode.WRITE):
            status = 0 if command.opcode == Opcode.FLUSH else StatusCode.INVALID_OPCODE
            queue.complete(cid, status, command.dwords[0])
        elif at + nbytes > len(self.content):
            queue.complete(cid, StatusCode.LBA_OUT_OF_RANGE)
        elif command.sgl_bytes != nbytes:
            queue.complete(cid, StatusCode.SGL_LENGTH_INVALID)
        elif command.opcode == Opcode.READ:
            view = memoryview(bytes(self.content[at : at + nbytes]))
            queue.send_data(cid, view, success=self.success)
        elif data is not None:
            if intact:
                self.content[at : at + nbytes] = data
            queue.complete(cid, 0 if intact else StatusCode.TRANSIENT_TRANSPORT)
        else:
            room = self.room(nbytes)
            self.writes[cid] = at, room
            queue.request_data(cid, memoryview(room)[:nbytes])
