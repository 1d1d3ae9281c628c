"""A memory cgroup around one process, with the v1 memory controller or with cgroup v2.

The limit covers everything that the processes touch, page cache included, and swap is off.
"""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hyades.common.errors import UsageError

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Files:
    """File names of one cgroup version."""

    limit: str
    swap: str  # set after the limit where it exists
    swap_value: str | None  # None: the limit again, as v1 counts memory and swap together
    peak: str
    events: str  # has a line "oom_kill N"


_VERSIONS = {
    1: _Files(
        "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", None,
        "memory.max_usage_in_bytes", "memory.oom_control",
    ),
    2: _Files("memory.max", "memory.swap.max", "0", "memory.peak", "memory.events"),
}  # fmt: skip


class MemoryGroup:
    """A cgroup of its own below *parent*; a context manager that removes it at the end."""

    def __init__(self, parent: Path, version: int, limit: int) -> None:
        self.version = version
        self.limit = limit
        self._files = _VERSIONS[version]
        self.path = parent / f"hyades-bench-{os.getpid()}-{time.monotonic_ns()}"
        self.path.mkdir()
        try:
            (self.path / self._files.limit).write_text(str(limit))
            swap = self.path / self._files.swap
            if swap.exists():
                swap.write_text(self._files.swap_value or str(limit))
        except OSError:
            self.path.rmdir()
            raise

    @property
    def procs(self) -> Path:
        """The file into which a process writes its id to enter."""
        return self.path / "cgroup.procs"

    def peak(self) -> int | None:
        """Most bytes ever charged, page cache included; None where the kernel does not say."""
        path = self.path / self._files.peak
        return int(path.read_text()) if path.exists() else None

    def oom_kills(self) -> int:
        """Return how many processes the kernel killed for memory in this group."""
        for line in (self.path / self._files.events).read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
        return 0

    def close(self) -> None:
        """Remove the group; processes that have just died may hold it for a moment."""
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:
                time.sleep(0.1)
        raise UsageError(f"{self.path} cannot be removed: a process in it is still running")

    def __enter__(self) -> "MemoryGroup":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Controller:
    """Where memory groups can be made."""

    version: int
    parent: Path

    def group(self, limit: int) -> MemoryGroup:
        """Return a new group limited to *limit* bytes."""
        return MemoryGroup(self.parent, self.version, limit)


def find_controller(root: Path = _ROOT, own: Path = _OWN) -> Controller | str:
    """Return where groups can be made, or the reason why nowhere: what was tried and what failed.

    `root` is where cgroups are mounted, `own` the list of groups of this process.
    """
    if not own.exists():
        return f"no memory cgroup: {own} does not exist"
    tried = []
    for version, parent in _candidates(root, own):
        failure = _failure(version, parent)
        if failure is None:
            return Controller(version, parent)
        tried.append(f"{parent} (v{version}): {failure}")
    return "no writable memory cgroup: " + ("; ".join(tried) or f"no memory controller in {root}")


def _candidates(root: Path, own: Path) -> Iterator[tuple[int, Path]]:
    """Yield this process's group and its parents, in v1's memory hierarchy and in v2's."""
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            base, version = root / "memory", 1
        elif controllers == "":
            base = root if (root / "cgroup.controllers").exists() else root / "unified"
            version = 2
        else:
            continue
        if version == 2 and "memory" not in _words(base / "cgroup.controllers"):
            continue
        # In a container the path may not be visible; the mount's root then stands for it.
        group = base / path.lstrip("/")
        group = group if group.is_dir() else base
        yield version, group
        while group != base:
            group = group.parent
            yield version, group


def _failure(version: int, parent: Path) -> str | None:
    """Make a group in *parent* and remove it again; return what failed."""
    try:
        if version == 2 and "memory" not in _words(parent / "cgroup.subtree_control"):
            (parent / "cgroup.subtree_control").write_text("+memory")
        with MemoryGroup(parent, version, 1 << 40):
            return None
    except OSError as error:
        return error.strerror or str(error)


def _words(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []
