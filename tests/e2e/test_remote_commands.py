"""The commands with volumes on other hosts, over nvme+tcp: ingest, refresh, export, inspect."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.reference import nvme
from tests.reference.runs import WIDTH, three_layers

from hyades.common.units import MIB
from hyades.deploy.cli import cli
from hyades.proxy.transports import nvme_tcp
from hyades.target_side.namespaces import MemoryNamespace
from hyades.target_side.server import Server

pytestmark = pytest.mark.timeout(200)


def hyades_(*arguments: Any, code: int = 0) -> str:
    """Run the command line; return what it says."""
    result = CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="hyades")
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Give two hosts with a blank namespace each."""
    with nvme.stopped_at_end() as servers:
        servers += [nvme.start({1: MemoryNamespace(32 * MIB)}) for _ in range(2)]
        yield servers


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """Write a graph and a model; return the options of an ingest."""
    monkeypatch.chdir(tmp_path)
    random = np.random.default_rng(3)
    np.save("e.npy", random.integers(0, 800, (2, 4000)))
    np.save("x.npy", random.standard_normal((800, WIDTH), np.float32))
    torch.save(three_layers("sage").state_dict(), "model.pt")
    return ("ingest", "--edges", "e.npy", "--features", "x.npy")


def embed(volume: str, file: str, *options: Any, outputs: str = "") -> bytes:
    """Refresh *volume* and return the exported rows."""
    there = ("--output-volume", outputs) if outputs else ()
    command = ("refresh", volume, "--model", "model.pt", "--out", "x", "--no-report")
    assert "x: 800 rows" in hyades_(*command, *there, *options)
    hyades_("export", outputs or volume, "x", file)
    return Path(file).read_bytes()


def test_one_host_two_hosts_and_outputs_elsewhere(
    servers: list[Server], inputs: tuple[Any, ...]
) -> None:
    hyades_(*inputs, "local.vol")
    local = embed("local.vol", "local.npy")

    one, two = (nvme.url(server) for server in servers)
    hyades_(*inputs, one)
    assert embed(one, "one.npy") == local
    assert embed(one, "elsewhere.npy", outputs=two) == local
    assert f"outputs of {one}" in hyades_("inspect", two)

    hyades_(*inputs, "--stripe", f"{one},{two}", "--force")
    assert embed(f"stripe:{two},{one}", "striped.npy") == local
    hyades_("inspect", f"stripe:{one},{two}", "--verify")


def test_how_long_a_refresh_waits(
    servers: list[Server], inputs: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flag reaches every member, and the outputs; what a URL says itself is kept."""
    one, two = (nvme.url(server) for server in servers)
    hyades_(*inputs, f"stripe:{one}")
    seen: dict[int, set[float]] = {}
    inner = nvme_tcp.parse

    def parse(*arguments: Any) -> Any:
        options = inner(*arguments)
        seen.setdefault(options.addresses[0].port, set()).add(options.ctrl_loss_timeout)
        return options

    monkeypatch.setattr(nvme_tcp, "parse", parse)
    embed(
        f"stripe:{one}", "a.npy", "--ctrl-loss-timeout", 7.5, outputs=f"{two}&ctrl_loss_timeout=9"
    )
    ports = [server.addresses[0][1] for server in servers]
    assert seen[ports[0]] == {7.5}
    assert 9.0 in seen[ports[1]]
    assert 7.5 not in seen[ports[1]]
