"""Stripes beyond the contract: order of flushes, errors, places, labels, locks."""

import shutil
import time

import numpy as np
import pytest
from tests.contracts.transport import finish, request

import hyades
from hyades.common.errors import DataError, UsageError
from hyades.common.layout import BLOCK, COMPLETION, Op, Status
from hyades.common.volume import Volume
from hyades.deploy.volumes import new_in_place, open_device
from hyades.proxy.arena import allocate_arena
from hyades.proxy.locate import flush_failure, locate, patience
from hyades.proxy.registry import open_transport
from hyades.proxy.stripes import split_members
from hyades.proxy.transports.faulty import Fault, FaultPlan, FaultyTransport
from hyades.proxy.transports.mem import MemoryStore, MemTransport
from hyades.proxy.transports.stripe import StripeTransport
from hyades.proxy.urls import Url

UNIT = 4


def stripe(*plans, unit=UNIT, blocks=32):
    """Return a stripe of faulty memory devices with an arena, and the arena."""
    members = [FaultyTransport(MemTransport(MemoryStore(blocks)), plan) for plan in plans]
    names = [f"dev{i}" for i in range(len(plans))]
    device = StripeTransport(members, names, unit * BLOCK)
    arena = allocate_arena(64 * BLOCK)
    device.register(arena)
    return device, arena


class Recorder(MemTransport):
    """A memory device that writes down what it is given and what it has run."""

    def __init__(self, log, index):
        super().__init__(MemoryStore(64))
        self.log, self.index, self.stopped = log, index, False

    def submit(self, requests):
        taken = super().submit(requests)
        self.log += [(self.index, "given", int(op)) for op in requests["op"][:taken]]
        return taken

    def poll(self, completions):
        if self.stopped:
            return 0
        return super().poll(completions)


def test_a_flush_goes_to_every_member_and_waits_for_all():
    log = []
    members = [Recorder(log, i) for i in range(3)]
    device = StripeTransport(members, ["a", "b", "c"], UNIT * BLOCK)
    device.register(allocate_arena(64 * BLOCK))
    assert finish(device, request(Op.WRITE, 2, 8, 0, 1))[1] == (0, 8 * BLOCK)
    log.clear()
    members[1].stopped = True
    assert device.submit(request(Op.FLUSH, cookie=9)) == 1
    assert sorted(log) == [(i, "given", Op.FLUSH) for i in range(3)]
    out = np.zeros(4, COMPLETION)
    for _ in range(3):
        device.wait(0.001)
        assert device.poll(out) == 0
    members[1].stopped = False
    assert device.poll(out) == 1
    assert (out["cookie"][0], out["status"][0]) == (9, Status.OK)


def test_a_flush_that_fails_at_one_member_fails():
    device, _ = stripe(FaultPlan(), FaultPlan([Fault("io", op=Op.FLUSH)]))
    assert finish(device, request(Op.FLUSH, cookie=1))[1] == (Status.IO, 0)


@pytest.mark.parametrize("late", [0, 1])
def test_of_several_failing_pieces_the_first_is_reported(late):
    """Whichever member answers first."""
    delays = [0.02 if i == late else 0.0 for i in range(2)]
    kinds = ["nospace", "io"]
    plans = [FaultPlan([Fault(k)], delay=d) for k, d in zip(kinds, delays, strict=True)]
    device, _ = stripe(*plans)
    for _ in range(5):
        assert finish(device, request(Op.WRITE, 2, 8, 0, 5))[5] == (Status.NO_SPACE, 0)
        assert finish(device, request(Op.WRITE, 6, 4, 0, 5))[5] == (Status.IO, 0)
        assert finish(device, request(Op.WRITE, 4, 4, 0, 5))[5] == (Status.IO, 0)
    assert device.stats()["errors"] == 15
    assert device.stats()["bytes_written"] == 0


def test_where_a_failure_lies():
    """Block 13 of the set: unit 3, so the second unit of member 1 behind its label."""
    fault = Fault("io", lbas=(2 * UNIT + 1, 2 * UNIT + 2))
    device, _ = stripe(FaultPlan(), FaultPlan([fault]))
    finish(device, request(Op.READ, 0, 8))
    assert locate(device, 0, 24) == f"member 0: dev0 LBA {UNIT}"
    assert finish(device, request(Op.READ, 0, 24))[0][0] == Status.IO
    assert locate(device, 0, 24) == f"member 1: dev1 LBA {2 * UNIT}"
    assert locate(device, 13, 1) == f"member 1: dev1 LBA {2 * UNIT + 1}"
    assert locate(device, 0, 8) == f"member 0: dev0 LBA {UNIT}"
    device.members[1].locate = lambda lba: f"target t ns 1 LBA {lba}"
    device.members[1].failed_lba = lambda lba, nblocks: lba + min(1, nblocks - 1)
    assert locate(device, 0, 24) == f"member 1: target t ns 1 LBA {2 * UNIT + 1}"


def test_what_members_know_is_passed_on():
    device, _ = stripe(FaultPlan(), FaultPlan())
    assert flush_failure(device) == ""
    assert patience(device, 7.0) == 7.0
    device.members[1].inner.flush_failure = lambda: "the target was away"
    device.members[1].inner.patience = 90.0
    assert flush_failure(device) == "the target was away"
    assert patience(device, 7.0) == 90.0


def test_only_the_last_failures_are_kept():
    device, _ = stripe(FaultPlan([Fault("io")]), FaultPlan([Fault("io")]), blocks=400)
    for lba in range(200):
        finish(device, request(Op.READ, lba))
    assert device.failed_lba(196, 8) == 199
    assert device.failed_lba(0, 100) == 0


def test_waiting_for_several_members_ends_with_the_first():
    device, _ = stripe(FaultPlan(delay=0.001), FaultPlan(delay=30.0))
    device.submit(request(Op.READ, 0, 1, 0, 1))
    device.submit(request(Op.READ, 4, 1, BLOCK, 2))
    out = np.zeros(4, COMPLETION)
    begin = time.monotonic()
    while not device.poll(out):
        device.wait(10)
        assert time.monotonic() - begin < 20
    assert out["cookie"][0] == 1
    device.close()
    assert device.poll(out) == 1
    assert out["cookie"][0] == 2


def test_a_member_that_closes_badly_does_not_keep_the_others_open():
    device, _ = stripe(FaultPlan(), FaultPlan())

    def fail():
        raise OSError("stuck")

    device.members[0].close = fail
    with pytest.raises(OSError, match="stuck"):
        device.close()
    with pytest.raises(UsageError, match="closed"):
        device.members[1].submit(request(Op.READ))


# -- URLs


@pytest.mark.parametrize(
    ("text", "members", "unit"),
    [
        ("/a,/b", ["/a", "/b"], None),
        ("/a,./b,../c", ["/a", "./b", "../c"], None),
        ("unit=64KiB,/a,mem://x", ["/a", "mem://x"], 65536),
        (
            "nvme+tcp://h:1/n?digest=header,data&ns=2,nvme+tcp://g:1/n?digest=header,data,blk:/dev/x",
            ["nvme+tcp://h:1/n?digest=header,data&ns=2", "nvme+tcp://g:1/n?digest=header,data",
             "blk:/dev/x"],
            None,
        ),
        (
            "faulty+file:///a?fault=io,op=read,lba=1-2,/b",
            ["faulty+file:///a?fault=io,op=read,lba=1-2", "/b"], None,
        ),
        ("nvme+tcp://[::1]:4420/n,/b", ["nvme+tcp://[::1]:4420/n", "/b"], None),
    ],
)  # fmt: skip
def test_members_of_a_url(text, members, unit):
    assert split_members(Url(f"stripe:{text}")) == (tuple(members), unit)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name 1 to 64 members"),
        ("a,b", r"names one member, 'a,b': write relative paths as \./name"),
        ("unit=5000,/a", "no multiple of 4096"),
        ("unit=2GiB,/a", "no multiple of 4096 bytes up to 1.0 GiB"),
        ("/a,stripe:/b", "a stripe cannot be the member of a stripe"),
        (",".join(f"/m{i}" for i in range(65)), "1 to 64"),
    ],
)
def test_urls_that_mean_nothing(text, words):
    with pytest.raises(UsageError, match=words):
        split_members(Url(f"stripe:{text}"))


# -- labels


@pytest.fixture
def made(tmp_path):
    """Return the paths of a stripe of three files, with a volume in it."""
    paths = [tmp_path / name for name in "abc"]
    url = "stripe:unit=16KiB," + ",".join(map(str, paths))
    with new_in_place(url, 1 << 16, force=False) as volume:
        volume.write_table("t", np.arange(100_000))
    return paths


def name(*paths):
    return "stripe:" + ",".join(map(str, paths))


def test_members_in_any_order(made):
    a, b, c = made
    for order in ((a, b, c), (c, a, b), (b, a, c)):
        with hyades.open(name(*order)) as opened:
            assert np.array_equal(opened.volume.read_table("t"), np.arange(100_000))
    with pytest.raises(UsageError, match=r"this stripe has units of 16\.0 KiB: leave unit= out"):
        hyades.open(f"stripe:unit=4KiB,{a},{b},{c}")


