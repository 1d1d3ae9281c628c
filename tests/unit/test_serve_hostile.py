"""What nobody should ask for, and what it is answered with: one line, nothing left behind."""

import errno
import socket
import threading

import pytest
from click.testing import CliRunner

from hyades.common.blocks import is_blank
from hyades.common.errors import DataError, UsageError
from hyades.common.units import parse_size
from hyades.deploy.cli import cli
from hyades.deploy.ready import ready_file
from hyades.deploy.volumes import open_device
from hyades.proxy.registry import open_transport
from hyades.proxy.stripes import find_set
from hyades.proxy.transport_blocks import TransportBlocks
from hyades.proxy.transports import nvme_session
from hyades.proxy.transports.mem import forget
from hyades.proxy.urls import Url
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import FileNamespace

NQN = "nqn.2026-01.org.example:g"
BASE = ["serve", "--nqn", NQN, "--namespace", "mem:1MiB", "--listen", "127.0.0.1:0"]


def refused(*flags):
    result = CliRunner().invoke(cli, list(map(str, flags)), prog_name="hyades")
    assert result.exit_code == 2, (result.output, result.exception)
    lines = [line for line in result.output.splitlines() if line.startswith("hyades: ")]
    assert len(lines) == 1
    return lines[0]


@pytest.mark.parametrize("host", ["..", "a..b", "x" * 70, "x" * 300])
def test_what_cannot_be_the_name_of_a_host(host):
    assert "no name of a host" in refused(*BASE[:-1], f"{host}:0")
    with pytest.raises(UsageError, match=r"no such host|is no address"):
        open_transport(f"nvme+tcp://{host}:4420/{NQN}")


def test_an_unforeseen_error_of_a_path_reaches_the_caller(monkeypatch):
    """Nobody waits for a path whose thread has ended."""

    def fail(*args, **kwargs):
        raise ZeroDivisionError("unforeseen")

    monkeypatch.setattr(nvme_session, "resolve", fail)
    for patience in ("", "?connect_timeout=60"):
        with pytest.raises(ZeroDivisionError, match="unforeseen"):
            open_transport(f"nvme+tcp://127.0.0.1:4420+127.0.0.2:4420/{NQN}{patience}")
    assert not [t for t in threading.enumerate() if t.name.startswith("hyades-nvme")]


def test_no_descriptor_for_a_socket(monkeypatch):
    def fail(*args):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socket", fail)
    with pytest.raises(UsageError, match=r"127\.0\.0\.1:4420.*Too many open files: raise ulimit"):
        open_transport(f"nvme+tcp://127.0.0.1:4420/{NQN}")


@pytest.mark.parametrize("size", ["100000TiB", "8388608TiB", "9" * 400 + "TiB"])
def test_more_memory_than_there_is(size):
    text = refused("serve", "--nqn", NQN, "--namespace", f"mem:{size}")
    assert "more memory than can be had" in text or "more than any file can hold" in text


def test_sizes_beyond_any_file():
    assert parse_size("8388607TiB") == 8388607 << 40
    for text in ("8388608TiB", "9" * 400):
        with pytest.raises(UsageError, match="more than any file can hold"):
            parse_size(text)


def test_a_file_without_a_size():
    with pytest.raises(UsageError, match="/proc/self/mem has no size"):
        FileNamespace("/proc/self/mem", read_only=True)


@pytest.mark.parametrize(
    ("name", "nbytes", "text"),
    [
        ("new", 1, "less than a block of 4096"),
        ("new", 4095, "less than a block of 4096"),
        ("new", 1 << 62, "cannot open .*new: "),
        ("nodir/new", 8192, "there is no folder .*nodir"),
    ],
)
def test_a_file_that_cannot_be_made_is_not_there(tmp_path, name, nbytes, text):
    with pytest.raises(UsageError, match=text):
        FileNamespace(tmp_path / name, create=nbytes)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["handshake", "stall", "grace"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0, 1e7])
def test_times_that_never_pass(name, value):
    with pytest.raises(UsageError, match=name):
        Limits(**{name: value})


def test_a_ready_file_that_cannot_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "nodir" / "ready", tmp_path / "folder"):
        assert f"--ready-file {path}: " in refused(*BASE, "--ready-file", path)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    assert not list((tmp_path / "folder").iterdir())


def test_a_ready_file_that_is_gone_at_the_end(tmp_path):
    with ready_file(tmp_path / "ready", ["127.0.0.1:1"]):
        assert (tmp_path / "ready").read_text() == "127.0.0.1:1\n"
        (tmp_path / "ready").unlink()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("listen = []", "nowhere to listen"),
        (f"advertise = '{'x' * 257}'", "at most 256"),
        ("advertise = 'é'", "at most 256 ASCII"),
        ("x = " + "[" * 5000, "recursion"),
        ("#" * (1 << 20), "too long"),
    ],
)
def test_settings_that_cannot_be_meant(tmp_path, text, answer):
    path = tmp_path / "serve.toml"
    path.write_text(f"namespace = ['mem:1MiB']\nnqn = '{NQN}'\n{text}\n")
    assert answer in refused("serve", "--config", path)


@pytest.mark.parametrize("backend", ["kernel", "spdk"])
@pytest.mark.parametrize("text", ["mem:1MiB", "g.vol,ro", "g.vol,block=512", "g.vol,block=512,ro"])
def test_namespaces_that_only_the_embedded_target_has(backend, text):
    flags = ["--backend", backend, "--dry-run", "--nqn", NQN, "--namespace", text]
    assert f"--namespace {text}: memory, ro and block= are" in refused("serve", *flags)


def test_one_namespace_twice_leaves_no_label():
    """Nothing says that two URLs lead to one device until it has been written."""
    with pytest.raises(DataError, match="named twice"):
        find_set(Url("stripe:mem://breaker,mem://breaker"), create=True)
    blocks = TransportBlocks(open_transport("mem://breaker"), "mem://breaker")
    try:
        assert is_blank(blocks)
    finally:
        blocks.close()
        forget("breaker")


def test_one_file_twice(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "hard").hardlink_to(tmp_path / "a")
    for other in ("a", "link", "hard", "x,{0}/x"):
        url = f"stripe:{tmp_path}/a,{tmp_path}/{other.format(tmp_path)}"
        with pytest.raises(UsageError, match="are one file; name each member once"):
            open_device(url, writable=True, create=True)
    assert (tmp_path / "a").stat().st_size == 0
