"""A folder that behaves like nvmet's configfs (drivers/nvme/target/configfs.c, Linux 6.1)."""

import errno
import os
import shutil
from pathlib import Path

from hyades.target_side.provision.nvmet import Tree

ATTRIBUTES = {
    "subsystems": {"attr_allow_any_host": "0", "attr_serial": "c0ffee", "attr_model": "Linux"},
    "namespaces": {
        "device_path": "(null)",
        "device_uuid": "00000000-0000-0000-0000-000000000000",
        "buffered_io": "0",
        "enable": "0",
    },
    "ports": dict.fromkeys(("addr_adrfam", "addr_trtype", "addr_traddr", "addr_trsvcid"), ""),
    "hosts": {},
}
GROUPS = {"subsystems": ["namespaces", "allowed_hosts"], "ports": ["subsystems", "referrals"]}


class FakeTree(Tree):
    """Imitates what mkdir, write, symlink and rmdir do and refuse, and logs every change.

    After *budget* changes it raises *failure*: a kill, or an error of the kernel.
    """

    def __init__(self, folder, *, loaded=True):
        super().__init__(folder / "config" / "nvmet", folder / "module")
        self.log, self.budget, self.failure = [], None, KeyboardInterrupt()
        self.root.parent.mkdir(parents=True, exist_ok=True)
        self._modules.mkdir(exist_ok=True)
        if loaded and not self.root.exists():
            self.load("nvmet")
            self.load("nvmet-tcp")
            self.log.clear()

    def load(self, name):
        self._change(f"load {name}")
        (self._modules / name.replace("-", "_")).mkdir()
        if name == "nvmet":
            for group in ("subsystems", "ports", "hosts"):
                (self.root / group).mkdir(parents=True)

    def write(self, path, value):
        self._change(f"write {path} {value}")
        owner, name = os.path.split(path)
        if not (self.root / path).exists():
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        if name.startswith("addr_") and self.list(f"{owner}/subsystems"):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), path)
        if name in ("device_path", "device_uuid", "buffered_io"):
            self._refuse(self.read(f"{owner}/enable") == "1", errno.EBUSY)
        if name == "attr_allow_any_host" and value == "1":
            self._refuse(self.list(f"{owner}/allowed_hosts"), errno.EINVAL)
        if name == "enable" and value == "1":
            backing = self.read(f"{owner}/device_path")
            self._refuse(not Path(backing).exists(), errno.ENOENT)
        (self.root / path).write_text(f"{value}\n")

    def make(self, path):
        self._change(f"make {path}")
        kind = path.split("/")[-2]
        (self.root / path).mkdir()
        for name, value in ATTRIBUTES[kind].items():
            (self.root / path / name).write_text(f"{value}\n")
        for group in GROUPS.get(kind, []):
            (self.root / path / group).mkdir()

    def remove(self, path):
        self._change(f"remove {path}")
        target = self.root / path
        for group in GROUPS.get(path.split("/")[-2], []):
            self._refuse(self.list(f"{path}/{group}"), errno.ENOTEMPTY)
        self._refuse(self.read(f"{path}/enable") == "1", errno.EBUSY)
        links = [entry for entry in self.root.rglob("*") if entry.is_symlink()]
        self._refuse(any(link.readlink() == target for link in links), errno.EBUSY)
        shutil.rmtree(target)

    def link(self, path, target):
        self._change(f"link {path}")
        owner = path.rsplit("/", 2)[0]
        if path.startswith("ports/"):
            unset = any(not self.read(f"{owner}/{name}") for name in ATTRIBUTES["ports"])
            self._refuse(unset, errno.EINVAL)
        else:
            self._refuse(self.read(f"{owner}/attr_allow_any_host") == "1", errno.EINVAL)
        self._refuse(not self.exists(target), errno.ENOENT)
        super().link(path, target)

    def unlink(self, path):
        self._change(f"unlink {path}")
        super().unlink(path)

    def picture(self):
        """Return {path: value or target} of all that is there."""
        found = {}
        for entry in self.root.rglob("*"):
            key = str(entry.relative_to(self.root))
            if entry.is_symlink():
                found[key] = entry.readlink()
            else:
                found[key] = None if entry.is_dir() else entry.read_text()
        return found

    def _change(self, text):
        if self.budget is not None:
            if self.budget == 0:
                raise self.failure
            self.budget -= 1
        self.log.append(text)

    def _refuse(self, condition, number):
        if condition:
            raise OSError(number, os.strerror(number))
