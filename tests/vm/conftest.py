"""The guest that every test of this folder shares; it is booted when the first one asks for it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vm import kernel
from tests.vm.linux import Linux
from tests.vm.machine import GuestLost, Machine

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PROBE_SECONDS = 20.0


def choose_accelerator(files: kernel.Kernel) -> str:
    """Return kvm where a test boot came up with it, else tcg; remembered until the host reboots.

    /dev/kvm proves nothing: the kernel can hang in its first instructions all the same.
    """
    remembered = files.folder / "accelerator"
    boot = BOOT_ID.read_text().strip()
    if remembered.exists():
        known, _, name = remembered.read_text().partition(" ")
        if known == boot:
            return name
    name = "tcg"
    if Path("/dev/kvm").exists():
        try:
            Machine(files, accelerator="kvm", boot_seconds=PROBE_SECONDS).close()
            name = "kvm"
        except GuestLost:
            pass
    remembered.write_text(f"{boot} {name}")
    return name


class Guest:
    """Boots the machine when it is first needed, and again where a test has lost it."""

    def __init__(self) -> None:
        self._machine: Machine | None = None

    def machine(self) -> Machine:
        """Return a machine that answers."""
        if self._machine is not None and not self._machine.alive():
            self.close()
        if self._machine is None:
            files = kernel.Kernel(kernel.cache_folder())
            self._machine = Machine(files, accelerator=choose_accelerator(files))
        return self._machine

    def close(self) -> None:
        """End the machine."""
        if self._machine is not None:
            self._machine.close()
            self._machine = None


@pytest.fixture(scope="session")
def guest() -> Iterator[Guest]:
    """Give the holder of the machine; skip where the host lacks what a machine needs."""
    problem = kernel.problem()
    if problem is not None:
        pytest.skip(problem)
    holder = Guest()
    yield holder
    holder.close()


@pytest.fixture
def machine(guest: Guest) -> Iterator[Machine]:
    """Give a running guest without NVMe connections, and leave it so."""
    machine = guest.machine()
    yield machine
    try:
        machine.set_link(True)
        Linux(machine).clean()
    except (AssertionError, GuestLost):
        guest.close()  # the next test gets a fresh one
        raise


@pytest.fixture
def linux(machine: Machine) -> Linux:
    """Give the guest's NVMe tools."""
    return Linux(machine)
