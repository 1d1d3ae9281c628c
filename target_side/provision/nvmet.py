"""The kernel's NVMe target, told by folders, values and links in configfs.

Rules (drivers/nvme/target/configfs.c):
1. ``mkdir`` makes an object with its attributes; ``rmdir`` removes it while nothing refers to it.
2. A namespace's attributes are set before ``enable``; a port's before a subsystem is linked to it:
   the link opens the port for hosts, so it comes last.
3. ``allowed_hosts`` counts where ``attr_allow_any_host`` is 0.
4. A port that listens on the address already is shared: nothing of it is changed.

Files are served through the page cache (``buffered_io``): nvmet's direct I/O fails on some file
systems.  Modules stay loaded at the end; connections that are closing may still use them.
"""

import dataclasses
import errno
import os
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from hyades.common.errors import BackendMissing, UsageError
from hyades.target_side.provision.steps import (
    Export,
    Record,
    Step,
    family_of,
    identifier,
    translated,
)

ROOT = Path("/sys/kernel/config/nvmet")
_MODULES = ("nvmet", "nvmet-tcp")
_LAST_PORT = 65535


class Tree:
    """The configfs folder of nvmet; paths are relative to *root*."""

    def __init__(self, root: Path = ROOT, modules: Path = Path("/sys/module")) -> None:
        self.root, self._modules = root, modules

    def exists(self, path: str) -> bool:
        """Return whether an object, attribute or link is there."""
        return os.path.lexists(self.root / path)

    def read(self, path: str) -> str:
        """Return an attribute's value, empty where it is not there."""
        try:
            return (self.root / path).read_text().strip()
        except FileNotFoundError:
            return ""

    def write(self, path: str, value: str) -> None:
        """Set an attribute in one write, which is what configfs wants."""
        fd = os.open(self.root / path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)

    def list(self, path: str) -> list[str]:
        """Return the names in a folder, sorted; none where there is no such folder."""
        try:
            return sorted(entry.name for entry in (self.root / path).iterdir())
        except FileNotFoundError:
            return []

    def make(self, path: str) -> None:
        """Make an object."""
        (self.root / path).mkdir()

    def remove(self, path: str) -> None:
        """Remove an object."""
        (self.root / path).rmdir()

    def link(self, path: str, target: str) -> None:
        """Make a link to the object *target*."""
        (self.root / path).symlink_to(self.root / target)

    def unlink(self, path: str) -> None:
        """Remove a link."""
        (self.root / path).unlink()

    def has_module(self, name: str) -> bool:
        """Return whether a module is loaded."""
        return (self._modules / name.replace("-", "_")).exists()

    def load(self, name: str) -> None:
        """Load a module; BackendMissing where that fails."""
        try:
            done = subprocess.run(
                ["modprobe", name], capture_output=True, text=True, check=False, timeout=60
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise BackendMissing(f"modprobe {name} did not run: {error}") from error
        if done.returncode:
            raise BackendMissing(
                f"modprobe {name} failed: {done.stderr.strip()}. The kernel needs the NVMe target"
                " over TCP (CONFIG_NVME_TARGET_TCP; Debian's linux-image-amd64 has it, the cloud"
                " flavour not), and this needs root. hyades serve --backend embedded needs neither"
            )
        if name == _MODULES[0] and not self.exists("."):
            raise BackendMissing(
                f"{self.root} is not there: mount -t configfs none {self.root.parent}"
            )


@dataclass(frozen=True)
class _TreeStep:
    tree: Tree = field(compare=False, repr=False)
    kind: ClassVar[str]

    @property
    def alters(self) -> Step | None:
        """Nothing, except for values."""
        return None

    def record(self) -> Record:
        """Return the fields, without the tree."""
        fields = (f.name for f in dataclasses.fields(self) if f.name != "tree")
        return {"kind": self.kind, **{name: getattr(self, name) for name in fields}}


@dataclass(frozen=True)
class LoadModule(_TreeStep):
    """A kernel module; it stays loaded."""

    name: str
    kind = "module"

    def describe(self) -> str:
        """Return the command that does the same."""
        return f"modprobe {self.name}"

    def done(self) -> bool:
        """Return whether the module is loaded."""
        return self.tree.has_module(self.name)

    def apply(self) -> None:
        """Load it."""
        self.tree.load(self.name)

    def undo(self) -> None:
        """Nothing: see above."""


@dataclass(frozen=True)
class MakeObject(_TreeStep):
    """A folder in configfs."""

    path: str
    kind = "object"

    def describe(self) -> str:
        """Return the command that does the same."""
        return f"mkdir {self.tree.root / self.path}"

    def done(self) -> bool:
        """Return whether the object is there."""
        return self.tree.exists(self.path)

    def apply(self) -> None:
        """Make it."""
        with translated(self.describe(), _hint):
            self.tree.make(self.path)

    def undo(self) -> None:
        """Remove it."""
        if self.tree.exists(self.path):
            with translated(f"rmdir {self.tree.root / self.path}", _hint):
                self.tree.remove(self.path)


@dataclass(frozen=True)
class SetValue(_TreeStep):
    """A value of the object *owner*; *undo_value* is written before the object goes."""

    owner: str
    attribute: str
    value: str
    undo_value: str = ""
    kind = "value"

    @property
    def alters(self) -> Step | None:
        """The object that has the value."""
        return MakeObject(self.tree, self.owner)

    @property
    def path(self) -> str:
        """The attribute's path."""
        return f"{self.owner}/{self.attribute}"

    def describe(self) -> str:
        """Return the command that does the same."""
        return f"echo {self.value} > {self.tree.root / self.path}"

    def done(self) -> bool:
        """Return whether the object has this value."""
        return self.tree.read(self.path) == self.value

    def apply(self) -> None:
        """Write it."""
        with translated(self.describe(), _hint):
            self.tree.write(self.path, self.value)

    def undo(self) -> None:
        """Write *undo_value*, if there is one."""
        if self.undo_value and self.tree.exists(self.path):
            with translated(f"echo {self.undo_value} > {self.tree.root / self.path}", _hint):
                self.tree.write(self.path, self.undo_value)


@dataclass(frozen=True)
class MakeLink(_TreeStep):
    """A link from one object to another."""

    path: str
    target: str
    kind = "link"

    def describe(self) -> str:
        """Return the command that does the same."""
        return f"ln -s {self.tree.root / self.target} {self.tree.root / self.path}"

    def done(self) -> bool:
        """Return whether the link is there."""
        return self.tree.exists(self.path)

    def apply(self) -> None:
        """Make it."""
        with translated(self.describe(), _hint):
            self.tree.link(self.path, self.target)

    def undo(self) -> None:
        """Remove it."""
        if self.tree.exists(self.path):
            with translated(f"rm {self.tree.root / self.path}", _hint):
                self.tree.unlink(self.path)


_KINDS: dict[str, Any] = {step.kind: step for step in (LoadModule, MakeObject, SetValue, MakeLink)}


class Nvmet:
    """The backend ``kernel``."""

    name = "kernel"

    def __init__(self, tree: Tree | None = None) -> None:
        self.tree = tree or Tree()

    def restore(self, record: Record) -> Step:
        """Return the step that *record* is of."""
        fields = dict(record)
        step: Step = _KINDS[fields.pop("kind")](self.tree, **fields)
        return step

    def plan(self, export: Export) -> list[Step]:
        """Return the steps of *export*; ports that are there are found by their address."""
        tree, subsystem = self.tree, f"subsystems/{export.nqn}"
        steps: list[Step] = [LoadModule(tree, name) for name in _MODULES]
        steps.append(MakeObject(tree, subsystem))
        # Hexadecimal without a zero in front: kernels before 5.17 hold it as a number.
        serial = f"1{identifier(export.nqn, 0).hex()[:15]}"
        any_host = "0" if export.allow_hosts else "1"
        steps += [
            SetValue(tree, subsystem, "attr_serial", serial),
            SetValue(tree, subsystem, "attr_allow_any_host", any_host),
        ]
        for nsid, backing in enumerate(export.namespaces, 1):
            steps += self._namespace(export.nqn, nsid, backing)
        for host in export.allow_hosts:
            steps.append(MakeObject(tree, f"hosts/{host}"))
            steps.append(MakeLink(tree, f"{subsystem}/allowed_hosts/{host}", f"hosts/{host}"))
        free = (n for n in range(1, _LAST_PORT + 1) if not tree.exists(f"ports/{n}"))
        for host, number in export.listen:
            port = self._port(host, number, free)
            values = {
                "addr_adrfam": family_of(host),
                "addr_trtype": "tcp",
                "addr_traddr": host,
                "addr_trsvcid": str(number),
            }
            steps.append(MakeObject(tree, port))
            steps += [SetValue(tree, port, name, value) for name, value in values.items()]
            steps.append(MakeLink(tree, f"{port}/subsystems/{export.nqn}", subsystem))
        return steps

    def _namespace(self, nqn: str, nsid: int, backing: Path) -> Iterator[Step]:
        path = f"subsystems/{nqn}/namespaces/{nsid}"
        buffered = "0" if backing.is_block_device() else "1"
        yield MakeObject(self.tree, path)
        yield SetValue(self.tree, path, "device_path", str(backing.resolve()))
        yield SetValue(self.tree, path, "buffered_io", buffered)
        name = uuid.UUID(bytes=identifier(nqn, nsid), version=4)
        yield SetValue(self.tree, path, "device_uuid", str(name))
        yield SetValue(self.tree, path, "enable", "1", undo_value="0")

    def _port(self, host: str, number: int, free: Iterator[int]) -> str:
        wanted = ("tcp", host, str(number))
        for name in self.tree.list("ports"):
            path = f"ports/{name}"
            found = (
                self.tree.read(f"{path}/addr_{key}") for key in ("trtype", "traddr", "trsvcid")
            )
            if tuple(found) == wanted:
                return path
        number_of_port = next(free, None)
        if number_of_port is None:
            raise UsageError(f"{self.tree.root}/ports has no free number")
        return f"ports/{number_of_port}"


def _hint(error: OSError) -> str:
    return {
        errno.EACCES: "this needs root, and a namespace or port that is not in use",
        errno.EPERM: "this needs root",
        errno.EADDRINUSE: "another program listens there: choose another --listen",
        errno.EADDRNOTAVAIL: "the address is not of this machine: choose another --listen",
        errno.EBUSY: "something still uses it",
        errno.ENOTEMPTY: "something still uses it",
        errno.ENOENT: "the file is not there, or the module is not loaded",
    }.get(error.errno or 0, "dmesg says why")
