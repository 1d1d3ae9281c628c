"""How fast this disk reads one file in order: fio where it is installed, else an own reader."""

import json
import mmap
import os
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from hyades.common.errors import UsageError
from hyades.common.units import MIB

_DEPTH = 8


@dataclass(frozen=True, slots=True)
class SequentialRate:
    """Bytes per second, and which program measured it how."""

    bytes_per_s: float
    method: str


def sequential_rate(path: Path, max_bytes: int = 2 << 30) -> SequentialRate:
    """Read up to *max_bytes* of the file at *path* past the page cache, 1 MiB at a time, 8 deep.

    Raises UsageError for a file below 1 MiB or a filesystem that refuses O_DIRECT.
    """
    size = min(path.stat().st_size, max_bytes) // MIB * MIB
    if size == 0:
        raise UsageError(f"{path} is smaller than 1 MiB: nothing to measure a rate on")
    own = f"own O_DIRECT reader, 1 MiB, {_DEPTH} threads"
    if shutil.which("fio") is None:
        return SequentialRate(_own(path, size), f"{own} (fio is not installed)")
    rate = _fio(path, size)
    if isinstance(rate, str):
        return SequentialRate(_own(path, size), f"{own} (fio failed: {rate})")
    return SequentialRate(rate, f"fio, io_uring, O_DIRECT, 1 MiB, depth {_DEPTH}")


def _fio(path: Path, size: int) -> float | str:
    """Return bytes per second, or what fio complained about."""
    with tempfile.TemporaryDirectory(prefix="hyades-bench-") as folder:
        command = [
            "fio", "--name=sequential", f"--filename={path}", f"--size={size}", "--readonly",
            "--rw=read", "--bs=1M", "--direct=1", "--ioengine=io_uring", f"--iodepth={_DEPTH}",
            "--output-format=json", f"--output={folder}/result",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return done.stderr.strip()[-200:] or f"exit status {done.returncode}"
        # fio may print a line of warning before the JSON.
        text = Path(folder, "result").read_text()
        job = json.loads(text[text.index("{") :])["jobs"][0]["read"]
        return float(job["bw_bytes"])


def _own(path: Path, size: int) -> float:
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        raise UsageError(f"cannot read {path} with O_DIRECT: {error.strerror}") from error

    def read(worker: int) -> None:
        with mmap.mmap(-1, MIB) as buffer:  # page-aligned, as O_DIRECT wants it
            for offset in range(worker * MIB, size, _DEPTH * MIB):
                if os.preadv(file, [buffer], offset) != MIB:
                    raise UsageError(f"{path} became shorter while it was read")

    try:
        started = time.monotonic()
        with ThreadPoolExecutor(_DEPTH) as pool:
            list(pool.map(read, range(_DEPTH)))
        return size / (time.monotonic() - started)
    finally:
        os.close(file)
