"""Linux and Hyades over RDMA in the guest, both ways: nvme-rdma and nvmet-rdma of the kernel."""

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vm import rdma
from tests.vm.conftest import Guest
from tests.vm.linux import NVMET, Linux
from tests.vm.machine import Job, Machine

from hyades.common.layout import Status
from hyades.common.units import MIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
NQN = "nqn.2024-01.org.example:rdma"
SIZE = 8 * MIB
NVMET_PORT = 4430
ADDRESS = f"--transport=rdma --traddr={rdma.HOST}"
# The target of one process, so that nothing but its own packages is imported.
_SERVE = """
import signal, sys
from pathlib import Path
from hyades.target_side.events import LineSink
from hyades.target_side.namespaces import FileNamespace, MemoryNamespace
from hyades.target_side.server import Server
from hyades.target_side.subsystem import Subsystem
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # in the threads to come, too
nqn, path, host, port, ready = sys.argv[1:]
spaces = {1: FileNamespace(path), 2: MemoryNamespace(4 << 20), 3: FileNamespace(path + "3")}
spaces[3].block_bytes, spaces[3].blocks = 512, spaces[3].blocks * 8
server = Server(
    [Subsystem(nqn, spaces)], [], rdma=[(host, int(port))], sink=LineSink(sys.stderr, as_json=False)
)
server.start()
Path(ready).touch()
signal.sigwait({signal.SIGTERM})
server.stop()
"""
# Reads all of a namespace, then writes it anew, in large and in small pieces.  At the end names
# memory with a key that is not valid: the kernel ends the association, and takes the next one.
_MOVE = """
import hashlib, sys
import numpy as np
from tests.contracts.transport import allocate_arena, finish, request
from hyades.common.layout import BLOCK, Op
from hyades.proxy.registry import open_transport
from hyades.proxy.transports import nvme_rdma_session
device = open_transport(sys.argv[1])
nbytes = device.nblocks * BLOCK
arena = allocate_arena(nbytes)
device.register(arena)

def move(op, piece):
    batch = [request(op, at // BLOCK, offset=at, nbytes=piece, cookie=at)
             for at in range(0, nbytes, piece)]
    assert {s for s, _ in finish(device, np.concatenate(batch)).values()} == {0}

move(Op.READ, 1 << 20)
print(hashlib.md5(arena).hexdigest())
arena[:] = np.random.default_rng(3).integers(0, 256, nbytes, np.uint8)
move(Op.WRITE, 1 << 18)
half = nbytes // 2
arena[half:] = arena[:half]
move(Op.WRITE, BLOCK)
finish(device, request(Op.FLUSH))
print(hashlib.md5(arena).hexdigest())
arena[:] = 0
move(Op.READ, 4 * BLOCK)
print(hashlib.md5(arena).hexdigest())
device.close()

bad = open_transport(sys.argv[1] + "&ctrl_loss_timeout=2&kato=1&timeout=5")
bad.register(arena)
right = nvme_rdma_session._describe
nvme_rdma_session._describe = lambda *what: (right(*what)[0], right(*what)[1] ^ 0xFF00)
arena[:BLOCK] = 0x55
print(finish(bad, request(Op.READ))[0][0], (arena[:BLOCK] == 0x55).all())
bad.close()
nvme_rdma_session._describe = right
again = open_transport(sys.argv[1])
again.register(arena)
device = again
move(Op.READ, 1 << 20)
print(hashlib.md5(arena).hexdigest())
again.close()
"""


