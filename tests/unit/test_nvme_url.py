"""URLs of remote namespaces."""

import uuid

import pytest

from hyades.common.errors import UsageError
from hyades.common.nvme.psk import Psk
from hyades.proxy.stripes import map_members
from hyades.proxy.transports import nvme_url
from hyades.proxy.transports.nvme_url import Address, parse, with_ctrl_loss_timeout, with_patience
from hyades.proxy.urls import Url

NQN = "nqn.2026-01.org.example:pages"


def options(text):
    return parse(Url(text))


def test_what_a_short_url_means():
    found = options(f"nvme+tcp://storage/{NQN}")
    assert found.addresses == (Address("storage", 4420),)
    assert (found.subnqn, found.nsid, found.queues, found.depth) == (NQN, 1, 2, 32)
    assert not found.header_digest
    assert not found.data_digest
    assert found.max_transfer == 1 << 20
    assert (found.kato, found.timeout, found.reconnect_delay) == (10.0, 30.0, 0.1)
    assert found.ctrl_loss_timeout == 60.0
    assert found.psk is None
    assert found.place(found.addresses[0]) == f"nvme+tcp://storage:4420/{NQN} ns 1"


def test_everything_said(tmp_path):
    key = tmp_path / "key"
    key.write_text(Psk(bytes(range(32)), 1).interchange())
    key.chmod(0o600)
    found = options(
        f"nvme+tcp://10.0.0.1:4421+[fe80::1%eth0]:4422+[::1]/{NQN}?ns=7&queues=4&depth=64"
        f"&digest=data,header&max_transfer=130KiB&tls={key}&tls_identity=0&hostnqn=nqn.2026-01.a:h"
        "&hostid=12345678-1234-1234-1234-123456789abc&kato=2.5&timeout=3&reconnect_delay=0.5"
        "&ctrl_loss_timeout=0&trust_cache=yes"
    )
    assert [str(a) for a in found.addresses] == [
        "10.0.0.1:4421", "[fe80::1%eth0]:4422", "[::1]:4420",
    ]  # fmt: skip
    assert (found.nsid, found.queues, found.depth) == (7, 4, 64)
    assert found.header_digest
    assert found.data_digest
    assert found.max_transfer == 128 << 10  # whole blocks
    assert found.psk is not None
    assert found.psk_identity == 0
    assert found.hostnqn == "nqn.2026-01.a:h"
    assert uuid.UUID(bytes=found.hostid).hex == "12345678123412341234123456789abc"
    assert (found.kato, found.timeout, found.reconnect_delay) == (2.5, 3.0, 0.5)
    assert found.ctrl_loss_timeout == 0
    assert found.trust_cache


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nvme+tcp://", "write nvme"),
        ("nvme+tcp://host:4420", "write nvme"),
        ("nvme+tcp://host:4420/", "write nvme"),
        (f"nvme+tcp:///{NQN}", "write nvme"),
        (f"nvme+tcp://host:0/{NQN}", "'host:0' is no address"),
        (f"nvme+tcp://host:70000/{NQN}", "is no address"),
        (f"nvme+tcp://host:x/{NQN}", "is no address"),
        (f"nvme+tcp://::1:4420/{NQN}", "is no address"),
        (f"nvme+tcp://a+/{NQN}", "'' is no address"),
        (f"nvme+tcp://a:1+a:1/{NQN}", "twice"),
        ("nvme+tcp://a/pages", "no NVMe qualified name"),
        (f"nvme+tcp://a/{NQN}?ns=0", "ns is a whole number from 1"),
        (f"nvme+tcp://a/{NQN}?ns=4294967295", "ns is at most"),
        (f"nvme+tcp://a/{NQN}?tls_identity=2", "tls_identity is at most 1"),
        (f"nvme+tcp://a/{NQN}?queues=65", "queues is at most 64"),
        (f"nvme+tcp://a/{NQN}?depth=0", "depth is a whole number"),
        (f"nvme+tcp://a/{NQN}?digest=all", "digest is header"),
        (f"nvme+tcp://a/{NQN}?kato=0", "kato is a number of seconds from 0.1 on"),
        (f"nvme+tcp://a/{NQN}?timeout=soon", "timeout is a number"),
        (f"nvme+tcp://a/{NQN}?timeout=nan", "timeout is a number"),
        (f"nvme+tcp://a/{NQN}?max_transfer=2048", "max_transfer is at least 4096"),
        (f"nvme+tcp://a/{NQN}?hostid=me", "the host id is a UUID, not 'me'"),
        (f"nvme+tcp://a/{NQN}?hostnqn=me", "no NVMe qualified name"),
        (f"nvme+tcp://a/{NQN}?nqn=x", "has no option nqn"),
        (f"nvme+tcp://a/{NQN}?tls=/nowhere/key", "/nowhere/key"),
    ],
)
def test_what_cannot_be_meant(text, says):
    with pytest.raises(UsageError, match=says.replace("+", r"\+")):
        options(text)


