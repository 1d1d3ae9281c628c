"""Cutting a byte stream into NVMe/TCP PDUs, and building them.

The receiver never holds page data: it says where the next bytes of the stream belong, and whoever
reads the socket puts them there (`socket.recvmsg_into(receiver.buffers())`).  Rules:
1. `buffers()` are the places of the next bytes, in order: what is missing of this PDU, then at most
   the fixed part of the next header.  The caller fills a prefix of them, of any length, and says
   how long it was with `received(n)`.  Events do not depend on how the stream was cut.
2. A PDU is checked as soon as the fields concerned are there, before any memory is set aside for
   it: type, lengths, flags, header digest.  What is wrong raises a Violation, and the stream is
   dead from then on.
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
from hyades.common.units import round_up

_BARE = frozenset((PduType.IC_REQ, PduType.IC_RESP, PduType.H2C_TERM, PduType.C2H_TERM))
_TERM = frozenset((PduType.H2C_TERM, PduType.C2H_TERM))
_DATA = frozenset((PduType.CAPSULE_CMD, PduType.H2C_DATA, PduType.C2H_DATA))
_DIGESTS = PduFlag.HDGST | PduFlag.DDGST
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
_HEAD, _PAYLOAD, _DIGEST = range(3)


class Violation(PeerError):  # noqa: N818
    """A PeerError that ends the connection: *fatal* and *info* go into the TermReq."""

    def __init__(self, text: str, fatal: Fatal = Fatal.SEQUENCE, info: int = 0) -> None:
        super().__init__(text)
        self.fatal = fatal
        self.info = info


class Header:
    """One PDU: its type, its flags, what follows the common header, and the bytes of its data."""

    __slots__ = ("body", "data_bytes", "flags", "kind")

    def __init__(self, kind: int, flags: int, body: bytes, data_bytes: int) -> None:
        self.kind, self.flags, self.body, self.data_bytes = kind, flags, body, data_bytes


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
        self.dead = False
        self._owner, self._accepts, self._max_data = owner, accepts, max_data
        self._head, self._tail = bytearray(256), bytearray(DIGEST_BYTES)
        self._views = (memoryview(self._head), memoryview(self._tail))
        self._stage, self._fill, self._need = _HEAD, 0, HEADER_BYTES
        self._checked = False
        self._pdu: Header | None = None
        self._target = memoryview(b"")
        self._term_data = bytearray(MAX_TERM_BYTES)

    def buffers(self) -> list[memoryview]:
        """Return where the next bytes belong, in order; at least one byte in all."""
        head, tail = self._views
        if self._stage == _HEAD:
            return [head[self._fill : self._need]]
        following = head[:HEADER_BYTES]
        if self._stage == _DIGEST:
            return [tail[self._fill :], following]
        rest = self._target[self._fill :]
        return [rest, tail, following] if self.data_digest else [rest, following]

    def received(self, nbytes: int) -> None:
        """Go on after *nbytes* were put into `buffers()`; raises Violation."""
        try:
            while nbytes:
                nbytes -= self._advance(nbytes)
        except Violation:
            self.dead = True
            raise

    @property
    def between(self) -> bool:
        """Whether the stream stands between two PDUs, where a peer may close it."""
        return self._stage == _HEAD and self._fill == 0

    @property
    def header(self) -> bytes:
        """The header that is being read, as far as it has come: what a TermReq quotes."""
        return bytes(self._head[: min(self._fill, IC_BYTES)])

    def _advance(self, nbytes: int) -> int:
        if self._stage == _HEAD:
            return self._advance_head(nbytes)
        whole = len(self._target) if self._stage == _PAYLOAD else DIGEST_BYTES
        step = min(nbytes, whole - self._fill)
        self._fill += step
        if self._fill == whole:
            if self._stage == _PAYLOAD and self.data_digest and not self._is_term():
                self._stage, self._fill = _DIGEST, 0
            else:
                self._finish()
        return step

    def _advance_head(self, nbytes: int) -> int:
        step = min(nbytes, self._need - self._fill)
        self._fill += step
        if not self._checked and self._fill >= COMMON_HEADER.size:
            self._check_common()
        if self._checked and self._fill == self._need:
            self._begin()
        return step

    def _is_term(self) -> bool:
        return self._pdu is not None and self._pdu.kind in _TERM

    def _check_common(self) -> None:
        """Check the first eight bytes and find where the header ends."""
        kind, flags, hlen, pdo, plen = COMMON_HEADER.unpack_from(self._head)
        if kind not in self._accepts:
            raise Violation(f"PDU type {kind:#04x} is not for this side", Fatal.HEADER_FIELD, 0)
        if hlen != self._accepts[kind]:
            text = f"PDU type {kind:#04x}: header length {hlen}, not {self._accepts[kind]}"
            raise Violation(text, Fatal.HEADER_FIELD, 2)
        digest = self.header_digest and kind not in _BARE
        if bool(flags & PduFlag.HDGST) != digest:
            text = f"PDU type {kind:#04x}: header digest flag {flags & 1}, agreed {int(digest)}"
            raise Violation(text, Fatal.HEADER_FIELD, 1)
        base = hlen + (DIGEST_BYTES if digest else 0)
        self._check_length(kind, flags, pdo, plen, base)
        has_data = kind in _DATA and plen > base
        self._need = max(base, pdo) if has_data else base
        self._checked = True

    def _check_length(self, kind: int, flags: int, pdo: int, plen: int, base: int) -> None:
        what = f"PDU type {kind:#04x}"
        if kind in _TERM:
            if not base <= plen <= MAX_TERM_BYTES:
                raise Violation(f"{what}: length {plen}", Fatal.HEADER_FIELD, 4)
            return
        if plen < base or (plen > base and kind not in _DATA):
            text = f"{what}: length {plen}, its header has {base} bytes"
            raise Violation(text, Fatal.HEADER_FIELD, 4)
        if plen == base:
            if kind in _DATA and kind != PduType.CAPSULE_CMD:
                raise Violation(f"{what} without data", Fatal.HEADER_FIELD, 4)
            return
        if bool(flags & PduFlag.DDGST) != self.data_digest:
            text = f"{what}: data digest flag {flags & 2}, agreed {int(self.data_digest)}"
            raise Violation(text, Fatal.HEADER_FIELD, 1)
        if pdo < base or pdo % 4 or pdo + self._digest_bytes >= plen:
            text = f"{what}: data offset {pdo} in {plen} bytes, header {base} bytes"
            raise Violation(text, Fatal.HEADER_FIELD, 3)
        if plen - pdo - self._digest_bytes > self._max_data:
            text = f"{what}: {plen - pdo} bytes of data, at most {self._max_data} are taken"
            raise Violation(text, Fatal.HEADER_FIELD, 4)

    @property
    def _digest_bytes(self) -> int:
        return DIGEST_BYTES if self.data_digest else 0

    def _begin(self) -> None:
        """Take the header, which is whole, and make room for the data."""
        kind, flags, hlen, pdo, plen = COMMON_HEADER.unpack_from(self._head)
        if flags & PduFlag.HDGST:
            found = int.from_bytes(self._head[hlen : hlen + DIGEST_BYTES], "little")
            made = crc32c(self._views[0][:hlen])
            if found != made:
                text = f"PDU type {kind:#04x}: header digest {found:#010x}, computed {made:#010x}"
                raise Violation(text, Fatal.HEADER_DIGEST, found)
        body = bytes(self._head[COMMON_HEADER.size : hlen])
        if kind in _TERM:
            data_bytes = plen - hlen
        elif kind in _DATA and plen > self._base(kind, hlen):
            data_bytes = plen - pdo - self._digest_bytes
        else:
            data_bytes = 0
        self._pdu = Header(kind, flags, body, data_bytes)
        if not data_bytes:
            self._finish()
            return
        if kind in _TERM:
            self._target = memoryview(self._term_data)[:data_bytes]
        else:
            self._target = self._owner.place(self._pdu)
            assert len(self._target) == data_bytes
        self._stage, self._fill = _PAYLOAD, 0

    def _base(self, kind: int, hlen: int) -> int:
        return hlen + (DIGEST_BYTES if self.header_digest and kind not in _BARE else 0)

    def _finish(self) -> None:
        pdu, target = self._pdu, self._target
        assert pdu is not None
        intact = True
        if pdu.data_bytes and pdu.kind not in _TERM and self.data_digest:
            intact = crc32c(target) == int.from_bytes(self._tail, "little")
        self._stage, self._fill, self._need = _HEAD, 0, HEADER_BYTES
        self._checked = False
        self._target = memoryview(b"")
        self._owner.finish(pdu, intact)


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
    start = hlen + (DIGEST_BYTES if digests & PduFlag.HDGST else 0)
    flags |= digests & PduFlag.HDGST
    if data_bytes:
        flags |= digests & PduFlag.DDGST
        pdo = round_up(start, align)
        plen = pdo + data_bytes + (DIGEST_BYTES if digests & PduFlag.DDGST else 0)
    else:
        pdo, plen = 0, start
    head = COMMON_HEADER.pack(kind, flags, hlen, pdo, plen) + body
    if digests & PduFlag.HDGST:
        head += crc32c(head).to_bytes(DIGEST_BYTES, "little")
    return head + bytes(pdo - len(head)) if pdo > len(head) else head


def build_term(kind: PduType, violation: Violation, offending: bytes) -> bytes:
    """Return the TermReq that tells the peer of *violation*, quoting the *offending* header."""
    quoted = offending[: MAX_TERM_BYTES - HEADER_BYTES]
    plen = HEADER_BYTES + len(quoted)
    head = COMMON_HEADER.pack(kind, 0, HEADER_BYTES, 0, plen)
    return head + TERM_BODY.pack(violation.fatal, violation.info & 0xFFFFFFFF) + quoted


def describe_term(header: Header) -> str:
    """Return what a TermReq says, for messages."""
    fatal, info = TERM_BODY.unpack(header.body)
    known = fatal in Fatal._value2member_map_
    name = Fatal(fatal).name.lower().replace("_", " ") if known else f"status {fatal}"
    return f"{name}, information {info:#x}"
