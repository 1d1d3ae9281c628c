"""Finding, loading and binding SPDK's shared libraries.

Rules:
1. The version is the one that libspdk_nvme.so's file name ends in (its soname), because the
   libraries export no function that tells it.  The soname's major number goes up with each
   release; below that of 24.01 the structures differ.
2. Load order, everything RTLD_GLOBAL: what no SPDK library names as needed comes first (libcrypto,
   libssl, DPDK), then env_dpdk before the rest, because it and libspdk_util need each other and
   only ld.so can bind a circle; sock_posix before a connect, because its constructor registers the
   sockets.  ld.so reads LD_LIBRARY_PATH when a process starts, so the process that loads is
   started with `search_path()` in it.
3. Finding opens no library: it looks at file names only, and is quick.
"""

import ctypes as c
import glob
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyades.common.errors import BackendMissing

VARIABLE = "HYADES_SPDK_LIB"
DPDK_VARIABLE = "HYADES_DPDK_LIB"
FLOOR = "24.01"
# major number of libspdk_nvme's soname -> release
RELEASES = {
    10: "23.05", 11: "23.09", 12: "24.01", 13: "24.05", 14: "24.09", 15: "25.01 or 25.05",
    16: "25.09", 17: "26.01", 18: "26.05",
}  # fmt: skip
_LEAST = min(major for major, release in RELEASES.items() if release >= FLOOR)
_NEWEST = max(RELEASES)
_NVME = "libspdk_nvme.so"
_SONAME = re.compile(r"libspdk_nvme\.so\.(\d+)(?:\.(\d+))?$")
_SSL = (("libcrypto.so.3", "libcrypto.so.1.1"), ("libssl.so.3", "libssl.so.1.1"))
_DPDK = (
    "kvargs", "telemetry", "log", "argparse", "eal", "ring", "mempool", "mempool_ring", "pci",
    "bus_pci",
)  # fmt: skip
_SPDK = (
    "env_dpdk", "log", "util", "trace", "dma", "json", "jsonrpc", "rpc", "thread", "keyring",
    "sock", "sock_posix", "vfio_user", "rdma_utils", "rdma_provider", "nvme",
)  # fmt: skip

_P, _I, _U32, _U64, _SIZE = c.c_void_p, c.c_int, c.c_uint32, c.c_uint64, c.c_size_t
# name -> (result, arguments).  What the pump calls is bound by name in spdk_pump.py; it is listed
# here too, so that a library without it is refused in words.
_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "spdk_env_opts_init": (None, (_P,)),
    "spdk_env_init": (_I, (_P,)),
    "spdk_mem_register": (_I, (_P, _SIZE)),
    "spdk_mem_unregister": (_I, (_P, _SIZE)),
    "spdk_nvme_transport_id_parse": (_I, (_P, c.c_char_p)),
    "spdk_nvme_transport_available_by_name": (c.c_bool, (c.c_char_p,)),
    "spdk_nvme_ctrlr_get_default_ctrlr_opts": (None, (_P, _SIZE)),
    "spdk_nvme_connect": (_P, (_P, _P, _SIZE)),
    "spdk_nvme_detach": (_I, (_P,)),
    "spdk_nvme_ctrlr_fail": (None, (_P,)),
    "spdk_nvme_ctrlr_is_failed": (c.c_bool, (_P,)),
    "spdk_nvme_ctrlr_get_data": (_P, (_P,)),
    "spdk_nvme_ctrlr_process_admin_completions": (_I, (_P,)),
    "spdk_nvme_ctrlr_get_first_active_ns": (_U32, (_P,)),
    "spdk_nvme_ctrlr_get_next_active_ns": (_U32, (_P, _U32)),
    "spdk_nvme_ctrlr_get_ns": (_P, (_P, _U32)),
    "spdk_nvme_ctrlr_get_default_io_qpair_opts": (None, (_P, _P, _SIZE)),
    "spdk_nvme_ctrlr_alloc_io_qpair": (_P, (_P, _P, _SIZE)),
    "spdk_nvme_ctrlr_free_io_qpair": (_I, (_P,)),
    "spdk_nvme_ctrlr_reconnect_io_qpair": (_I, (_P,)),
    "spdk_nvme_ns_get_sector_size": (_U32, (_P,)),
    "spdk_nvme_ns_get_num_sectors": (_U64, (_P,)),
    "spdk_nvme_ns_get_max_io_xfer_size": (_U32, (_P,)),
    "spdk_nvme_ns_get_md_size": (_U32, (_P,)),
    "spdk_nvme_ns_get_flags": (_U32, (_P,)),
    "spdk_nvme_ns_get_uuid": (_P, (_P,)),
    "spdk_nvme_ns_get_nguid": (_P, (_P,)),
    "spdk_nvme_ns_cmd_read": (_I, (_P, _P, _P, _U64, _U32, _P, _P, _U32)),
    "spdk_nvme_ns_cmd_write": (_I, (_P, _P, _P, _U64, _U32, _P, _P, _U32)),
    "spdk_nvme_ns_cmd_flush": (_I, (_P, _P, _P, _P)),
    "spdk_nvme_qpair_process_completions": (c.c_int32, (_P, _U32)),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Where SPDK's libraries are, and which release they are."""

    folder: Path
    release: str  # 24.01, or what is known of a newer one
    dpdk: Path | None  # where librte_eal.so is, if it is not part of SPDK's own libraries

    def search_path(self) -> list[str]:
        """Return the folders that ld.so must look in."""
        return [str(folder) for folder in (self.folder, self.dpdk) if folder is not None]