def test_the_name_of_this_host(tmp_path, monkeypatch):
    """Stable; what nvme-cli has written counts first."""
    machine = tmp_path / "machine-id"
    machine.write_text("0123456789abcdef0123456789abcdef\n")
    monkeypatch.setattr(nvme_url, "_MACHINE_ID", machine)
    monkeypatch.setattr(nvme_url, "_NVME", tmp_path / "nvme")
    made = options(f"nvme+tcp://a/{NQN}")
    assert made.hostnqn == f"nqn.2014-08.org.nvmexpress:uuid:{uuid.UUID(bytes=made.hostid)}"
    assert options(f"nvme+tcp://b/{NQN}").hostnqn == made.hostnqn
    machine.write_text("ffffffffffffffffffffffffffffffff\n")
    assert options(f"nvme+tcp://a/{NQN}").hostid != made.hostid
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme/hostnqn").write_text("nqn.2014-08.org.nvmexpress:uuid:x\n")
    (tmp_path / "nvme/hostid").write_text("12345678-1234-1234-1234-123456789abc\n")
    found = options(f"nvme+tcp://a/{NQN}")
    assert found.hostnqn == "nqn.2014-08.org.nvmexpress:uuid:x"
    assert found.hostid.hex() == "12345678123412341234123456789abc"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("g.vol", "g.vol"),
        ("nvme+tcp://a/nqn.x", "nvme+tcp://a/nqn.x?ctrl_loss_timeout=2.5"),
        ("nvme+tcp://a/nqn.x?ns=2", "nvme+tcp://a/nqn.x?ns=2&ctrl_loss_timeout=2.5"),
        ("nvme+tcp://a/nqn.x?ctrl_loss_timeout=9", "nvme+tcp://a/nqn.x?ctrl_loss_timeout=9"),
        (
            "stripe:unit=64KiB,nvme+tcp://a/nqn.x?digest=header,data,/b,nvme+tcp://c/nqn.x",
            "stripe:unit=64KiB,nvme+tcp://a/nqn.x?digest=header,data&ctrl_loss_timeout=2.5,/b,"
            "nvme+tcp://c/nqn.x?ctrl_loss_timeout=2.5",
        ),
    ],
)
def test_an_option_for_every_remote_volume(text, expected):
    changed = map_members(text, lambda url: with_ctrl_loss_timeout(url, 2.5))
    assert changed == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("g.vol", "g.vol"),
        ("nvme+tcp://a/nqn.x", "nvme+tcp://a/nqn.x?connect_timeout=60.0"),
        (
            "faulty+nvme+tcp://a/nqn.x?io=1&ctrl_loss_timeout=3",
            "faulty+nvme+tcp://a/nqn.x?io=1&ctrl_loss_timeout=3&connect_timeout=3",
        ),
        ("nvme+tcp://a/nqn.x?connect_timeout=1", "nvme+tcp://a/nqn.x?connect_timeout=1"),
    ],
)
def test_patience_with_a_volume_that_was_in_reach(text, expected):
    assert with_patience(text) == expected
