"""The host's end of one NVMe/TCP queue: bytes and commands in, bytes and completions out.

States: NEW -start-> IC_SENT -ICResp-> READY -error or close-> CLOSED.  Rules:
1. Commands are taken in READY only; the caller's first one is Connect.
2. At most `depth` commands are out.  Every one that `submit` took ends exactly once: in
   `completions`, or, when the queue closes, in what `close` returns.
3. Data that arrives lies in the memory given with the command, and nowhere else; data that is sent
   is taken from there when the controller asks for it.  That memory is free again when the command
   has ended.
4. Whatever the controller may not do raises Violation; a TermReq is then all that is in the output
   (none where the controller ended the connection itself).
5. No I/O and no clock: `now` is any clock of the caller's, in seconds.
Must stay in sync: target.py is the other end.
"""

from enum import Enum

from hyades.common.checksum import crc32c
from hyades.common.errors import UsageError
from hyades.common.nvme.commands import set_sgl
from hyades.common.nvme.layout import (
    COMMON_HEADER,
    CQE,
    DATA_BODY,
    DIGEST_BYTES,
    IC_BODY,
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
_AT = COMMON_HEADER.size
_LAST, _SUCCESS, _DDGST = int(PduFlag.LAST), int(PduFlag.SUCCESS), int(PduFlag.DDGST)
_NOTHING = memoryview(b"")


class State(Enum):
    """See the module."""

    NEW = "new"
    IC_SENT = "initializing"
    READY = "ready"
    CLOSED = "closed"


class _Exchange:
    """One command that is out."""

    __slots__ = ("asked", "broken", "cid", "done", "into", "source")

    def __init__(self, cid: int, into: memoryview, source: memoryview) -> None:
        self.cid, self.into, self.source = cid, into, source
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
        self._wanted = int(header_digest and PduFlag.HDGST) | int(data_digest and PduFlag.DDGST)
        self._digests = 0
        self._align = 4
        self._out: list[Segment] = []
        self._exchanges: list[_Exchange | None] = [None] * depth
        self._free = list(range(depth))[::-1]
        self._sending: set[int] = set()  # command ids whose R2T is answered in the output
        self._landing: _Exchange | None = None  # whose data is arriving
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
        data, room = _as_bytes(source), _as_bytes(into)
        self._exchanges[cid] = exchange = _Exchange(cid, room, data)
        if data and (in_capsule or len(data) <= self.in_capsule):
            set_sgl(sqe, cid, len(data), Sgl.IN_CAPSULE)
            exchange.asked = len(data)
            self._send(PduType.CAPSULE_CMD, 0, bytes(sqe), data)
        else:
            set_sgl(sqe, cid, len(data) or len(room), Sgl.TRANSPORT)
            self._send(PduType.CAPSULE_CMD, 0, bytes(sqe), _NOTHING)
        return cid

    def take_output(self) -> list[Segment]:
        """Return and forget what is to be sent, in order."""
        out, self._out = self._out, []
        self._sending.clear()
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
            term = build_term(PduType.H2C_TERM, violation, self._receiver.header)
            self._out = [term] if term else []
            self.state = State.CLOSED
            raise

    def quiet_since(self) -> float | None:
        """Return when the controller was last heard of, None where it owes nothing."""
        owes = self.outstanding or self.state is State.IC_SENT
        return self.last_heard if owes else None

    def close(self) -> list[int]:
        """Forget the connection and the memory; return the command ids that were out.

        Of the output only a TermReq stays.
        """
        if self.state is not State.CLOSED:
            self.state, self._out = State.CLOSED, []
        self._receiver.close()
        self._landing = None
        lost = [cid for cid, exchange in enumerate(self._exchanges) if exchange is not None]
        self._exchanges = [None] * self.depth
        self._free = list(range(self.depth))[::-1]
        return lost

    # -- what the receiver calls

    def place(self, header: Header) -> memoryview:
        """Return where the data of a C2HData belongs."""
        cid, _, offset, nbytes, _ = DATA_BODY.unpack_from(header.raw, _AT)
        exchange = self._exchange(cid, 8)
        if nbytes != header.data_bytes:
            text = f"C2HData of {header.data_bytes} bytes says that it has {nbytes}"
            raise Violation(text, Fatal.HEADER_FIELD, 16)
        end = offset + nbytes
        if offset != exchange.done or end > len(exchange.into):
            raise Violation(
                f"C2HData for bytes {offset} to {end} of a command that reads"
                f" {len(exchange.into)} and has {exchange.done}",
                Fatal.OUT_OF_RANGE if end > len(exchange.into) else Fatal.SEQUENCE,
            )
        flags = header.flags
        if flags & _SUCCESS and (not flags & _LAST or end != len(exchange.into)):
            text = f"SUCCESS after {end} of {len(exchange.into)} bytes, flags {flags:#x}"
            if not flags & _LAST:
                raise Violation(text, Fatal.HEADER_FIELD, 1)
            raise Violation(text)
        self._landing = exchange
        return exchange.into[offset:end]

    def finish(self, header: Header, intact: bool) -> None:
        """Take a whole PDU."""
        kind = header.kind
        if kind == PduType.C2H_DATA:
            self._data_arrived(header, intact)
        elif kind == PduType.CAPSULE_RESP:
            self._responded(header)
        elif kind == PduType.R2T:
            self._asked(header)
        elif kind == PduType.IC_RESP:
            self._initialized(header)
        else:
            raise Violation(f"the controller ended the connection: {describe_term(header)}", None)

    # -- the parts

    def _exchange(self, cid: int, at: int) -> _Exchange:
        found = self._exchanges[cid] if cid < self.depth else None
        if found is None:
            raise Violation(f"an answer to command {cid}, which is not out", Fatal.HEADER_FIELD, at)
        return found

    def _initialized(self, header: Header) -> None:
        if self.state is not State.IC_SENT:
            raise Violation("ICResp before ICReq")
        version, align, digests, max_h2c = IC_BODY.unpack_from(header.raw, _AT)
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
        self._receiver.data_digest = bool(digests & _DDGST)
        self._receiver.initialized = True
        self.state = State.READY

    def _data_arrived(self, header: Header, intact: bool) -> None:
        exchange, self._landing = self._landing, None
        assert exchange is not None
        exchange.done += header.data_bytes
        exchange.broken = exchange.broken or not intact
        if header.flags & _SUCCESS:
            self._end(exchange, 0, 0)

    def _responded(self, header: Header) -> None:
        result, _, _, cid, status = CQE.unpack_from(header.raw, _AT)
        exchange = self._exchange(cid, 20)
        code = status >> 1
        if not code and exchange.done != len(exchange.into):
            raise Violation(
                f"command {cid} succeeded after {exchange.done} of {len(exchange.into)} bytes"
            )
        if not code and (exchange.asked != len(exchange.source) or cid in self._sending):
            raise Violation(
                f"command {cid} succeeded, but {exchange.asked} of {len(exchange.source)} bytes"
                f" were asked for{' and not sent yet' if cid in self._sending else ''}"
            )
        self._end(exchange, code, result)

    def _end(self, exchange: _Exchange, code: int, result: int) -> None:
        if exchange.broken and not code:
            code = int(StatusCode.TRANSIENT_TRANSPORT)
        cid = exchange.cid
        self._exchanges[cid] = None
        self._free.append(cid)
        self.completions.append((cid, code, result))

    def _asked(self, header: Header) -> None:
        cid, tag, offset, nbytes, _ = DATA_BODY.unpack_from(header.raw, _AT)
        exchange = self._exchange(cid, 8)
        end = offset + nbytes
        if offset != exchange.asked or not nbytes or end > len(exchange.source):
            raise Violation(
                f"R2T for bytes {offset} to {end} of a command that writes"
                f" {len(exchange.source)}, {exchange.asked} were asked for",
                Fatal.OUT_OF_RANGE if end > len(exchange.source) else Fatal.SEQUENCE,
            )
        if cid in self._sending:  # it cannot have the data of the last one: that is not sent yet
            raise Violation(f"a second R2T for command {cid}, one at a time", Fatal.LIMIT_EXCEEDED)
        self._sending.add(cid)
        exchange.asked = end
        while offset < end:
            step = min(self.max_h2c, end - offset)
            last = _LAST if offset + step == end else 0
            body = DATA_BODY.pack(cid, tag, offset, step, 0)
            self._send(PduType.H2C_DATA, last, body, exchange.source[offset : offset + step])
            offset += step

    def _send(self, kind: PduType, flags: int, body: bytes, data: memoryview) -> None:
        self._out.append(
            build_pdu(kind, flags, body, len(data), digests=self._digests, align=self._align)
        )
        if data:
            self._out.append(data)
            if self._digests & _DDGST:
                self._out.append(crc32c(data).to_bytes(DIGEST_BYTES, "little"))


def _as_bytes(view: memoryview | None) -> memoryview:
    if view is None:
        return _NOTHING
    return view if view.itemsize == 1 and view.ndim == 1 else view.cast("B")
