"""Linux reads views: over TCP from the host, over RDMA in the guest, and one that it asks for."""

import hashlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.reference.view_host import SAMPLE, made_here, write_volume
from tests.vm import rdma
from tests.vm.kernel import ROOT
from tests.vm.linux import Linux
from tests.vm.machine import Machine
from tests.vm.serving import Serve

from hyades.common.nvme.vendor import ViewRequest, build_request

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
NQN = "nqn.2024-01.org.example:views"
VIEWS = {2: ViewRequest("features", "float16"), 3: ViewRequest("features", "int8", 256 << 10)}
FLAGS = ("--view", "features:float16", "--view", "features:int8,page=256KiB")
ASKED = ViewRequest("features", "bfloat16", sample=SAMPLE)
# Compiles, on the host, the kernels that make a view.
_WARM = """
import sys
from tests.reference.view_host import HALF, made_here
made_here(sys.argv[1], HALF)
"""


def md5(path: Path, what: ViewRequest) -> str:
    """Return the MD5 of a view, made here."""
    return hashlib.md5(made_here(path, what)).hexdigest()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serve, Path]]:
    """Give a target on the host with two views for everyone, and its volume."""
    folder = tmp_path_factory.mktemp("views")
    path = write_volume(folder / "g.vol")
    with Serve(folder, f"{path},ro", nqn=NQN, options=FLAGS) as serve:
        yield serve, path


def test_linux_reads_views_over_tcp(linux: Linux, served: tuple[Serve, Path]) -> None:
    serve, path = served
    linux.connect(serve.address, NQN, "--data-digest")
    assert linux.md5(linux.device(NQN)) == hashlib.md5(path.read_bytes()).hexdigest()
    for nsid, what in VIEWS.items():
        device = linux.device(NQN, nsid)
        assert linux.md5(device) == md5(path, what)
        assert linux.machine.run(f"blockdev --getro {device}").out.strip() == "1"


def test_linux_asks_for_a_view(linux: Linux, served: tuple[Serve, Path]) -> None:
    """The commands of docs/interop.md."""
    serve, path = served
    linux.connect(serve.address, NQN)
    linux.device(NQN, 3)
    name = f"/dev/{linux.controller(NQN)}"
    data = build_request(ASKED)
    (linux.machine.folder / "request").write_bytes(data)
    dwords = len(data) // 4
    answer = linux.machine.run(
        f"nvme admin-passthru {name} --opcode=0xc1 --namespace-id=1 --write"
        f" --data-len={len(data)} --input-file={linux.machine.folder}/request"
        f" --cdw10={dwords} --cdw11=0 --cdw12={dwords} 2>&1"
    ).out
    found = re.search(r"result: ?(?:0x)?([0-9a-f]+)", answer)
    assert found is not None, answer
    assert int(found[1], 16) == 4
    linux.machine.run(f"nvme ns-rescan {name}")
    assert linux.md5(linux.device(NQN, 4)) == md5(path, ASKED)
    linux.machine.run(f"nvme admin-passthru {name} --opcode=0xc0 --namespace-id=4")
    linux.machine.run(f"nvme ns-rescan {name}")
    listed = linux.json(f"list-ns {name}")["nsid_list"]
    assert [entry["nsid"] for entry in listed] == [1, 2, 3]
    refused = linux.machine.run(
        f"nvme admin-passthru {name} --opcode=0xc0 --namespace-id=4 2>&1", check=False
    )
    assert refused.code != 0
    assert "400b" in refused.out  # Invalid Namespace or Format, Do Not Retry


def test_a_killed_target_has_the_same_views_again(linux: Linux, served: tuple[Serve, Path]) -> None:
    serve, path = served
    linux.connect(serve.address, NQN, "--reconnect-delay=1", "--ctrl-loss-tmo=120")
    device, expected = linux.device(NQN, 2), md5(path, VIEWS[2])
    linux.machine.run("dmesg --clear")
    serve.kill()
    read = linux.machine.start(
        f"dd if={device} bs=16k iflag=direct status=none | md5sum", timeout=120
    )
    linux.machine.run("until dmesg | grep -q Reconnecting; do sleep 0.2; done", timeout=60)
    assert read.running()
    serve.start()
    assert read.wait().out.split()[0] == expected


def test_linux_reads_views_over_rdma(linux: Linux, machine: Machine, tmp_path: Path) -> None:
    """Kernel nvme-rdma; the target computes the view in the guest, too."""
    rdma.prepare(machine)
    path = write_volume(tmp_path / "g.vol")
    env = rdma.warm(machine.folder)
    subprocess.run(
        [sys.executable, "-c", _WARM, str(path)], cwd=ROOT, env=os.environ | env, check=True,
        timeout=200,
    )  # fmt: skip
    (machine.folder / "view.vol").write_bytes(path.read_bytes())
    ready, volume = "/dev/shm/serving", "/dev/shm/g.vol"
    machine.run(f"cp {machine.folder}/view.vol {volume}")
    job = machine.start(
        f"exec {sys.executable} -m hyades.deploy.cli serve -n {volume},ro {' '.join(FLAGS)}"
        f" --nqn {NQN}-rdma --listen rdma:{rdma.HOST}:{rdma.PORT} --allow-any-host"
        f" --ready-file {ready}", timeout=400, **env,
    )  # fmt: skip
    machine.run(f"until [ -e {ready} ]; do sleep 0.2; done", timeout=300)
    machine.run(
        f"nvme connect --transport=rdma --traddr={rdma.HOST} --trsvcid={rdma.PORT}"
        f" --nqn={NQN}-rdma --nr-io-queues=1"
    )
    for nsid, what in VIEWS.items():
        assert linux.md5(linux.device(f"{NQN}-rdma", nsid)) == md5(path, what)
    linux.disconnect(f"{NQN}-rdma")
    job.signal(signal.SIGTERM)
    assert job.wait(check=False).code == 0
