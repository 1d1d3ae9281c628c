"""TLS with pre-shared keys against the openssl program, with either hash, and against a cheat."""

import base64
import ctypes
import shutil
import socket
import ssl
import subprocess
import time

import pytest

from hyades.common.errors import BackendMissing, PeerError
from hyades.common.nvme import tls
from hyades.common.nvme.psk import Keyring, Psk

OPENSSL = shutil.which("openssl")
HOST, SUBSYSTEM = "nqn.psk-test-host", "nqn.psk-test-subsys"
PSKS = [Psk(bytes(range(32)), 1), Psk(bytes(range(48)), 2)]
SUITES = {1: "TLS_AES_128_GCM_SHA256", 2: "TLS_AES_256_GCM_SHA384"}
by_hash = pytest.mark.parametrize("psk", PSKS, ids=["sha256", "sha384"])


@pytest.fixture(autouse=True, scope="module")
def _needs_both():
    if OPENSSL is None:
        pytest.skip("needs the openssl program")
    try:
        tls.probe()
    except BackendMissing as error:
        pytest.skip(str(error))


def session_file(key, path):
    """Write *key* as a session: the program takes a key with SHA-384 in no other form."""
    library = tls._library()
    library.SSL_new.restype, library.SSL_new.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    library.SSL_free.argtypes = [ctypes.c_void_p]
    encode = library.i2d_SSL_SESSION
    encode.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)]
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    connection = library.SSL_new(tls._pointer(context))
    session = tls._session(connection, key)
    library.SSL_SESSION_set1_id_context(session, b"", 0)  # which is the program's own
    raw = ctypes.create_string_buffer(encode(session, None))
    encode(session, ctypes.byref(ctypes.cast(raw, ctypes.c_char_p)))
    library.SSL_SESSION_free(session)
    library.SSL_free(connection)
    text = base64.encodebytes(raw.raw).decode()
    name = "SSL SESSION PARAMETERS"
    path.write_text(f"-----BEGIN {name}-----\n{text}-----END {name}-----\n")
    return path


def arguments(key, folder):
    """Return what gives the program *key*."""
    named = ["-psk_identity", str(key.identity)]
    if key.identity.hash == 1:
        return [*named, "-psk", key.secret.hex()]
    return [*named, "-psk_session", str(session_file(key, folder / "session.pem"))]


def run(command):
    return subprocess.Popen(
        [OPENSSL, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def serve(options):
    """Start openssl s_server; return (process, port)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run(["s_server", "-accept", f"127.0.0.1:{port}", "-tls1_3", "-quiet", *options]), port


def connect(process, port):
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=20)
        except ConnectionRefusedError:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)


@by_hash
def test_our_client(psk, tmp_path):
    key = psk.derive(HOST, SUBSYSTEM)
    process, port = serve([*arguments(key, tmp_path), "-nocert"])
    try:
        with tls.wrap_client(connect(process, port), psk, HOST, SUBSYSTEM) as client:
            assert client.cipher()[0] == SUITES[psk.hash]
            client.sendall(b"to openssl\n")
            assert process.stdout.readline() == b"to openssl\n"
            process.stdin.write(b"from openssl\n")
            process.stdin.flush()
            assert client.recv(100) == b"from openssl\n"
    finally:
        process.kill()
        process.communicate()


@by_hash
def test_our_server(psk, tmp_path):
    """The program offers both suites; the one of the only key must be chosen."""
    key = psk.derive(HOST, SUBSYSTEM)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.settimeout(20)
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    process = run(
        [
            "s_client",
            "-connect",
            address,
            "-tls1_3",
            "-quiet",
            "-noservername",
            *arguments(key, tmp_path),
        ]
    )
    try:
        accepted, _ = listener.accept()
        accepted.settimeout(20)
        with tls.wrap_server(accepted, Keyring([psk])) as server:
            assert server.identity == key.identity
            assert server.cipher()[0] == SUITES[psk.hash]
            server.sendall(b"hello\n")
            assert process.stdout.readline() == b"hello\n"
    finally:
        listener.close()
        process.kill()
        process.communicate()


def test_a_server_that_shows_a_certificate_instead_of_using_the_key(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    make = f"req -x509 -newkey rsa:2048 -nodes -subj /CN=liar -keyout {key} -out {certificate}"
    subprocess.run([OPENSSL, *make.split()], check=True, capture_output=True)
    process, port = serve(["-key", str(key), "-cert", str(certificate)])
    try:
        with pytest.raises(PeerError, match="did not use the pre-shared key"):
            tls.wrap_client(connect(process, port), PSKS[0], HOST, SUBSYSTEM)
    finally:
        process.kill()
        process.communicate()
