"""SPDK for tests: a stand-in that is compiled here, and what a real one would need."""

import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from hyades.common.layout import BLOCK
from hyades.proxy.registry import open_transport
from hyades.proxy.transports import spdk_library

SOURCE = Path(__file__).with_name("spdk_standin.c")
NQN = "nqn.2016-06.io.spdk:standin"
ADDRESS = f"127.0.0.1:4420/{NQN}"
# release -> (soname of libspdk_nvme, sizes of the three options structures); "later" is made up:
# larger than any that exists
RELEASES = {
    "23.09": (11, 112, 816, 72),
    "24.01": (12, 112, 824, 72),
    "26.05": (18, 128, 856, 80),
    "later": (99, 128 + 512, 856 + 512, 80 + 512),
}
COMPILER = shutil.which("cc")

needs_compiler = pytest.mark.skipif(
    COMPILER is None, reason="no C compiler (cc) to build the stand-in of SPDK: install gcc"
)


@functools.cache
def build(release: str = "26.05") -> Path:
    """Return a folder with the stand-in's libraries of *release*, built once a test process."""
    if COMPILER is None:
        pytest.skip("no C compiler (cc) to build the stand-in of SPDK: install gcc")
    soname, *sizes = RELEASES[release]
    folder = Path(tempfile.mkdtemp(prefix="hyades-standin-"))
    _folders.append(folder)
    names = zip(("ENV_SIZE", "CTRLR_SIZE", "QPAIR_SIZE"), sizes, strict=True)
    flags = [f"-D{name}={size}" for name, size in names]
    for part, library in (("PART_ENV", "env_dpdk"), ("PART_NVME", "nvme")):
        target = folder / f"libspdk_{library}.so.{soname}.0"
        subprocess.run(
            [COMPILER, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-D{part}", *flags,
             "-o", str(target), str(SOURCE)],
            check=True,
        )  # fmt: skip
        (folder / f"libspdk_{library}.so").symlink_to(target.name)
    return folder


_folders: list[Path] = []


def remove_builds() -> None:
    """Delete what `build` made."""
    build.cache_clear()
    while _folders:
        shutil.rmtree(_folders.pop())


class StandIn:
    """The stand-in's environment: where its devices are and what goes wrong."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self._patch, self.folder = monkeypatch, folder
        self.log = folder / "standin.log"
        monkeypatch.setenv(spdk_library.VARIABLE, str(build()))
        monkeypatch.setenv("STANDIN_FOLDER", str(folder))
        monkeypatch.setenv("STANDIN_LOG", str(self.log))
        monkeypatch.delenv("STANDIN", raising=False)

    def release(self, name: str) -> None:
        """Use the libraries of another release."""
        self._patch.setenv(spdk_library.VARIABLE, str(build(name)))

    def faults(self, **faults: object) -> None:
        """Set what goes wrong; see spdk_standin.c.  It counts for what is opened from now on."""
        text = ",".join(f"{name}={value}" for name, value in faults.items())
        self._patch.setenv("STANDIN", text)

    def device(self, nblocks: int, name: str = NQN) -> Path:
        """Make the file behind subsystem *name*."""
        path = self.folder / name
        path.write_bytes(bytes(nblocks * BLOCK))
        return path

    def open(self, options: str = "ns=1", *, writable: bool = True):
        """Open spdk+tcp:// to the stand-in."""
        return open_transport(f"spdk+tcp://{ADDRESS}?{options}", writable=writable)

    def lines(self, first_word: str) -> list[str]:
        """Return what the stand-in told, of one kind."""
        text = self.log.read_text() if self.log.exists() else ""
        return [line for line in text.splitlines() if line.split()[0] == first_word]


REAL_URL = os.environ.get("HYADES_SPDK_URL", "")
needs_real_spdk = pytest.mark.skipif(
    not (os.environ.get(spdk_library.VARIABLE) and REAL_URL),
    reason=f"{spdk_library.VARIABLE} and HYADES_SPDK_URL (a namespace that may be overwritten)"
    " name no real SPDK",
)
