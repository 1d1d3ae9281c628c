"""Pre-shared keys of NVMe/TCP: how they are written down, named and turned into TLS keys.

Rules (NVMe TCP Transport Specification 1.0c and TP 8018, sections 3.6.1.3 and 3.6.1.5):

    configured PSK --HostNQN--> retained PSK --nvme-tls-psk--> TLS PSK

1. Interchange format ``NVMeTLSkey-1:hh:base64:``: the configured PSK (32 or 48 bytes) and its
   CRC-32, little-endian.  hh: 00 keeps it as the retained PSK, 01 derives that by SHA-256, 02 by
   SHA-384.
2. retained = HKDF-Expand-Label(HKDF-Extract(0, configured), "HostNQN", host NQN, same length).
3. The hash of the TLS cipher suite follows from the length: 32 bytes SHA-256, 48 bytes SHA-384.
4. Identity version 0: ``NVMe0Rhh hostnqn subnqn``.  Version 1 adds the Base64 digest
   HMAC(retained, "hostnqn subnqn NVMe-over-Fabrics"), so that a server can tell keys apart.
5. TLS PSK = HKDF-Expand-Label(HKDF-Extract(0, retained), "nvme-tls-psk", context, hash length);
   the context is the whole identity in version 0, ``hh digest`` in version 1.

The null character that revision 1.0 puts at the end of an identity is not sent: neither Linux nor
SPDK does.  libnvme before 1.16 wrote other HKDF labels (``--compat`` in newer ones); those keys
differ from these.  Must stay in sync with the TLS contexts in tls.py, which name keys by hash.
"""

import base64
import binascii
import hmac
import os
import stat
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hyades.common.errors import UsageError

HASHES = {1: "sha256", 2: "sha384"}  # hash specifier -> name
_LENGTHS = {32: 1, 48: 2}  # key bytes -> hash specifier
_DIGEST_BYTES = {1: 32, 2: 48}
_PREFIX = "NVMeTLSkey-1:"
_MAX_FILE = 4096  # bytes; a key file holds one line
_MAX_NQN = 223  # bytes (NVMe Base, 4.5)
_MAX_CONTEXT = 255  # an HkdfLabel counts its context in one byte (RFC 8446, 7.1)


@dataclass(frozen=True, slots=True)
class Identity:
    """A PSK identity as it stands in a ClientHello."""

    version: int  # 0, or 1 with a digest
    hash: int  # of the cipher suite: 1 SHA-256, 2 SHA-384
    hostnqn: str
    subnqn: str
    digest: str = ""

    def __str__(self) -> str:
        text = f"NVMe{self.version}R{self.hash:02d} {self.hostnqn} {self.subnqn}"
        return f"{text} {self.digest}" if self.digest else text


@dataclass(frozen=True, slots=True)
class TlsKey:
    """What TLS needs of a key: its name, the secret and the hash of the cipher suite."""

    identity: Identity
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Psk:
    """A configured PSK; *transform* is 0 (used as it is), 1 (SHA-256) or 2 (SHA-384)."""

    configured: bytes = field(repr=False)
    transform: int
    source: str = "a key"  # where it came from, for messages

    def __post_init__(self) -> None:
        if len(self.configured) not in _LENGTHS:
            raise UsageError(f"{self.source}: a key has 32 or 48 bytes, not {len(self.configured)}")
        if self.transform not in (0, self.hash):
            raise UsageError(
                f"{self.source}: hash {self.transform:02d} does not go with"
                f" {len(self.configured)} bytes: 01 takes 32, 02 takes 48"
            )

    @property
    def hash(self) -> int:
        """Hash specifier of the cipher suite that this key is for."""
        return _LENGTHS[len(self.configured)]

    def interchange(self) -> str:
        """Return the key in the PSK interchange format."""
        checked = self.configured + zlib.crc32(self.configured).to_bytes(4, "little")
        return f"{_PREFIX}{self.transform:02d}:{base64.b64encode(checked).decode()}:"

    def retained(self, hostnqn: str) -> bytes:
        """Return the retained PSK for the host *hostnqn*."""
        if self.transform == 0:
            return self.configured
        name = HASHES[self.transform]
        return expand_label(name, self.configured, b"HostNQN", _nqn(hostnqn), len(self.configured))

    def identity(self, hostnqn: str, subnqn: str, version: int = 1) -> Identity:
        """Return the identity under which host *hostnqn* offers this key to *subnqn*."""
        if version not in (0, 1):
            raise UsageError(f"PSK identities have version 0 or 1, not {version}")
        host, subsystem = _nqn(hostnqn), _nqn(subnqn)
        if version == 0:
            return Identity(0, self.hash, hostnqn, subnqn)
        text = host + b" " + subsystem + b" NVMe-over-Fabrics"
        digest = hmac.new(self.retained(hostnqn), text, HASHES[self.hash]).digest()
        return Identity(1, self.hash, hostnqn, subnqn, base64.b64encode(digest).decode())

    def derive(self, hostnqn: str, subnqn: str, version: int = 1) -> TlsKey:
        """Return identity and TLS PSK for one pair of host and subsystem."""
        identity = self.identity(hostnqn, subnqn, version)
        named = str(identity) if version == 0 else f"{self.hash:02d} {identity.digest}"
        context = named.encode()
        if len(context) > _MAX_CONTEXT:
            raise UsageError(
                f"{hostnqn} and {subnqn} are too long for a version 0 PSK identity: together"
                f" with 'NVMe0R01' at most {_MAX_CONTEXT} bytes"
            )
        name, length = HASHES[self.hash], _DIGEST_BYTES[self.hash]
        secret = expand_label(name, self.retained(hostnqn), b"nvme-tls-psk", context, length)
        return TlsKey(identity, secret)


