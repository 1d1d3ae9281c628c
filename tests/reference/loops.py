"""Loop devices: files that the kernel shows as block devices, with logical blocks of any size."""

import contextlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest


def attach(file, sector, *, read_only=False):
    """Return the path of a new loop device over *file*; skip where none can be made."""
    if os.geteuid() != 0 or shutil.which("losetup") is None:
        pytest.skip("loop devices need root and losetup")
    command = ["losetup", "--find", "--show", "--sector-size", str(sector), str(file)]
    if read_only:
        command.insert(1, "--read-only")
    for _ in range(20):  # another process may take the free one first
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return Path(done.stdout.strip())
        if "busy" not in done.stderr:
            break
    pytest.skip(f"no loop device of {sector}-byte sectors: {done.stderr.strip()}")


def detach(device):
    """Give a loop device back."""
    subprocess.run(["losetup", "--detach", str(device)], check=True)


@contextlib.contextmanager
def loop_device(file, sector, *, nbytes=None, read_only=False):
    """Give a loop device over *file*, of *nbytes* zero bytes where they are named."""
    if nbytes is not None:
        with Path(file).open("wb") as made:
            made.truncate(nbytes)
    device = attach(file, sector, read_only=read_only)
    try:
        yield device
    finally:
        detach(device)
