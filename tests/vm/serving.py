"""`hyades serve` as a process of the host, which a test may kill and start again."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.vm.linux import Address
from tests.vm.machine import HOST, TIED

START_SECONDS = 60.0


class Serve:
    """One target on the host's loopback; later starts listen on the port of the first."""

    def __init__(self, folder: Path, *namespaces: str, nqn: str, options: tuple[str, ...] = ()):
        self.ready = folder / "ready"
        self.log = folder / "serve.log"
        self.nqn = nqn
        self.port = 0
        self._options = ["--nqn", nqn, "--advertise", HOST, "--ready-file", str(self.ready)]
        self._options += [part for name in namespaces for part in ("--namespace", name)]
        self._options += options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> Address:
        """Return where the guest finds the target."""
        return Address(HOST, self.port)

    def addresses(self) -> list[Address]:
        """Return where the guest finds each listener."""
        lines = self.ready.read_text().split()
        return [Address(HOST, int(line.rpartition(":")[2])) for line in lines]

    def start(self) -> None:
        """Start and wait until hosts may connect."""
        self.ready.unlink(missing_ok=True)
        command = [*TIED, sys.executable, "-m", "hyades.deploy.cli", "serve"]
        command += ["--listen", f"127.0.0.1:{self.port}", *self._options]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        end = time.monotonic() + START_SECONDS
        while not self.ready.exists():
            if self._process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"hyades serve did not start:\n{self.log.read_text()}")
            time.sleep(0.02)
        self.port = self.addresses()[0].port

    def kill(self) -> None:
        """End the target with SIGKILL; it may have ended before."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """End the target with SIGTERM and return its exit code."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout=30)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.kill()
