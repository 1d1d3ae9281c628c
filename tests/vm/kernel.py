"""Debian's generic kernel made ready to boot in QEMU, from the files that
deploy/scripts/fetch-vm-kernel.sh unpacked.

Two files are made once and kept beside them.  `vmlinux`: the uncompressed kernel, booted through
its PVH entry, since unpacking it in the guest is slow without KVM.  `initrd`: a cpio archive (newc)
of busybox, init.sh and the few modules that reach the host's root; it is made again when one of its
sources is newer.
"""

import lzma
import os
import shutil
import struct
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INIT = Path(__file__).with_name("init.sh")
FETCH = "deploy/scripts/install-debian.sh test"
MODULES = ("virtio_pci", "virtio_console", "9pnet_virtio", "9p", "overlay", "virtio_net")
_FOLDERS = ("bin", "dev", "proc", "sys", "modules", "host", "writes", "new")
# Linux' Documentation/arch/x86/boot.rst: setup_sects; payload_offset and payload_length.
_SETUP_SECTS, _PAYLOAD = 0x1F1, struct.Struct("<II")
_PAYLOAD_AT = 0x248


class Kernel:
    """An unpacked kernel: its release, modules and bootable files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.release = (folder / "release").read_text().strip()
        self.modules = folder / "root/lib/modules" / self.release
        self.image = folder / "root/boot" / f"vmlinuz-{self.release}"

    def vmlinux(self) -> Path:
        """Return the uncompressed kernel."""
        path = self.folder / f"vmlinux-{self.release}"
        if not path.exists():
            _replace(path, unpack_kernel(self.image.read_bytes()))
        return path

    def initrd(self) -> Path:
        """Return the first root file system."""
        path = self.folder / f"initrd-{self.release}.cpio"
        sources = [INIT, Path(__file__), self.modules / "modules.dep"]
        if not path.exists() or any(s.stat().st_mtime > path.stat().st_mtime for s in sources):
            _replace(path, self._archive())
        return path

    def _archive(self) -> bytes:
        entries = [_entry(name, 0o40755) for name in _FOLDERS]
        entries.append(_entry("bin/busybox", 0o100755, _busybox().read_bytes()))
        entries.append(_entry("init", 0o100755, INIT.read_bytes()))
        for i, module in enumerate(self._needed()):
            name = f"modules/{i:03d}-{module.name}"
            entries.append(_entry(name, 0o100644, module.read_bytes()))
        return b"".join([*entries, _entry("TRAILER!!!", 0)])

    def _needed(self) -> list[Path]:
        # modules.dep lists all that a module needs, the ones to load first at the end.
        depends: dict[str, list[str]] = {}
        for line in (self.modules / "modules.dep").read_text().splitlines():
            path, _, others = line.partition(":")
            depends[_module_name(path)] = [path, *others.split()]
        builtin = {_module_name(p) for p in (self.modules / "modules.builtin").read_text().split()}
        order: dict[str, None] = {}
        for name in MODULES:
            if name not in builtin:
                order |= dict.fromkeys(reversed(depends[name]))
        return [self.modules / path for path in order]


def cache_folder() -> Path:
    """Return where fetch-vm-kernel.sh unpacks to."""
    return Path(os.environ.get("HYADES_VM_CACHE", ROOT / ".vm"))


def problem() -> str | None:
    """Return what a virtual machine lacks here and the command that fetches it, or None."""
    for program, package in [
        ("qemu-system-x86_64", "qemu-system-x86"), ("nvme", "nvme-cli"), ("fio", "fio"),
        ("busybox", "busybox-static"), ("modprobe", "kmod"), ("setpriv", "util-linux"),
    ]:  # fmt: skip
        if shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            return f"{program} ({package}) is not installed: run {FETCH} as root"
    if b"/lib64/ld-linux" in _busybox().read_bytes():
        return f"busybox is not the static one: run {FETCH} as root"
    if not (cache_folder() / "release").exists():
        return f"no kernel in {cache_folder()}: run deploy/scripts/fetch-vm-kernel.sh"
    return None


def unpack_kernel(image: bytes) -> bytes:
    """Return the ELF file inside a bzImage that was packed with xz."""
    offset, length = _PAYLOAD.unpack_from(image, _PAYLOAD_AT)
    start = ((image[_SETUP_SECTS] or 4) + 1) * 512 + offset
    elf = lzma.LZMADecompressor().decompress(image[start : start + length])
    if elf[:4] != b"\x7fELF":
        raise ValueError(f"the kernel image holds {elf[:4]!r}, not an ELF file")
    return elf


def _busybox() -> Path:
    return Path(str(shutil.which("busybox")))


def _module_name(path: str) -> str:
    return path.rpartition("/")[2].removesuffix(".ko").replace("-", "_")


def _entry(name: str, mode: int, data: bytes = b"") -> bytes:
    # newc: ino mode uid gid nlink mtime size devmajor devminor rdevmajor rdevminor namesize check.
    path = name.encode() + b"\0"
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(path), 0)
    head = b"070701" + b"".join(b"%08X" % f for f in fields) + path
    return _pad(head) + _pad(data)


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _replace(path: Path, data: bytes) -> None:
    new = path.with_suffix(f".{os.getpid()}")
    new.write_bytes(data)
    new.replace(path)
