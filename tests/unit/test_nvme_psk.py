import shutil
import subprocess

import pytest

from hyades.common.errors import UsageError
from hyades.common.nvme.psk import (
    Identity,
    Keyring,
    Psk,
    expand_label,
    load_psk,
    parse_identity,
    parse_psk,
)

KEY32 = bytes.fromhex("5512DBB6737D0106F65975B773DFB011FFC344BCF442E2DD6D8BC4870B5D5B03")
KEY48 = KEY32 + KEY32[16:]
HOST, SUBSYSTEM = "nqn.psk-test-host", "nqn.psk-test-subsys"
# The example of the transport specification, section 3.6.1.5, and libnvme's other vectors.
INTERCHANGE = [
    (0, KEY32, "NVMeTLSkey-1:00:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:"),
    (1, KEY32, "NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:"),
    (
        2,
        KEY48,
        "NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwP/w0S89ELi3W2LxIcLXVsDn8kXZQ==:",
    ),
]
# libnvme's vectors: they pin the retained PSK, too, because the digest is keyed with it.
IDENTITIES = [
    (1, KEY32, f"NVMe1R01 {HOST} {SUBSYSTEM} iSbjiStwJ/1TrTvDlt2fjFmzvsytOJelidNnA+X5lEU="),
    (
        2,
        KEY48,
        f"NVMe1R02 {HOST} {SUBSYSTEM}"
        " QhW2+Rp6RzHlNtCslyRxMnwJ11tKKhz8JCAQpQ+XUD8f9td1VeH5h53yz2wKJG1a",
    ),
]
PSKS = [Psk(KEY32, 1), Psk(KEY48, 2), Psk(KEY32, 0), Psk(KEY48, 0)]


@pytest.mark.parametrize(("transform", "key", "text"), INTERCHANGE)
def test_interchange_format(transform, key, text):
    psk = parse_psk(text)
    assert (psk.configured, psk.transform) == (key, transform)
    assert psk.interchange() == text


@pytest.mark.parametrize(("transform", "key", "identity"), IDENTITIES)
def test_identities_are_those_of_libnvme(transform, key, identity):
    found = Psk(key, transform).identity(HOST, SUBSYSTEM)
    assert str(found) == identity
    assert parse_identity(identity.encode()) == found


def test_identity_version_0_is_the_one_of_the_specification():
    host = "nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6"
    subsystem = "nqn.2014-08.org.nvmexpress:uuid:36ebf5a9-1df9-47b3-a6d0-e9ba32e428a2"
    assert str(Psk(KEY32, 1).identity(host, subsystem, 0)) == f"NVMe0R01 {host} {subsystem}"


def test_expand_label_against_rfc_8448():
    # RFC 8448, section 3: the key schedule of a simple 1-RTT handshake.  HKDF-Extract(0, 0) is the
    # early secret; "derived" with the hash of nothing as context gives this.
    nothing = bytes.fromhex("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855")
    derived = expand_label("sha256", bytes(32), b"derived", nothing, 32)
    assert derived.hex() == "6f2615a108c702c5678f54fc9dbab69716c076189c48250cebeac3576c3611ba"


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("psk", PSKS, ids=lambda p: f"{p.transform}-{len(p.configured)}")
def test_tls_keys_differ_by_everything_that_names_them(psk, version):
    keys = [
        psk.derive(HOST, SUBSYSTEM, version),
        psk.derive(HOST + "x", SUBSYSTEM, version),
        psk.derive(HOST, SUBSYSTEM + "x", version),
        psk.derive(HOST, SUBSYSTEM, 1 - version),
    ]
    assert len({key.secret for key in keys}) == 4
    assert {len(key.secret) for key in keys} == {len(psk.configured)}
    assert psk.configured.hex() not in repr(psk) + repr(keys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "32 or 48 bytes"),
        ("hello", "nvme gen-tls-key"),
        ("00" * 31, "not 31"),
        ("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ", "nvme gen-tls-key"),
        ("NVMeTLSkey-1:03:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:", "00, 01 or 02"),
        ("NVMeTLSkey-1:02:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:", "02 takes 48"),
        ("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrA:", "CRC-32"),
        ("NVMeTLSkey-1:01:WRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:", "CRC-32"),
        ("NVMeTLSkey-1:01:!!!!:", "Base64"),
        ("NVMeTLSkey-1:01:AAAA:", "not 0"),
        ("NVMeTLSkey-1:01::", "not 0"),
        ("NVMeTLSkey-2:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:", "nvme gen-tls-key"),
    ],
)
def test_unsound_keys(text, words):
    with pytest.raises(UsageError, match=words) as caught:
        parse_psk(text, "key.txt")
    assert "key.txt" in str(caught.value)
    assert "VRLb" not in str(caught.value)


