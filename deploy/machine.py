"""Facts about this machine, as /proc and the cgroup state them."""

import os
import platform
from importlib import metadata
from pathlib import Path

from hyades.deploy.report.model import Machine

_PACKAGES = ("hyades", "numpy", "torch", "numba", "torch_geometric")


def cpu_name(root: Path = Path("/")) -> str:
    """Return the processor's name, or its architecture where /proc does not give one."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def cpu_flags(root: Path = Path("/")) -> frozenset[str]:
    """Return the processor's feature flags ("flags" on x86, "Features" on Arm)."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def memory_total(root: Path = Path("/")) -> int:
    """Return the machine's memory in bytes, or 0 where it is not known."""
    return _meminfo("MemTotal", root)


def memory_available(root: Path = Path("/")) -> int:
    """Return the memory that programs can still take, in bytes."""
    return _meminfo("MemAvailable", root)


def cgroup_limit(root: Path = Path("/")) -> int | None:
    """Return the lowest memory limit of this process's cgroup and its parents, or None."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            base, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        folder = base / path.lstrip("/")
        for place in (folder, *folder.parents):
            if place == base.parent:
                break
            limits.append(_read_limit(place / name))
    # v1 writes "no limit" as a number near 2**63.
    known = [limit for limit in limits if limit is not None and limit < 1 << 60]
    return min(known, default=None)


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))


def version_of(package: str) -> str | None:
    """Return the installed version of a distribution, without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def this_machine(device: str) -> Machine:
    """Describe the machine for a report; *device* says what ran the scheduler."""
    versions = {"python": platform.python_version()}
    versions |= {name: found for name in _PACKAGES if (found := version_of(name))}
    return Machine(
        host=platform.node(),
        cpu=cpu_name(),
        cores=cores(),
        memory=memory_total(),
        kernel=platform.release(),
        device=device,
        versions=versions,
    )


def _meminfo(field: str, root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return 0


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
