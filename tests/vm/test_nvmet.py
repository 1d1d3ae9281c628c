"""The initiator against the kernel's target (nvmet-tcp) in the guest."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.contracts.transport import BLOCKS, TransportContract, finish, request
from tests.vm.conftest import Guest
from tests.vm.linux import NVMET, Linux

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, Op, Status
from hyades.common.units import MIB
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport
from hyades.proxy.transport import Transport

pytestmark = pytest.mark.slow
NQN = "nqn.2024-01.org.example:nvmet"
SIZES = {1: BLOCKS * BLOCK, 2: 16 * MIB, 3: 8 * MIB}
DIGESTS = ["none", "header", "data", "header,data"]


class Nvmet:
    """Files in the guest's memory as namespaces of a kernel target that the host can reach."""

    def __init__(self, linux: Linux) -> None:
        self.linux = linux
        for nsid, nbytes in SIZES.items():
            linux.machine.run(f"truncate --size={nbytes} {self.path(nsid)}")
        linux.export(NQN, {nsid: self.path(nsid) for nsid in SIZES}, port=4420)
        self.port = linux.machine.forward(4420)

    def path(self, nsid: int) -> str:
        """Return where a namespace lies in the guest."""
        return f"/dev/shm/namespace{nsid}"

    def open(self, nsid: int, **options: object) -> Transport:
        """Return the initiator's end."""
        text = "".join(f"&{key}={value}" for key, value in options.items())
        return open_transport(f"nvme+tcp://127.0.0.1:{self.port}/{NQN}?ns={nsid}{text}")


@pytest.fixture(scope="module")
def nvmet(guest: Guest) -> Iterator[Nvmet]:
    """Give one target for all tests of this file."""
    linux = Linux(guest.machine())
    yield Nvmet(linux)
    linux.clean()


