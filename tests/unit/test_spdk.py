"""SPDK: URLs, finding the libraries, what an NVMe status means, and what cannot be opened."""

import ctypes
import os

import numpy as np
import pytest
from tests.contracts.transport import arena_for, finish, request
from tests.reference.spdk import ADDRESS, NQN, StandIn, build, needs_compiler, remove_builds

from hyades.common.errors import BackendMissing, DeviceLost, UsageError
from hyades.common.layout import BLOCK, Op, Status
from hyades.common.nvme import identify
from hyades.proxy.registry import open_transport, probe_all
from hyades.proxy.transports import spdk, spdk_library
from hyades.proxy.transports.spdk_status import AGAIN, outcome
from hyades.proxy.transports.spdk_url import settings_of
from hyades.proxy.urls import Url


@pytest.fixture(scope="module", autouse=True)
def _libraries():
    yield
    remove_builds()


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    return StandIn(monkeypatch, tmp_path)


# -- URLs


def test_a_whole_url():
    settings = settings_of(
        Url(
            f"spdk+tcp://{ADDRESS}?ns=3&queues=2&depth=64&digest=header,data&hostnqn=nqn.2014-08.x:y"
            "&max_transfer=130KiB&kato=5&timeout=2.5&ctrl_loss_timeout=7&memory=512MiB&trust_cache=1"
        )
    )
    assert settings.trid() == (
        "trtype:TCP adrfam:IPv4 traddr:127.0.0.1 trsvcid:4420 subnqn:nqn.2016-06.io.spdk:standin"
    )
    assert (settings.namespace, settings.queues, settings.depth) == (3, 2, 64)
    assert settings.header_digest
    assert settings.data_digest
    assert settings.hostnqn == "nqn.2014-08.x:y"
    assert settings.max_transfer == 128 * 1024
    assert (settings.kato, settings.timeout, settings.ctrl_loss_timeout) == (5, 2.5, 7)
    assert (settings.huge_pages, settings.memory, settings.trust_cache) == (False, 512, True)


def test_other_kinds_of_address():
    rdma = settings_of(Url("spdk+rdma://[::1]:4420/nqn.x?digest=none"))
    assert rdma.trid() == "trtype:RDMA adrfam:IPv6 traddr:::1 trsvcid:4420 subnqn:nqn.x"
    assert not rdma.header_digest
    named = settings_of(Url("spdk+tcp://localhost:4420/nqn.x"))
    assert "traddr:localhost" not in named.trid()  # SPDK takes numbers only
    pcie = settings_of(Url("spdk+pcie://0000:01:00.0?ns=1"))
    assert pcie.trid() == "trtype:PCIe traddr:0000:01:00.0"
    assert pcie.huge_pages


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("spdk+tcp://host", "write spdk\\+tcp://HOST:PORT/SUBSYSTEM-NQN"),
        ("spdk+tcp://host:4420", "SUBSYSTEM-NQN"),
        ("spdk+tcp://127.0.0.1:4420/" + "n" * 224, "at most 223"),
        ("spdk+tcp://no-such-host.invalid:4420/nqn.x", "no address for no-such-host.invalid"),
        ("spdk+tcp://127.0.0.1:99999/nqn.x", "99999 is no port"),
        (f"spdk+tcp://{ADDRESS}?digest=crc", "digest is header, data or both"),
        (f"spdk+tcp://{ADDRESS}?queues=0", "queues is a whole number from 1"),
        (f"spdk+tcp://{ADDRESS}?max_transfer=100", "at least 4096"),
        (f"spdk+tcp://{ADDRESS}?kato=x", "kato is a number of seconds from 1"),
        (f"spdk+tcp://{ADDRESS}?nsid=1", "has no option nsid"),
        ("spdk+pcie://01:00.0", "0000:01:00.0"),
    ],
)
def test_urls_that_cannot_be_meant(url, complaint):
    with pytest.raises(UsageError, match=complaint):
        settings_of(Url(url))


# -- libraries


def test_nothing_found_says_what_was_searched(tmp_path):
    said = spdk_library.find({"LD_LIBRARY_PATH": str(tmp_path)})
    assert isinstance(said, str)
    assert f"no libspdk_nvme.so in {tmp_path}, /usr/local/lib, " in said
    assert "HYADES_SPDK_LIB is not set" in said
    assert "build SPDK 24.01 or newer with --with-shared and set HYADES_SPDK_LIB" in said
    said = spdk_library.find({"HYADES_SPDK_LIB": str(tmp_path)})
    assert isinstance(said, str)
    assert said.startswith(f"HYADES_SPDK_LIB={tmp_path} holds no libspdk_nvme.so: build SPDK")


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (["libspdk_nvme.so"], "no link to a file with a version in its name"),
        (["libspdk_nvme.so.11.0"], r"is 23.09 \(libspdk_nvme.so.11\), but 24.01 or newer"),
        (["libspdk_nvme.so.3.0"], "is older than 23.05"),
        (["libspdk_nvme.so.12.0", "libspdk_nvme.so.18.0"], "of one release only"),
    ],
)
def test_libraries_that_cannot_be_used(tmp_path, files, complaint):
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(AssertionError, match=complaint):
        raise AssertionError(spdk_library.find({"HYADES_SPDK_LIB": str(tmp_path)}))


