"""Cutting a byte stream into NVMe/TCP PDUs, and building them.

The receiver never holds page data: it says where the next bytes of the stream belong, and whoever
reads the socket puts them there (`socket.recvmsg_into(receiver.buffers())`).  Rules:
1. `buffers()` are the places of the next bytes, in order: what is missing of this PDU, then at most
   the fixed part of the next header.  The caller fills a prefix of them, of any length, and says
   how long it was with `received(n)`.  Events do not depend on how the stream was cut.
2. A PDU is checked before any memory is set aside for it: type, flags, lengths once its first 24
   bytes are there (the shortest header), then the header digest, then what the owner knows.  What
   is wrong raises a Violation for the lowest wrong field, and the stream is dead from then on.
3. The owner places data (`place`, which may refuse it) and hears when the PDU is whole (`finish`).
   A wrong data digest is no violation: `finish` is told, and the command fails, not the connection.
Source: NVM Express TCP Transport Specification 1.0, sections 3.3 and 3.6.
"""

from collections.abc import Mapping
from typing import Protocol

from hyades.common.checksum import crc32c
from hyades.common.errors import PeerError
from hyades.common.nvme.layout import (
    COMMAND_BYTES,
    COMMON_HEADER,
    DIGEST_BYTES,
    HEADER_BYTES,
    IC_BYTES,
    MAX_TERM_BYTES,
    TERM_BODY,
    Fatal,
    PduFlag,
    PduType,
)

_INITIAL = frozenset((PduType.IC_REQ, PduType.IC_RESP))
_TERM = frozenset((PduType.H2C_TERM, PduType.C2H_TERM))
_DATA = frozenset((PduType.CAPSULE_CMD, PduType.H2C_DATA, PduType.C2H_DATA))
_HDGST, _DDGST = int(PduFlag.HDGST), int(PduFlag.DDGST)  # plain ints: every PDU tests them
# What each side may get, and its header length.
FROM_HOST: Mapping[int, int] = {
    PduType.IC_REQ: IC_BYTES,
    PduType.H2C_TERM: HEADER_BYTES,
    PduType.CAPSULE_CMD: COMMAND_BYTES,
    PduType.H2C_DATA: HEADER_BYTES,
}
FROM_CONTROLLER: Mapping[int, int] = {
    PduType.IC_RESP: IC_BYTES,
    PduType.C2H_TERM: HEADER_BYTES,
    PduType.CAPSULE_RESP: HEADER_BYTES,
    PduType.C2H_DATA: HEADER_BYTES,
    PduType.R2T: HEADER_BYTES,
}
_FIXED, _REST, _PAYLOAD, _DIGEST = range(4)
_NOTHING = memoryview(b"")


class Violation(PeerError):  # noqa: N818
    """A PeerError that ends the connection: *fatal* and *info* go into the TermReq.

    *fatal* is None where the peer is not told: it sent a TermReq itself, right or malformed.
    """

    def __init__(self, text: str, fatal: Fatal | None = Fatal.SEQUENCE, info: int = 0) -> None:
        super().__init__(text)
        self.fatal = fatal
        self.info = info


class Header:
    """One PDU: its type, its flags, its header's bytes, and how many bytes of data it has."""

    __slots__ = ("data_bytes", "flags", "kind", "raw")

    def __init__(self, kind: int, flags: int, raw: bytes, data_bytes: int) -> None:
        self.kind, self.flags, self.raw, self.data_bytes = kind, flags, raw, data_bytes

    @property
    def body(self) -> bytes:
        """What follows the common header."""
        return self.raw[COMMON_HEADER.size :]


class Owner(Protocol):
    """Whose PDUs a receiver cuts."""

    def place(self, header: Header) -> memoryview:
        """Return the writable bytes that the data of this PDU belongs in, or raise Violation."""
        ...

    def finish(self, header: Header, intact: bool) -> None:
        """Take a whole PDU; *intact* is False where its data digest was wrong."""
        ...