class Target:
    """Our target in the guest."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.path = "/dev/shm/namespace"
        machine.run(f"for n in '' 3; do head -c {SIZE} /dev/urandom > {self.path}$n; done")
        self.script = machine.folder / "serve.py"
        self.script.write_text(_SERVE)
        self.job: Job
        self.start()

    def start(self) -> None:
        """Start it and wait until hosts may connect."""
        ready, log = "/dev/shm/ready", "/dev/shm/log"
        words = f"{NQN} {self.path} {rdma.HOST} {rdma.PORT} {ready}"
        self.job = self.machine.start(
            f"rm -f {ready}; exec {sys.executable} {self.script} {words} 2>> {log}", timeout=390,
        )  # fmt: skip
        self.machine.run(f"until [ -e {ready} ]; do sleep 0.1; done", timeout=100)

    def stop(self, number: int) -> int:
        """End it by a signal and return its exit code."""
        self.job.signal(number)
        return self.job.wait(check=False).code

    def log(self) -> str:
        """Return what it has reported."""
        return self.machine.run("cat /dev/shm/log").out


@pytest.fixture(scope="module")
def target(guest: Guest) -> Iterator[Target]:
    """Give one target for all tests of Linux as the host."""
    machine = guest.machine()
    rdma.prepare(machine)
    found = Target(machine)
    yield found
    found.stop(signal.SIGKILL)


@pytest.fixture
def connected(target: Target) -> Iterator[Linux]:
    """Give Linux with a connection to the target."""
    linux = Linux(target.machine)
    options = "--nr-io-queues=1 --reconnect-delay=1 --ctrl-loss-tmo=120 --keep-alive-tmo=5"
    linux.machine.run(f"nvme connect {ADDRESS} --trsvcid={rdma.PORT} --nqn={NQN} {options}")
    yield linux
    linux.machine.run("nvme disconnect-all")


def test_linux_discovers(target: Target) -> None:
    output = target.machine.run(
        f"nvme discover {ADDRESS} --trsvcid={rdma.PORT} --output-format=json"
    )
    (record,) = output.json()["records"]
    assert record["trtype"] == "rdma"
    assert (record["traddr"], record["trsvcid"]) == (rdma.HOST, str(rdma.PORT))
    assert record["subnqn"] == NQN


def test_linux_reads_and_writes(connected: Linux, target: Target) -> None:
    device = connected.device(NQN)
    assert connected.md5(device) == connected.md5(target.path)
    second = connected.device(NQN, 2)
    for block in ("4k", "512k"):  # in the capsule, and fetched by RDMA READ
        target.machine.run(
            f"head -c 4M /dev/urandom > /dev/shm/data;"
            f"dd if=/dev/shm/data of={second} bs={block} oflag=direct status=none;"
            f"dd if={second} bs=1M iflag=direct status=none | cmp - /dev/shm/data"
        )
    target.machine.run(f"dd if=/dev/shm/data of={device} bs=64k oflag=direct status=none")
    target.machine.run(f"nvme flush {device} && cmp -n 4194304 {target.path} /dev/shm/data")


def test_fio_verifies(connected: Linux, target: Target) -> None:
    for nsid, smallest in ((1, 4096), (3, 512)):
        device = connected.device(NQN, nsid)
        job = connected.fio(
            device, "--rw=randwrite", f"--bsrange={smallest}-256k", f"--blockalign={smallest}",
            "--bs_unaligned=0", "--iodepth=16", "--size=4m", "--verify=crc32c",
            "--verify_fatal=1", "--randrepeat=1",
        )  # fmt: skip
        connected.machine.run(job, timeout=120)


def test_a_killed_target_comes_back(connected: Linux, target: Target) -> None:
    """What Linux writes while the target is away is written when it is back."""
    device = connected.device(NQN)
    target.machine.run("dmesg --clear; head -c 1M /dev/urandom > /dev/shm/data")
    assert target.stop(signal.SIGKILL) == -9
    write = target.machine.start(
        f"dd if=/dev/shm/data of={device} bs=64k oflag=direct status=none", timeout=120
    )
    target.machine.run("until dmesg | grep -q Reconnecting; do sleep 0.2; done", timeout=60)
    assert write.running()
    target.start()
    write.wait()
    target.machine.run(f"cmp -n 1048576 {target.path} /dev/shm/data")
    assert connected.md5(device) == connected.md5(target.path)


def test_a_target_that_stops(connected: Linux, target: Target) -> None:
    """No connection has to be cut, and Linux comes back to the next one."""
    device = connected.device(NQN)
    assert target.stop(signal.SIGTERM) == 0
    log = target.log()
    assert "Traceback" not in log
    assert "stopped cut=0" in log
    target.start()
    assert connected.md5(device) == connected.md5(target.path)


def test_the_command_serves_and_doctor_sees_the_device(machine: Machine) -> None:
    rdma.prepare(machine)
    env, ready = rdma.warm(machine.folder), "/dev/shm/serving"
    hyades = f"{sys.executable} -m hyades.deploy.cli"
    job = machine.start(
        f"exec {hyades} serve -n mem:1MiB --nqn {NQN}-served --listen rdma:{rdma.HOST}:0"
        f" --allow-any-host --ready-file {ready}", timeout=200, **env,
    )  # fmt: skip
    seen = machine.run(f"{hyades} doctor", timeout=200, check=False, **env).out
    assert "RDMA devices rxe0" in seen
    machine.run(f"until [ -e {ready} ]; do sleep 0.1; done", timeout=100)
    kind, host, port = machine.run(f"cat {ready}").out.strip().split(":")
    assert (kind, host) == ("rdma", rdma.HOST)
    log = machine.run(f"nvme discover {ADDRESS} --trsvcid={port} --output-format=json").json()
    assert [record["subnqn"] for record in log["records"]] == [f"{NQN}-served"]
    job.signal(signal.SIGTERM)
    assert job.wait(check=False).code == 0


def test_our_initiator_on_nvmet(machine: Machine) -> None:
    rdma.prepare(machine)
    path, space = "/dev/shm/kernel", f"{NVMET}/subsystems/{NQN}-kernel"
    machine.run(f"head -c {SIZE} /dev/urandom > {path}")
    before = Linux(machine).md5(path)
    machine.run(
        f"set -e; mkdir {space}; cd {space}; echo 1 > attr_allow_any_host; mkdir namespaces/1;"
        f"cd namespaces/1; echo -n {path} > device_path; echo 1 > buffered_io; echo 1 > enable;"
        f"mkdir {NVMET}/ports/1; cd {NVMET}/ports/1; echo ipv4 > addr_adrfam;"
        f"echo rdma > addr_trtype; echo {rdma.HOST} > addr_traddr;"
        f"echo {NVMET_PORT} > addr_trsvcid; ln -s {space} subsystems/"
    )
    script = machine.folder / "move.py"
    script.write_text(_MOVE)
    url = f"nvme+rdma://{rdma.HOST}:{NVMET_PORT}/{NQN}-kernel?ns=1"
    env = {**rdma.warm(machine.folder), "PYTHONPATH": str(Path.cwd())}
    output = machine.run(f"{sys.executable} {script} '{url}'", timeout=300, **env).out
    read, wrote, back, status, untouched, again = output.split()
    assert read == before
    assert wrote == back == again == Linux(machine).md5(path)
    assert (int(status), untouched) == (Status.LOST, "True")