@pytest.mark.parametrize(
    ("soname", "release"),
    [(12, "24.01"), (18, "26.05"), (40, r"newer than 26.05 (libspdk_nvme.so.40)")],
)
def test_the_release_follows_from_the_soname(tmp_path, soname, release):
    (tmp_path / f"libspdk_nvme.so.{soname}.1").touch()
    (tmp_path / "libspdk_nvme.so").symlink_to(f"libspdk_nvme.so.{soname}.1")
    found = spdk_library.find({"HYADES_SPDK_LIB": str(tmp_path)})
    assert isinstance(found, spdk_library.Found)
    assert found.release == release
    assert found.search_path()[0] == str(tmp_path)


def test_dpdk_is_found_beside_or_where_it_is_said_to_be(tmp_path):
    libraries, dpdk = tmp_path / "build" / "lib", tmp_path / "dpdk" / "build" / "lib"
    elsewhere = tmp_path / "elsewhere"
    for folder in (libraries, dpdk, elsewhere):
        folder.mkdir(parents=True)
    (libraries / "libspdk_nvme.so.18.0").touch()
    (dpdk / "librte_eal.so.24").touch()
    (elsewhere / "librte_eal.so.25").touch()
    found = spdk_library.find({"HYADES_SPDK_LIB": str(libraries)})
    assert isinstance(found, spdk_library.Found)
    assert found.dpdk == dpdk
    chosen = {"HYADES_SPDK_LIB": str(libraries), "HYADES_DPDK_LIB": str(elsewhere)}
    assert spdk_library.find(chosen).search_path() == [str(libraries), str(elsewhere)]


def test_probe_and_detail(monkeypatch, tmp_path):
    monkeypatch.setenv("HYADES_SPDK_LIB", str(tmp_path))
    probes = {p.scheme: p for p in probe_all() if p.scheme.startswith("spdk+")}
    assert set(probes) == {"spdk+tcp", "spdk+rdma", "spdk+pcie"}
    assert all("holds no libspdk_nvme.so" in str(p.problem) for p in probes.values())
    with pytest.raises(BackendMissing, match=r"holds no libspdk_nvme\.so"):
        open_transport(f"spdk+tcp://{ADDRESS}")
    (tmp_path / "libspdk_nvme.so.13.0").touch()
    assert spdk.probe() is None
    assert spdk.detail() == f"SPDK 24.05 in {tmp_path}"


# -- NVMe status


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (0x000, Status.OK),
        (0x001, Status.INVALID),  # opcode
        (0x002, Status.INVALID),  # field
        (0x004, Status.IO),  # data transfer error
        (0x006, Status.IO),  # internal device error
        (0x007, AGAIN),  # abort requested
        (0x008, AGAIN),  # submission queue deleted
        (0x4008, AGAIN),  # the same with DNR, which SPDK sets when it gives a queue up
        (0x00B, Status.INVALID),  # namespace
        (0x020, Status.INVALID),  # write protected
        (0x080, Status.INVALID),  # LBA out of range
        (0x081, Status.NO_SPACE),  # capacity exceeded
        (0x4081, Status.NO_SPACE),
        (0x082, AGAIN),  # namespace not ready
        (0x4082, Status.IO),  # ... and it will not be
        (0x022, AGAIN),  # transient transport error
        (0x182, Status.INVALID),  # read-only range
        (0x180, Status.IO),  # conflicting attributes
        (0x280, Status.IO),  # write fault
        (0x281, Status.IO),  # unrecovered read error
        (0x282, Status.IO),  # guard check
        (0x286, Status.INVALID),  # access denied
        (0x300, AGAIN),  # internal path error
        (0x4300, Status.LOST),
        (0x302, AGAIN),  # inaccessible
        (0x303, AGAIN),  # in transition
        (0x370, AGAIN),  # host path error
        (0x7FF, Status.IO),  # vendor's own
    ],
)
def test_what_a_status_means(status, expected):
    assert outcome(status) == int(expected)


def test_the_cache_epoch_is_where_targets_put_it():
    info = identify.ControllerInfo(
        subnqn="nqn.x", cntlid=1, serial="s", model="m", firmware="f", max_transfer=0,
        in_capsule=8192, namespaces=1, cache_epoch=bytes(range(16)),
    )  # fmt: skip
    assert identify.parse_cache_epoch(identify.build_controller(info)) == bytes(range(16))
    assert identify.parse_cache_epoch(bytes(4096)) == bytes(16)


# -- opening


@needs_compiler
def test_options_reach_the_driver(stand_in):
    stand_in.device(8)
    before = os.sched_getaffinity(0)
    host = "nqn.2014-08.org.example:host"
    options = f"queues=3&digest=data&hostnqn={host}&kato=20&memory=64MiB&depth=200&timeout=4"
    device = stand_in.open(options)
    device.close()
    (environment,) = stand_in.lines("env")
    assert environment == f"env core=[{min(before)}] mem=64 no_pci=1 no_huge=1"
    (connect,) = stand_in.lines("connect")
    assert connect == (
        f"connect TCP 127.0.0.1:4420 {NQN} queues=3 kato=20000 depth=200 hostnqn={host}"
        " digests=01 ack=12"
    )
    assert len(stand_in.lines("queue")) == 3
    assert os.sched_getaffinity(0) == before