def move(device: Transport, op: Op, lba: int, nbytes: int, *, piece: int) -> dict[int, int]:
    """Read or write a range in pieces, all queued at once, at the same place of the arena."""
    batch = [
        request(op, lba + at // BLOCK, offset=at, nbytes=min(piece, nbytes - at), cookie=at)
        for at in range(0, nbytes, piece)
    ]
    return {cookie: status for cookie, (status, _) in finish(device, np.concatenate(batch)).items()}


@pytest.mark.parametrize("digest", DIGESTS)
def test_both_sides_see_the_same_bytes(nvmet: Nvmet, digest: str) -> None:
    nbytes = SIZES[2]
    data = np.random.default_rng(len(digest)).integers(0, 256, nbytes, np.uint8)
    device = nvmet.open(2, digest=digest, queues=4)
    try:
        assert device.nblocks == nbytes // BLOCK
        arena = allocate_arena(nbytes)
        device.register(arena)
        arena[:] = data
        for piece in (4 * BLOCK, MIB):
            assert set(move(device, Op.WRITE, 0, nbytes, piece=piece).values()) == {Status.OK}
        assert finish(device, request(Op.FLUSH)) == {0: (Status.OK, 0)}
        (nvmet.linux.machine.folder / "expected").write_bytes(data.tobytes())
        nvmet.linux.machine.run(f"cmp {nvmet.path(2)} {nvmet.linux.machine.folder}/expected")

        nvmet.linux.machine.run(f"head -c {nbytes} /dev/urandom > {nvmet.path(2)}")
        assert set(move(device, Op.READ, 0, nbytes, piece=MIB).values()) == {Status.OK}
        path = nvmet.linux.machine.folder / "read"
        path.write_bytes(arena.tobytes())
        nvmet.linux.machine.run(f"cmp {nvmet.path(2)} {path}")
    finally:
        device.close()


def test_the_kernel_granted_the_queues(nvmet: Nvmet) -> None:
    with_four = nvmet.open(2, queues=4)
    try:
        established = "grep -c ':1144 .* 01 ' /proc/net/tcp"
        assert nvmet.linux.machine.run(established).out.strip() == "5"  # and the admin queue
    finally:
        with_four.close()


def test_namespaces_do_not_mix(nvmet: Nvmet) -> None:
    for nsid in (2, 3):
        device = nvmet.open(nsid)
        arena = allocate_arena(BLOCK)
        device.register(arena)
        arena[:] = nsid
        assert finish(device, request(Op.WRITE, 1)) == {0: (Status.OK, BLOCK)}
        device.close()
    for nsid in (2, 3):
        script = f"od -An -tu1 -j{BLOCK} -N1 {nvmet.path(nsid)}"
        assert nvmet.linux.machine.run(script).out.strip() == str(nsid)


@pytest.mark.parametrize(
    ("nqn", "nsid"), [(NQN, 9), ("nqn.2024-01.org.example:absent", 1)], ids=["namespace", "name"]
)
def test_what_is_absent_is_named(nvmet: Nvmet, nqn: str, nsid: int) -> None:
    # A name that is absent comes with those that the kernel's discovery log has.
    wanted = f"{NQN}.* {nsid}" if nqn == NQN else rf"{nqn}(?s:.*){NQN}"
    with pytest.raises(UsageError, match=wanted):
        open_transport(f"nvme+tcp://127.0.0.1:{nvmet.port}/{nqn}?ns={nsid}&ctrl_loss_timeout=1")


def check_writes(device: Transport, interrupt: Callable[[], object]) -> None:
    """Write until *interrupt* has returned and a little longer, then read all of it back."""
    blocks = SIZES[2] // BLOCK
    arena = allocate_arena(2 * blocks * BLOCK)
    device.register(arena)
    rows = arena.reshape(-1, BLOCK)
    cutting = threading.Thread(target=interrupt)
    cutting.start()
    rounds, more = 0, 3
    while more:
        more -= not cutting.is_alive()
        rounds += 1
        rows[:blocks] = np.random.default_rng(rounds).integers(0, 256, (blocks, BLOCK), np.uint8)
        assert set(move(device, Op.WRITE, 0, blocks * BLOCK, piece=MIB).values()) == {Status.OK}
    cutting.join()
    rows[blocks:] = 0
    read = np.concatenate(
        [request(Op.READ, b, 16, (blocks + b) * BLOCK, b) for b in range(0, blocks, 16)]
    )
    assert {status for status, _ in finish(device, read).values()} == {Status.OK}
    assert np.array_equal(rows[:blocks], rows[blocks:])


def test_a_port_that_goes_and_comes_back(nvmet: Nvmet) -> None:
    """The kernel ends every association of the port; the initiator goes on when it is back."""
    link = f"{NVMET}/ports/4420/subsystems/{NQN}"
    script = f"sleep 0.5; rm {link}; sleep 1; ln -s {NVMET}/subsystems/{NQN} {link}"
    device = nvmet.open(2, digest="data")
    try:
        check_writes(device, lambda: nvmet.linux.machine.run(script))
        assert device.stats()["reconnects"] >= 1
    finally:
        device.close()


def test_a_link_that_is_cut(nvmet: Nvmet) -> None:
    """Nothing ends the connections: only keep-alive and time limits notice."""

    def cut() -> None:
        time.sleep(0.5)
        nvmet.linux.machine.set_link(False)
        time.sleep(4)
        nvmet.linux.machine.set_link(True)

    device = nvmet.open(2, kato=1, timeout=1)
    try:
        check_writes(device, cut)
        assert device.stats()["reconnects"] >= 1
    finally:
        device.close()


class NvmetContract(TransportContract):
    """Every test takes namespace 1, of BLOCKS blocks, after filling it with zeros."""

    fixed_size = True
    digest = "none"

    @pytest.fixture(autouse=True)
    def _target(self, nvmet: Nvmet) -> None:
        self.nvmet = nvmet

    def make(self, folder: Path, nblocks: int) -> Transport:
        assert nblocks == BLOCKS
        device = self.nvmet.open(1)
        device.register(allocate_arena(BLOCKS * BLOCK))
        assert finish(device, request(Op.WRITE, 0, BLOCKS)) == {0: (Status.OK, BLOCKS * BLOCK)}
        device.close()
        return self.nvmet.open(1, digest=self.digest)

    def test_longer_than_max_transfer(self, tmp_path: Path) -> None:
        device = self.nvmet.open(2, digest=self.digest)
        limit = device.limits.max_transfer
        device.register(allocate_arena(limit + BLOCK))
        assert finish(device, request(Op.READ, nbytes=limit, cookie=1))[1] == (0, limit)
        assert finish(device, request(Op.READ, nbytes=limit + BLOCK, cookie=2))[2][0] == -7
        device.close()


class TestNvmet(NvmetContract):
    pass


class TestNvmetWithDigests(NvmetContract):
    digest = "header,data"
