"""The controller's end of one NVMe/TCP queue: bytes in, commands out, answers in, bytes out.

States: NEW -ICReq-> READY -error or close-> CLOSED.  Rules:
1. `commands` are those that came whole, with their in-capsule data; each is answered once with
   `complete`, after `request_data` (a write whose data did not come along) or `send_data` (a read).
2. A write's data goes into the memory given to `request_data`; the command is in `arrived` once it
   is all there, and is not answered before.  The memory is used until then, also after `abandon`.
3. Page data is sent by reference: a payload is any object with `nbytes` that whoever writes the
   socket understands (a range of a file), or a memoryview.  With data digests it is a memoryview.
4. At most `depth` commands are out (a peer that sends more ends the connection), so what a peer can
   make us hold is `depth` times `in_capsule`, and what its unread answers refer to: whoever writes
   the socket stops reading commands while too much of that is waiting.
5. Whatever the host may not do raises Violation; a TermReq is then all that is in the output (none
   where the host ended the connection itself).  Once closed, answers are dropped without a word:
   they may come from other threads' work.
6. No I/O and no clock: `now` is any clock of the caller's, in seconds.
7. A command may take the id of an Asynchronous Event Request that is out: SPDK forgets its requests
   by itself when it detaches.  The request is then in `superseded` and must not be answered.
Must stay in sync: host.py is the other end.
"""

from typing import Protocol

from hyades.common.checksum import crc32c
from hyades.common.errors import UsageError
from hyades.common.nvme.commands import Command
from hyades.common.nvme.layout import (
    COMMON_HEADER,
    CQE,
    DATA_BODY,
    DIGEST_BYTES,
    IC_BODY,
    SGL_DESCRIPTOR,
    SQE_CID,
    SQE_SGL,
    Admin,
    Fatal,
    PduFlag,
    PduType,
    Sgl,
)
from hyades.common.nvme.pdu import (
    FROM_HOST,
    Header,
    Receiver,
    Violation,
    build_pdu,
    build_term,
    describe_term,
)

_BOTH = int(PduFlag.HDGST | PduFlag.DDGST)
_DDGST, _LAST = int(PduFlag.DDGST), int(PduFlag.LAST)
_LAST_AND_SUCCESS = int(PduFlag.LAST | PduFlag.SUCCESS)
_AT = COMMON_HEADER.size
_LEAST_H2C = 4096  # what ICResp must grant


class Payload(Protocol):
    """Data that is sent by reference."""

    @property
    def nbytes(self) -> int: ...


Segment = bytes | memoryview | Payload


class _Write:
    """A write whose data is on its way."""

    __slots__ = ("broken", "cid", "into", "received")

    def __init__(self, cid: int, into: memoryview) -> None:
        self.cid, self.into = cid, into
        self.received = 0
        self.broken = False


