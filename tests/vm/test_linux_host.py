"""Linux as NVMe host against `hyades serve`: the commands of nvme-cli, and data by fio and MD5."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.vm.linux import Linux
from tests.vm.serving import Serve

from hyades.common.units import MIB

pytestmark = pytest.mark.slow
NQN = "nqn.2024-01.org.example:served"
SIZE = 16 * MIB
DIGESTS = {
    "none": [], "header": ["--hdr-digest"], "data": ["--data-digest"],
    "both": ["--hdr-digest", "--data-digest"],
}  # fmt: skip
# One CPU gives one queue of each kind: for reads, for writes, and one that is polled.
QUEUES = ["--nr-io-queues=1", "--nr-write-queues=1", "--nr-poll-queues=1"]
INVALID_PARAMETERS, INVALID_HOST = 0x4182, 0x4184  # status and Do Not Retry
BLOCK_SIZES = {1: 4096, 2: 512}
QUEUE_OPTIONS = {1: QUEUES, 2: [*QUEUES, "--disable-sqflow", "--queue-size=16"]}


class Target:
    """A running target whose namespaces 1 and 2 are files, 3 is memory and 4 is read-only."""

    def __init__(self, folder: Path) -> None:
        self.files = {nsid: folder / f"namespace{nsid}" for nsid in (1, 2, 4)}
        for nsid, path in self.files.items():
            path.write_bytes(np.random.default_rng(nsid).bytes(SIZE))
        self.serve = Serve(
            folder, str(self.files[1]), f"{self.files[2]},block=512", "mem:4MiB",
            f"{self.files[4]},ro", nqn=NQN, options=("--listen", "127.0.0.1:0"),
        )  # fmt: skip

    def md5(self, nsid: int) -> str:
        """Return the MD5 of a namespace's file."""
        return _md5(self.files[nsid])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Give one target for all tests that do not end it."""
    found = Target(tmp_path_factory.mktemp("served"))
    with found.serve:
        yield found


def test_discover(linux: Linux, target: Target) -> None:
    addresses = target.serve.addresses()
    records = linux.discover(addresses[0])
    expected = {"subnqn": NQN, "trtype": "tcp", "adrfam": "ipv4", "subtype": "nvme subsystem"}
    assert [{key: record[key] for key in expected} for record in records] == [expected] * 2
    found = [(record["traddr"], record["trsvcid"]) for record in records]
    assert found == [(address.host, str(address.port)) for address in addresses]


def test_connect_all_follows_discovery(linux: Linux, target: Target) -> None:
    linux.machine.run(f"nvme connect-all {target.serve.address}")
    assert linux.md5(linux.device(NQN)) == target.md5(1)


def test_identify_and_logs(linux: Linux, target: Target) -> None:
    linux.connect(target.serve.address, NQN)
    linux.device(NQN, 4)
    name = f"/dev/{linux.controller(NQN)}"
    found = linux.json(f"id-ctrl {name}")
    assert found["subnqn"] == NQN
    assert found["mdts"] == 8  # 1 MiB in pages of 4096 bytes
    assert found["nn"] >= 4
    namespaces = [entry["nsid"] for entry in linux.json(f"list-ns {name}")["nsid_list"]]
    assert namespaces == [1, 2, 3, 4]
    for nsid, block in BLOCK_SIZES.items():
        space = linux.json(f"id-ns {name} --namespace-id={nsid}")
        assert space["nsze"] == space["ncap"] == SIZE // block
        assert 1 << space["lbafs"][space["flbas"] & 15]["ds"] == block
    identifiers = {linux.machine.run(f"nvme ns-descs {name} -n {n}").out for n in (1, 2, 3, 4)}
    assert len(identifiers) == 4
    linux.json(f"smart-log {name}")
    linux.json(f"error-log {name}")
    linux.json(f"fw-log {name}")
    assert linux.machine.run(f"nvme get-feature {name} --feature-id=7").out  # number of queues
    assert "cntlid" not in linux.machine.run("dmesg | tail -30").out


def test_list_subsys(linux: Linux, target: Target) -> None:
    linux.connect(target.serve.address, NQN)
    linux.device(NQN)
    text = linux.machine.run("nvme list-subsys").out
    assert f"NQN={NQN}" in text
    assert f"tcp traddr=10.0.2.2,trsvcid={target.serve.port}" in text
    assert "live" in text
    assert "disconnected 1 controller" in linux.disconnect(NQN)
    assert NQN not in linux.machine.run("nvme list-subsys").out


@pytest.mark.parametrize("nsid", BLOCK_SIZES)
@pytest.mark.parametrize("digest", DIGESTS)
def test_fio_verifies(linux: Linux, target: Target, digest: str, nsid: int) -> None:
    linux.connect(target.serve.address, NQN, *QUEUE_OPTIONS[nsid], *DIGESTS[digest])
    device = linux.device(NQN, nsid)
    assert linux.md5(device) == target.md5(nsid)
    smallest = BLOCK_SIZES[nsid]
    job = linux.fio(
        device, "--rw=randwrite", f"--bsrange={smallest}-256k", "--bs_unaligned=0",
        "--iodepth=16", "--size=8m", "--verify=crc32c", "--verify_fatal=1", "--randrepeat=1",
        f"--blockalign={smallest}",
    )  # fmt: skip
    linux.machine.run(job, timeout=200)
    linux.machine.run(f"nvme flush {device}")
    assert linux.md5(device) == target.md5(nsid)


def test_several_namespaces(linux: Linux, target: Target) -> None:
    linux.connect(target.serve.address, NQN)
    seen = {}
    for nsid in (1, 2, 3, 4):
        device = linux.device(NQN, nsid)
        script = f"blockdev --getsize64 --getss --getro {device}"
        seen[nsid] = [int(word) for word in linux.machine.run(script).out.split()]
    assert seen == {
        1: [SIZE, 4096, 0], 2: [SIZE, 512, 0], 3: [4 * MIB, 4096, 0], 4: [SIZE, 4096, 1],
    }  # fmt: skip
    assert linux.md5(linux.device(NQN, 4)) == target.md5(4)


def test_write_zeroes(linux: Linux, target: Target) -> None:
    linux.connect(target.serve.address, NQN)
    before = np.fromfile(target.files[1], np.uint8).reshape(-1, 4096)
    linux.machine.run(f"nvme write-zeroes {linux.device(NQN)} --start-block=3 --block-count=4")
    after = np.fromfile(target.files[1], np.uint8).reshape(-1, 4096)
    assert not after[3:8].any()  # the count is zero-based
    assert np.array_equal(np.delete(after, slice(3, 8), 0), np.delete(before, slice(3, 8), 0))


def test_an_idle_host_stays_connected(linux: Linux, target: Target) -> None:
    linux.connect(target.serve.address, NQN, "--keep-alive-tmo=1")
    device = linux.device(NQN)
    linux.machine.run("dmesg --clear; sleep 4")
    assert "reconnect" not in linux.machine.run("dmesg").out
    assert linux.md5(device) == target.md5(1)


def test_two_paths_to_one_device(linux: Linux, target: Target) -> None:
    """The two listeners lead to one controller each, and to the same namespaces."""
    first, second = target.serve.addresses()
    linux.connect(first, NQN)
    linux.connect(second, NQN)
    device = linux.device(NQN)
    (subsystem,) = [
        found
        for host in linux.json("list-subsys")
        for found in host["Subsystems"]
        if found["NQN"] == NQN
    ]
    ports = {path["Address"].split("trsvcid=")[1].split(",")[0] for path in subsystem["Paths"]}
    assert ports == {str(first.port), str(second.port)}
    assert {path["State"] for path in subsystem["Paths"]} == {"live"}
    assert linux.md5(device) == target.md5(1)
    assert "disconnected 2 controller" in linux.disconnect(NQN)


def test_a_name_that_is_not_served(linux: Linux, target: Target) -> None:
    refused = linux.connect(target.serve.address, f"{NQN}-not", check=False)
    assert refused.code != 0
    log = linux.machine.run("dmesg | tail -5").out
    assert f'Connect Invalid Data Parameter, subsysnqn "{NQN}-not"' in log
    assert f"ret={INVALID_PARAMETERS}" in log


def test_a_host_that_may_not_connect(linux: Linux, tmp_path: Path) -> None:
    allowed, other = "nqn.2024-01.org.example:host", "nqn.2024-01.org.example:other"
    with Serve(tmp_path, "mem:1MiB", nqn=NQN, options=("--allow-host", allowed)) as serve:
        assert linux.connect(serve.address, NQN, f"--hostnqn={other}", check=False).code != 0
        log = linux.machine.run("dmesg | tail -5").out
        assert f"not allowed, hostnqn: {other}" in log
        assert f"ret={INVALID_HOST}" in log
        linux.connect(serve.address, NQN, f"--hostnqn={allowed}")
        linux.device(NQN)


def test_the_largest_transfer_is_kept(linux: Linux, tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(np.random.default_rng(5).bytes(SIZE))
    options = ("--max-transfer", "64KiB")
    with Serve(tmp_path, str(path), nqn=NQN, options=options) as serve:
        linux.connect(serve.address, NQN)
        device = linux.device(NQN)
        queue = f"/sys/block/{Path(device).name}/queue"
        assert linux.machine.run(f"cat {queue}/max_hw_sectors_kb").out.strip() == "64"
        script = f"dd if={device} bs=4M iflag=direct status=none | md5sum"
        assert (
            linux.machine.run(script).out.split()[0] == hashlib.md5(path.read_bytes()).hexdigest()
        )
        linux.machine.run(f"dd if=/dev/urandom of={device} bs=4M count=4 oflag=direct")
        assert linux.md5(device) == _md5(path)


def test_a_killed_target_comes_back(linux: Linux, tmp_path: Path) -> None:
    """Killed twice while fio writes: what was in flight is sent again, and all of it is right."""
    path = tmp_path / "disk"
    path.write_bytes(bytes(SIZE))
    with Serve(tmp_path, str(path), nqn=NQN) as serve:
        linux.connect(
            serve.address, NQN, "--reconnect-delay=1", "--ctrl-loss-tmo=120", "--data-digest"
        )
        device = linux.device(NQN)
        job = linux.machine.start(
            linux.fio(
                device, "--rw=randwrite", "--bs=16k", "--iodepth=16", "--size=16m", "--rate=2m",
                "--verify=crc32c", "--verify_fatal=1", "--randrepeat=1",
            ),
            timeout=200,
        )  # fmt: skip
        for _ in range(2):
            _wait_for_blocks(path, _blocks_written(path) + 100)
            serve.kill()
            time.sleep(1)
            assert job.running()
            serve.start()
        job.wait()
        assert "reconnect" in linux.machine.run("dmesg").out
        assert linux.md5(device) == _md5(path)


def _blocks_written(path: Path) -> int:
    return int(np.fromfile(path, np.uint8).reshape(-1, 4096).any(axis=1).sum())


def _wait_for_blocks(path: Path, wanted: int) -> None:
    end = time.monotonic() + 60
    while _blocks_written(path) < wanted:
        assert time.monotonic() < end, "nothing is written any more"
        time.sleep(0.1)


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def test_a_cut_link_is_restored(linux: Linux, target: Target) -> None:
    linux.connect(
        target.serve.address, NQN, "--keep-alive-tmo=2", "--reconnect-delay=1",
        "--ctrl-loss-tmo=120",
    )  # fmt: skip
    device = linux.device(NQN)
    linux.machine.run("dmesg --clear")
    linux.machine.set_link(False)
    linux.machine.run("until dmesg | grep -q 'starting error recovery'; do sleep 0.2; done")
    linux.machine.set_link(True)
    linux.machine.run("until dmesg | grep -q 'Successfully reconnected'; do sleep 0.2; done")
    assert linux.md5(device) == target.md5(1)


def test_a_target_that_stops_lets_hosts_end_what_is_in_flight(linux: Linux, tmp_path: Path) -> None:
    with Serve(tmp_path, "mem:8MiB", nqn=NQN) as serve:
        linux.connect(serve.address, NQN, "--ctrl-loss-tmo=0")
        device = linux.device(NQN)
        # Once the device is gone, its name must not become a file.
        write = f"dd if=/dev/zero of={device} bs=64k oflag=direct conv=nocreat count=128"
        job = linux.machine.start(f"while {write}; do echo >> /dev/shm/rounds; done")
        linux.machine.run("until [[ -s /dev/shm/rounds ]]; do sleep 0.1; done")
        assert job.running()
        assert serve.stop() == 0
        job.wait(check=False)
        assert "Traceback" not in serve.log.read_text()
