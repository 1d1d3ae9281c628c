"""The controller's end of one NVMe/TCP queue: bytes in, commands out, answers in, bytes out.

States: NEW -ICReq-> READY -error or close-> CLOSED.  Rules:
1. `commands` are those that came whole, with their in-capsule data; each is answered once with
   `complete`, after `request_data` (a write whose data did not come along) or `send_data` (a read).
2. A write's data goes into the memory given to `request_data`; the command is in `arrived` once it
   is all there.  The memory is used until then, also after `abandon`.
3. Page data is sent by reference: a payload is any object with `nbytes` that whoever writes the
   socket understands (a range of a file), or a memoryview.  With data digests it is a memoryview.
4. At most `depth` commands are out (a peer that sends more ends the connection), so what a peer can
   make us hold is `depth` times `in_capsule`.
5. Whatever the host may not do raises Violation; a TermReq is then in the output.
6. No I/O and no clock: `now` is any clock of the caller's, in seconds.
Must stay in sync: host.py is the other end.
"""

from typing import Protocol

from hyades.common.checksum import crc32c
from hyades.common.errors import UsageError
from hyades.common.nvme.commands import Command
from hyades.common.nvme.layout import (
    CQE,
    DATA_BODY,
    DIGEST_BYTES,
    IC_BODY,
    Fatal,
    PduFlag,
    PduType,
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

_BOTH = PduFlag.HDGST | PduFlag.DDGST


class Payload(Protocol):
    """Data that is sent by reference."""

    @property
    def nbytes(self) -> int: ...


Segment = bytes | memoryview | Payload


class _Write:
    """A write whose data is on its way."""

    __slots__ = ("broken", "into", "received")

    def __init__(self, into: memoryview) -> None:
        self.into = into
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
        self.ready = self.closed = False
        self.commands: list[tuple[Command, memoryview | None, bool]] = []  # data, digest right
        self.arrived: list[tuple[int, bool]] = []  # command id, digests right
        self.depth = depth
        self.qid = 0
        self.digests = 0
        self.last_heard = 0.0
        self._in_capsule, self._max_h2c = in_capsule, max_h2c
        self._allowed = allowed_digests
        self._align = 4
        self._flow_control = True
        self._head = 0  # SQHD
        self._open: set[int] = set()  # command ids that are out
        self._writes: dict[int, _Write] = {}
        self._out: list[Segment] = []
        self._capsule_data: memoryview | None = None
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
        if cid not in self._open or cid in self._writes or not into:
            raise UsageError(f"command {cid} cannot ask for data now")
        self._writes[cid] = _Write(into)
        self._out.append(self._pdu(PduType.R2T, 0, DATA_BODY.pack(cid, cid, 0, len(into), 0)))

    def send_data(self, cid: int, payload: Payload | memoryview, *, success: bool) -> None:
        """Send all the data of a read; where *success*, that is its completion too.

        *success* is left out where the host counts submission queue heads.
        """
        nbytes = payload.nbytes
        if cid not in self._open or not nbytes:
            raise UsageError(f"command {cid} cannot send {nbytes} bytes now")
        success = success and not self._flow_control
        flags = PduFlag.LAST | (PduFlag.SUCCESS if success else 0)
        self._out.append(
            self._pdu(PduType.C2H_DATA, flags, DATA_BODY.pack(cid, 0, 0, nbytes, 0), nbytes)
        )
        self._out.append(payload)
        if self.digests & PduFlag.DDGST:
            if not isinstance(payload, memoryview):
                raise UsageError("a data digest needs the data in memory")
            self._out.append(crc32c(payload).to_bytes(DIGEST_BYTES, "little"))
        if success:
            self._open.discard(cid)
        else:
            self.complete(cid)

    def complete(self, cid: int, status: int = 0, result: int = 0) -> None:
        """Answer a command with a status code (status.py) and a result."""
        self._open.discard(cid)
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
            self._out = [build_term(PduType.C2H_TERM, violation, self._receiver.header)]
            self.closed = True
            raise

    def close(self) -> None:
        """Forget the connection."""
        self.closed = True
        self._open.clear()
        self._writes.clear()

    # -- what the receiver calls

    def place(self, header: Header) -> memoryview:
        """Return where the data of a capsule or of an H2CData belongs."""
        if not self.ready:
            raise Violation(f"PDU type {header.kind:#04x} before ICReq")
        if header.kind == PduType.CAPSULE_CMD:
            self._check_depth()
            if header.data_bytes > self._in_capsule:
                text = f"{header.data_bytes} bytes in a capsule, at most {self._in_capsule}"
                raise Violation(text, Fatal.LIMIT_EXCEEDED, 4)
            self._capsule_data = memoryview(bytearray(header.data_bytes))
            return self._capsule_data
        return self._place_write(header)

    def finish(self, header: Header, intact: bool) -> None:
        """Take a whole PDU."""
        kind = header.kind
        if kind == PduType.H2C_TERM:
            raise Violation(f"the host ended the connection: {describe_term(header)}")
        if kind == PduType.IC_REQ:
            self._initialize(header)
        elif not self.ready:
            raise Violation(f"PDU type {kind:#04x} before ICReq")
        elif kind == PduType.CAPSULE_CMD:
            self._command_arrived(header, intact)
        else:
            self._data_arrived(header, intact)

    # -- the parts

    def _initialize(self, header: Header) -> None:
        if self.ready:
            raise Violation("ICReq came twice")
        version, align, digests, _ = IC_BODY.unpack(header.body)
        if version:
            raise Violation(f"PDU format version {version}", Fatal.UNSUPPORTED, 8)
        if align > 31:
            raise Violation(f"HPDA {align}, at most 31", Fatal.HEADER_FIELD, 10)
        agreed = digests & self._allowed
        body = IC_BODY.pack(0, 0, agreed, self._max_h2c)
        self._out.append(build_pdu(PduType.IC_RESP, 0, body))
        self._align, self.digests = 4 * (align + 1), agreed
        self._receiver.header_digest = bool(agreed & PduFlag.HDGST)
        self._receiver.data_digest = bool(agreed & PduFlag.DDGST)
        self.ready = True

    def _check_depth(self) -> None:
        if len(self._open) >= self.depth:
            raise Violation(f"command {self.depth + 1} on a queue of {self.depth}")

    def _command_arrived(self, header: Header, intact: bool) -> None:
        self._check_depth()
        command, data = Command(header.body), self._capsule_data
        self._capsule_data = None
        if self._flow_control:
            self._head = (self._head + 1) % self.depth
        if command.cid in self._open:
            raise Violation(f"command id {command.cid} is in use", Fatal.HEADER_FIELD, 10)
        self._open.add(command.cid)
        self.commands.append((command, data, intact))

    def _place_write(self, header: Header) -> memoryview:
        cid, tag, offset, nbytes, _ = DATA_BODY.unpack(header.body)
        write = self._writes.get(cid)
        if write is None or tag != cid:
            raise Violation(f"H2CData for tag {tag} of command {cid}", Fatal.HEADER_FIELD, 10)
        if nbytes != header.data_bytes or nbytes > self._max_h2c:
            text = f"H2CData of {header.data_bytes} bytes says {nbytes}, at most {self._max_h2c}"
            raise Violation(text, Fatal.HEADER_FIELD, 16)
        if offset != write.received or offset + nbytes > len(write.into):
            raise Violation(
                f"H2CData for bytes {offset} to {offset + nbytes} of {len(write.into)},"
                f" {write.received} are there",
                Fatal.OUT_OF_RANGE, 12,
            )  # fmt: skip
        last = offset + nbytes == len(write.into)
        if bool(header.flags & PduFlag.LAST) != last:
            text = f"H2CData: LAST at byte {offset + nbytes} of {len(write.into)}"
            raise Violation(text, Fatal.HEADER_FIELD, 1)
        return write.into[offset : offset + nbytes]

    def _data_arrived(self, header: Header, intact: bool) -> None:
        cid = DATA_BODY.unpack(header.body)[0]
        write = self._writes[cid]
        write.received += header.data_bytes
        write.broken = write.broken or not intact
        if write.received == len(write.into):
            del self._writes[cid]
            self.arrived.append((cid, not write.broken))

    def _answer(self, cid: int, status: int, result: int) -> bytes:
        head = self._head if self._flow_control else 0xFFFF
        return self._pdu(
            PduType.CAPSULE_RESP, 0, CQE.pack(result, head, self.qid, cid, status << 1)
        )

    def _pdu(self, kind: PduType, flags: int, body: bytes, data_bytes: int = 0) -> bytes:
        return build_pdu(kind, flags, body, data_bytes, digests=self.digests, align=self._align)