class Keyring:
    """The keys that a target accepts."""

    def __init__(self, psks: Iterable[Psk]) -> None:
        self.psks = tuple(psks)
        if not self.psks:
            raise UsageError("TLS needs at least one key: --tls-psk FILE")

    @property
    def hashes(self) -> frozenset[int]:
        """Hash specifiers of the suites that some key is for."""
        return frozenset(psk.hash for psk in self.psks)

    def find(self, offered: Identity) -> TlsKey | None:
        """Return the key that goes by the name *offered*, if exactly one does.

        A version 0 identity does not say which key is meant, so it is taken only where one key
        has the hash that it names.
        """
        found = []
        for psk in self.psks:
            if psk.hash != offered.hash:
                continue
            expected = psk.identity(offered.hostnqn, offered.subnqn, offered.version)
            if hmac.compare_digest(str(expected).encode(), str(offered).encode()):
                found.append(psk)
        if len({psk.configured for psk in found}) != 1:
            return None
        return found[0].derive(offered.hostnqn, offered.subnqn, offered.version)


def parse_identity(raw: bytes) -> Identity | None:
    """Return what a peer's identity says, or None where it is not one of NVMe/TCP."""
    try:
        fields = raw.decode("utf-8").split(" ")
    except UnicodeDecodeError:
        return None
    head, names = fields[0], fields[1:]
    if len(head) != 8 or not head.startswith("NVMe") or head[5] != "R":
        return None
    version, specifier = head[4], head[6:]
    if (version, len(names)) not in (("0", 2), ("1", 3)) or specifier not in ("01", "02"):
        return None
    if not all(_is_nqn(name.encode()) for name in names[:2]):
        return None
    return Identity(int(version), int(specifier), names[0], names[1], "".join(names[2:]))


def expand_label(name: str, secret: bytes, label: bytes, context: bytes, length: int) -> bytes:
    """Return HKDF-Expand-Label(HKDF-Extract(0, *secret*), *label*, *context*, *length*).

    RFC 5869 and RFC 8446 section 7.1; *length* is at most one digest, so one block is enough.
    """
    size = hmac.new(b"", b"", name).digest_size
    if length > size:
        raise UsageError(f"{name} gives {size} bytes, not {length}")
    extracted = hmac.new(bytes(size), secret, name).digest()
    full = b"tls13 " + label
    info = length.to_bytes(2, "big") + bytes([len(full)]) + full + bytes([len(context)]) + context
    return hmac.new(extracted, info + b"\x01", name).digest()[:length]


def load_psk(path: str | os.PathLike[str]) -> Psk:
    """Read one key: PSK interchange format, or 64 or 96 hex digits (hash 01 or 02).

    UsageError where others may read the file, or where it holds no sound key.
    """
    name = Path(path)
    try:
        with name.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_MAX_FILE + 1)
    except OSError as error:
        raise UsageError(f"cannot read the key {name}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise UsageError(f"{name} holds a key that others may read: chmod 600 {name}")
    if len(raw) > _MAX_FILE:
        raise UsageError(f"{name} is too long for a key file: one key, one line")
    try:
        text = raw.decode("ascii").strip()
    except UnicodeDecodeError:
        raise UsageError(f"{name}: {_FORMS}") from None
    return parse_psk(text, str(name))


_FORMS = f"a key is written {_PREFIX}01:base64: (nvme gen-tls-key) or as 64 or 96 hex digits"


def parse_psk(text: str, source: str = "a key") -> Psk:
    """Return the key that *text* holds; UsageError names *source*, never the key."""
    if not text.startswith(_PREFIX):
        try:
            key = bytes.fromhex(text)
        except ValueError:
            raise UsageError(f"{source}: {_FORMS}") from None
        return Psk(key, _LENGTHS.get(len(key), 0), source)
    transform, _, rest = text.removeprefix(_PREFIX).partition(":")
    if transform not in ("00", "01", "02") or not rest.endswith(":"):
        raise UsageError(f"{source}: {_FORMS}; the hash is 00, 01 or 02")
    try:
        checked = base64.b64decode(rest[:-1], validate=True)
    except binascii.Error:
        raise UsageError(f"{source}: the key is not Base64") from None
    key, crc = checked[:-4], checked[-4:]
    if len(key) in _LENGTHS and zlib.crc32(key).to_bytes(4, "little") != crc:
        raise UsageError(f"{source}: the key's CRC-32 is wrong: it was cut or mistyped")
    return Psk(key, int(transform), source)


def _nqn(text: str) -> bytes:
    raw = text.encode()
    if not _is_nqn(raw):
        raise UsageError(f"an NQN has 1 to 223 bytes without spaces, not {text!r}")
    return raw


def _is_nqn(raw: bytes) -> bool:
    return 0 < len(raw) <= _MAX_NQN and all(byte > 0x20 for byte in raw)
