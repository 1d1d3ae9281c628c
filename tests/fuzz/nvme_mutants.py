"""Conversations of NVMe/TCP that are right, and mutations of them, for nvme_fuzz.py."""

import random
from functools import cache

from tests.reference.nvme_pdus import (
    BLOCK,
    C2H,
    C2H_TERM,
    COMMAND,
    H2C,
    H2C_TERM,
    HEADER,
    IC_REQ,
    IC_RESP,
    LAST,
    R2T,
    RESPONSE,
    SUCCESS,
    answer_body,
    data_body,
    ic,
    pdu,
    sqe,
    words,
)

from hyades.common.checksum import crc32c
from hyades.common.nvme import commands
from hyades.common.nvme.commands import Connect

SLOTS = (4, 512, 1500, 64)  # bytes that commands 0 to 3 of the host read
WRITES = (1200, 16)  # bytes that commands 4 and 5 write; command 6 is a flush
COMMON = ((0, 1), (1, 1), (2, 1), (3, 1), (4, 4))
FIELDS = {
    IC_REQ: ((8, 2), (10, 1), (11, 1), (12, 4)),
    IC_RESP: ((8, 2), (10, 1), (11, 1), (12, 4)),
    H2C_TERM: ((8, 2), (10, 4)),
    C2H_TERM: ((8, 2), (10, 4)),
    COMMAND: ((8, 1), (9, 1), (10, 2), (12, 4), (32, 8), (40, 4), (47, 1), (48, 8), (56, 2)),
    RESPONSE: ((8, 8), (16, 2), (18, 2), (20, 2), (22, 2)),
    H2C: ((8, 2), (10, 2), (12, 4), (16, 4)),
    C2H: ((8, 2), (10, 2), (12, 4), (16, 4)),
    R2T: ((8, 2), (10, 2), (12, 4), (16, 4)),
}
ODD = (
    0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 20, 23, 24, 25, 28, 31, 32, 71, 72, 76, 100, 127, 128, 152, 153,
    255, 256, 511, 512, 516, 2048, 2052, 4096, 65535, 65536, 1 << 20, (1 << 31) - 1, 1 << 31,
    (1 << 32) - 4, (1 << 32) - 1,
)  # fmt: skip


@cache
def host_side(digests: int) -> tuple[bytes, ...]:
    """Return what a controller says to a host with the commands of `ready_host`, in order."""
    d = {"digests": digests}
    return (
        ic(IC_RESP, digests=digests, last=4096),
        pdu(R2T, data_body(4, 9, 0, 600), **d),
        pdu(C2H, data_body(1, 0, 0, 100), b"a" * 100, **d),
        pdu(C2H, data_body(0, 0, 0, 4), b"bcde", flags=LAST | SUCCESS, align=64, **d),
        pdu(C2H, data_body(2, 0, 0, 1000), b"f" * 1000, **d),
        pdu(R2T, data_body(4, 8, 600, 600), **d),
        pdu(C2H, data_body(1, 0, 100, 412), b"g" * 412, flags=LAST, align=128, **d),
        pdu(RESPONSE, answer_body(6, 0x06, 7), **d),
        pdu(C2H, data_body(2, 0, 1000, 500), b"h" * 500, flags=LAST | SUCCESS, **d),
        pdu(RESPONSE, answer_body(1), **d),
        pdu(RESPONSE, answer_body(3, 0x281), **d),
        pdu(RESPONSE, answer_body(4), **d),
        pdu(RESPONSE, answer_body(5, 0x280), **d),
    )


@cache
def target_side(digests: int) -> tuple[bytes, ...]:
    """Return what a host says to a target, in order."""
    d = {"digests": digests}
    connect = b"".join(map(bytes, commands.connect(Connect(1, 8, "nqn.a:b", "nqn.c:d", b"i" * 16))))
    head = bytearray(connect[:64])
    commands.set_sgl(head, 0, 1024, 1)
    return (
        ic(IC_REQ, digests=digests),
        pdu(COMMAND, bytes(head), connect[64:], **d),
        pdu(COMMAND, sqe(1, 3, 3 * BLOCK, slba=5, blocks=3), **d),
        pdu(COMMAND, sqe(2, 4, 2 * BLOCK, blocks=2), **d),
        pdu(H2C, data_body(3, 3, 0, 1000), b"x" * 1000, **d),
        pdu(
            COMMAND, sqe(1, 5, 2 * BLOCK, sgl=1, slba=9, blocks=2), b"y" * 2 * BLOCK, align=96, **d
        ),
        pdu(COMMAND, sqe(1, 6, BLOCK, slba=20), **d),
        pdu(H2C, data_body(6, 6, 0, BLOCK), b"z" * BLOCK, flags=LAST, align=128, **d),
        pdu(H2C, data_body(3, 3, 1000, 536), b"w" * 536, flags=LAST, **d),
        pdu(COMMAND, sqe(0, 7), **d),
        pdu(COMMAND, sqe(2, 8, 64 * BLOCK, blocks=64), **d),
    )


