"""What `hyades serve --backend kernel` makes serves our initiator (Linux: test_serve_kernel.py)."""

import shlex
import signal
import sys

import numpy as np
import pytest
from tests.contracts.transport import finish, request
from tests.vm.linux import NVMET, Linux
from tests.vm.machine import Job

from hyades.common.layout import BLOCK, Op, Status
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport

pytestmark = pytest.mark.slow
NQN = "nqn.2024-01.org.example:provided"
FILE, DRIVE = "/dev/shm/disk", "/dev/nvme0n1"  # a tmpfs has no direct I/O; a drive has
READY, STATE = "/dev/shm/ready", "/dev/shm/state"
LISTING = (
    f"cd {NVMET}; ls -d subsystems/* subsystems/*/namespaces/* ports/* hosts/* 2>/dev/null; true"
)


def start(linux: Linux) -> Job:
    """Start the command in the guest."""
    command = [
        sys.executable, "-m", "hyades.deploy.cli", "serve", "--backend", "kernel", "--nqn", NQN,
        "--namespace", FILE, "--namespace", DRIVE, "--listen", "0.0.0.0:4420",
        "--allow-any-host", "--ready-file", READY,
    ]  # fmt: skip
    return linux.machine.start(shlex.join(command), timeout=120, XDG_STATE_HOME=STATE)


def wait_for_file(linux: Linux, job: Job, path: str) -> None:
    """Return once the target is ready."""
    script = f"for i in $(seq 600); do [[ -s {path} ]] && exit; sleep 0.1; done; exit 1"
    waiting = linux.machine.start(script, timeout=100)
    while waiting.running():
        if not job.running():
            waiting.signal()
            pytest.fail(f"the command ended: {job.wait(check=False)}")
        linux.machine.run("sleep 0.1")
    waiting.wait()


def test_a_file_and_a_drive_for_our_initiator(linux: Linux) -> None:
    linux.machine.run(f"truncate --size=4M {FILE}")
    job = start(linux)
    wait_for_file(linux, job, READY)
    port = linux.machine.forward(4420)
    for nsid, place in {1: FILE, 2: DRIVE}.items():
        device = open_transport(f"nvme+tcp://127.0.0.1:{port}/{NQN}?ns={nsid}")
        arena = allocate_arena(2 * BLOCK)
        device.register(arena)
        arena[:BLOCK] = np.random.default_rng(nsid).integers(0, 256, BLOCK, np.uint8)
        assert finish(device, request(Op.WRITE, 5)) == {0: (Status.OK, BLOCK)}
        assert finish(device, request(Op.FLUSH)) == {0: (Status.OK, 0)}
        assert finish(device, request(Op.READ, 5, offset=BLOCK)) == {0: (Status.OK, BLOCK)}
        assert np.array_equal(arena[:BLOCK], arena[BLOCK:])
        device.close()
        (linux.machine.folder / "block").write_bytes(arena[:BLOCK].tobytes())
        linux.machine.run(f"cmp -n {BLOCK} {place} {linux.machine.folder}/block {5 * BLOCK} 0")

    job.signal(signal.SIGTERM)
    assert job.wait(check=False).code == 0
    assert linux.machine.run(LISTING).out == ""
    assert linux.machine.run(f"test ! -e {READY}").code == 0
