"""Two network namespaces joined by a cable, for tests of slow and broken links.

A thread moves into a namespace with setns; threads that it starts are there, too.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

_T = TypeVar("_T")
_NEWNET = 0x40000000
TARGET, HOST = "10.77.0.1", "10.77.0.2"


class Network:
    """A target's side and a host's side: namespaces, addresses, and one device in each."""

    def __init__(self) -> None:
        self.target, self.host = f"hyades-t-{os.getpid()}", f"hyades-h-{os.getpid()}"

    def make(self) -> None:
        """Make the namespaces and the cable; skip the test where that is not allowed."""
        if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
            pytest.skip("network namespaces need root, ip and tc")
        try:
            for name in (self.target, self.host):
                _run("ip", "netns", "add", name)
                _run("ip", "-n", name, "link", "set", "lo", "up")
            _run("ip", "link", "add", "cable0", "netns", self.target, "type", "veth",
                 "peer", "name", "cable1", "netns", self.host)  # fmt: skip
            ends = ((self.target, "cable0", TARGET), (self.host, "cable1", HOST))
            for name, device, address in ends:
                _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", device)
                _run("ip", "-n", name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            self.remove()
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")

    def remove(self) -> None:
        """Take everything away; the cable goes with its ends."""
        for name in (self.target, self.host):
            with contextlib.suppress(subprocess.CalledProcessError, FileNotFoundError):
                _run("ip", "netns", "del", name)

    def limit(self, rate: str) -> None:
        """Let both directions carry at most *rate*, such as 50mbit."""
        for name, device in ((self.target, "cable0"), (self.host, "cable1")):
            _run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf",
                 "rate", rate, "burst", "32kb", "latency", "100ms")  # fmt: skip

    def set_link(self, state: str) -> None:
        """Pull the cable ("down") or plug it in ("up")."""
        _run("ip", "-n", self.host, "link", "set", "cable1", state)

    def as_host(self, work: Callable[[], _T]) -> _T:
        """Run *work* in a thread on the host's side; return or raise what it does."""
        results: list[_T] = []
        errors: list[BaseException] = []

        def inside() -> None:
            try:
                with Path("/run/netns", self.host).open() as space:
                    libc = ctypes.CDLL(None, use_errno=True)
                    if libc.setns(space.fileno(), _NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                results.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return results[0]


@contextlib.contextmanager
def joined_namespaces() -> Iterator[Network]:
    """Make a network for a test, or skip it."""
    network = Network()
    network.make()
    try:
        yield network
    finally:
        network.remove()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