class Receiver:
    """The receiving half of a connection; see the module."""

    def __init__(self, owner: Owner, accepts: Mapping[int, int], max_data: int) -> None:
        """Cut PDUs of the types *accepts* (type: header length) with up to *max_data* bytes."""
        self.header_digest = self.data_digest = False
        self.initialized = False  # ICReq and ICResp belong before, all else after
        self._owner, self._accepts, self._max_data = owner, accepts, max_data
        head, self._tail = bytearray(256), bytearray(DIGEST_BYTES)
        self._head, self._tail_view = memoryview(head), memoryview(self._tail)
        self._fixed = self._head[:HEADER_BYTES]
        self._stage, self._fill, self._goal = _FIXED, 0, HEADER_BYTES
        self._data_bytes = 0
        self._pdu: Header | None = None
        self._target = _NOTHING
        self._digested = False  # a data digest follows the payload
        self._term_data = bytearray(MAX_TERM_BYTES)

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes belong, in order; at least one byte in all."""
        stage, fill = self._stage, self._fill
        if stage == _PAYLOAD:
            rest = self._target[fill:] if fill else self._target
            return [rest, self._tail_view, self._fixed] if self._digested else [rest, self._fixed]
        if stage == _DIGEST:
            return [self._tail_view[fill:], self._fixed]
        return [self._head[fill : self._goal]]

    def received(self, nbytes: int) -> None:
        """Go on after *nbytes* were put into `buffers()`; raises Violation."""
        try:
            while nbytes:
                missing = self._goal - self._fill
                if nbytes < missing:
                    self._fill += nbytes
                    return
                nbytes -= missing
                self._fill = self._goal
                self._next()
        except Violation:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the owner's memory: `buffers` no longer leads to it."""
        self._restart()

    @property
    def between(self) -> bool:
        """Whether the stream stands between two PDUs, where a peer may close it."""
        return self._stage == _FIXED and self._fill == 0

    @property
    def header(self) -> bytes:
        """The header of the last PDU whose header was read: what a TermReq quotes."""
        return bytes(self._fixed) if self._pdu is None else self._pdu.raw

    def _next(self) -> None:
        """Go on to the next part of the stream."""
        stage = self._stage
        if stage == _FIXED:
            self._pdu = None
            self._goal = self._check()
            self._stage = _REST
            if self._goal == HEADER_BYTES:
                self._begin()
        elif stage == _REST:
            self._begin()
        elif stage == _PAYLOAD and self._digested:
            self._stage, self._fill, self._goal = _DIGEST, 0, DIGEST_BYTES
        else:
            self._finish()

    def _check(self) -> int:
        """Check the common header, lowest field first, and return how long the header is."""
        kind, flags, hlen, pdo, plen = COMMON_HEADER.unpack_from(self._head)
        expected = self._accepts.get(kind)
        what = "PDU type %#04x"
        if expected is None:
            raise _header_error(f"{what} is not for this side", kind, 0)
        if kind in _TERM:
            return self._check_term(kind, hlen, plen)
        if (kind in _INITIAL) == self.initialized:
            raise Violation(f"{what % kind} {'after' if self.initialized else 'before'} ICResp")
        base = expected
        if self.header_digest:
            base += DIGEST_BYTES
        if flags & _HDGST != self.header_digest:
            text = f"{what}: header digest flag {flags & _HDGST}, agreed {self.header_digest:d}"
            raise _header_error(text, kind, 1)
        self._data_bytes = 0
        has_data = plen > base and kind in _DATA
        if has_data and bool(flags & _DDGST) != self.data_digest:
            text = f"{what}: data digest flag {flags & _DDGST:d}, agreed {self.data_digest:d}"
            raise _header_error(text, kind, 1)
        if hlen != expected:
            raise _header_error(f"{what}: header length {hlen}, not {expected}", kind, 2)
        if has_data:
            self._check_data(kind, pdo, plen, base)
            return int(pdo)
        if plen != base or (kind in _DATA and kind != PduType.CAPSULE_CMD):
            raise _header_error(f"{what}: length {plen}, its header has {base}", kind, 4)
        return base

    def _check_term(self, kind: int, hlen: int, plen: int) -> int:
        # A TermReq is not answered by a TermReq, whatever is wrong with it.
        if hlen != HEADER_BYTES or not HEADER_BYTES <= plen <= MAX_TERM_BYTES:
            raise Violation(f"PDU type {kind:#04x}: length {plen}, header length {hlen}", None)
        self._data_bytes = plen - hlen
        return hlen

    def _check_data(self, kind: int, pdo: int, plen: int, base: int) -> None:
        what = "PDU type %#04x"
        if pdo < base or pdo % 4 or pdo > plen:
            text = f"{what}: data offset {pdo} in {plen} bytes, header {base} bytes"
            raise _header_error(text, kind, 3)
        data_bytes = plen - pdo - (DIGEST_BYTES if self.data_digest else 0)
        if data_bytes <= 0:
            raise _header_error(f"{what}: no data in {plen} bytes, data offset {pdo}", kind, 4)
        if data_bytes > self._max_data:
            text = f"{what % kind}: {data_bytes} bytes of data, at most {self._max_data} are taken"
            raise Violation(text, Fatal.LIMIT_EXCEEDED)
        self._data_bytes = data_bytes

    def _begin(self) -> None:
        """Take the header, which is whole, and make room for the data."""
        head, data_bytes = self._head, self._data_bytes
        kind, flags, hlen = head[0], head[1], head[2]
        self._pdu = pdu = Header(kind, flags, bytes(head[:hlen]), data_bytes)
        if self.header_digest and kind not in _TERM:
            found = int.from_bytes(head[hlen : hlen + DIGEST_BYTES], "little")
            made = crc32c(pdu.raw)
            if found != made:
                text = f"PDU type {kind:#04x}: header digest {found:#010x}, computed {made:#010x}"
                raise Violation(text, Fatal.HEADER_DIGEST, found)
        if not data_bytes:
            self._digested = False
            self._finish()
            return
        if kind in _TERM:
            self._target, self._digested = memoryview(self._term_data)[:data_bytes], False
        else:
            self._target, self._digested = self._owner.place(pdu), self.data_digest
        assert len(self._target) == data_bytes
        self._stage, self._fill, self._goal = _PAYLOAD, 0, data_bytes

    def _finish(self) -> None:
        pdu = self._pdu
        assert pdu is not None
        intact = True
        if self._digested:
            intact = crc32c(self._target) == int.from_bytes(self._tail, "little")
        self._restart()
        self._owner.finish(pdu, intact)

    def _restart(self) -> None:
        self._stage, self._fill, self._goal = _FIXED, 0, HEADER_BYTES
        self._target = _NOTHING


