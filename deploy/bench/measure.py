"""Runs commands as processes of their own and measures time, memory and storage traffic."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hyades.common.units import format_size
from hyades.deploy.bench.memlimit import MemoryGroup, find_controller

_LAUNCH = Path(__file__).with_name("launch.py")
_DROP = Path("/proc/sys/vm/drop_caches")

Outcome = Literal["ok", "failed", "killed", "timeout", "skipped"]


@dataclass(frozen=True, slots=True)
class Measurement:
    """What one process cost, from its fork to its end."""

    outcome: Outcome
    detail: str = ""  # why it is not ok
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_rss: int = 0  # bytes; pages of mapped files count while they are resident
    read_bytes: int = 0  # from storage, as /proc/PID/io counts
    written_bytes: int = 0
    group_peak: int | None = None  # most bytes charged to its cgroup, page cache included
    limit: int | None = None
    cold: bool = False  # the page cache was dropped before


def skipped(reason: str, limit: int | None = None) -> Measurement:
    """Return the measurement of a run that did not take place."""
    return Measurement("skipped", reason, limit=limit)


def drop_page_cache() -> str | None:
    """Write back and drop the page cache; return None, or the reason why it was not dropped."""
    os.sync()
    try:
        _DROP.write_text("3")
    except OSError as error:
        return f"page cache not dropped: {_DROP}: {error.strerror}"
    time.sleep(0.2)
    return None


def run_measured(
    command: Sequence[str],
    *,
    limit: int | None = None,
    timeout_s: float = 900.0,
    cold: bool = True,
    env: Mapping[str, str] | None = None,
) -> Measurement:
    """Run *command*, in a memory cgroup of *limit* bytes if given, and measure it.

    `cold` drops the page cache first where that is allowed.  A command that fails, is killed, or
    takes longer than *timeout_s* gives a measurement that says so; a limit that cannot be set one
    with outcome "skipped".
    """
    if limit is None:
        group: MemoryGroup | None = None
    else:
        controller = find_controller()
        if isinstance(controller, str):
            return skipped(controller, limit)
        group = controller.group(limit)
    with group or nullcontext(), tempfile.TemporaryDirectory(prefix="hyades-bench-") as folder:
        scratch = Path(folder)
        spec = {
            "command": list(command),
            "log": str(scratch / "log"),
            "result": str(scratch / "result"),
            "timeout_s": timeout_s,
            "procs": None if group is None else str(group.procs),
        }
        (scratch / "spec").write_text(json.dumps(spec))
        dropped = cold and drop_page_cache() is None
        environment = {**os.environ, **(env or {})}
        launcher = [sys.executable, "-I", "-S", str(_LAUNCH), str(scratch / "spec")]
        subprocess.run(launcher, check=True, env=environment)
        result = json.loads((scratch / "result").read_text())
        log = (scratch / "log").read_text(errors="replace")
        outcome, detail = _judge(result, log, timeout_s, group)
        return Measurement(
            outcome, detail,
            wall_s=result["wall_s"], cpu_s=result["cpu_s"], peak_rss=result["peak_rss"],
            read_bytes=result["read_bytes"], written_bytes=result["written_bytes"],
            group_peak=None if group is None else group.peak(), limit=limit, cold=dropped,
        )  # fmt: skip


def _judge(
    result: Mapping[str, float], log: str, timeout_s: float, group: MemoryGroup | None
) -> tuple[Outcome, str]:
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "no output")
    if result["timed_out"]:
        return "timeout", f"stopped after {timeout_s:g} s"
    if result["exit"] and group is not None and group.oom_kills():
        return "killed", f"killed for memory at {format_size(group.limit)}"
    if result["exit"] < 0:
        return "killed", f"ended by signal {-int(result['exit'])}: {last[:200]}"
    if result["exit"]:
        return "failed", f"exit status {int(result['exit'])}: {last[:200]}"
    return "ok", ""