@needs_compiler
@pytest.mark.parametrize("release", ["24.01", "later"])
def test_structures_of_other_releases(stand_in, release):
    """The library writes all of its own structures, larger or smaller than those known here."""
    stand_in.release(release)
    stand_in.device(8)
    device = stand_in.open()
    arena = arena_for(device, 2 * BLOCK)
    device.register(arena)
    arena[:BLOCK] = 5
    assert finish(device, request(Op.WRITE, 7, 1, 0, 1))[1][0] == Status.OK
    assert finish(device, request(Op.READ, 7, 1, BLOCK, 1))[1][0] == Status.OK
    assert (arena == 5).all()
    expected = release if release == "24.01" else "newer than 26.05 (libspdk_nvme.so.99)"
    assert f"SPDK {expected}, namespace 1" in device.describe()
    device.close()


@needs_compiler
def test_an_old_release_is_refused(stand_in):
    stand_in.release("23.09")
    stand_in.device(8)
    with pytest.raises(BackendMissing, match=r"is 23.09 .* but 24.01 or newer is needed"):
        stand_in.open()
    assert not stand_in.log.exists()  # it was not loaded


@needs_compiler
@pytest.mark.parametrize(
    ("faults", "error", "complaint"),
    [
        ({"noenv": 1}, BackendMissing, r"spdk_env_init failed .*memory=256MiB.*no free hugepages"),
        ({"namespaces": 0}, UsageError, "no namespace 1; there are: none"),
        ({"sector": 520}, UsageError, "blocks of 520 bytes"),
        ({"meta": 8}, UsageError, "8 bytes of metadata"),
        ({"maxio": 2048}, UsageError, "transfers of 0 bytes"),
    ],
)
def test_what_cannot_be_opened_says_why(stand_in, faults, error, complaint):
    stand_in.device(8)
    stand_in.faults(**faults)
    with pytest.raises(error, match=complaint):
        stand_in.open()


@needs_compiler
def test_the_wrong_namespace_or_target(stand_in):
    with pytest.raises(DeviceLost, match=r"no connection to trtype:TCP .*standin: no such subsys"):
        stand_in.open()
    stand_in.device(8)
    stand_in.faults(namespaces=2)
    with pytest.raises(UsageError, match="no namespace 5; there are: 1, 2"):
        stand_in.open("ns=5")


@needs_compiler
def test_no_rdma_in_the_libraries(stand_in):
    stand_in.device(8)
    stand_in.faults(rdma=0)
    with pytest.raises(BackendMissing, match=r"built without RDMA: build them with --with-rdma"):
        open_transport(f"spdk+rdma://{ADDRESS}")


@needs_compiler
def test_a_library_that_lacks_a_function_is_named(monkeypatch):
    folder = build()
    library = ctypes.CDLL(str(folder / "libspdk_env_dpdk.so"))
    with pytest.raises(BackendMissing, match="have no spdk_nvme_transport_id_parse"):
        spdk_library.Functions([library])


@needs_compiler
@pytest.mark.parametrize("scheme", ["spdk+rdma", "spdk+pcie"])
def test_adapters_get_memory_that_they_can_reach(stand_in, scheme):
    """The arena of three blocks is registered as one huge page, at a multiple of 2 MiB."""
    address = "0000:01:00.0" if scheme == "spdk+pcie" else ADDRESS
    stand_in.device(8, address if scheme == "spdk+pcie" else NQN)
    device = open_transport(f"{scheme}://{address}")
    arena = arena_for(device, 3 * BLOCK)
    device.register(arena)
    assert stand_in.lines("register") == ["register aligned=1"]
    arena[: 2 * BLOCK] = np.arange(2 * BLOCK) % 251
    assert finish(device, request(Op.WRITE, 2, 2, 0, 1))[1] == (0, 2 * BLOCK)
    device.close()
    (environment,) = stand_in.lines("env")
    assert environment.endswith("no_pci=0 no_huge=0" if scheme == "spdk+pcie" else "no_huge=1")


@needs_compiler
def test_read_only(stand_in):
    stand_in.device(8)
    device = stand_in.open(writable=False)
    device.register(arena_for(device, BLOCK))
    assert finish(device, request(Op.WRITE, 0, 1, 0, 1))[1][0] == Status.INVALID
    assert finish(device, request(Op.READ, 0, 1, 0, 1))[1][0] == Status.OK
    device.close()


@needs_compiler
def test_no_flush_without_a_cache(stand_in):
    stand_in.device(8)
    stand_in.faults(noflush=1)
    device = stand_in.open()
    device.register(arena_for(device, BLOCK))
    assert finish(device, request(Op.FLUSH, cookie=1))[1] == (0, 0)
    device.close()
    assert stand_in.lines("flush") == []
