"""Links between namespaces: what they carry is counted, and nothing of them stays behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hyades.common.errors import DeviceLost, UsageError
from hyades.deploy.bench import link
from hyades.deploy.bench.link import TARGET, Link, Speed, joined, parse_speed, remove_stale

PAYLOAD = 3_000_000
_SEND = (
    "import socket, sys\n"
    f"server = socket.create_server(('{TARGET}', 0))\n"
    "print(server.getsockname()[1], flush=True)\n"
    "peer, _ = server.accept()\n"
    f"peer.sendall(bytes({PAYLOAD}))\n"
    "peer.close()\n"
)
_RECEIVE = (
    "import socket, sys\n"
    f"peer = socket.create_connection(('{TARGET}', int(sys.argv[1])))\n"
    "while peer.recv(1 << 16): pass\n"
)


@pytest.fixture
def allowed() -> None:
    reason = link.probe()
    if reason is not None:
        pytest.skip(f"no links here: {reason}")


def spaces(made: Link) -> set[str]:
    folder = Path("/run/netns")
    there = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return there & {made.target, made.host}


def send(made: Link) -> None:
    command = made.at_target([sys.executable, "-c", _SEND])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout is not None
        port = sender.stdout.readline().strip()
        subprocess.run(
            made.at_host([sys.executable, "-c", _RECEIVE, port]), check=True, timeout=120
        )
        assert sender.wait(60) == 0


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("rate", [None, "100mbit"])
def test_bytes_on_the_wire_are_counted(rate: str | None) -> None:
    with joined(parse_speed(rate)) as made:
        assert spaces(made) == {made.target, made.host}
        before = made.carried()
        send(made)
        spent = made.carried() - before
    # Frames of 1500 bytes carry 1448 of payload and 66 of headers; what is lost is sent again.
    assert 1.04 * PAYLOAD < spent.to_host < 1.25 * PAYLOAD
    assert 0 < spent.to_target < 0.1 * PAYLOAD
    assert spaces(made) == set()


@pytest.mark.usefixtures("allowed")
def test_the_rate_is_the_one_asked_for() -> None:
    with joined(parse_speed("123mbit")) as made:
        shown = subprocess.run(
            ["tc", "-n", made.target, "qdisc", "show", "dev", "cable0"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    assert "tbf" in shown
    assert "rate 123Mbit" in shown


@pytest.mark.usefixtures("allowed")
def test_a_delay_is_there_or_the_link_says_why_not() -> None:
    with joined(parse_speed("1gbit", 2.0)) as made:
        shown = subprocess.run(
            ["tc", "-n", made.host, "qdisc", "show", "dev", "cable1"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
    assert ("netem" in shown) != ("no netem" in made.note)


@pytest.mark.usefixtures("allowed")
def test_nothing_stays_after_an_error() -> None:
    def fail() -> None:
        with joined(Speed()) as made:
            kept.append(made)
            assert spaces(made)
            raise DeviceLost("gone")

    kept: list[Link] = []
    with pytest.raises(DeviceLost):
        fail()
    assert spaces(kept[0]) == set()


_HOLD = (
    "import time\n"
    "from hyades.deploy.bench.link import Speed, joined\n"
    "with joined(Speed()) as link:\n"
    "    print(link.target, link.host, flush=True)\n"
    "    time.sleep(300)\n"
)


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_stays_of_an_interrupted_run(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as holder:
        assert holder.stdout is not None
        names = set(holder.stdout.readline().split())
        assert len(names) == 2
        os.kill(holder.pid, number)
        holder.wait(60)
    if number == signal.SIGKILL:  # the next run does it
        remove_stale()
    deadline = time.monotonic() + 30
    while names & {path.name for path in Path("/run/netns").iterdir()}:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("text", ["10", "10gb", "-1gbit", "1bit", "0mbit", "99999gbit"])
def test_rates_that_cannot_be_meant(text: str) -> None:
    with pytest.raises(UsageError, match="--link"):
        parse_speed(text)


def test_speeds() -> None:
    assert parse_speed("2.5gbit").rate == 2.5e9
    assert parse_speed("10gbit").burst == 1_250_000
    assert parse_speed("1mbit").burst == 128 << 10
    assert parse_speed(None).text == "unshaped"
    assert parse_speed("1gbit", 0.5).text == "1gbit, 0.5 ms"
    with pytest.raises(UsageError, match="delay"):
        parse_speed("1gbit", -1.0)
