"""hyades discover."""

import socket
import threading

from click.testing import CliRunner
from tests.reference import nvme

from hyades.deploy.cli import cli
from hyades.target_side.namespaces import MemoryNamespace


def run(*arguments):
    result = CliRunner().invoke(cli, ["discover", *arguments])
    return result.exit_code, result.output


def test_what_is_offered():
    hosts = frozenset([nvme.HOST])
    with nvme.stopped_at_end() as servers:
        servers.append(nvme.start({1: MemoryNamespace(1 << 20)}, hosts=hosts))
        host, port = servers[0].addresses[0]
        code, output = run(f"{host}:{port}", "--hostnqn", nvme.HOST)
        assert code == 0, output
        assert [line.split() for line in output.splitlines()] == [
            ["subsystem", "kind", "transport", "address", "TLS"],
            [nvme.NQN, "volumes", "tcp", f"{host}:{port}", "no"],
        ]
        code, output = run(f"{host}:{port}", "--hostnqn", "nqn.2026-01.org.example:stranger")
        assert (code, "offers nothing to nqn.2026-01.org.example:stranger" in output) == (0, True)


def test_nobody_listens():
    sock = socket.create_server(("127.0.0.1", 0))
    host, port = sock.getsockname()
    sock.close()
    code, output = run(f"{host}:{port}")
    assert code == 2
    assert f"hyades serve --listen {host}:{port}" in output
    assert run("not an address")[0] == 2


def test_who_hangs_up_at_once_may_want_tls():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()

        def hang_up():
            with listener.accept()[0] as sock:
                sock.recv(1 << 16)

        thread = threading.Thread(target=hang_up)
        thread.start()
        code, output = run(f"{host}:{port}")
        thread.join()
    assert code == 4
    assert f"{host}:{port}: the target closed the connection" in output
    assert "does it want TLS" in output