def test_what_is_no_set(made, tmp_path):
    a, b, c = made
    with pytest.raises(DataError, match=f"^{a} belongs to a stripe of 3 members, 2 are named: mem"):
        hyades.open(name(a, c))
    shutil.copy(a, tmp_path / "copy")
    with pytest.raises(DataError, match=r"copy and .*/a are both member 0 .*leave it out"):
        hyades.open(name(a, b, tmp_path / "copy"))
    other = [tmp_path / "x", tmp_path / "y", tmp_path / "z"]
    with new_in_place(name(*other), 1 << 16, force=False):
        pass
    with pytest.raises(DataError, match=f"^{other[2]} belongs to stripe .*, {a} to stripe"):
        hyades.open(name(a, b, other[2]))
    (tmp_path / "blank").write_bytes(bytes(1 << 20))
    with pytest.raises(DataError, match=r"blank is blank, it has no label; name the members"):
        hyades.open(name(a, b, tmp_path / "blank"))
    data = bytearray(c.read_bytes())
    data[40] ^= 1
    c.write_bytes(data)
    with pytest.raises(DataError, match=f"^{c} has a damaged label: its CRC32C"):
        hyades.open(name(a, b, c))


def test_a_member_alone_is_explained(made):
    with pytest.raises(DataError, match=r"belongs to a stripe: name all its members, stripe:URL"):
        hyades.open(made[0])


def test_the_smallest_member_bounds_the_set(made):
    a, b, c = made
    device = open_transport(name(a, b, c), writable=False)
    before = device.nblocks
    device.close()
    with b.open("r+b") as file:
        file.truncate(b.stat().st_size // 2 // BLOCK * BLOCK)
    device = open_transport(name(a, b, c), writable=False)
    assert device.nblocks < before
    device.close()
    with pytest.raises(DataError, match="it is truncated"):
        hyades.open(name(a, b, c))


def test_labelled_or_other_data_is_not_overwritten_without_force(made, tmp_path):
    a, b, _ = made
    with (
        pytest.raises(DataError, match="3 members, 2 are named"),
        new_in_place(name(a, b), 1 << 16, force=False),
    ):
        pass
    with new_in_place(name(a, b), 1 << 16, force=True) as volume:
        first = volume.uuid
    with hyades.open(name(b, a)) as opened:
        assert opened.volume.uuid == first


def test_what_fails_leaves_nothing(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    b.write_bytes(bytes(1 << 20))  # a blank device that was there
    with pytest.raises(ZeroDivisionError), new_in_place(name(a, b), 1 << 16, force=False):
        raise ZeroDivisionError
    assert not a.exists()
    assert not any(b.read_bytes())


# -- locks


def test_two_writers_are_refused(made):
    a, b, c = made
    with hyades.open(name(a, b, c), writable=True):
        for url in (name(a, b, c), name(c, b, a), str(b)):
            with pytest.raises(UsageError, match="is being used by process"):
                hyades.open(url, writable=True)
        with pytest.raises(UsageError, match="is being written by process"):
            hyades.open(name(a, b, c))
    with (
        hyades.open(name(a, b, c)), hyades.open(name(b, a, c)),
        pytest.raises(UsageError, match="is being used by"),
    ):  # fmt: skip
        hyades.open(name(a, b, c), writable=True)
    with pytest.raises(DataError):
        hyades.open(name(a, b))
    open_device(name(a, b, c), writable=True).close()  # what could not be opened holds no lock


def test_a_member_of_a_fixed_size_that_is_full(tmp_path):
    small = FaultyTransport(MemTransport(MemoryStore(8)), FaultPlan())

    def grow(nblocks):
        raise UsageError(f"a namespace of 32 KiB; {nblocks} blocks are needed: use a larger one")

    small.grow = grow
    device = StripeTransport([MemTransport(MemoryStore(8)), small], ["a", "b"], UNIT * BLOCK)
    assert device.nblocks == 8
    with pytest.raises(UsageError, match=r"member 1 of the stripe, b: .* use a larger one"):
        device.grow(9 + UNIT)


def test_a_volume_survives_odd_units_and_growth(tmp_path):
    url = f"stripe:unit=12KiB,{tmp_path}/a,{tmp_path}/b"
    random = np.random.default_rng(0)
    expected = {}
    with new_in_place(url, 1 << 16, force=False) as volume:
        for i in range(6):
            expected[f"t{i}"] = random.integers(0, 1 << 60, int(random.integers(1, 60_000)))
            volume.write_table(f"t{i}", expected[f"t{i}"])
            if i % 2:
                volume.commit()
    with hyades.open(url) as opened:
        assert isinstance(opened.volume, Volume)
        assert list(opened.volume.verify()) == []
        for key, table in expected.items():
            assert np.array_equal(opened.volume.read_table(key), table)
