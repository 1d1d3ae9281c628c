"""hyades serve: flags, settings, the ready file, signals, locks, metrics and the log."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from click.testing import CliRunner
from tests.reference.nvme_host import NQN, Host, pattern

from hyades.common.blocks import FileBlocks
from hyades.common.errors import UsageError
from hyades.common.nvme import commands
from hyades.common.nvme.layout import Opcode
from hyades.common.units import MIB
from hyades.deploy.cli import cli
from hyades.deploy.serving import parse_address, read_settings

pytestmark = pytest.mark.timeout(100)
CLI = [sys.executable, "-m", "hyades.deploy.cli", "serve"]


class Served:
    """A running `hyades serve`."""

    def __init__(self, folder, *flags):
        self.ready = folder / "ready"
        command = [*CLI, "--nqn", NQN, "--ready-file", str(self.ready), *map(str, flags)]
        if "--listen" not in flags and "--config" not in flags:
            command += ["--listen", "127.0.0.1:0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not self.ready.exists():
            assert self.process.poll() is None, self.process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        lines = self.ready.read_text().splitlines()
        self.addresses = [(h, int(p)) for h, p in (line.rsplit(":", 1) for line in lines)]

    def stop(self, number=signal.SIGTERM):
        """Return (exit code, log)."""
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=60)
        return self.process.returncode, log


@pytest.fixture
def serve(tmp_path):
    running = []

    def begin(*flags):
        running.append(Served(tmp_path, *flags))
        return running[-1]

    yield begin
    for served in running:
        if served.process.poll() is None:
            served.process.kill()
        served.process.communicate()


def fails(*flags):
    result = CliRunner().invoke(cli, ["serve", *map(str, flags)], prog_name="hyades")
    assert result.exit_code == 2, result.output
    return result.output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_from_ready_to_stopped(serve, tmp_path, number):
    path = tmp_path / "new.vol"
    served = serve("--namespace", path, "--create", "8MiB", "--listen", "127.0.0.1:0",
                   "--listen", "127.0.0.1:0", "--log", "json")  # fmt: skip
    assert len(served.addresses) == 2
    assert path.stat().st_size == 8 * MIB
    host = Host(served.addresses[1])
    assert host.io.write(1, pattern(8192)) == 0
    code, log = served.stop(number)
    assert code == 0
    assert not served.ready.exists()
    assert path.read_bytes()[4096:12288] == pattern(8192)
    events = [json.loads(line) for line in log.splitlines()]
    names = [event["event"] for event in events]
    assert names[:2] == ["listening", "listening"]
    assert names.count("accepted") == 2
    assert names[-1] == "stopped"
    assert all(event["time"] > 1e9 for event in events)


def test_a_file_in_use_here_is_refused_there_and_back(serve, tmp_path):
    path = tmp_path / "g.vol"
    path.write_bytes(bytes(MIB))
    served = serve("--namespace", path)
    with pytest.raises(UsageError, match="is being used by"):
        FileBlocks(path, writable=True)
    assert "another process" in fails("--namespace", path, "--nqn", NQN, "-l", "127.0.0.1:0")
    served.stop()
    blocks = FileBlocks(path, writable=True)
    assert "another process" in fails("--namespace", path, "--nqn", NQN, "-l", "127.0.0.1:0")
    blocks.close()


def test_read_only_shares_the_file_with_readers(serve, tmp_path):
    path = tmp_path / "g.vol"
    path.write_bytes(bytes(MIB))
    serve("--namespace", f"{path},ro")
    FileBlocks(path, writable=False).close()
    with pytest.raises(UsageError, match="is being used by"):
        FileBlocks(path, writable=True)


def test_settings_from_a_file_and_flags_that_win(serve, tmp_path):
    path = tmp_path / "g.vol"
    path.write_bytes(bytes(MIB))
    config = tmp_path / "serve.toml"
    config.write_text(
        f'namespace = ["{path}", "mem:1MiB,block=512"]\nlisten = ["127.0.0.1:0"]\n'
        'nqn = "nqn.2026-01.org.example:other"\nmax-transfer = "64KiB"\nqueues = 3\n'
    )
    served = serve("--config", config, "--queues", "2")
    host = Host(served.addresses[0], queues=4)  # of the flag's --nqn
    assert host.controller.queues == 2
    assert host.controller.info.max_transfer == 65536
    assert host.io.write(0, b"y" * 512, nsid=2, block=512) == 0


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense = 1", "no setting 'nonsense'"),
        ("queues = 'many'", "queues"),
        ("block-size = 1000", "block-size"),
        ("namespace = 'g.vol'", "namespace"),
        ("queues = ", "Invalid value"),
        ("namespace = ['g.vol']\nnqn = 'here'", "no NVMe qualified name"),
        ("namespace = ['g.vol']", "--nqn"),
        ("", "--namespace"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(tmp_path, text, problem):
    config = tmp_path / "serve.toml"
    config.write_text(text)
    with pytest.raises(UsageError, match=problem):
        read_settings(config, {})


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--listen", "0.0.0.0:0"], "--allow-host"),
        (["--listen", "127.0.0.1:99999"], "no address"),
        (["--listen", "127.0.0.1:x"], "no address"),
        (["--max-transfer", "1000"], "max-transfer"),
        (["--create", "many"], "as a size"),
        (["--tls-psk", "/nothing"], "/nothing"),
        (["--fault", "read:x"], "--fault"),
        (["--allow-host", "me"], "qualified name"),
        (["--dry-run"], "--backend"),
        (["--backend", "kernel", "--create", "1MiB"], "--create"),
        (["--namespace", "/nowhere/g.vol"], "--create SIZE"),
        (["--namespace", "/dev/null"], "neither a file nor"),
        (["--namespace", "mem:1KiB"], "less than a block"),
        (["--metrics", "127.0.0.1:1", "--namespace", "mem:1MiB,block=100"], "block=512"),
    ],
)
def test_flags_that_cannot_be(flags, problem):
    output = fails("--namespace", "mem:1MiB", "--nqn", NQN, "-l", "127.0.0.1:0", *flags)
    assert problem in output
    assert output.count("\n") == 1


def test_an_address_has_several_forms():
    assert parse_address("10.0.0.1:5") == ("10.0.0.1", 5)
    assert parse_address("[::1]:5") == ("::1", 5)
    assert parse_address("[::1]") == ("::1", 4420)
    assert parse_address("10.0.0.1") == ("10.0.0.1", 4420)
    assert parse_address(":7") == ("127.0.0.1", 7)


def test_metrics(serve):
    served = serve("--namespace", "mem:1MiB", "--metrics", "127.0.0.1:0", "--log", "json",
                   "--fault", "read:7")  # fmt: skip
    lines = [json.loads(served.process.stderr.readline()) for _ in range(2)]
    url = lines[1]["url"]
    host = Host(served.addresses[0])
    assert host.io.write(0, bytes(8192)) == 0
    assert [host.io.read(lba, 1)[0] != 0 for lba in (0, 1, 7)] == [False, False, True]
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = answer.read().decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert values["hyades_connections"] == "2"
    assert (values["hyades_controllers"], values["hyades_io_queues"]) == ("1", "1")
    assert values['hyades_commands_total{queue="io",opcode="read"}'] == "3"
    assert values['hyades_commands_total{queue="io",opcode="write"}'] == "1"
    assert values['hyades_commands_total{queue="admin",opcode="identify"}'] == "1"
    assert values['hyades_errors_total{status="0x281",name="read_error"}'] == "1"
    assert (values["hyades_read_bytes_total"], values["hyades_written_bytes_total"]) == (
        "8192", "8192",
    )  # fmt: skip
    assert int(values["hyades_latency_seconds_count"]) == 5  # with the I/O queue's Connect
    assert values['hyades_latency_seconds_bucket{le="+Inf"}'] == "5"
    buckets = [int(v) for k, v in values.items() if "bucket" in k]
    assert buckets == sorted(buckets)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url + "x")
    code, log = served.stop()
    assert code == 0
    failed = [json.loads(x) for x in log.splitlines() if '"failed"' in x]
    assert [(f["command"], f["lba"]) for f in failed] == [("read", 7)]


def test_a_second_signal_does_not_wait(serve, tmp_path):
    path = tmp_path / "g.vol"
    path.write_bytes(bytes(MIB))
    served = serve("--namespace", path, "--grace", "1000")
    host = Host(served.addresses[0])
    write = commands.transfer(Opcode.WRITE, 1, 0, 64)
    host.io.queue.submit(write, source=memoryview(bytes(1 << 18)))
    host.io.sock.sendall(b"".join(host.io.queue.take_output()))  # and the data never comes
    assert host.io.sock.recv(24)[0] == 9  # the R2T: it is in flight
    served.process.send_signal(signal.SIGTERM)
    while True:
        line = served.process.stderr.readline()
        if "stopping" in line:
            break
    assert served.process.poll() is None
    code, log = served.stop()
    assert code == 0
    assert "stopped" in log


def test_serving_imports_neither_torch_nor_numba():
    script = (
        "import sys, hyades.deploy.commands.serve\n"
        "print([m for m in ('torch', 'numba', 'pyarrow', 'scipy') if m in sys.modules])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_text_log_has_one_line_for_a_host_that_comes_and_one_as_it_goes(serve):
    served = serve("--namespace", "mem:1MiB", "--listen", "127.0.0.1:0", "--log", "text")
    host = Host(served.addresses[0])
    assert host.io.write(1, pattern(8192)) == 0
    host.close()
    with pytest.raises(UsageError, match="refused queue 0"):
        Host(served.addresses[0], nqn="nqn.2026-01.org.example:nobody")
    _, log = served.stop()
    lines = [line.split(maxsplit=2)[1:] for line in log.splitlines()]
    assert [name for name, _ in lines].count("accepted") == 1
    assert " queue=0 " in next(rest for name, rest in lines if name == "accepted")
    assert [name for name, _ in lines].count("refused") == 1
