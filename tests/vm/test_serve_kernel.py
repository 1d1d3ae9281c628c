"""`hyades serve --backend kernel` in the guest: configfs, nvmet, and Linux as the host."""

import sys

import pytest
from tests.vm.linux import Address, Linux
from tests.vm.machine import Job, Machine

pytestmark = pytest.mark.slow
NQN = "nqn.2024-01.org.example:provisioned"
ROOT = "/sys/kernel/config/nvmet"
HOST = "nqn.2024-01.org.example:host"
FILES = ("/dev/shm/first", "/dev/shm/second")
PICTURE = f"cd {ROOT} 2>/dev/null && find . -mindepth 2 | grep -v /ana_groups | sort || true"


class Provisioned:
    """The command in the guest."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        for number, path in enumerate(FILES):
            machine.run(f"head -c {(8 + number) << 20} /dev/urandom > {path}")

    def command(self, *options: str) -> str:
        """Return the shell's text of the command."""
        names = " ".join(f"-n {path}" for path in FILES)
        serve = f"{sys.executable} -m hyades.deploy.cli serve --backend kernel {names} --nqn {NQN}"
        return " ".join([serve, *options])

    def start(self, *options: str) -> Job:
        """Start it and wait until hosts may connect."""
        ready = "/dev/shm/ready"
        self.machine.run(f"rm -f {ready}")
        script = self.command(*options, f"--ready-file {ready}")
        job = self.machine.start(f"echo $$ > /dev/shm/pid; exec {script}", timeout=400)
        wait = f"until [ -e {ready} ] || ! kill -0 $(cat /dev/shm/pid); do sleep 0.1; done"
        self.machine.run(wait, timeout=200)
        return job

    def stop(self, job: Job, signal: str = "TERM") -> None:
        """End it by a signal."""
        self.machine.run(f"kill -{signal} $(cat /dev/shm/pid)")
        output = job.wait(check=False)
        assert output.code == (-9 if signal == "KILL" else 0), output

    def picture(self) -> str:
        """Return what is in nvmet's configfs."""
        return self.machine.run(PICTURE).out


def test_export_connect_verify_and_undo(machine: Machine) -> None:
    served, linux = Provisioned(machine), Linux(machine)
    before = served.picture()
    options = ("-l 127.0.0.1:4420", f"--allow-host {HOST}")
    steps = machine.run(served.command("--dry-run", *options), timeout=200).out
    assert f"mkdir {ROOT}/subsystems/{NQN}/namespaces/2" in steps
    assert served.picture() == before

    job = served.start(*options)
    address = Address("127.0.0.1", 4420)
    stranger = linux.connect(address, NQN, f"--hostnqn={HOST}-not", check=False)
    assert stranger.code != 0
    linux.connect(address, NQN, f"--hostnqn={HOST}")
    for number, path in enumerate(FILES, 1):
        assert linux.md5(linux.device(NQN, number)) == linux.md5(path)
    linux.disconnect(NQN)

    served.stop(job, "KILL")
    left = served.picture()
    assert f"./subsystems/{NQN}/namespaces/2\n" in left  # nobody cleaned up
    again = served.start(*options)
    assert served.picture() == left  # it went on with what was there
    linux.connect(address, NQN, f"--hostnqn={HOST}")
    linux.disconnect(NQN)
    served.stop(again)
    assert served.picture() == before
