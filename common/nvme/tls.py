"""TLS 1.3 with pre-shared keys for NVMe/TCP, from the standard library's ssl through ctypes.

Rules:
1. TLS 1.3 only, AES-GCM suites only, (EC)DHE always, no certificates, no tickets, no early data.
   A handshake counts only if the key was used: a peer that shows a certificate instead is refused.
2. ssl has no call for a PSK with SHA-384, so the SSL_CTX behind an SSLContext is looked up in
   CPython's object (first field after the object header, 3.10 to 3.13) and OpenSSL's callbacks are
   set on it.  Nothing of that is used before `probe` has found that the pointer leads to the right
   context, by reading back a setting, and has shaken hands in memory with both hashes.
3. One context per connection: the callback leaves there what it found (`found`).
4. OpenSSL owns an SSL_SESSION once a callback has returned it; the callback frees it only where it
   does not return it.  The identity's bytes stay ours, so the context keeps them.
5. A callback never raises: what goes wrong is kept in the context and raised after the handshake.

The sockets are ssl.SSLSocket, blocking with or without timeout, or non-blocking (SSLWantReadError
and SSLWantWriteError).  They have no sendmsg; and bytes may wait in OpenSSL while the file
descriptor is not readable, so a selector's loop reads until SSLWantReadError or `pending` is 0.
"""

import _ssl
import ctypes
import functools
import os
import socket
import ssl
import sys
from dataclasses import dataclass
from typing import Any

from hyades.common.errors import BackendMissing, HyadesError, PeerError
from hyades.common.nvme.psk import HASHES, Identity, Keyring, Psk, TlsKey, parse_identity

_SUITES = {1: b"TLS_AES_128_GCM_SHA256", 2: b"TLS_AES_256_GCM_SHA384"}
_SUITE_CODES = {1: b"\x13\x01", 2: b"\x13\x02"}  # RFC 8446, B.4
_TLS13 = 0x0304
_SESSION_CONTEXT = b"hyades"  # a client refuses a session whose context differs from its own
_MARKER = 7  # a number of tickets that nobody sets, to recognise an SSL_CTX
_DONE, _FAILED = 1, 0  # what a callback returns

_P = ctypes.c_void_p
_USE_SESSION = ctypes.CFUNCTYPE(  # (SSL*, md, identity**, length*, SSL_SESSION**) -> int
    ctypes.c_int,
    _P,
    _P,
    ctypes.POINTER(_P),
    ctypes.POINTER(ctypes.c_size_t),
    ctypes.POINTER(_P),
)
_FIND_SESSION = ctypes.CFUNCTYPE(  # (SSL*, identity, length, SSL_SESSION**) -> int
    ctypes.c_int, _P, _P, ctypes.c_size_t, ctypes.POINTER(_P)
)
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "OpenSSL_version": (ctypes.c_char_p, [ctypes.c_int]),
    "SSL_CIPHER_find": (_P, [_P, ctypes.c_char_p]),
    "SSL_CTX_get_num_tickets": (ctypes.c_size_t, [_P]),
    "SSL_CTX_set_ciphersuites": (ctypes.c_int, [_P, ctypes.c_char_p]),
    "SSL_CTX_set_psk_find_session_callback": (None, [_P, _FIND_SESSION]),
    "SSL_CTX_set_psk_use_session_callback": (None, [_P, _USE_SESSION]),
    "SSL_CTX_set_session_id_context": (ctypes.c_int, [_P, ctypes.c_char_p, ctypes.c_uint]),
    "SSL_SESSION_free": (None, [_P]),
    "SSL_SESSION_new": (_P, []),
    "SSL_SESSION_set1_id_context": (ctypes.c_int, [_P, ctypes.c_char_p, ctypes.c_uint]),
    "SSL_SESSION_set1_master_key": (ctypes.c_int, [_P, ctypes.c_char_p, ctypes.c_size_t]),
    "SSL_SESSION_set_cipher": (ctypes.c_int, [_P, _P]),
    "SSL_SESSION_set_protocol_version": (ctypes.c_int, [_P, ctypes.c_int]),
}


@dataclass(slots=True)
class Found:
    """What a connection's callback found; apart from the context, so that no cycle arises."""

    identity: Identity | None = None  # of the key in use
    refusal: str = ""  # why there was no key
    error: HyadesError | None = None  # what went wrong in the callback


class PskContext(ssl.SSLContext):
    """One connection's settings and what its callback found."""

    found: Found
    _keep: list[Any]  # callbacks and buffers that OpenSSL has pointers to

    def explain(self, error: OSError) -> HyadesError:
        """Return the exception for a handshake that failed with *error*."""
        if self.found.error is not None:
            return self.found.error
        if self.found.refusal:
            return PeerError(f"TLS handshake refused: {self.found.refusal}")
        if isinstance(error, TimeoutError):
            return PeerError("no answer to the TLS handshake: is TLS on at the other side?")
        if isinstance(error, ssl.SSLEOFError | ConnectionError):
            return PeerError("the other side closed the connection during the TLS handshake")
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        return PeerError(
            f"TLS handshake failed ({reason}): key, host NQN and subsystem NQN must be the same"
            " on both sides, and TLS on at both"
        )

    def check(self, key_used: bool | None) -> None:
        """Raise PeerError unless the handshake used the key."""
        if self.found.error is not None:
            raise self.found.error
        if not key_used:
            raise PeerError("the other side did not use the pre-shared key in the TLS handshake")


