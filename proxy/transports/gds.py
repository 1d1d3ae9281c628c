"""GPU direct storage: ``gds:///data/g.vol`` through kvikio and cuFile.

A file or block device whose pages go straight between a local SSD and an arena in GPU memory, an
array with ``__cuda_array_interface__`` (cupy, torch).  An arena in host memory works as well, but
there kvikio reads with preadv on its threads: `describe` says so.  Without a GPU, cuFile and the
nvidia-fs driver, or on a file system without O_DIRECT, opening is refused; ``compat=1`` asks for
kvikio's POSIX mode on purpose, through the page cache.

kvikio has one pool of threads and one set of defaults in a process; a transport makes the pool
larger where ``threads`` asks for more, never smaller.
"""

import ctypes
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from hyades.common.errors import BackendMissing, UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import MIB
from hyades.proxy.transports.engines import Engine, Geometry
from hyades.proxy.transports.file import EngineName, FileTransport
from hyades.proxy.transports.gds_engine import KvikioEngine
from hyades.proxy.urls import Url

_INSTALL = "pip install -c constraints.txt -e '.[gpu]'"
_COMPAT = "or add ?compat=1 for kvikio's POSIX mode"


class GdsTransport(FileTransport):
    """A FileTransport whose pages kvikio moves."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        compat: bool = False,
        threads: int = 4,
        create: bool = False,
        writable: bool = True,
        depth: int = 64,
        max_transfer: int = 4 * MIB,
    ) -> None:
        """Open *path*; *compat* allows kvikio's POSIX mode."""
        self._kvikio = _load()
        self._compat = compat
        self._threads = threads
        self._pinned: Any = None  # the arena, where it is registered with cuFile
        super().__init__(
            path, create=create, writable=writable, depth=depth, max_transfer=max_transfer
        )

    def register(self, arena: Any) -> None:
        """Take the uint8 *arena* that request offsets index, in GPU or host memory."""
        if not hasattr(arena, "__cuda_array_interface__"):
            super().register(arena)
            self._notes.append("arena in host memory: preadv on kvikio's threads")
            return
        self._refuse_closed()
        _check_device_arena(arena.__cuda_array_interface__, again=self._arena is not None)
        if not self._compat:
            # Shorter requests would go through host memory, and in submit.
            self._kvikio.defaults.set("gds_threshold", 0)
            self._kvikio.memory_register(arena)
            self._pinned = arena
        self._arena = arena
        self._engine.register(arena)
        self._notes.append("arena in GPU memory")

    def close(self) -> None:
        """Let transfers that run finish, release the arena, close the file."""
        super().close()
        if self._pinned is not None:
            self._kvikio.memory_deregister(self._pinned)
            self._pinned = None

    def describe(self) -> str:
        """Return one line for people: cuFile or not, where the arena is, the last error."""
        notes = "".join(f"; {note}" for note in self._notes)
        assert isinstance(self._engine, KvikioEngine)
        error = self._engine.last_error
        return f"{self.path}: {self._engine.describe()}{notes}" + (
            f"; last error: {error}" if error else ""
        )

    def _use_page_cache(self, why: str) -> None:
        if not self._compat:
            raise BackendMissing(f"{self.path}: {why}: use ext4 or XFS on a local SSD, {_COMPAT}")
        super()._use_page_cache(why)

    def _start(self, engine: EngineName, geometry: Geometry) -> Engine:  # noqa: ARG002
        defaults, modes = self._kvikio.defaults, self._kvikio.CompatMode
        if defaults.get("num_threads") < self._threads:
            defaults.set("num_threads", self._threads)
        mode = modes.ON if self._compat else modes.OFF

        def open_file() -> Any:
            with defaults.set("compat_mode", mode):
                return self._kvikio.CuFile(self.path, "r+" if geometry.writable else "r")

        how = "POSIX mode (compat=1), page cache" if self._compat else "cuFile"
        try:
            return KvikioEngine(geometry, open_file, f"kvikio {self._kvikio.__version__}, {how}")
        except (RuntimeError, OSError) as error:
            raise BackendMissing(
                f"{self.path}: cuFile refuses it ({error}): use ext4 or XFS on a local SSD,"
                f" {_COMPAT}"
            ) from error


def _check_device_arena(interface: dict[str, Any], *, again: bool) -> None:
    if again:
        raise UsageError("this transport has an arena already: open a second transport")
    address, read_only = interface["data"]
    strides = interface.get("strides")
    if (
        interface["typestr"] not in ("|u1", "<u1")
        or len(interface["shape"]) != 1
        or strides not in (None, (1,))
        or read_only
    ):
        raise UsageError("an arena is a contiguous one-dimensional uint8 array that can be written")
    if address % BLOCK:
        raise UsageError(f"the arena starts at an address that is no multiple of {BLOCK}")


def open_url(url: Url, *, create: bool, writable: bool) -> GdsTransport:
    """Open ``gds:///path?compat=&threads=&depth=&max_transfer=``."""
    compat, threads = url.flag("compat", False), url.integer("threads", 4, least=1)
    depth, max_transfer = url.integer("depth", 64, least=1), url.size("max_transfer", 4 * MIB)
    url.refuse_unused()
    if not url.path:
        raise UsageError(f"{url} names no file")
    return GdsTransport(
        url.path,
        compat=compat,
        threads=threads,
        create=create,
        writable=writable,
        depth=depth,
        max_transfer=max_transfer,
    )


def probe() -> str | None:
    """Return what GPU direct storage lacks here and the fix, or None."""
    problem = probe_compat()
    if problem is not None:
        return problem
    if not _has_gpu(Path("/proc/driver/nvidia/gpus")):
        return f"no NVIDIA GPU: use a machine with one, {_COMPAT}"
    if not _load().cufile_driver.get("is_gds_available"):
        return (
            "cuFile finds no nvidia-fs driver: apt-get install nvidia-gds and"
            f" modprobe nvidia-fs, {_COMPAT}"
        )
    return None


def probe_url(url: Url) -> str | None:
    """Return what *url* lacks here: ``compat=1`` needs no more than kvikio and libcuda."""
    return probe_compat() if Url(str(url)).flag("compat", False) else probe()


def probe_compat() -> str | None:
    """Return what kvikio's POSIX mode lacks here and the fix, or None."""
    try:
        _load()
    except BackendMissing as error:
        return str(error)
    if not _has_library("libcuda.so.1"):  # it is asked whose memory each buffer is, in any mode
        return "kvikio needs libcuda.so.1: install the NVIDIA driver"
    return None


def detail() -> str:
    """Return the version of kvikio and cuFile."""
    kvikio = _load()
    version = ".".join(str(part) for part in kvikio.cufile_driver.libcufile_version())
    return f"kvikio {kvikio.__version__}, cuFile {version}"


def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


def _has_gpu(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _load() -> Any:
    try:
        for name in ("kvikio.defaults", "kvikio.cufile_driver"):
            import_module(name)
        return import_module("kvikio")
    except ModuleNotFoundError as error:
        raise BackendMissing(f"{error.name} is not installed: {_INSTALL}") from error
    except (ImportError, OSError, RuntimeError) as error:  # libkvikio or libcufile does not load
        text = str(error).strip().splitlines()[0]
        raise BackendMissing(f"kvikio does not load ({text}): {_INSTALL}") from error