def mutate(pdus: list[bytes], digests: int, rng: random.Random) -> set[int]:
    """Change *pdus* in place; return the places that are not what they were."""
    at = rng.randrange(len(pdus))
    how = rng.random() if len(pdus[at]) >= 24 else 1.0
    if how < 0.5:
        pdus[at] = change_field(pdus[at], digests, rng)
    elif how < 0.62:
        pdus[at] = flip(pdus[at], rng)
    elif how < 0.7:
        pdus[at] = pdus[at][: rng.randrange(len(pdus[at]))]
    elif how < 0.76:
        pdus.insert(at, pdus[at])
        at += 1
    elif how < 0.84:
        other = rng.randrange(len(pdus))
        pdus[at], pdus[other] = pdus[other], pdus[at]
        return {at, other} if at != other else set()
    elif how < 0.88:
        del pdus[at]
        return {min(at, len(pdus) - 1)} if pdus else set()
    elif how < 0.95:
        pdus.insert(at, stranger(digests, rng))
    else:
        pdus.insert(at, rng.randbytes(rng.randrange(1, 200)))
    return {at}


def change_field(data: bytes, digests: int, rng: random.Random) -> bytes:
    """Give a field another value; mostly make the digest of the header right again."""
    kind = data[0]
    offset, width = rng.choice(COMMON if rng.random() < 0.45 else FIELDS.get(kind, COMMON))
    changed = bytearray(data)
    old = int.from_bytes(data[offset : offset + width], "little")
    how = rng.random()
    if how < 0.6:
        value = rng.choice(ODD)
    elif how < 0.8:
        value = old + rng.choice((-512, -4, -1, 1, 4, 512))
    else:
        value = old ^ 1 << rng.randrange(8 * width)
    changed[offset : offset + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    hlen = HEADER.get(kind, 24)
    if digests & 1 and kind > C2H_TERM and len(changed) >= hlen + 4 and rng.random() < 0.85:
        changed[hlen : hlen + 4] = crc32c(changed[:hlen]).to_bytes(4, "little")
    return bytes(changed)


def flip(data: bytes, rng: random.Random) -> bytes:
    """Flip up to four bits."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def stranger(digests: int, rng: random.Random) -> bytes:
    """Return a whole PDU of any type with numbers that may mean something."""
    kind = rng.choice(tuple(FIELDS))
    if kind in (IC_REQ, IC_RESP):
        return ic(kind, digests=digests, last=4096)
    if kind in (H2C_TERM, C2H_TERM):
        quoted = rng.randbytes(rng.choice((0, 24, 72, 128)))
        body = words((rng.randrange(8), 2), (rng.choice(ODD), 4))
        return pdu(kind, body, plen=24 + len(quoted)) + quoted
    if kind == COMMAND and rng.random() < 0.3:  # a long one, and the data never comes
        nbytes = rng.choice((2052, 4096, 1 << 20, 1 << 28))
        return pdu(kind, sqe(1, 9, nbytes, sgl=1), plen=72 + 4 * (digests & 1) + nbytes,
                   pdo=72 + 4 * (digests & 1), flags=digests & 2, digests=digests & 1)  # fmt: skip
    nbytes = rng.choice((0, 4, 64, 512, 2048))
    data = bytes(nbytes) if kind in (COMMAND, H2C, C2H) else b""
    if kind == COMMAND:
        blocks = max(nbytes // BLOCK, 1)
        sgl = rng.choice((1, 1, 0x5A))
        data = data if sgl == 1 else b""
        body = sqe(rng.randrange(4), rng.randrange(10), nbytes, sgl=sgl, blocks=blocks)
    elif kind == RESPONSE:
        body = answer_body(rng.randrange(8), rng.choice((0, 0x281)))
    else:
        cid = rng.randrange(8)
        body = data_body(cid, cid, rng.choice((0, 100, 600, 1000)), nbytes)
    flags = rng.choice((0, LAST, LAST | SUCCESS))
    return pdu(kind, body, data, flags=flags, digests=digests, align=rng.choice((4, 64)))


def prepare(said: list[bytes], digests: int, rng: random.Random) -> tuple[list[bytes], set[int]]:
    """Mutate *said*, mostly once and early; return it and the places that changed."""
    if rng.random() < 0.5:
        said = said[: rng.randrange(1, len(said) + 1)]
    changed: set[int] = set()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if said:
            changed |= mutate(said, digests, rng)
    return said, changed