class PskSocket(ssl.SSLSocket):
    """A TLS connection; after the handshake `identity` says which key is in use."""

    @property
    def identity(self) -> Identity | None:
        """The PSK identity of the handshake: host and subsystem NQN that the key vouches for."""
        return _own(self.context).found.identity

    def do_handshake(self, block: bool = False) -> None:
        """Shake hands; PeerError where it fails, SSLWantReadError or ...Write to be called again.

        `__cause__` of the PeerError is a TimeoutError, ConnectionError or SSLEOFError where the
        path failed and not the key.
        """
        try:
            super().do_handshake(block)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except OSError as error:
            raise _own(self.context).explain(error) from error
        _own(self.context).check(self.session_reused)


def _own(context: ssl.SSLContext) -> PskContext:
    assert isinstance(context, PskContext)
    return context


def server_context(keys: Keyring) -> PskContext:
    """Return the context of one incoming connection; the host may use any key of *keys*."""
    probe()
    return _server_context(keys)


def client_context(psk: Psk, hostnqn: str, subnqn: str, version: int = 1) -> PskContext:
    """Return the context of one connection of host *hostnqn* to *subnqn*.

    Identity *version* 1 is that of current specifications; SPDK and older hosts know only 0.
    """
    probe()
    return _client_context(psk.derive(hostnqn, subnqn, version))


def wrap_server(sock: socket.socket, keys: Keyring, *, handshake: bool = True) -> PskSocket:
    """Return *sock* as the server's side of TLS; *sock* itself is no longer usable.

    With *handshake* false (for non-blocking sockets) the caller calls do_handshake until it
    returns.  PeerError where the handshake fails; the socket is closed then.
    """
    return _wrap(server_context(keys), sock, server_side=True, handshake=handshake)


def wrap_client(
    sock: socket.socket,
    psk: Psk,
    hostnqn: str,
    subnqn: str,
    *,
    version: int = 1,
    handshake: bool = True,
) -> PskSocket:
    """Return *sock* as the host's side of TLS; as `wrap_server` else."""
    context = client_context(psk, hostnqn, subnqn, version)
    return _wrap(context, sock, server_side=False, handshake=handshake)


@functools.cache
def probe() -> None:
    """Find out once whether TLS with PSK works here; BackendMissing with reason and fix."""
    _library()
    for length in (32, 48):
        psk = Psk(bytes(range(length)), 0, "the self-test's key")
        wrong = Psk(bytes(length), 0, "the self-test's wrong key")
        if not _shakes_hands(psk, psk) or _shakes_hands(psk, wrong):
            raise _missing(f"a handshake in memory with {HASHES[psk.hash]} went wrong")


def _wrap(
    context: PskContext, sock: socket.socket, *, server_side: bool, handshake: bool
) -> PskSocket:
    try:
        wrapped = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
    except OSError as error:  # the other side is gone already
        raise context.explain(error) from error
    assert isinstance(wrapped, PskSocket)
    if handshake:
        try:
            wrapped.do_handshake()
        except BaseException:
            wrapped.close()
            raise
    return wrapped


def _server_context(keys: Keyring) -> PskContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, keys.hashes)
    found = context.found

    def find(connection: int, name: int, length: int, session: Any) -> int:
        try:
            session[0] = None
            raw = ctypes.string_at(name, length)
            offered = parse_identity(raw)
            if offered is None:
                found.refusal = f"{raw[:80]!r} is no NVMe/TCP PSK identity"
                return _DONE  # without a session: no key, and OpenSSL refuses
            key = keys.find(offered)
            if key is None:
                found.refusal = f"no key here goes by the identity {str(offered)[:600]!r}"
                return _DONE
            session[0] = _session(connection, key)
            found.identity, found.refusal = offered, ""
            return _DONE
        except Exception as error:
            return _keep_error(found, error)

    callback = _FIND_SESSION(find)
    context._keep.append(callback)
    _library().SSL_CTX_set_psk_find_session_callback(_pointer(context), callback)
    return context


def _client_context(key: TlsKey) -> PskContext:
    context = _context(ssl.PROTOCOL_TLS_CLIENT, frozenset((key.identity.hash,)))
    found, name = context.found, str(key.identity).encode()
    buffer = ctypes.create_string_buffer(name, len(name))

    def use(connection: int, _digest: int, identity: Any, length: Any, session: Any) -> int:
        try:
            session[0] = _session(connection, key)
            identity[0] = ctypes.addressof(buffer)
            length[0] = len(name)
            found.identity = key.identity
            return _DONE
        except Exception as error:
            return _keep_error(found, error)

    callback = _USE_SESSION(use)
    context._keep += [buffer, callback]
    _library().SSL_CTX_set_psk_use_session_callback(_pointer(context), callback)
    return context


