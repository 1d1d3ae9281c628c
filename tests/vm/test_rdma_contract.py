"""The transport contract, and views, over RDMA: files of tests/contracts in the guest."""

import pytest
from tests.vm import rdma
from tests.vm.machine import Machine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(560)]
# Namespaces in files differ in the target's part only: the tests that move data are enough.
_SOME = "TestMemory or write_then_read or whole_batch or queue_holds or close or flush"


def test_the_contract_suite(machine: Machine) -> None:
    rdma.prepare(machine)
    last = rdma.run_tests(
        machine, "tests/contracts/test_rdma_transport.py", "-k", _SOME, timeout=500
    )
    assert "passed" in last
    assert "skipped" not in last


def test_views_that_a_host_asks_for(machine: Machine) -> None:
    rdma.prepare(machine)
    last = rdma.run_tests(machine, "tests/contracts/test_rdma_views.py", timeout=500)
    assert "passed" in last
    assert "skipped" not in last