def find(environment: Mapping[str, str] | None = None) -> Found | str:
    """Return SPDK's libraries, or why they cannot be used and what to do."""
    variables = os.environ if environment is None else environment
    chosen = variables.get(VARIABLE, "")
    folders = [Path(chosen)] if chosen else _folders(variables)
    for folder in folders:
        names = _names(folder)
        if names:
            release = _release(folder, names)
            if isinstance(release, tuple):
                return release[0]
            return Found(folder, release, _find_dpdk(folder, variables))
    if chosen:
        searched = f"{VARIABLE}={chosen} holds no {_NVME}"
    else:
        places = ", ".join(str(folder) for folder in folders)
        searched = f"no {_NVME} in {places}, and {VARIABLE} is not set"
    return (
        f"{searched}: build SPDK {FLOOR} or newer with --with-shared and set {VARIABLE} to the"
        " folder of its .so files (build/lib)"
    )


def _names(folder: Path) -> list[str]:
    try:
        return [name for name in os.listdir(folder) if name.startswith(_NVME)]  # noqa: PTH208
    except OSError:
        return []


def _release(folder: Path, names: list[str]) -> str | tuple[str]:
    """Return the release, or in a tuple why it cannot be used."""
    resolved = [(folder / name).resolve().name for name in names]
    found = [match for name in resolved if (match := _SONAME.search(name))]
    if not found:
        return (
            f"{folder}/{_NVME} is no link to a file with a version in its name"
            f" ({_NVME}.N.N), so its release is unknown: point {VARIABLE} at the folder that"
            " SPDK's build or make install filled",
        )
    majors = sorted({int(match[1]) for match in found})
    if len(majors) > 1:
        several = ", ".join(f"{_NVME}.{major}" for major in majors)
        return (f"{folder} holds {several}: keep the libraries of one release only",)
    major = majors[0]
    if major < _LEAST:
        return (
            f"SPDK in {folder} is {RELEASES.get(major, 'older than 23.05')}"
            f" ({_NVME}.{major}), but {FLOOR} or newer is needed: build a newer one and set"
            f" {VARIABLE} to it",
        )
    return RELEASES.get(major, f"newer than {RELEASES[_NEWEST]} ({_NVME}.{major})")