def test_key_files(tmp_path):
    path = tmp_path / "key"
    path.write_text(INTERCHANGE[1][2] + "\n")
    path.chmod(0o600)
    assert load_psk(path).configured == KEY32
    path.write_text(KEY48.hex())
    assert (load_psk(path).configured, load_psk(path).transform) == (KEY48, 2)
    for mode in (0o640, 0o604, 0o644):
        path.chmod(mode)
        with pytest.raises(UsageError, match=f"chmod 600 {path}"):
            load_psk(path)
    path.chmod(0o600)
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(UsageError, match="written"):
        load_psk(path)
    path.write_text("00" * 5000)
    with pytest.raises(UsageError, match="too long"):
        load_psk(path)
    with pytest.raises(UsageError, match="cannot read the key"):
        load_psk(tmp_path / "absent")


@pytest.mark.skipif(shutil.which("nvme") is None, reason="needs nvme-cli")
@pytest.mark.parametrize("hmac", [1, 2])
def test_a_key_of_nvme_cli(hmac, tmp_path):
    path = tmp_path / "key"
    path.touch(0o600)
    with path.open("wb") as file:
        subprocess.run(["nvme", "gen-tls-key", f"--hmac={hmac}"], stdout=file, check=True)
    psk = load_psk(path)
    assert psk.transform == psk.hash == hmac
    ours = ["nvme", "check-tls-key", f"--key={psk.interchange()}"]
    assert subprocess.run(ours, capture_output=True, check=True).returncode == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"NVMe",
        b"NVMe0R01",
        b"NVMe0R01 a",
        b"NVMe0R01 a b c",
        b"NVMe1R01 a b",
        b"NVMe1R01 a  b",
        b"NVMe2R01 a b c",
        b"NVMe0G01 a b",
        b"NVMe0R03 a b",
        b"NVMe0R01 \xff b",
        b"NVMe0R01 a\x04 b",
        b"NVMe0R01 a b\0",
        b"NVMe0R01 a " + b"b" * 224,
        b"Client_identity",
    ],
)
def test_identities_that_are_none(raw):
    assert parse_identity(raw) is None


def test_keyring():
    other = Psk(bytes(32), 1)
    ring = Keyring([PSKS[0], other, PSKS[1]])
    for psk in (PSKS[0], other, PSKS[1]):
        assert ring.find(psk.identity(HOST, SUBSYSTEM)) == psk.derive(HOST, SUBSYSTEM)
    assert ring.find(PSKS[1].identity(HOST, SUBSYSTEM, 0)) == PSKS[1].derive(HOST, SUBSYSTEM, 0)
    assert ring.find(other.identity(HOST, SUBSYSTEM, 0)) is None  # two keys could be meant
    assert ring.find(Identity(1, 1, HOST, SUBSYSTEM, "AAAA")) is None
    assert ring.find(Psk(bytes(48), 2).identity(HOST, SUBSYSTEM)) is None
    with pytest.raises(UsageError, match="--tls-psk"):
        Keyring([])


@pytest.mark.parametrize("nqn", ["", "a b", "x" * 224, "a\0"])
def test_nqns_that_no_identity_can_hold(nqn):
    for names in ((nqn, SUBSYSTEM), (HOST, nqn)):
        with pytest.raises(UsageError, match="NQN"):
            PSKS[0].derive(*names)


def test_names_too_long_for_version_0():
    with pytest.raises(UsageError, match="too long"):
        PSKS[0].derive("h" * 200, "s" * 200, 0)
    assert len(PSKS[0].derive("h" * 223, "s" * 223, 1).secret) == 32
