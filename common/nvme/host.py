"""The host's end of one NVMe/TCP queue: bytes and commands in, bytes and completions out.

States: NEW -start-> IC_SENT -ICResp-> READY -error or close-> CLOSED.  Rules:
1. Commands are taken in READY only; the caller's first one is Connect.
2. At most `depth` commands are out.  Every one that `submit` took ends exactly once: in
   `completions`, or, when the queue closes, in what `close` returns.
3. Data that arrives lies in the memory given with the command, and nowhere else; data that is sent
   is taken from there when the controller asks for it.  That memory is free again when the command
   has ended.
4. Whatever the controller may not do raises Violation; a TermReq is then in the output.
5. No I/O and no clock: `now` is any clock of the caller's, in seconds.
Must stay in sync: target.py is the other end.
"""

from enum import Enum

from hyades.common.checksum import crc32c
from hyades.common.errors import UsageError
from hyades.common.nvme.commands import set_sgl
from hyades.common.nvme.layout import (
    CQE,
    DATA_BODY,
    DIGEST_BYTES,
    IC_BODY,
    SQE_BYTES,
    Fatal,
    PduFlag,
    PduType,
    Sgl,
)
from hyades.common.nvme.pdu import (
    FROM_CONTROLLER,
    Header,
    Receiver,
    Violation,
    build_pdu,
    build_term,
    describe_term,
)
from hyades.common.nvme.status import StatusCode

Segment = bytes | memoryview
_LEAST_H2C = 4096  # the least that a controller may ask for
_NOTHING = memoryview(b"")


class State(Enum):
    """See the module."""

    NEW = "new"
    IC_SENT = "initializing"
    READY = "ready"
    CLOSED = "closed"


class _Exchange:
    """One command that is out."""

    __slots__ = ("asked", "broken", "done", "into", "source")

    def __init__(self, into: memoryview, source: memoryview) -> None:
        self.into, self.source = into, source
        self.done = 0  # bytes that arrived
        self.asked = 0  # bytes that the controller asked for
        self.broken = False  # a data digest was wrong


