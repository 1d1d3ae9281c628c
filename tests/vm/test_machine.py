"""The virtual machine itself: commands, time limits, files, network, and the kernel's own NVMe/TCP
in a circle, so that a failure of the other tests here is about Hyades."""

import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.vm.conftest import Guest
from tests.vm.kernel import ROOT
from tests.vm.linux import Address, Linux
from tests.vm.machine import HOST, Machine

pytestmark = pytest.mark.slow
NQN = "nqn.2024-01.org.example:circle"


def test_commands_give_output_and_exit_code(machine: Machine) -> None:
    output = machine.run("echo $word; echo no >&2; exit 3", check=False, word="yes")
    assert (output.code, output.out, output.err) == (3, "yes\n", "no\n")
    with pytest.raises(AssertionError, match=r"(?s)false\nended with 1"):
        machine.run("false")
    assert machine.run("uname -r").out.strip() == machine.kernel.release


def test_jobs_overlap_and_end(machine: Machine) -> None:
    waiting = machine.start("read < /dev/tty0; sleep 100")
    endless = machine.start("while :; do echo line; done", timeout=0.5)
    waiting.signal()
    assert endless.wait(check=False).code == 124
    assert waiting.wait(check=False).code == -9


def test_the_folder_is_shared_and_the_host_is_not_written(machine: Machine) -> None:
    path = machine.folder / "there"
    machine.run(f"echo from the guest > {path}; cp {path} {__file__}")
    assert path.read_text() == "from the guest\n"
    assert "from the guest\n" not in __file__
    path.write_text("from the host\n")
    assert machine.run(f"cat {path}").out == "from the host\n"


def test_both_sides_reach_each_other(machine: Machine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        job = machine.start(f"exec 3<>/dev/tcp/{HOST}/{port}; cat <&3")
        peer, _ = server.accept()
        with peer:
            peer.sendall(b"hello")
    assert job.wait().out == "hello"

    reached: list[bytes] = []
    script = "import socket; s = socket.create_server(('', 5000)); print(s.accept()[0].recv(9))"
    job = machine.start(f'{sys.executable} -c "{script}"')
    machine.run("until grep -q :1388 /proc/net/tcp; do sleep 0.05; done")
    with socket.create_connection(("127.0.0.1", machine.forward(5000)), timeout=20) as peer:
        peer.sendall(b"to guest")
        reached.append(job.wait().out.encode())
    assert reached == [b"b'to guest'\n"]


def test_a_cut_link_comes_back(machine: Machine) -> None:
    machine.set_link(False)
    machine.run("until grep -q 0 /sys/class/net/eth0/carrier; do sleep 0.05; done", timeout=20)
    machine.set_link(True)
    machine.run("until grep -q 1 /sys/class/net/eth0/carrier; do sleep 0.05; done", timeout=20)


def test_qemu_ends_with_whoever_started_it(guest: Guest) -> None:
    """Also when that is killed and can end nothing itself."""
    script = (
        "import sys; sys.path.insert(0, '.')\n"
        "from tests.vm import kernel, machine\n"
        "found = machine.Machine(kernel.Kernel(kernel.cache_folder()))\n"
        "print(found.process_id, found.folder, flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as owner:
        assert owner.stdout is not None
        number, folder = owner.stdout.readline().decode().split()
        assert b"qemu-system" in Path(f"/proc/{number}/cmdline").read_bytes()
        owner.kill()
    shutil.rmtree(folder)
    assert _gone(number), f"QEMU is still there: {number}"


def _gone(number: str) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":  # whoever adopts it has not looked yet
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("digests", [[], ["--hdr-digest", "--data-digest"]])
def test_the_kernel_connects_to_itself(linux: Linux, digests: list[str]) -> None:
    linux.machine.run("head -c 8M /dev/urandom > /dev/shm/disk")
    linux.export(NQN, {1: "/dev/shm/disk"}, port=4420)
    address = Address("127.0.0.1", 4420)
    assert NQN in [record["subnqn"] for record in linux.discover(address)]
    linux.connect(address, NQN, *digests)
    device = linux.device(NQN)
    assert linux.md5(device) == linux.md5("/dev/shm/disk")
    assert "disconnected 1 controller" in linux.disconnect(NQN)
