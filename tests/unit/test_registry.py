"""URLs, the table of transports, and the in-memory ones."""

import numpy as np
import pytest

from hyades.common.errors import BackendMissing, UsageError
from hyades.common.layout import BLOCK
from hyades.proxy import registry
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport, probe_all, schemes
from hyades.proxy.transports import mem
from hyades.proxy.urls import Url


def test_unknown_scheme_lists_those_that_exist():
    with pytest.raises(UsageError) as caught:
        open_transport("floppy://host:4420/nqn.x?ns=1")
    text = str(caught.value)
    assert text.startswith(
        "floppy://host:4420/nqn.x?ns=1: no transport floppy://; there are file://, blk://, gds://, mem://,"
    )
    assert text.endswith(" stripe: and plain paths")
    assert all(name in text for name in registry.MODULES)
    with pytest.raises(UsageError, match=r"no transport faulty\+floppy"):
        open_transport("faulty+floppy://x")


def test_every_module_in_the_table_can_be_probed():
    probes = {p.scheme: p for p in probe_all()}
    assert set(probes) == set(registry.MODULES)
    libraries = ("gds", "spdk+", "nvme+rdma")  # and devices
    assert all(p.problem is None for p in probes.values() if not p.scheme.startswith(libraries))
    assert probes["file"].detail
    assert "faulty+mem" in schemes()


def test_a_backend_that_cannot_run_says_why(monkeypatch):
    monkeypatch.setattr(mem, "probe", lambda: "no memory: buy some")
    with pytest.raises(BackendMissing, match=r"mem://x: no memory: buy some"):
        open_transport("mem://x")
    assert [p.problem for p in probe_all() if p.scheme == "mem"] == ["no memory: buy some"]


def test_a_plain_path_is_literal(tmp_path):
    path = tmp_path / "odd?name=1"
    path.write_bytes(bytes(BLOCK))
    transport = open_transport(str(path))
    assert transport.nblocks == 1
    transport.close()


def test_named_memory_is_shared_and_forgotten():
    first = open_transport("mem://shared-test?size=8KiB", create=True)
    second = open_transport("mem://shared-test")
    assert second.nblocks == 2
    first.grow(5)
    assert second.nblocks == 5
    mem.forget("shared-test")
    with pytest.raises(UsageError, match="this process has no mem://shared-test; it has: "):
        open_transport("mem://shared-test")
    assert open_transport("mem://", create=True).nblocks == 0


def test_memory_grows_without_losing_data():
    store = mem.MemoryStore(3)
    store.data[: 3 * BLOCK] = 7
    for nblocks in (4, 5, 100, 50):
        store.grow(nblocks)
    assert store.nblocks == 100
    assert (store.data[: 3 * BLOCK] == 7).all()
    assert not store.data[3 * BLOCK :].any()
    with pytest.raises(UsageError, match="does not fit in memory"):
        store.grow(2**50)


def test_read_only_memory():
    open_transport("mem://ro-test?size=4096", create=True)
    transport = open_transport("mem://ro-test", writable=False)
    with pytest.raises(UsageError, match="reading only"):
        transport.grow(9)
    mem.forget("ro-test")


def test_null_options():
    assert open_transport("null://").nblocks == 2**40 // BLOCK
    assert "leave the buffer" in open_transport("null://?size=1MiB&fill=none").stats()["describe"]
    with pytest.raises(UsageError, match="zero or none"):
        open_transport("null://?fill=ones")
    with pytest.raises(UsageError, match="cannot read 'big' as a size"):
        open_transport("null://?size=big")


@pytest.mark.parametrize(
    ("text", "scheme", "path"),
    [
        ("a.vol", "file", "a.vol"), ("/x/y", "file", "/x/y"), ("file:///x", "file", "/x"),
        ("MEM://a", "mem", "a"), ("c:/x", "file", "c:/x"), ("x+y-z.1://p?a=b", "x+y-z.1", "p"),
    ],
)  # fmt: skip
def test_urls(text, scheme, path):
    url = Url(text)
    assert (url.scheme, url.path, str(url)) == (scheme, path, text)


def test_url_options_are_decoded_and_handed_on():
    url = Url("mem://n?fault=io%2Cevery=2&x=a b&size=4%26")
    assert url.take_all("fault") == ["io,every=2"]
    assert Url("mem://n" + url.rest()).take_all("size") == ["4&"]
    with pytest.raises(UsageError, match="key=value"):
        Url("mem://n?novalue")


def test_arena_is_aligned_and_untouched():
    arena = allocate_arena(5000)
    assert len(arena) == 2 * BLOCK
    assert arena.ctypes.data % (2 << 20) == 0
    assert not np.any(arena)
