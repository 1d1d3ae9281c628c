"""RDMA in the guest: the kernel's software device on the guest's network card, and tests on it.

The packets of two processes of the guest go from the card back to itself.  Data moves slowly (tens
of MB/s), so everything is small.
"""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from tests.vm.kernel import ROOT
from tests.vm.machine import Machine

from hyades.common.rdma.library import probe

HOST = "10.0.2.15"
PORT = 4421
# The guest's processor is not the host's: see test_refresh.py.
_ANY_CPU = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
_PREPARE = """
modprobe -a rdma_rxe rdma_ucm ib_uverbs nvme-rdma nvmet-rdma
rdma link show rxe0/1 2>/dev/null || rdma link add rxe0 type rxe netdev eth0
"""
# What compiles the kernels that a transport needs.
_WARM = """
import pathlib, sys
from tests.contracts.transport import allocate_arena, finish, request
from tests.reference import nvme
from hyades.common.layout import Op
from hyades.proxy.registry import open_transport
server = nvme.file_server(pathlib.Path(sys.argv[1]), 8)
device = open_transport(nvme.url(server))
device.register(allocate_arena(4096))
finish(device, request(Op.READ))
device.close()
server.stop()
"""


def prepare(machine: Machine) -> None:
    """Make the RDMA device; skip where the host has no libraries for it."""
    problem = probe()
    if problem is not None and "no RDMA device" not in problem and "/dev/" not in problem:
        pytest.skip(problem)
    machine.run(_PREPARE)


@cache
def warm(folder: Path) -> dict[str, str]:
    """Compile on the host what tests in the guest need, into *folder*, which the guest sees."""
    cache = folder / "rdma-kernels"  # test_refresh.py has a folder "kernels"
    cache.mkdir()
    env = {**_ANY_CPU, "NUMBA_CACHE_DIR": str(cache)}
    subprocess.run(
        [sys.executable, "-c", _WARM, str(folder)], cwd=ROOT, env=os.environ | env, check=True,
        timeout=200,
    )  # fmt: skip
    return env


def run_tests(machine: Machine, *arguments: str, timeout: float = 400) -> str:
    """Run pytest in the guest and return its last line; AssertionError with its output else."""
    env = warm(machine.folder)
    words = " ".join(f"'{word}'" for word in arguments)
    command = f"{sys.executable} -m pytest -q -x -p no:cacheprovider --timeout=150 {words}"
    output = machine.run(command, timeout=timeout, **env).out
    return output.strip().splitlines()[-1]
