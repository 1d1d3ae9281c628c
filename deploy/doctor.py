"""What this machine can do and what is missing, with the command that fixes it."""

import importlib
import mmap
import os
import platform
import shutil
import ssl
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec

from hyades.common.dma import doca
from hyades.common.errors import BackendMissing
from hyades.common.nvme import tls
from hyades.common.units import GIB, MIB, format_size
from hyades.deploy.machine import (
    cgroup_limit,
    cores,
    cpu_flags,
    cpu_name,
    memory_available,
    memory_total,
)
from hyades.deploy.surroundings import Surroundings
from hyades.proxy.registry import probe_all
from hyades.proxy.transports import spdk_library

Status = Literal["ok", "degraded", "missing"]


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One finding.  `needed_for` says what does not work, or works slowly, without it."""

    name: str
    status: Status
    detail: str
    needed_for: str
    fix: str = ""
    required: bool = False  # nothing works without it


def examine(machine: Surroundings | None = None) -> list[Check]:
    """Return every check of *machine*, in the order in which a reader wants them."""
    machine = machine or Surroundings()
    return [check for part in _PARTS for check in part(machine)]


def healthy(checks: list[Check]) -> bool:
    """Tell whether everything that is required is there."""
    return all(check.status != "missing" for check in checks if check.required)


def table(checks: list[Check], paint: Callable[[str, Status], str] = lambda t, _: t) -> list[str]:
    """Return lines: status, name, detail, and the fix under what is not ok."""
    width = max(len(check.name) for check in checks)
    lines = []
    for check in checks:
        status = paint(f"{check.status:<8}", check.status)
        lines.append(f"{status}  {check.name:<{width}}  {check.detail}")
        if check.status != "ok":
            lines.append(f"{'':8}  {'':{width}}  for: {check.needed_for}")
            if check.fix:
                lines.append(f"{'':8}  {'':{width}}  fix: {check.fix}")
    return lines


def _python(machine: Surroundings) -> Iterator[Check]:
    yield Check(
        name="Python",
        status="ok" if sys.version_info >= (3, 11) else "missing",
        detail=platform.python_version(),
        needed_for="everything",
        fix="install Python 3.11 or newer and set the environment up again",
        required=True,
    )
    for package, purpose in (
        ("numpy", "everything"),
        ("torch", "matrix products"),
        ("numba", "the scheduler and tile kernels"),
    ):
        version = machine.package(package)
        yield Check(
            name=package,
            status="ok" if version else "missing",
            detail=version or "not installed",
            needed_for=purpose,
            fix=f"pip install -c constraints.txt {package}",
            required=True,
        )
    yield _package(
        machine, "torch_geometric", "live PyG modules as models; checkpoints load without it",
        "pip install -c constraints.txt torch_geometric",
    )  # fmt: skip


def _processor(machine: Surroundings) -> Iterator[Check]:
    flags = cpu_flags(machine.root)
    yield Check(
        name="processor",
        status="ok",
        detail=f"{cpu_name(machine.root)}, {cores()} cores",
        needed_for="the CPU device",
    )
    hardware = bool(importlib.import_module("crc32c").hardware_based)
    yield Check(
        name="CRC32C",
        status="ok" if hardware else "degraded",
        detail="in hardware" if hardware else "in software",
        needed_for="checking every page at the speed of the disk",
        fix="a processor with SSE4.2 or the Armv8 CRC extension",
    )
    half = bool({"f16c", "fphp", "asimdhp"} & flags)
    yield Check(
        name="float16",
        status="ok" if half else "degraded",
        detail="converted in hardware" if half else "no f16c: converted in software",
        needed_for="float16 features at the speed of float32",
        fix="store the features as float32",
    )
    wide = next((f for f in ("avx512f", "avx2", "sve", "asimd") if f in flags), None)
    yield Check(
        name="vectors",
        status="ok" if wide else "degraded",
        detail=wide or "neither AVX2 nor Neon",
        needed_for="tile kernels at the speed of memory",
        fix="a processor with AVX2",
    )


def _memory(machine: Surroundings) -> Iterator[Check]:
    total, free = memory_total(machine.root), memory_available(machine.root)
    limit = cgroup_limit(machine.root)
    detail = f"{format_size(total)}, {format_size(free)} available"
    if limit is not None:
        detail += f"; this cgroup may take {format_size(limit)}"
    usable = free if limit is None else min(free, limit)
    yield Check(
        name="memory",
        status="ok" if usable >= GIB else "degraded",
        detail=detail,
        needed_for="a budget of 512 MiB and what Python and torch take themselves",
        fix="raise the memory limit, or give --memory well below it",
    )
    pages = _huge_pages(machine)
    yield Check(
        name="huge pages",
        status="ok" if pages else "missing",
        detail=f"{pages} reserved" if pages else "none reserved",
        needed_for="spdk+pcie:// volumes",
        fix="echo 1024 | sudo tee /proc/sys/vm/nr_hugepages",
    )


def _disk(machine: Surroundings) -> Iterator[Check]:
    free = shutil.disk_usage(machine.folder).free
    yield Check(
        name="disk",
        status="ok" if free >= GIB else "degraded",
        detail=f"{format_size(free)} free in {machine.folder}",
        needed_for="volumes",
        fix="free some space, or work in another folder",
    )
    refused = direct_io_refused(machine.folder)
    yield Check(
        name="O_DIRECT",
        status="degraded" if refused else "ok",
        detail=refused or f"works in {machine.folder}",
        needed_for="reading past the page cache, so that --memory is all that is used",
        fix="keep volumes on ext4, XFS, Btrfs or a raw device",
    )
    for probe in probe_all():
        if probe.scheme == "file":
            yield Check(
                name="io_uring",
                status="degraded" if "slower" in probe.detail else "ok",
                detail=probe.detail,
                needed_for="many reads in flight from one thread",
                fix="sudo sysctl kernel.io_uring_disabled=0, or allow io_uring in the container",
            )
        elif probe.problem and not probe.scheme.startswith(("spdk+", "nvme+rdma")):  # see _fabrics
            problem, _, fix = probe.problem.rpartition(": ")
            yield Check(
                name=f"{probe.scheme}://",
                status="missing",
                detail=problem or fix,
                needed_for=f"{probe.scheme}:// volumes",
                fix=fix if problem else "",
            )
        elif probe.detail:
            yield Check(
                name=f"{probe.scheme}://",
                status="ok",
                detail=probe.detail,
                needed_for=f"{probe.scheme}:// volumes",
            )


def _accelerator(machine: Surroundings) -> Iterator[Check]:
    gpus = machine.entries("proc/driver/nvidia/gpus")
    name = machine.output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    yield Check(
        name="GPU",
        status="ok" if gpus else "missing",
        detail=f"{len(gpus)} x {name or 'NVIDIA'}" if gpus else "no NVIDIA GPU",
        needed_for="the CUDA device",
        fix="a machine with an NVIDIA GPU and its driver",
    )
    install = "pip install -c constraints.txt -e '.[gpu]'"
    yield _package(machine, "numba-cuda", "compiling the scheduler for a GPU",
                   "pip install -c constraints.txt -e '.[ptx]'")  # fmt: skip
    yield _package(machine, "cupy-cuda13x", "the CUDA device (later versions)", install)
    yield _package(machine, "kvikio-cu13", "gds:// volumes", install)


def _fabrics(machine: Surroundings) -> Iterator[Check]:
    devices = machine.entries("sys/class/infiniband")
    yield Check(
        name="RDMA device",
        status="ok" if devices else "missing",
        detail=", ".join(devices) or "none in /sys/class/infiniband",
        needed_for="nvme+rdma:// and hyades serve --listen rdma:...",
        fix="an RDMA adapter, or: modprobe -a rdma_rxe rdma_ucm && rdma link add rxe0 type rxe"
        " netdev eth0",
    )
    verbs = machine.module("pyverbs")
    yield Check(
        name="pyverbs",
        status="ok" if verbs else "missing",
        detail="found" if verbs else "not installed",
        needed_for="nvme+rdma:// and hyades serve --listen rdma:...",
        fix="apt-get install python3-pyverbs ibverbs-providers rdma-core",
    )
    problem = doca.probe(machine.environment)
    yield Check(
        name="DOCA DMA",
        status="missing" if problem else "ok",
        detail=problem or doca.detail(machine.environment),
        needed_for="hyades serve --listen dma:/PATH --dma-engine doca (memcpy needs nothing)",
        fix="a BlueField with doca-runtime 2.5 or newer",
    )
    yield _tls()
    yield _spdk(machine)
    yield _package(machine, "spdk", "provisioning an SPDK target over JSON-RPC",
                   "pip install -c constraints.txt -e '.[fabrics]'")  # fmt: skip
    loaded = set(machine.entries("sys/module"))
    have = [m for m in ("nvme_tcp", "nvme_rdma", "nvmet") if m in loaded]
    yield Check(
        name="kernel NVMe-oF",
        status="ok" if have else "missing",
        detail=", ".join(have) or "neither nvme_tcp nor nvmet is loaded",
        needed_for="mounting a served volume, or serving one from the kernel",
        fix="sudo modprobe -a nvme_tcp nvmet_tcp",
    )
    for program, package, purpose in (
        ("nvme", "nvme-cli", "connecting the kernel to a served volume"),
        ("fio", "fio", "hyades bench: the disk's own rate to compare with"),
    ):
        path = machine.program(program)
        yield Check(
            name=package,
            status="ok" if path else "missing",
            detail=(machine.output(path, "--version") or path) if path else "not installed",
            needed_for=purpose,
            fix=f"apt-get install {package}",
        )


_PARTS = (_python, _processor, _memory, _disk, _accelerator, _fabrics)


def _package(machine: Surroundings, package: str, purpose: str, fix: str) -> Check:
    version = machine.package(package)
    return Check(
        name=package,
        status="ok" if version else "missing",
        detail=version or "not installed",
        needed_for=purpose,
        fix=fix,
    )


def _tls() -> Check:
    missing = ""
    try:
        tls.probe()
    except BackendMissing as error:
        missing = str(error)
    detail, _, fix = missing.partition(". Use ")
    return Check(
        name="TLS with keys",
        status="missing" if missing else "ok",
        detail=detail or f"TLS 1.3, {ssl.OPENSSL_VERSION}",
        needed_for="hyades serve --tls-psk and nvme+tcp://...?tls=FILE",
        fix=f"use {fix}" if fix else "",
    )


def _spdk(machine: Surroundings) -> Check:
    found = spdk_library.find(machine.environment)
    if isinstance(found, str):
        detail, _, fix = found.partition(": ")
    else:
        detail, fix = f"{found.release} in {found.folder}", ""
    return Check(
        name="SPDK libraries",
        status="missing" if isinstance(found, str) else "ok",
        detail=detail,
        needed_for="spdk+tcp://, spdk+rdma:// and spdk+pcie:// volumes",
        fix=fix,
    )


def _huge_pages(machine: Surroundings) -> int:
    try:
        lines = (machine.root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("HugePages_Total:"))


def direct_io_refused(folder: os.PathLike[str] | str) -> str | None:
    """Return why O_DIRECT does not work in *folder*, or None."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".hyades-doctor-") as file:
            file.write(bytes(MIB))
            file.flush()
            handle = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            try:
                with mmap.mmap(-1, 4096) as page:
                    os.preadv(handle, [page], 0)
            finally:
                os.close(handle)
    except OSError as error:
        return f"{error.strerror} in {folder}"
    return None
