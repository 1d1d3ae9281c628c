import json
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from hyades.common.units import GIB, MIB
from hyades.deploy.bench import systems
from hyades.deploy.bench.eviction import Topology
from hyades.deploy.bench.graphs import GraphSpec, write_graph
from hyades.deploy.bench.peers_venv import peers_ready
from hyades.deploy.bench.planned import ORDERS, HyadesPlanner
from hyades.deploy.bench.runner import run_case
from hyades.deploy.bench.systems import PROCESS_BYTES, Case, Hyades, HyadesInMemory, Peer, Workplace
from hyades.deploy.bench.weights import ModelSpec
from hyades.deploy.commands.bench import command as bench

TOY = Case("toy", ModelSpec("sage", (24, 16, 16)))


@pytest.mark.slow
def test_hyades_and_a_peer_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systems, "peers_ready", lambda _: None)
    own = [Hyades(GIB, cold=False), HyadesInMemory(GIB, cold=False)]
    # The tests' own environment has PyG and can stand in for that of the peers.
    peer = Peer("pyg-full-csr", Path(sys.prefix))
    rows = run_case(TOY, [*own, peer], Workplace(tmp_path), repeat=1, cold=False)
    assert [(row.system, row.median.measured.detail) for row in rows] == [
        ("hyades", ""), ("hyades-mem", ""), ("pyg-full-csr", ""),
    ]  # fmt: skip
    hyades, in_memory, pyg = rows
    assert pyg.sample is not None
    assert hyades.sample is not None
    assert pyg.sample.shape == hyades.sample.shape == (3000, 16)
    assert max(pyg.difference or 0, hyades.difference or 0) < 1e-5
    assert in_memory.sample is None
    assert in_memory.prepared == hyades.prepared  # one ingest serves both
    detail = hyades.median.detail
    assert detail is not None
    assert detail.planned_read
    assert "plan resident" in detail.notes
    assert 0 < detail.seconds < hyades.median.measured.wall_s
    assert in_memory.median.detail is not None
    assert in_memory.median.detail.planned_read == detail.planned_read


def test_the_budget_in_a_limit_leaves_room_for_the_process() -> None:
    own = Hyades(2 * GIB)
    assert own.budget(TOY) == 2 * GIB
    limited = Case("toy", TOY.model, GIB)
    assert own.budget(limited) == GIB - PROCESS_BYTES
    assert own.obstacle(limited) is None
    small = Case("toy", TOY.model, 128 * MIB)
    assert "128 MiB are less than" in (own.obstacle(small) or "")


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> HyadesPlanner:
    folder = tmp_path_factory.mktemp("planned")
    files = write_graph(GraphSpec(3000, 8, 1, shuffled=True), folder / "graph")
    return HyadesPlanner(files, folder, 32, 64)


def topology(planner: HyadesPlanner, name: str) -> Topology:
    reorder = planner.orders((name,))[name]
    empty = np.zeros(0, np.int64)
    order = np.arange(3000) if reorder is None else reorder(empty, empty.astype(np.int32))
    return Topology(name, empty, empty.astype(np.int32), order)


@pytest.mark.parametrize("name", ORDERS)
def test_every_order_is_planned(planner: HyadesPlanner, name: str) -> None:
    graph = topology(planner, name)
    assert np.array_equal(np.sort(graph.order), np.arange(3000))
    states = 3000 * 32 * 4
    moved = {}
    for fraction in (16, 4, 2):
        rows = planner(graph, states // fraction)
        kinds = [plan.partition(":")[0] for plan, _, _ in rows]
        assert kinds in (["passes", "log"], ["passes"])
        passes, read, written = rows[0]
        # P passes read the input P times and write nothing more.
        assert written == 0
        assert int(passes.partition(":")[2]) == fraction
        assert (fraction - 1) * 3000 * 64 * 4 <= read
        moved[fraction] = read
        if len(rows) == 2:
            _, read, written = rows[1]
            assert read == written > 0
    assert moved[16] > moved[4] > moved[2]
    assert planner(graph, 2 * states) == [("resident", 0, 0)]


def test_a_new_graph_under_the_same_name_is_ingested_anew(tmp_path: Path) -> None:
    def span(seed: int) -> int:
        files = write_graph(GraphSpec(400, 4, 1, seed), tmp_path / "graph")
        found = HyadesPlanner(files, tmp_path, 16, 16)
        with found._open("none") as volume:
            assert volume.catalog.graph is not None
            return volume.catalog.graph.span_before

    assert span(1) == span(1) != span(2)


def run(*arguments: str) -> str:
    result = CliRunner().invoke(bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_policies_command_writes_table_json_and_plots(tmp_path: Path) -> None:
    output = run(
        "policies", "--graph", "toy", "--order", "none", "--order", "hyades", "--policy",
        "min-pending", "--policy", "belady", "--width", "32", "--out", str(tmp_path),
    )  # fmt: skip
    assert "Simulation of topology only" in output
    assert "hyades passes:" in output
    content = json.loads((tmp_path / "policies.json").read_text())
    assert {row["order"] for row in content["simulated"]} == {"none", "hyades"}
    assert {row["policy"] for row in content["simulated"]} == {"min-pending", "belady"}
    assert len(content["simulated"]) == 16
    assert len(content["planned"]) >= 8
    assert (tmp_path / "policies.txt").read_text() in output
    assert (tmp_path / "policies.png").stat().st_size > 0
    assert (tmp_path / "policies.svg").stat().st_size > 0


def test_the_peers_command_without_their_environment(tmp_path: Path) -> None:
    venv = tmp_path / "none"
    assert peers_ready(venv) is not None
    output = run(
        "peers", "--graph", "toy", "--graph", "toy-shuffled", "--model", "gcn", "--system",
        "dgl-full", "--warm", "--venv", str(venv), "--out", str(tmp_path),
    )  # fmt: skip
    assert output.count("skipped: no peers' environment") == 2
    assert "toy-shuffled, GCN 24-16-16" in output
    assert (tmp_path / "peers.json").exists()


def test_the_commands_are_listed() -> None:
    output = run("--help")
    for name in ("all", "peers", "peers-venv", "policies"):
        assert f"  {name} " in output
    assert "refresh-worker" not in output
