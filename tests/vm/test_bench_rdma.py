"""The rows of `hyades bench transports` that need an RDMA device, in the guest.

Nothing is asserted of their seconds: the software device moves tens of MB/s, and so does the guest.
"""

import json
import os
import subprocess
import sys

import pytest
from tests.vm import rdma
from tests.vm.kernel import ROOT
from tests.vm.machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]

_BENCH = (
    "-m", "hyades.deploy.cli", "bench", "transports", "--shape", "mag", "--scale", "0.001",
    "--fanout", "2,2", "--type", "float16", "--no-project", "--no-compute", "--repeat", "1",
)  # fmt: skip


def test_rows_over_rdma(machine: Machine) -> None:
    rdma.prepare(machine)
    env, out = rdma.warm(machine.folder), str(machine.folder / "bench")
    # The same over shared memory, here: graph, volume and compiled kernels are there then.
    here = [sys.executable, *_BENCH, "--only", "dma", "--out", out]
    subprocess.run(here, cwd=ROOT, env=os.environ | env, check=True, timeout=250)
    there = f"{sys.executable} {' '.join(_BENCH)} --only nvme+rdma --rdma {rdma.HOST} --out {out}"
    machine.run(there, timeout=500, check=True, **env)
    rows = json.loads((machine.folder / "bench" / "transports.json").read_text())["rows"]
    assert {row["transport"] for row in rows} == {"nvme+rdma"}
    assert not any(row["reason"] for row in rows)
    for row in rows:
        assert row["rows"] == row["predicted_rows"]
        assert row["readings"][0]["payload"] > 0
    by = {(tuple(r["case"]["fanouts"]), r["case"]["encoding"], r["case"]["sampled"]): r
          for r in rows if not r["case"]["root"]}  # fmt: skip
    full, half = by[(-1, -1), "float32", False], by[(-1, -1), "float16", False]
    assert half["readings"][0]["payload"] < 0.6 * full["readings"][0]["payload"]
    assert by[(2, 2), "float32", True]["rows"] < full["rows"]
