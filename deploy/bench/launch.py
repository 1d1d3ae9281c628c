"""Run one command and say what it cost: a small process of its own, standard library only.

usage: python -I -S launch.py SPEC.json

It is separate because a child inherits the peak RSS of whoever forks it, so the forker must be
small.  SPEC: command, log (takes stdout and stderr), timeout_s, procs (the cgroup.procs file to
enter, or null), result (the JSON file to write).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    """Read the spec named on the command line, run it, write the result."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    Path(spec["result"]).write_text(json.dumps(measure(spec)))


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Run ``spec["command"]`` to its end or timeout; return seconds, bytes and exit status."""
    log = os.open(spec["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become(spec, log)
    os.close(log)
    timed_out = False

    def expire(*_: object) -> None:
        nonlocal timed_out
        timed_out = True
        os.killpg(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, spec["timeout_s"])
    try:
        # WNOWAIT leaves a zombie, whose counters can still be read.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    except KeyboardInterrupt:
        os.killpg(pid, signal.SIGKILL)
        raise
    wall = time.monotonic() - started
    signal.setitimer(signal.ITIMER_REAL, 0)
    io = _io(pid)
    _, status, usage = os.wait4(pid, 0)
    return {
        "wall_s": wall,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "exit": os.waitstatus_to_exitcode(status),
        "timed_out": timed_out,
        "peak_rss": usage.ru_maxrss * 1024,
        "major_faults": usage.ru_majflt,
        "read_bytes": io["read_bytes"],
        "written_bytes": io["write_bytes"] - io["cancelled_write_bytes"],
    }


def _become(spec: dict[str, Any], log: int) -> None:
    """In the child: enter the cgroup and turn into the command."""
    try:
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        if spec["procs"] is not None:
            Path(spec["procs"]).write_text(str(os.getpid()))
        os.execvp(spec["command"][0], spec["command"])
    except OSError as error:
        os.write(2, f"cannot start {spec['command'][0]}: {error}\n".encode())
    finally:
        os._exit(127)


def _io(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return {name: int(value) for name, _, value in (line.partition(": ") for line in lines)}


if __name__ == "__main__":
    main()
