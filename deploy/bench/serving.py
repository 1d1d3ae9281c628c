"""Servers that a benchmark starts, measures and stops: processes of their own on loopback."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hyades.common.errors import DeviceLost

NQN = "nqn.2026-01.org.hyades:bench"
_PATIENCE = 30.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that accepts connections; *address* is what it wrote to its ready file."""

    address: str
    pid: int

    def cpu_seconds(self) -> float:
        """Return the CPU time that it has used, in user and kernel."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def plain_sender(path: Path) -> Iterator[Server]:
    """Run the plain sender of bandwidth_worker.py on *path*."""
    with _started(["hyades.deploy.bench.bandwidth_worker", "--serve", str(path)]) as server:
        yield server


@contextmanager
def served(
    path: Path, options: Sequence[str] = (), *, listen: str = "127.0.0.1:0",
    inside: Callable[[Sequence[str]], Sequence[str]] = list,
) -> Iterator[Server]:  # fmt: skip
    """Run `hyades serve` with the namespace *path*, on a free port of loopback if nothing is said.

    *inside* returns a command as it runs elsewhere, such as in a network namespace.
    """
    command = [
        "hyades.deploy.cli", "serve", "--namespace", str(path), "--nqn", NQN,
        "--listen", listen, *options, "--ready-file",
    ]  # fmt: skip
    with _started(command, inside) as server:
        yield server


@contextmanager
def _started(
    command: list[str], inside: Callable[[Sequence[str]], Sequence[str]] = list
) -> Iterator[Server]:
    """Run a module whose last argument is the file that says when it is ready."""
    with tempfile.TemporaryDirectory(prefix="hyades-bench-") as folder:
        ready, log = Path(folder, "ready"), Path(folder, "log")
        with log.open("wb") as output:
            process = subprocess.Popen(
                inside([sys.executable, "-m", *command, str(ready)]),
                stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        try:
            yield Server(_wait(process, ready, log), process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], ready: Path, log: Path) -> str:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        if ready.exists() and (text := ready.read_text().split()):
            return text[0]
        if process.poll() is not None:
            break
        time.sleep(0.02)
    said = log.read_text(errors="replace").strip()[-400:] or "nothing"
    raise DeviceLost(f"{process.args!r} did not become ready; it said: {said}")
