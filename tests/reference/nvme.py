"""Targets for tests, and relays that damage what passes between a host and a target."""

import contextlib
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hyades.common.errors import BackendMissing
from hyades.common.layout import BLOCK
from hyades.common.nvme.psk import Keyring, Psk
from hyades.common.nvme.tls import probe as probe_tls
from hyades.proxy.registry import open_transport
from hyades.proxy.transport import Transport
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import FileNamespace, Namespace
from hyades.target_side.server import Server
from hyades.target_side.subsystem import Subsystem

NQN = "nqn.2026-01.org.example:pages"
HOST = "nqn.2026-01.org.example:host"
_names = itertools.count()
# Short times, so that losses are found and mended within a test.
QUICK = {"kato": 1, "timeout": 2, "reconnect_delay": 0.02}


def file_server(
    folder: Path, nblocks: int, *, block_bytes: int = BLOCK, keys: Keyring | None = None,
    listeners: int = 1, read_only: bool = False, epoch: bytes = bytes(16), **limits: Any,
) -> Server:  # fmt: skip
    """Return a started server of one zeroed file of *nblocks* 4096-byte blocks."""
    path = folder / f"namespace-{next(_names)}"
    path.write_bytes(bytes(nblocks * BLOCK))
    namespace = FileNamespace(path, block_bytes=block_bytes, read_only=read_only)
    return start({1: namespace}, keys=keys, listeners=listeners, epoch=epoch, **limits)


def start(
    namespaces: dict[int, Namespace], *, keys: Keyring | None = None, listeners: int = 1,
    port: int = 0, epoch: bytes = bytes(16), hosts: frozenset[str] | None = None, **limits: Any,
) -> Server:  # fmt: skip
    """Return a started server of *namespaces* on the loopback interface."""
    server = Server(
        [Subsystem(NQN, namespaces, hosts, epoch=epoch)],
        [("127.0.0.1", port)] * listeners, limits=Limits(**limits), keys=keys,
    )  # fmt: skip
    server.start()
    return server


def url(*servers: Server, **options: Any) -> str:
    """Return the URL of namespace 1 through every listener of *servers*."""
    return address_url(*(a for server in servers for a in server.addresses), **options)


def address_url(*addresses: tuple[str, int], **options: Any) -> str:
    """Return the URL of namespace 1 through *addresses*."""
    where = "+".join(f"{host}:{port}" for host, port in addresses)
    options = {"hostnqn": HOST, **options}
    return f"nvme+tcp://{where}/{NQN}?" + "&".join(f"{k}={v}" for k, v in options.items())


def after(seconds: float) -> Callable[[], bool]:
    """Return a function that says whether *seconds* have passed since now."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def connect(*addresses: tuple[str, int], **options: Any) -> Transport:
    """Return a transport through *addresses* that finds and mends losses quickly."""
    return open_transport(address_url(*addresses, **{**QUICK, **options}))


def make_key(folder: Path) -> tuple[Path, Keyring]:
    """Write a key for TLS into *folder*; return its path and the target's keyring.

    The test is skipped where TLS cannot be had.
    """
    try:
        probe_tls()
    except BackendMissing as missing:
        pytest.skip(str(missing))
    psk = Psk(bytes(range(32)), 1, "test")
    key = folder / "key"
    key.write_text(psk.interchange())
    key.chmod(0o600)
    return key, Keyring([psk])


@contextlib.contextmanager
def stopped_at_end() -> Iterator[list[Server]]:
    """Give a list; stop the servers in it at the end."""
    servers: list[Server] = []
    try:
        yield servers
    finally:
        for server in servers:
            server.stop(grace=1.0)


class TargetProcess:
    """``hyades serve`` of one file in a process that a test kills; always at the same address."""

    def __init__(
        self, path: Path, *flags: str, host: str = "127.0.0.1", prefix: Sequence[str] = ()
    ) -> None:
        """Serve *path* at any free port of *host*; *prefix* is what the command runs under."""
        self.path, self.flags, self.prefix = path, flags, prefix
        self.address = (host, 0)
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; return once it accepts connections."""
        ready = self.path.with_suffix(f".ready-{self.starts}")
        self.starts += 1
        log = self.path.with_suffix(".log").open("ab")
        command = [
            *self.prefix, sys.executable, "-m", "hyades.deploy.cli", "serve", "--nqn", NQN,
            "--namespace", str(self.path), "--listen", "{}:{}".format(*self.address),
            "--ready-file", str(ready), *self.flags,
        ]  # fmt: skip
        with log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not (ready.exists() and ready.read_text().strip()):
            said = self.path.with_suffix(".log").read_text()
            assert self._process.poll() is None, said
            assert time.monotonic() < deadline, said
            time.sleep(0.01)
        self._came_up(ready.read_text().split()[0])

    def _came_up(self, where: str) -> None:
        host, _, port = where.rpartition(":")
        self.address = (host, int(port))

    def kill(self) -> None:
        """End it at once, with whatever it was doing."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        if self._process is not None:
            self._process.send_signal(number)

    def pause(self) -> None:
        """Stop it as SIGSTOP does, and return when every thread has stopped: that takes a while."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        deadline = time.monotonic() + 60
        while any(_state(thread) != "T" for thread in threads.iterdir()):
            assert time.monotonic() < deadline, "it does not stop"
            time.sleep(0.001)

    def __enter__(self) -> "TargetProcess":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def _state(thread: Path) -> str:
    """Return the state of a thread by its folder in /proc: the letter behind its name."""
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]
