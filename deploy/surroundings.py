"""What `hyades doctor` may look at; tests put another machine here."""

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hyades.deploy.machine import version_of

_DEBIAN_PYTHON = Path("usr/lib/python3/dist-packages")


@dataclass(frozen=True)
class Surroundings:
    """A machine: its files from *root* on, environment, installed packages and programs."""

    root: Path = Path("/")
    folder: Path = field(default_factory=Path.cwd)
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def package(self, name: str) -> str | None:
        """Return the version of an installed distribution."""
        return version_of(name)

    def module(self, name: str) -> bool:
        """Tell whether a module could be imported, Debian's own packages included."""
        if importlib.util.find_spec(name) is not None:
            return True
        return (self.root / _DEBIAN_PYTHON / name).exists()

    def program(self, name: str) -> str | None:
        """Return the path of a program."""
        return shutil.which(name, path=self.environment.get("PATH", ""))

    def output(self, *command: str) -> str:
        """Return the first line that *command* prints, or an empty text where it fails."""
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        lines = done.stdout.strip().splitlines()
        return lines[0] if lines and done.returncode == 0 else ""

    def entries(self, folder: str) -> list[str]:
        """Return the names in a folder below root, sorted; none where it does not exist."""
        try:
            return sorted(entry.name for entry in (self.root / folder).iterdir())
        except OSError:
            return []