def _folders(variables: Mapping[str, str]) -> list[Path]:
    """Return the folders that ld.so would look in, and where SPDK installs itself."""
    listed = [entry for entry in variables.get("LD_LIBRARY_PATH", "").split(":") if entry]
    configured = []
    for path in ("/etc/ld.so.conf", *sorted(glob.glob("/etc/ld.so.conf.d/*.conf"))):  # noqa: PTH207
        try:
            lines = Path(path).read_text().splitlines()
        except OSError:
            continue
        configured += [line.strip() for line in lines if line.startswith("/")]
    triple = f"{platform.machine()}-linux-gnu"
    usual = ["/usr/local/lib", "/usr/local/lib64", f"/usr/lib/{triple}", "/usr/lib64", "/usr/lib"]
    return [Path(text) for text in dict.fromkeys([*listed, *usual, *configured])]


def _find_dpdk(folder: Path, variables: Mapping[str, str]) -> Path | None:
    chosen = variables.get(DPDK_VARIABLE, "")
    beside = folder.parent.parent / "dpdk" / "build" / "lib"  # a build in SPDK's own tree
    for place in [Path(chosen)] if chosen else [folder, beside, *_folders(variables)]:
        if next(place.glob("librte_eal.so*"), None) is not None:
            return place
    return None


class Functions:
    """SPDK's functions by their C names; see _FUNCTIONS for their types."""

    def __init__(self, libraries: list[c.CDLL]) -> None:
        """Bind every function; BackendMissing names the first that no library has."""
        for name, (result, arguments) in _FUNCTIONS.items():
            holder = next((library for library in libraries if hasattr(library, name)), None)
            if holder is None:
                raise BackendMissing(
                    f"SPDK's libraries have no {name}: use an unchanged build of {FLOOR} or newer"
                )
            function = getattr(holder, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:  # for type checkers: the names come from the table
        raise AttributeError(name)


def load(found: Found) -> Functions:
    """Load the libraries into this process and bind them; BackendMissing says what failed."""
    for names in _SSL:
        _first(names)
    if found.dpdk is not None:
        for name in _DPDK:
            _load_dpdk(found.dpdk, name)
    libraries = []
    for name in _SPDK:
        path = _versioned(found.folder, f"libspdk_{name}")
        if path is not None:
            libraries.append(_open(str(path), found))
        elif name in ("env_dpdk", "nvme"):
            raise BackendMissing(
                f"{found.folder} holds no libspdk_{name}.so: build SPDK with --with-shared and"
                f" set {VARIABLE}"
            )
    return Functions(libraries)


def _first(names: tuple[str, ...]) -> None:
    """Load the first of *names* that ld.so finds; whether one is needed, SPDK's libraries say."""
    for name in names:
        try:
            c.CDLL(name, mode=c.RTLD_GLOBAL)
        except OSError:
            continue
        return


def _load_dpdk(folder: Path, name: str) -> None:
    for place in (folder, *sorted(folder.glob("dpdk/pmds-*"))):
        path = _versioned(place, f"librte_{name}")
        if path is not None:
            c.CDLL(str(path), mode=c.RTLD_GLOBAL)
            return


def _versioned(folder: Path, stem: str) -> Path | None:
    """Return ``stem.so``, or the shortest ``stem.so.N`` where there is only that."""
    paths = sorted(folder.glob(f"{stem}.so*"), key=lambda path: len(path.name))
    return paths[0] if paths else None


def _open(path: str, found: Found) -> c.CDLL:
    try:
        return c.CDLL(path, mode=c.RTLD_GLOBAL)
    except OSError as error:
        dpdk = found.dpdk if found.dpdk is not None else "not found"
        raise BackendMissing(
            f"cannot load {path}: {error} (SPDK {found.release}; DPDK's libraries: {dpdk}; set"
            f" {DPDK_VARIABLE} to the folder of librte_eal.so if they lie elsewhere)"
        ) from error
