"""Doctor: what is there, what is missing and how to get it, on machines made up here."""

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hyades.common.errors import BackendMissing
from hyades.deploy import doctor
from hyades.deploy.doctor import Check, direct_io_refused, examine, healthy, table
from hyades.deploy.surroundings import Surroundings
from hyades.proxy.transports import file, gds, null

NAMES_MISSING_ON_A_BARE_MACHINE = {
    "huge pages", "GPU", "numba-cuda", "cupy-cuda13x", "kvikio-cu13", "gds://", "RDMA device",
    "DOCA DMA", "pyverbs", "SPDK libraries", "spdk", "kernel NVMe-oF", "nvme-cli", "fio",
    "torch_geometric",
}  # fmt: skip


@dataclass(frozen=True)
class Made(Surroundings):
    """A machine that has exactly what a test gives it."""

    packages: dict[str, str] = field(default_factory=dict)
    modules: set[str] = field(default_factory=set)
    programs: dict[str, str] = field(default_factory=dict)  # name -> first line of output

    def package(self, name: str) -> str | None:
        return self.packages.get(name)

    def module(self, name: str) -> bool:
        return name in self.modules

    def program(self, name: str) -> str | None:
        return f"/usr/bin/{name}" if name in self.programs else None

    def output(self, *command: str) -> str:
        return self.programs.get(command[0].rpartition("/")[2], "")


BASE = {"numpy": "2.4", "torch": "2.13", "numba": "0.68"}


@pytest.fixture(autouse=True)
def _with_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.tls, "probe", lambda: None)


@pytest.fixture(autouse=True)
def _without_kvikio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gds, "probe", lambda: "kvikio is not installed: pip install it")


@pytest.fixture(autouse=True)
def _without_doca(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.doca, "probe", lambda _: "no libdoca_common.so")


def make(tmp_path: Path, **changes: Any) -> Made:
    """Return a machine with *files* and nothing else below its root."""
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    for name, text in changes.pop("files", {}).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    given: dict[str, Any] = {"root": root, "folder": tmp_path, "environment": {}, "packages": BASE}
    return Made(**given | changes)


def by_name(machine: Surroundings) -> dict[str, Check]:
    checks = examine(machine)
    found = {check.name: check for check in checks}
    assert len(found) == len(checks)
    return found


def test_a_bare_machine_is_healthy_and_says_how_to_get_the_rest(tmp_path: Path) -> None:
    checks = by_name(make(tmp_path))
    missing = {name for name, check in checks.items() if check.status == "missing"}
    assert missing == NAMES_MISSING_ON_A_BARE_MACHINE
    assert healthy(list(checks.values()))
    for check in checks.values():
        assert check.status == "ok" or check.fix or check.name.endswith("://")
        assert "\n" not in check.detail + check.fix + check.needed_for


def test_what_is_required_decides_health(tmp_path: Path) -> None:
    checks = examine(make(tmp_path, packages={"numpy": "2.4", "torch": "2.13"}))
    assert not healthy(checks)
    numba = next(check for check in checks if check.name == "numba")
    assert (numba.status, numba.detail) == ("missing", "not installed")
    assert numba.fix == "pip install -c constraints.txt numba"


def test_a_full_machine_has_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "detail", lambda: "O_DIRECT through io_uring")
    monkeypatch.setattr(gds, "probe", lambda: None)
    monkeypatch.setattr(gds, "detail", lambda: "kvikio 26.10, cuFile 1.14")
    monkeypatch.setattr(doctor.doca, "probe", lambda _: None)
    monkeypatch.setattr(doctor.doca, "detail", lambda _: "device 0000:03:00.0")
    library = tmp_path / "spdk"
    library.mkdir()
    (library / "libspdk_nvme.so.15.0").touch()
    extra = ("numba-cuda", "cupy-cuda13x", "kvikio-cu13", "spdk", "torch_geometric")
    machine = make(
        tmp_path,
        packages=BASE | dict.fromkeys(extra, "1.0"),
        modules={"pyverbs"},
        programs={"nvme": "nvme version 2.3", "fio": "fio-3.33", "nvidia-smi": "NVIDIA H200"},
        environment={"HYADES_SPDK_LIB": str(library)},
        files={
            "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\nHugePages_Total: 8",
            "proc/cpuinfo": "model name : Fast 9000\nflags : fpu sse4_2 f16c avx2 avx512f",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": "",
            "proc/driver/nvidia/gpus/0000:02:00.0/information": "",
            "sys/class/infiniband/mlx5_0/node_type": "1",
            "sys/module/nvme_tcp/refcnt": "0",
        },
    )
    checks = by_name(machine)
    assert {name for name, check in checks.items() if check.status != "ok"} == set()
    for name, detail in {
        "GPU": "2 x NVIDIA H200", "RDMA device": "mlx5_0", "nvme-cli": "nvme version 2.3",
        "SPDK libraries": f"25.01 or 25.05 in {library}", "huge pages": "8 reserved",
        "vectors": "avx512f",
        "memory": "64.0 GiB, 32.0 GiB available", "kernel NVMe-oF": "nvme_tcp",
    }.items():  # fmt: skip
        assert checks[name].detail == detail
    assert checks["processor"].detail.startswith("Fast 9000, ")