class HostQueue:
    """One connection; see the module."""

    def __init__(
        self, depth: int, *, header_digest: bool = False, data_digest: bool = False,
        max_data: int = 1 << 26,
    ) -> None:  # fmt: skip
        """Keep up to *depth* commands out; *max_data* bounds the data of one PDU."""
        self.state = State.NEW
        self.depth = depth
        self.in_capsule = 0  # bytes of data that a command may carry; the caller sets it (IOCCSZ)
        self.max_h2c = _LEAST_H2C
        self.last_heard = 0.0
        self.completions: list[tuple[int, int, int]] = []  # (cid, status code, result)
        self.bytes_in = 0
        self._wanted = (PduFlag.HDGST if header_digest else 0) | (
            PduFlag.DDGST if data_digest else 0
        )
        self._digests = 0
        self._align = 4
        self._out: list[Segment] = []
        self._exchanges: list[_Exchange | None] = [None] * depth
        self._free = list(range(depth))[::-1]
        self._receiver = Receiver(self, FROM_CONTROLLER, max_data)

    @property
    def outstanding(self) -> int:
        """Commands that are out."""
        return self.depth - len(self._free)

    @property
    def room(self) -> int:
        """Commands that `submit` would take now."""
        return len(self._free) if self.state is State.READY else 0

    def start(self, now: float = 0.0) -> None:
        """Send ICReq."""
        assert self.state is State.NEW
        self.state, self.last_heard = State.IC_SENT, now
        # PFV 0, HPDA 0 (no alignment), one R2T a command
        self._out.append(build_pdu(PduType.IC_REQ, 0, IC_BODY.pack(0, 0, self._wanted, 0)))

    def submit(
        self, sqe: bytearray, *, into: memoryview | None = None, source: memoryview | None = None,
        in_capsule: bool = False, now: float = 0.0,
    ) -> int:  # fmt: skip
        """Send a command (its SGL and command id are filled in) and return its command id.

        *into* takes what it reads, *source* is what it writes; where *in_capsule*, or where the
        controller takes that much, the data goes along with the command.
        """
        if self.state is not State.READY or not self._free:
            raise UsageError(f"this queue is {self.state.value}, {self.outstanding} are out")
        cid = self._free.pop()
        if self.outstanding == 1:
            self.last_heard = now
        data = source if source is not None else _NOTHING
        self._exchanges[cid] = _Exchange(into if into is not None else _NOTHING, data)
        if data and (in_capsule or len(data) <= self.in_capsule):
            set_sgl(sqe, cid, len(data), Sgl.IN_CAPSULE)
            self._exchanges[cid].asked = len(data)  # type: ignore[union-attr]
            self._send(PduType.CAPSULE_CMD, 0, bytes(sqe), data)
        else:
            set_sgl(sqe, cid, len(data) + len(into or b""), Sgl.TRANSPORT)
            self._send(PduType.CAPSULE_CMD, 0, bytes(sqe), _NOTHING)
        return cid

    def take_output(self) -> list[Segment]:
        """Return and forget what is to be sent, in order."""
        out, self._out = self._out, []
        return out

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes from the controller belong: see pdu.py."""
        return self._receiver.buffers()

    def received(self, nbytes: int, now: float = 0.0) -> None:
        """Go on after *nbytes* were put into `buffers()`; raises Violation."""
        if self.state is State.CLOSED:
            raise UsageError("this queue is closed")
        self.last_heard = now
        self.bytes_in += nbytes
        try:
            self._receiver.received(nbytes)
        except Violation as violation:
            self._out = [build_term(PduType.H2C_TERM, violation, self._receiver.header)]
            self.state = State.CLOSED
            raise

    def quiet_since(self) -> float | None:
        """Return when the controller was last heard of, None where it owes nothing."""
        owes = self.outstanding or self.state is State.IC_SENT
        return self.last_heard if owes else None

    def close(self) -> list[int]:
        """Forget the connection; return the command ids that were out."""
        self.state = State.CLOSED
        lost = [cid for cid, exchange in enumerate(self._exchanges) if exchange is not None]
        self._exchanges = [None] * self.depth
        self._free = list(range(self.depth))[::-1]
        return lost

    # -- what the receiver calls

    def place(self, header: Header) -> memoryview:
        """Return where the data of a C2HData belongs."""
        cid, _, offset, nbytes, _ = DATA_BODY.unpack(header.body)
        exchange = self._exchange(cid)
        if nbytes != header.data_bytes:
            text = f"C2HData of {header.data_bytes} bytes says that it has {nbytes}"
            raise Violation(text, Fatal.HEADER_FIELD, 16)
        if offset != exchange.done or offset + nbytes > len(exchange.into):
            raise Violation(
                f"C2HData for bytes {offset} to {offset + nbytes} of a command that reads"
                f" {len(exchange.into)} and has {exchange.done}",
                Fatal.OUT_OF_RANGE, 12,
            )  # fmt: skip
        return exchange.into[offset : offset + nbytes]

    def finish(self, header: Header, intact: bool) -> None:
        """Take a whole PDU."""
        kind = header.kind
        if kind == PduType.C2H_TERM:
            raise Violation(f"the controller ended the connection: {describe_term(header)}")
        if self.state is State.IC_SENT:
            self._initialized(header)
        elif kind == PduType.C2H_DATA:
            self._data_arrived(header, intact)
        elif kind == PduType.CAPSULE_RESP:
            self._responded(header)
        elif kind == PduType.R2T:
            self._asked(header)
        else:
            raise Violation("ICResp came twice")

    # -- the parts

    def _exchange(self, cid: int) -> _Exchange:
        found = self._exchanges[cid] if cid < self.depth else None
        if found is None or self.state is not State.READY:
            raise Violation(f"an answer to command {cid}, which is not out", Fatal.HEADER_FIELD, 8)
        return found

    def _initialized(self, header: Header) -> None:
        if header.kind != PduType.IC_RESP:
            raise Violation(f"PDU type {header.kind:#04x} before ICResp")
        version, align, digests, max_h2c = IC_BODY.unpack(header.body)
        if version:
            raise Violation(f"PDU format version {version}", Fatal.UNSUPPORTED, 8)
        if align > 31:
            raise Violation(f"CPDA {align}, at most 31", Fatal.HEADER_FIELD, 10)
        if digests != self._wanted:
            text = f"digests {digests:#x} in ICResp, {self._wanted:#x} were asked for"
            raise Violation(text, Fatal.HEADER_FIELD, 11)
        if max_h2c < _LEAST_H2C or max_h2c % 4:
            raise Violation(f"MAXH2CDATA {max_h2c}", Fatal.HEADER_FIELD, 12)
        self._align, self._digests, self.max_h2c = 4 * (align + 1), digests, max_h2c
        self._receiver.header_digest = bool(digests & PduFlag.HDGST)
        self._receiver.data_digest = bool(digests & PduFlag.DDGST)
        self.state = State.READY

    def _data_arrived(self, header: Header, intact: bool) -> None:
        cid = DATA_BODY.unpack(header.body)[0]
        exchange = self._exchange(cid)
        exchange.done += header.data_bytes
        exchange.broken = exchange.broken or not intact
        if not header.flags & PduFlag.SUCCESS:
            return
        if not header.flags & PduFlag.LAST or exchange.done != len(exchange.into):
            text = f"SUCCESS after {exchange.done} of {len(exchange.into)} bytes"
            raise Violation(text, Fatal.HEADER_FIELD, 1)
        self._end(cid, exchange, StatusCode.SUCCESS, 0)

    def _responded(self, header: Header) -> None:
        result, _, _, cid, status = CQE.unpack(header.body)
        exchange = self._exchange(cid)
        code = status >> 1
        if not code and exchange.done != len(exchange.into):
            raise Violation(
                f"command {cid} succeeded after {exchange.done} of {len(exchange.into)} bytes"
            )
        if not code and exchange.asked != len(exchange.source):
            raise Violation(
                f"command {cid} succeeded, but {exchange.asked} of {len(exchange.source)} bytes"
                " were asked for"
            )
        self._end(cid, exchange, code, result)

    def _end(self, cid: int, exchange: _Exchange, code: int, result: int) -> None:
        if exchange.broken and not code:
            code = StatusCode.TRANSIENT_TRANSPORT
        self._exchanges[cid] = None
        self._free.append(cid)
        self.completions.append((cid, code, result))

    def _asked(self, header: Header) -> None:
        cid, tag, offset, nbytes, _ = DATA_BODY.unpack(header.body)
        exchange = self._exchange(cid)
        if offset != exchange.asked or not nbytes or offset + nbytes > len(exchange.source):
            raise Violation(
                f"R2T for bytes {offset} to {offset + nbytes} of a command that writes"
                f" {len(exchange.source)}, {exchange.asked} were asked for",
                Fatal.OUT_OF_RANGE, 12,
            )  # fmt: skip
        exchange.asked, end = offset + nbytes, offset + nbytes
        while offset < end:
            step = min(self.max_h2c, end - offset)
            last = PduFlag.LAST if offset + step == end else 0
            body = DATA_BODY.pack(cid, tag, offset, step, 0)
            self._send(PduType.H2C_DATA, last, body, exchange.source[offset : offset + step])
            offset += step

    def _send(self, kind: PduType, flags: int, body: bytes, data: memoryview) -> None:
        assert kind != PduType.CAPSULE_CMD or len(body) == SQE_BYTES
        self._out.append(
            build_pdu(kind, flags, body, len(data), digests=self._digests, align=self._align)
        )
        if data:
            self._out.append(data)
            if self._digests & PduFlag.DDGST:
                self._out.append(crc32c(data).to_bytes(DIGEST_BYTES, "little"))