def _header_error(text: str, kind: int, at: int) -> Violation:
    return Violation(text % kind, Fatal.HEADER_FIELD, at)


def feed(receiver: Receiver, data: bytes | bytearray | memoryview) -> None:
    """Copy *data* where it belongs: for streams that are in memory already; raises Violation."""
    view = memoryview(data)
    while view:
        taken = 0
        for buffer in receiver.buffers():
            step = min(len(buffer), len(view))
            buffer[:step] = view[:step]
            view, taken = view[step:], taken + step
        receiver.received(taken)


def build_pdu(
    kind: PduType, flags: int, body: bytes, data_bytes: int = 0, *, digests: int = 0, align: int = 4
) -> bytes:
    """Return what goes before the data of a PDU (all of it where *data_bytes* is 0).

    *digests* are the flags that were agreed on (none for ICReq, ICResp and TermReq); *align* is
    what the peer asked the data offset to be a multiple of.
    """
    hlen = COMMON_HEADER.size + len(body)
    plen = hlen + DIGEST_BYTES if digests & _HDGST else hlen
    pdo = 0
    flags |= digests & _HDGST
    if data_bytes:
        pdo = -(-plen // align) * align
        plen = pdo + data_bytes + (DIGEST_BYTES if digests & _DDGST else 0)
        flags |= digests & _DDGST
    head = COMMON_HEADER.pack(kind, flags, hlen, pdo, plen) + body
    if digests & _HDGST:
        head += crc32c(head).to_bytes(DIGEST_BYTES, "little")
    return head.ljust(pdo, b"\0")


def build_term(kind: PduType, violation: Violation, offending: bytes) -> bytes:
    """Return the TermReq that tells the peer of *violation*, quoting the *offending* header.

    Empty where the peer is not told.
    """
    if violation.fatal is None:
        return b""
    quoted = offending[: MAX_TERM_BYTES - HEADER_BYTES]
    plen = HEADER_BYTES + len(quoted)
    head = COMMON_HEADER.pack(kind, 0, HEADER_BYTES, 0, plen)
    return head + TERM_BODY.pack(violation.fatal, violation.info & 0xFFFFFFFF) + quoted


def describe_term(header: Header) -> str:
    """Return what a TermReq says, for messages."""
    fatal, info = TERM_BODY.unpack_from(header.raw, COMMON_HEADER.size)
    known = fatal in Fatal._value2member_map_
    name = Fatal(fatal).name.lower().replace("_", " ") if known else f"status {fatal}"
    return f"{name}, information {info:#x}"