class TargetQueue:
    """One connection; see the module."""

    def __init__(
        self, *, depth: int = 32, in_capsule: int = 8192, max_h2c: int = 1 << 17,
        allowed_digests: int = _BOTH,
    ) -> None:  # fmt: skip
        """Bound what is taken: *in_capsule* bytes in a capsule, *max_h2c* in a data PDU.

        *depth* holds until Connect says otherwise (`configure`).
        """
        if max_h2c < _LEAST_H2C or max_h2c % 4:
            raise UsageError(f"MAXH2CDATA {max_h2c}: at least {_LEAST_H2C}, a multiple of 4")
        self.ready = self.closed = False
        self.commands: list[tuple[Command, memoryview | None, bool]] = []  # data, digest right
        self.arrived: list[tuple[int, bool]] = []  # command id, digests right
        self.superseded: list[int] = []  # event requests that the host has forgotten, see rule 7
        self.depth = depth
        self.qid = 0
        self.digests = 0
        self.last_heard = 0.0
        self._in_capsule, self._max_h2c = in_capsule, max_h2c
        self._allowed = allowed_digests
        self._align = 4
        self._flow_control = True
        self._head = 0  # SQHD
        self._open: dict[int, int] = {}  # command ids that are out: bytes of data in their SGL
        self._events: set[int] = set()  # those of them that are Asynchronous Event Requests
        self._writes: dict[int, _Write] = {}
        self._out: list[Segment] = []
        self._capsule_data: memoryview | None = None
        self._landing: _Write | None = None  # whose data is arriving
        self._receiver = Receiver(self, FROM_HOST, max(in_capsule, max_h2c))

    @property
    def outstanding(self) -> int:
        """Commands that are out."""
        return len(self._open)

    @property
    def idle(self) -> bool:
        """Whether nothing is out and the stream stands between two PDUs."""
        return not self._open and self._receiver.between

    def configure(self, qid: int, depth: int, *, flow_control: bool) -> None:
        """Take what Connect asked for."""
        self.qid, self.depth, self._flow_control = qid, depth, flow_control
        self._head = 1 % depth  # Connect was entry 0

    def request_data(self, cid: int, into: memoryview) -> None:
        """Ask for all the data of a write; it goes *into* this memory."""
        if self.closed:
            return
        self._check_out(cid, into.nbytes)
        self._writes[cid] = _Write(cid, into.cast("B") if into.itemsize > 1 else into)
        self._out.append(self._pdu(PduType.R2T, 0, DATA_BODY.pack(cid, cid, 0, into.nbytes, 0)))

    def send_data(
        self, cid: int, payload: Payload | memoryview, *, success: bool, answer: bool = True
    ) -> None:
        """Send all the data of a read; where *success*, that is its completion too.

        *success* is left out where the host counts submission queue heads.  Where *answer* is
        false the caller calls `complete` once the data is on its way: it may still turn out bad.
        """
        if self.closed:
            return
        nbytes = payload.nbytes
        self._check_out(cid, nbytes)
        digest = b""
        if self.digests & _DDGST:
            if not isinstance(payload, memoryview):
                raise UsageError("a data digest needs the data in memory")
            digest = crc32c(payload).to_bytes(DIGEST_BYTES, "little")
        success = success and answer and not self._flow_control
        flags = _LAST_AND_SUCCESS if success else _LAST
        body = DATA_BODY.pack(cid, 0, 0, nbytes, 0)
        self._out.append(self._pdu(PduType.C2H_DATA, flags, body, nbytes))
        self._out.append(payload)
        if digest:
            self._out.append(digest)
        if success:
            del self._open[cid]
        elif answer:
            self.complete(cid)

    def complete(self, cid: int, status: int = 0, result: int = 0) -> None:
        """Answer a command with a status code (status.py) and a result."""
        if self.closed:
            return
        if cid not in self._open or cid in self._writes:
            raise UsageError(f"command {cid} cannot be answered now: not out, or its data is due")
        del self._open[cid]
        self._events.discard(cid)
        self._out.append(self._answer(cid, status, result))

    def abandon(self, cid: int) -> bool:
        """Return whether *cid* is out: whoever executes it decides whether it can be stopped."""
        return cid in self._open

    def take_output(self) -> list[Segment]:
        """Return and forget what is to be sent, in order."""
        out, self._out = self._out, []
        return out

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes from the host belong: see pdu.py."""
        return self._receiver.buffers()

    def received(self, nbytes: int, now: float = 0.0) -> None:
        """Go on after *nbytes* were put into `buffers()`; raises Violation."""
        if self.closed:
            raise UsageError("this queue is closed")
        self.last_heard = now
        try:
            self._receiver.received(nbytes)
        except Violation as violation:
            # Answers that are under way would follow a broken stream: the TermReq comes first.
            term = build_term(PduType.C2H_TERM, violation, self._receiver.header)
            self._out = [term] if term else []
            self.closed = True
            raise

    def close(self) -> None:
        """Forget the connection and the memory; of the output only a TermReq stays."""
        if not self.closed:
            self.closed, self._out = True, []
        self._receiver.close()
        self._capsule_data = self._landing = None
        self._open.clear()
        self._events.clear()
        self._writes.clear()

    # -- what the receiver calls

    def place(self, header: Header) -> memoryview:
        """Return where the data of a capsule or of an H2CData belongs."""
        if header.kind == PduType.CAPSULE_CMD:
            self._check_command(header)
            if header.data_bytes > self._in_capsule:
                text = f"{header.data_bytes} bytes in a capsule, at most {self._in_capsule}"
                raise Violation(text, Fatal.LIMIT_EXCEEDED)
            self._capsule_data = memoryview(bytearray(header.data_bytes))
            return self._capsule_data
        return self._place_write(header)

    def finish(self, header: Header, intact: bool) -> None:
        """Take a whole PDU."""
        kind = header.kind
        if kind == PduType.CAPSULE_CMD:
            self._command_arrived(header, intact)
        elif kind == PduType.H2C_DATA:
            self._data_arrived(header, intact)
        elif kind == PduType.IC_REQ:
            self._initialize(header)
        else:
            raise Violation(f"the host ended the connection: {describe_term(header)}", None)

    # -- the parts

    def _initialize(self, header: Header) -> None:
        version, align, digests, _ = IC_BODY.unpack_from(header.raw, _AT)
        if version:
            raise Violation(f"PDU format version {version}", Fatal.UNSUPPORTED, 8)
        if align > 31:
            raise Violation(f"HPDA {align}, at most 31", Fatal.HEADER_FIELD, 10)
        agreed = digests & self._allowed
        body = IC_BODY.pack(0, 0, agreed, self._max_h2c)
        self._out.append(build_pdu(PduType.IC_RESP, 0, body))
        self._align, self.digests = 4 * (align + 1), agreed
        self._receiver.header_digest = bool(agreed & PduFlag.HDGST)
        self._receiver.data_digest = bool(agreed & _DDGST)
        self.ready = self._receiver.initialized = True

    def _check_out(self, cid: int, nbytes: int) -> None:
        """Check that a command that is out may move *nbytes* now."""
        if cid in self._writes or not 0 < nbytes <= self._open.get(cid, 0):
            raise UsageError(
                f"command {cid} cannot move {nbytes} bytes now: its SGL has {self._open.get(cid)}"
            )

    def _check_command(self, header: Header) -> None:
        """Refuse what cannot be answered: too many, an id in use, data that is not what it says."""
        cid = int.from_bytes(header.raw[_AT + SQE_CID : _AT + SQE_CID + 2], "little")
        if cid in self._open and cid not in self._events:
            raise Violation(f"command id {cid} is in use", Fatal.HEADER_FIELD, _AT + SQE_CID)
        if len(self._open) >= self.depth:
            raise Violation(f"command {self.depth + 1} on a queue of {self.depth}")
        offset, nbytes, kind = SGL_DESCRIPTOR.unpack_from(header.raw, _AT + SQE_SGL)
        if kind == Sgl.IN_CAPSULE:
            if offset:
                text = f"in-capsule data at offset {offset}"
                raise Violation(text, Fatal.UNSUPPORTED, _AT + SQE_SGL)
            if nbytes != header.data_bytes:
                text = f"{header.data_bytes} bytes in a capsule whose SGL says {nbytes}"
                raise Violation(text, Fatal.HEADER_FIELD, 4)
        elif header.data_bytes:
            text = f"{header.data_bytes} bytes in a capsule with an SGL of type {kind:#04x}"
            raise Violation(text, Fatal.UNSUPPORTED, _AT + SQE_SGL + 15)

    def _command_arrived(self, header: Header, intact: bool) -> None:
        if not header.data_bytes:  # else `place` did it
            self._check_command(header)
        command, data = Command(header.raw[_AT:]), self._capsule_data
        self._capsule_data = None
        if self._flow_control:
            self._head = (self._head + 1) % self.depth
        if command.cid in self._events:
            self._events.discard(command.cid)
            self.superseded.append(command.cid)
        if command.opcode == Admin.ASYNC_EVENT and not self.qid:
            self._events.add(command.cid)
        self._open[command.cid] = command.sgl_bytes
        self.commands.append((command, data, intact))

    def _place_write(self, header: Header) -> memoryview:
        cid, tag, offset, nbytes, _ = DATA_BODY.unpack_from(header.raw, _AT)
        write = self._writes.get(tag)
        if write is None or cid != write.cid:
            at = 10 if write is None else 8
            raise Violation(f"H2CData for tag {tag} of command {cid}", Fatal.HEADER_FIELD, at)
        if nbytes != header.data_bytes:
            text = f"H2CData of {header.data_bytes} bytes says that it has {nbytes}"
            raise Violation(text, Fatal.HEADER_FIELD, 16)
        if nbytes > self._max_h2c:
            text = f"H2CData of {nbytes} bytes, at most {self._max_h2c}"
            raise Violation(text, Fatal.LIMIT_EXCEEDED)
        end, whole = offset + nbytes, len(write.into)
        if offset != write.received or end > whole:
            raise Violation(
                f"H2CData for bytes {offset} to {end} of {whole}, {write.received} are there",
                Fatal.OUT_OF_RANGE if end > whole else Fatal.SEQUENCE,
            )
        if bool(header.flags & _LAST) != (end == whole):
            raise Violation(f"H2CData: flags {header.flags:#x} at byte {end} of {whole}")
        self._landing = write
        return write.into[offset:end]

    def _data_arrived(self, header: Header, intact: bool) -> None:
        write, self._landing = self._landing, None
        assert write is not None
        write.received += header.data_bytes
        write.broken = write.broken or not intact
        if write.received == len(write.into):
            del self._writes[write.cid]
            self.arrived.append((write.cid, not write.broken))

    def _answer(self, cid: int, status: int, result: int) -> bytes:
        head = self._head if self._flow_control else 0xFFFF
        return self._pdu(
            PduType.CAPSULE_RESP, 0, CQE.pack(result, head, self.qid, cid, status << 1)
        )

    def _pdu(self, kind: PduType, flags: int, body: bytes, data_bytes: int = 0) -> bytes:
        return build_pdu(kind, flags, body, data_bytes, digests=self.digests, align=self._align)
