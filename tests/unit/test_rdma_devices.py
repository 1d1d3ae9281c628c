"""Memory of RDMA devices, and what is told where there are none: with stand-ins for pyverbs."""

import os
from types import SimpleNamespace

import pytest

from hyades.common.errors import BackendMissing, UsageError
from hyades.common.rdma import device as devices
from hyades.common.rdma import gpu, library
from hyades.common.rdma.cm import socket_address
from hyades.common.rdma.device import Device, Devices, address_of
from hyades.deploy import serving
from hyades.proxy.registry import open_transport
from hyades.proxy.transports import nvme_url
from hyades.proxy.urls import Url
from hyades.target_side.events import NullSink
from hyades.target_side.namespaces import MemoryNamespace
from hyades.target_side.server import Server
from hyades.target_side.subsystem import Subsystem

NQN = "nqn.2026-01.org.example:rdma"


class Failure(Exception):  # noqa: N818
    """What pyverbs raises."""


class Handle:
    """A memory region."""

    live = 0

    def __init__(self, domain, nbytes, access, **where):
        if where.get("address", 0) in refused or where.get("dmabuf") in refused:
            raise Failure("no")
        self.lkey, self.rkey, self.access, self.where = 1, 2, access, where
        Handle.live += 1

    def close(self):
        Handle.live -= 1


refused: set = set()


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    found = SimpleNamespace(max_qp_rd_atom=128, max_qp_init_rd_atom=4, max_qp_wr=99)
    found.device_cap_flags = 1 << 21
    context = SimpleNamespace(query_device=lambda: found, close=lambda: None)
    enums = SimpleNamespace(
        IBV_ACCESS_LOCAL_WRITE=1, IBV_ACCESS_REMOTE_WRITE=2, IBV_ACCESS_REMOTE_READ=4
    )
    made = SimpleNamespace(
        device=SimpleNamespace(Context=lambda name: context), enums=enums,
        pd=SimpleNamespace(PD=lambda _: context), mr=SimpleNamespace(MR=Handle, DmaBufMR=Handle),
    )  # fmt: skip
    monkeypatch.setattr(devices, "verbs", lambda: made)
    monkeypatch.setattr(devices, "failures", lambda: (Failure,))
    refused.clear()
    Handle.live = 0


def test_memory_is_found_by_its_address():
    device = Device("rxe0")
    assert (device.reads, device.invalidates, device.max_work) == (4, True, 99)
    memory = [memoryview(bytearray(100)) for _ in range(5)]
    regions = [device.register(m, remote=False) for m in memory]
    for view, region in zip(memory, regions, strict=True):
        at = address_of(view)
        assert region.handle.access == 1
        assert device.find(at, 100) is device.find(at + 99, 1) is region
        assert device.find(at + 1, 100) is None
        assert device.find(at - 1, 1) is None
        assert region.translate(at + 7) == at + 7
    device.forget(regions[2])
    assert device.find(address_of(memory[2]), 1) is None
    assert Handle.live == 4
    device.close()
    assert Handle.live == 0


def test_shared_memory_is_registered_once_with_every_device():
    owner = Devices()
    first, memory = owner.open("a"), memoryview(bytearray(64))
    owner.share(memory)
    second = owner.open("b")
    assert owner.open("a") is first
    for device in (first, second):
        region = device.find(address_of(memory), 64)
        assert region is not None
        assert region.handle.access == 7  # the peer writes and reads it
    assert Handle.live == 2
    owner.close()
    assert Handle.live == 0


def test_memory_that_cannot_be_registered(monkeypatch):
    device, memory = Device("rxe0"), memoryview(bytearray(64))
    refused.add(address_of(memory))
    with pytest.raises(UsageError, match=r"64 bytes cannot be registered.*ulimit"):
        device.register(memory, remote=True)


