"""Linux in the guest as NVMe host (nvme-cli) and as NVMe target (nvmet through configfs)."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.vm.machine import Machine, Output

NVMET = "/sys/kernel/config/nvmet"
# Waits for the block device of namespace $2 of subsystem $1; prints its path.  The kernel scans for
# namespaces after connect has returned, and the path of one controller (nvme0c0n1) is no device.
_FIND = """
cd /sys/block
for try in $(seq 300); do
  for block in nvme*; do
    [[ $block == *c*n* ]] && continue
    [[ $(<$block/device/subsysnqn) == "$1" && $(<$block/nsid) == "$2" ]] 2>/dev/null || continue
    [[ -b /dev/$block ]] && { echo /dev/$block; exit; }
  done
  sleep 0.1
done
echo "no namespace $2 of $1"; ls /sys/block; dmesg | tail -20; exit 1
"""
_CLEAN = f"""
nvme disconnect-all
cd {NVMET} || exit
for link in ports/*/subsystems/* subsystems/*/allowed_hosts/*; do [[ -L $link ]] && rm $link; done
for folder in subsystems/*/namespaces/* ports/* subsystems/* hosts/*; do
  [[ -d $folder ]] && rmdir $folder
done
rm -rf /dev/shm/*
exit 0
"""


@dataclass(frozen=True, slots=True)
class Address:
    """Where the guest finds a target."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"--transport=tcp --traddr={self.host} --trsvcid={self.port}"


class Linux:
    """Commands of the guest around NVMe."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def discover(self, address: Address, *options: str) -> list[dict[str, Any]]:
        """Return the records of the discovery log."""
        flags = shlex.join(options)
        output = self.machine.run(f"nvme discover {address} --output-format=json {flags}")
        records: list[dict[str, Any]] = output.json()["records"]
        return records

    def connect(self, address: Address, nqn: str, *options: str, check: bool = True) -> Output:
        """Run `nvme connect`, with one I/O queue unless *options* say otherwise."""
        flags = shlex.join(["--nr-io-queues=1", *options])
        return self.machine.run(f"nvme connect {address} --nqn={nqn} {flags}", check=check)

    def device(self, nqn: str, namespace: int = 1) -> str:
        """Return the path of a connected namespace, once it is there."""
        output = self.machine.run(f"set -- {nqn} {namespace}\n{_FIND}")
        return output.out.strip()

    def controller(self, nqn: str) -> str:
        """Return the name of the first controller of a subsystem, such as nvme1."""
        found = self.machine.run(f"grep -lx {nqn} /sys/class/nvme/*/subsysnqn").out.split()
        return Path(found[0]).parent.name

    def disconnect(self, nqn: str) -> str:
        """Run `nvme disconnect` and return its text."""
        return self.machine.run(f"nvme disconnect --nqn={nqn}").out

    def json(self, command: str) -> Any:
        """Run an nvme command and return its output parsed."""
        return self.machine.run(f"nvme {command} --output-format=json").json()

    def md5(self, path: str) -> str:
        """Return the MD5 of a whole device or file, read past the page cache where it can be."""
        direct = "iflag=direct" if path.startswith("/dev/nvme") else ""
        script = f"set -o pipefail; dd if={path} bs=1M {direct} status=none | md5sum"
        return self.machine.run(script, timeout=120).out.split()[0]

    def fio(self, path: str, *options: str) -> str:
        """Return the command line of one fio job against a device that ends at the first error."""
        flags = shlex.join(["--direct=1", "--ioengine=libaio", "--minimal", *options])
        return f"fio --name=job --filename={path} {flags}"

    def export(self, nqn: str, paths: dict[int, str], *, port: int) -> None:
        """Serve files or devices of the guest as the namespaces of a subsystem of nvmet."""
        lines = ["set -e", f"cd {NVMET}", f"mkdir subsystems/{nqn}"]
        lines += [f"echo 1 > subsystems/{nqn}/attr_allow_any_host"]
        for number, path in paths.items():
            folder = f"subsystems/{nqn}/namespaces/{number}"
            lines += [f"mkdir {folder}", f"echo -n {path} > {folder}/device_path"]
            if Path(path).parts[:3] == ("/", "dev", "shm"):
                lines += [f"echo 1 > {folder}/buffered_io"]  # tmpfs has no direct I/O
            lines += [f"echo 1 > {folder}/enable"]
        folder = f"ports/{port}"
        lines += [f"mkdir {folder}", f"cd {folder}", "echo ipv4 > addr_adrfam"]
        lines += ["echo tcp > addr_trtype", "echo 0.0.0.0 > addr_traddr"]
        lines += [f"echo {port} > addr_trsvcid", f"ln -s {NVMET}/subsystems/{nqn} subsystems/"]
        self.machine.run("\n".join(lines))

    def clean(self) -> None:
        """Disconnect from every target and remove what `export` made."""
        self.machine.run(_CLEAN, timeout=120)