def test_a_processor_without_vectors_or_half_precision(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": "model name : Old\nflags : fpu sse2"}
    checks = by_name(make(tmp_path, files=files))
    assert checks["float16"].status == checks["vectors"].status == "degraded"


def test_a_cgroup_limit_is_named_and_counts(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 67108864 kB\nMemAvailable: 33554432 kB",
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": str(768 << 20),
    }
    check = by_name(make(tmp_path, files=files))["memory"]
    assert check.status == "degraded"
    assert check.detail.endswith("this cgroup may take 768.0 MiB")


def test_an_spdk_folder_without_the_library_is_named(tmp_path: Path) -> None:
    machine = make(tmp_path, environment={"HYADES_SPDK_LIB": str(tmp_path / "nowhere")})
    check = by_name(machine)["SPDK libraries"]
    assert check.status == "missing"
    assert check.detail == f"HYADES_SPDK_LIB={tmp_path}/nowhere holds no libspdk_nvme.so"


def test_refused_io_uring_is_degraded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "detail", lambda: "preadv on threads, slower: io_uring is off")
    check = by_name(make(tmp_path))["io_uring"]
    assert check.status == "degraded"
    assert "kernel.io_uring_disabled" in check.fix


def test_a_transport_that_cannot_run_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(null, "probe", lambda: "there is no nothing: apt-get install nothing")
    check = by_name(make(tmp_path))["null://"]
    assert (check.status, check.detail) == ("missing", "there is no nothing")
    assert check.fix == "apt-get install nothing"


def test_tls_is_tried_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = by_name(make(tmp_path))["TLS with keys"]
    assert check.status == "ok"
    assert "OpenSSL" in check.detail

    def refuse() -> None:
        raise BackendMissing("TLS with pre-shared keys: no OpenSSL. Use CPython 3.11")

    monkeypatch.setattr(doctor.tls, "probe", refuse)
    check = by_name(make(tmp_path))["TLS with keys"]
    assert (check.status, check.detail) == ("missing", "TLS with pre-shared keys: no OpenSSL")
    assert check.fix == "use CPython 3.11"


def test_refused_direct_io_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert direct_io_refused(tmp_path) is None
    assert direct_io_refused(tmp_path / "x") == f"No such file or directory in {tmp_path}/x"
    really_open = os.open

    def refuse(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return really_open(path, flags, *mode)

    monkeypatch.setattr(doctor.os, "open", refuse)
    assert direct_io_refused(tmp_path) == f"Invalid argument in {tmp_path}"
    assert list(tmp_path.iterdir()) == []


def test_the_table_puts_the_fix_under_what_is_missing(tmp_path: Path) -> None:
    checks = [
        Check(name="a", status="ok", detail="fine", needed_for="x"),
        Check(name="bcd", status="missing", detail="gone", needed_for="y", fix="do this"),
    ]
    assert table(checks) == [
        "ok        a    fine",
        "missing   bcd  gone",
        "               for: y",
        "               fix: do this",
    ]
    painted = table(checks, lambda text, status: f"<{status}>{text.strip()}")
    assert painted[1].startswith("<missing>missing")
    again = msgspec.json.decode(msgspec.json.encode(checks), type=list[Check])
    assert again == checks


def test_this_very_machine_can_be_examined() -> None:
    assert healthy(examine())


def test_surroundings_ask_the_system(tmp_path: Path) -> None:
    here = Surroundings(environment={"PATH": os.environ["PATH"]})
    assert here.package("numpy")
    assert here.package("no-such-distribution") is None
    assert here.module("json")
    assert not here.module("no_such_module")
    assert here.program("sh")
    assert here.output("sh", "-c", "echo one; echo two") == "one"
    assert here.output("sh", "-c", "exit 3") == ""
    assert here.output("/no/such/program") == ""
    assert here.entries("no/such/folder") == []
    debian = tmp_path / "usr/lib/python3/dist-packages/pyverbs"
    debian.mkdir(parents=True)
    assert Surroundings(root=tmp_path).module("pyverbs")