@pytest.mark.parametrize("dmabuf", [True, False])
def test_gpu_memory(monkeypatch, dmabuf):
    """By its dma-buf, which calls addresses by their offset; else by its address."""
    device, pointer = Device("rxe0"), 0x7000_0000_1234
    fd = os.open("/dev/null", os.O_RDONLY)
    monkeypatch.setattr(gpu, "export", lambda *_: (fd, 0x234))
    if not dmabuf:
        refused.add(fd)
    region = device.register_gpu(pointer, 4096)
    assert device.find(pointer + 96, 4000) is region
    assert region.translate(pointer + 8) == (0x234 + 8 if dmabuf else pointer + 8)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)


def test_gpu_memory_that_no_way_leads_to(monkeypatch):
    def none(*_):
        raise BackendMissing("no dma-buf of GPU memory: CUDA error 801")

    monkeypatch.setattr(gpu, "export", none)
    refused.add(4096)
    with pytest.raises(UsageError, match=r"CUDA error 801.*nvidia-peermem.*cannot be registered"):
        Device("rxe0").register_gpu(4096, 4096)


# -- where there is no device


@pytest.mark.skipif(library.devices() != [], reason="this machine has an RDMA device")
def test_a_machine_without_a_device_says_what_is_missing():
    problem = library.probe()
    assert problem is not None
    with pytest.raises(BackendMissing, match=r"rdma link add|apt-get"):
        open_transport(f"nvme+rdma://192.0.2.1/{NQN}")
    server = Server([Subsystem(NQN, {1: MemoryNamespace(4096)})], [], rdma=[("127.0.0.1", 0)])
    with pytest.raises(BackendMissing, match=r"cannot listen on rdma:127.0.0.1:0: .*(rdma|apt)"):
        server.start()
    server.stop()


def test_pyverbs_that_is_absent(monkeypatch):
    def absent(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(library, "_import", absent)
    library.verbs.cache_clear()
    try:
        assert "apt-get install python3-pyverbs" in (library.probe() or "")
    finally:
        library.verbs.cache_clear()


def test_urls():
    options = nvme_url.parse(Url(f"nvme+rdma://192.0.2.1/{NQN}?ns=2&depth=8"), "rdma")
    assert (options.nsid, options.depth, options.scheme) == (2, 8, "nvme+rdma")
    assert options.place(options.addresses[0]) == f"nvme+rdma://192.0.2.1:4420/{NQN} ns 2"
    for key in ("digest=data", "tls=key"):
        with pytest.raises(UsageError, match="has no option"):
            nvme_url.parse(Url(f"nvme+rdma://192.0.2.1/{NQN}?{key}"), "rdma")
    with pytest.raises(UsageError, match="write nvme\\+rdma://"):
        nvme_url.parse(Url("nvme+rdma://192.0.2.1"), "rdma")


def test_addresses():
    assert socket_address("192.0.2.1", 4420).hex() == "0200" + "1144" + "c0000201" + "00" * 8
    six = socket_address("::1", 1)
    assert six.hex() == "0a00" + "0001" + "00" * 4 + "00" * 15 + "01" + "00" * 4


def test_where_a_target_is_told_to_listen():
    texts = ["127.0.0.1:0", "rdma:192.0.2.1", "rdma:[2001:db8::1]:5"]
    tcp, over_rdma = serving.split_addresses(texts)
    assert tcp == [("127.0.0.1", 0)]
    assert over_rdma == [("192.0.2.1", 4420), ("2001:db8::1", 5)]
    told = {"namespace": ["mem:1MiB"], "nqn": NQN, "listen": ["rdma:192.0.2.1:0"]}
    with pytest.raises(UsageError, match="allow-host"):
        serving.build_server(serving.read_settings(None, told), NullSink())
    keyed = serving.read_settings(None, told | {"tls_psk": ["key"]})
    with pytest.raises(UsageError, match="RDMA has no TLS"):
        serving.build_server(keyed, NullSink())
    with pytest.raises(UsageError, match="--backend embedded"):
        serving.check_external(serving.read_settings(None, told | {"backend": "kernel"}))


def test_transfers_that_are_too_long_for_a_descriptor():
    from hyades.target_side.limits import Limits

    with pytest.raises(UsageError, match=r"over RDMA: at most 8\.0 MiB"):
        Server([], [], rdma=[("127.0.0.1", 0)], limits=Limits(max_transfer=16 << 20))