def _keep_error(found: Found, error: Exception) -> int:
    """Keep what a callback may not raise: OpenSSL stands between it and the caller."""
    if isinstance(error, HyadesError):
        found.error = error
    else:
        found.error = PeerError(f"TLS handshake failed in a callback: {error!r}")
    return _FAILED


def _context(protocol: int, hashes: frozenset[int]) -> PskContext:
    context = PskContext(protocol)
    context.sslsocket_class = PskSocket
    context.found, context._keep = Found(), []
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # `check` refuses what did not use the key
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    # The host's order counts: it knows which of its keys it offers.
    context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    library, pointer = _library(), _pointer(context)
    suites = b":".join(_SUITES[specifier] for specifier in sorted(hashes, reverse=True))
    if not (
        library.SSL_CTX_set_ciphersuites(pointer, suites)
        and library.SSL_CTX_set_session_id_context(pointer, _SESSION_CONTEXT, len(_SESSION_CONTEXT))
    ):
        raise _missing(f"OpenSSL refuses the suites {suites.decode()}")
    return context


def _session(connection: int, key: TlsKey) -> int:
    """Return a new SSL_SESSION that holds *key*; who gets it owns it."""
    library = _library()
    session: int | None = library.SSL_SESSION_new()
    if session is None:
        raise _missing("OpenSSL has no memory for a session")
    cipher = library.SSL_CIPHER_find(connection, _SUITE_CODES[key.identity.hash])
    if (
        cipher
        and library.SSL_SESSION_set1_master_key(session, key.secret, len(key.secret))
        and library.SSL_SESSION_set_cipher(session, cipher)
        and library.SSL_SESSION_set_protocol_version(session, _TLS13)
        and library.SSL_SESSION_set1_id_context(session, _SESSION_CONTEXT, len(_SESSION_CONTEXT))
    ):
        return session
    library.SSL_SESSION_free(session)
    raise _missing(f"OpenSSL refuses a session with {_SUITES[key.identity.hash].decode()}")


@functools.cache
def _library() -> Any:
    """Return the libssl that Python's ssl itself uses, once an SSLContext is understood."""
    try:
        # Symbols are looked for in _ssl's own dependencies: never in another copy of OpenSSL.
        library = ctypes.CDLL(getattr(_ssl, "__file__", None))
        for name, (result, arguments) in _PROTOTYPES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise _missing(f"Python's OpenSSL cannot be reached ({error})") from error
    version = library.OpenSSL_version(0).decode()
    if version != ssl.OPENSSL_VERSION:
        raise _missing(f"Python uses {ssl.OPENSSL_VERSION}, but {version} was found")
    if sys.implementation.name != "cpython":
        raise _missing(f"{sys.implementation.name} lays out an SSLContext in its own way")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.num_tickets = _MARKER
    pointer = _pointer(context)
    if not _is_mapped(pointer) or library.SSL_CTX_get_num_tickets(pointer) != _MARKER:
        raise _missing("this Python lays out an SSLContext in an unknown way")
    return library


def _pointer(context: ssl.SSLContext) -> int:
    """Return the SSL_CTX of *context*: the first field after the object's header."""
    return _P.from_address(id(context) + object.__basicsize__).value or 0


def _is_mapped(address: int) -> bool:
    """Return whether *address* may be read, without touching it."""
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _missing(f"/proc/self/mem cannot be opened ({error.strerror})") from error
    try:
        return address > 0 and len(os.pread(memory, 256, address)) == 256
    except (OSError, OverflowError):
        return False
    finally:
        os.close(memory)


def _missing(why: str) -> BackendMissing:
    return BackendMissing(
        f"TLS with pre-shared keys: {why}. Searched: the OpenSSL of Python"
        f" {sys.version.split()[0]}. Use CPython 3.10 to 3.13 linked with OpenSSL 1.1.1 or newer"
        " as a shared library (Debian's python3 is), or serve without TLS on a trusted network"
    )


def _shakes_hands(theirs: Psk, ours: Psk) -> bool:
    """Return whether a client with one key and a server with another agree, in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    key = ours.derive("nqn.hyades:host", "nqn.hyades:subsystem", 0)
    server = _server_context(Keyring([theirs])).wrap_bio(up, down, server_side=True)
    client = _client_context(key).wrap_bio(down, up)
    waiting = [client, server]
    for _ in range(8):  # three flights; more means that they wait for each other
        for side in list(waiting):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
            waiting.remove(side)
        if not waiting:
            client.write(b"self-test")
            if not (client.session_reused and server.session_reused):
                return False
            return server.read(9) == b"self-test" and server.version() == "TLSv1.3"
    return False
