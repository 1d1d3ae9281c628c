"""Keys that are not valid, missing receives, peers that vanish: tests/faults in the guest."""

import pytest
from tests.vm import rdma
from tests.vm.machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]


def test_what_goes_wrong(machine: Machine) -> None:
    rdma.prepare(machine)
    last = rdma.run_tests(machine, "tests/faults/test_rdma_faults.py")
    assert "passed" in last
    assert "skipped" not in last
