"""hyades bench transports at toy size, its tables, and its page."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from hyades.common.blocks import FileBlocks
from hyades.common.errors import UsageError
from hyades.common.viewspec import SampleSpec
from hyades.common.volume import Volume
from hyades.deploy.bench import link
from hyades.deploy.bench.comparison import Case, Fetched, Row, base_of, make_cases
from hyades.deploy.bench.comparison_page import (
    Results,
    batches,
    plot_group,
    render_page,
    table_2,
    table_4_5,
)
from hyades.deploy.bench.comparison_run import (
    existing,
    fanout_option,
    mark_kept,
    stage_option,
    why_not,
)
from hyades.deploy.bench.graphs import GraphSpec, write_graph
from hyades.deploy.bench.rows_reader import Reading
from hyades.deploy.bench.shapes import Shape
from hyades.deploy.bench.transports import command as transports
from hyades.deploy.bench.transports import parse_fanouts
from hyades.deploy.ingest.api import ingest
from hyades.target_side.stage.viewpages import open_volume_view

RAW = ((-1, -1), "float32", False, False, False)


def run(out: Path, *arguments: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Run a toy, and return its rows by transport and case."""
    toy = ["--shape", "mag", "--scale", "0.003", "--repeat", "1", "--out", str(out)]
    done = CliRunner().invoke(transports, [*toy, *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    found = json.loads((out / "transports.json").read_text())
    assert found["published"] == "LGNNIC, arXiv:2608.07733v1"
    return {(row["transport"], *_case(row["case"])): row for row in found["rows"]}


def _case(case: dict[str, Any]) -> tuple[Any, ...]:
    names = ("encoding", "sampled", "projected", "root")
    return tuple(case["fanouts"]), *(case[name] for name in names)


@pytest.mark.slow
def test_a_toy_run_writes_tables_json_and_a_page(tmp_path: Path) -> None:
    rows = run(tmp_path, "--fanout", "3,2", "--hidden", "16")
    for transport in ("nvme+tcp", "dma"):
        assert not rows[(transport, *RAW)]["reason"]
        for key, row in rows.items():
            if key[0] != transport:
                continue
            assert row["rows"] == row["predicted_rows"]
            assert row["readings"][0]["payload"] > 0
            assert len(row["compute"]) == 1
    assert {row["link"] for key, row in rows.items() if key[0] == "dma"} == {"shared memory"}

    def payload(*case: Any) -> int:
        row = rows[("dma", *case)]
        return int(row["readings"][0]["payload"])

    full = payload(*RAW)
    assert payload((-1, -1), "float16", False, False, False) < 0.52 * full
    assert payload((-1, -1), "int8", False, False, False) < 0.28 * full
    # 128 features of 4 bytes become 16 of 2
    assert payload((-1, -1), "float16", False, True, False) < 1.1 * full / 16
    sampled = rows[("dma", (3, 2), "float32", True, False, False)]
    assert sampled["rows"] < rows[("dma", *RAW)]["rows"]
    assert sampled["readings"][0]["stage"]["sample"] > 0
    root = rows[("dma", (3, 2), "float32", True, False, True)]
    assert root["rows"] == rows[("dma", *RAW)]["rows"]

    text = (tmp_path / "transports.txt").read_text()
    assert "times 0.003" in text
    assert "2,209 vertices, 16,249 edges, 128 features, 349 classes (of 736,389" in text
    assert "mag       sockets  [10, 10]" in text  # published cells, ours were not asked for
    page = (tmp_path / "transports.html").read_text()
    assert page.count("<svg") == sum(1 for t in ("nvme+tcp", "dma") if (t, *RAW) in rows)
    assert not re.search(r"(?:src|href)=.https?:", page)  # nothing is fetched
    rdma = why_not("nvme+rdma", None)
    if rdma:
        assert rows[("nvme+rdma", *RAW)]["reason"] == rdma


@pytest.mark.slow
def test_a_link_counts_what_it_carries(tmp_path: Path) -> None:
    reason = link.probe()
    if reason is not None:
        pytest.skip(f"no links here: {reason}")
    rows = run(tmp_path, "--only", "nvme+tcp", "--link", "1gbit", "--fanout", "-1,-1",
               "--no-project", "--type", "float16", "--delay", "0.1", "--no-compute")  # fmt: skip
    (name,) = {row["link"] for row in rows.values()}
    # Where the kernel cannot delay, the row says so.
    assert name == "1gbit, 0.1 ms" or name.startswith("1gbit, 0.1 ms, no delay: ")
    full = rows[("nvme+tcp", *RAW)]
    assert full["total_s"] == full["transfer_s"]
    half = rows["nvme+tcp", (-1, -1), "float16", False, False, False]
    for row in (full, half):
        payload = row["readings"][0]["payload"]
        assert row["wire_counted"]
        assert payload < row["wire"] < 1.2 * payload
    assert not list(Path("/run/netns").glob(f"hyades-link-*-{os.getpid()}"))


@pytest.mark.slow
def test_a_refresh_over_the_transport(tmp_path: Path) -> None:
    rows = run(tmp_path, "--only", "dma", "--fanout", "-1,-1", "--no-project", "--no-compute",
               "--type", "float32", "--refresh")  # fmt: skip
    (row,) = rows.values()
    assert len(row["refresh"]) == 1
    assert row["refresh"][0] > 0
    assert row["compute"] == []
    assert {path.name for path in (tmp_path / "work").iterdir()} == {
        "graphs", "volumes", "weights"
    }  # fmt: skip


def reading(seconds: float, payload: int = 1000, rows: int = 10) -> Reading:
    """Return a reading of that many seconds."""
    return Reading(0.5, seconds, rows, payload, -1, -1, {"sample": 0.25, "read": 9.0})


def made(case: Case, seconds: float, transport: str = "nvme+tcp", shape: str = "reddit") -> Row:
    """Return a row with two seconds of computation."""
    return Row(shape, transport, "1gbit", case, [reading(seconds)], [2.0])


def test_totals_and_speedups() -> None:
    base = made(Case((-1, -1)), 8.0)
    half = made(Case((25, 10), "float16", sampled=True), 1.5)
    rows = [base, half]
    assert base_of(half, rows) is base
    assert base.total_s == 10.0  # raw rows: nothing is opened
    assert half.total_s == 4.0
    assert half.prepare_s == 0.25  # reading the medium is no preparation
    assert not half.counted
    assert half.wire == 1000
    assert base_of(made(Case((-1, -1)), 1.0, "dma"), rows) is None
    found = Results([], rows).json()["rows"][1]
    assert (found["transfer_speedup"], found["total_speedup"]) == (8.0 / 1.5, 2.5)


def test_our_figures_stand_beside_the_published_ones() -> None:
    sampled = Case((25, 10), "float32", sampled=True)
    half = Case((25, 10), "float16", sampled=True)
    rows = [made(Case((-1, -1)), 8.0), made(sampled, 2.0), made(half, 1.0)]
    rows.append(Row("reddit", "nvme+rdma", "RDMA device", sampled, reason="no device"))
    lines = {tuple(line[1:3]): line for line in table_2(rows).lines}
    assert lines["sockets", "[25, 10]"][3:] == ["8.56", "4.00", "8.76", "2.22"]
    assert lines["dma", "[25, 10]"][4] == "not measured"
    assert len(lines) == 6
    lines = {tuple(line[1:3]): line for line in table_4_5(rows).lines}
    found = lines["sockets", "[25, 10]"]
    assert found[3:7] == ["36.84 / 10.11", "2.000 / 1.000", "3.64", "2.00"]
    assert found[7:] == ["37.19 / 10.45", "4.500 / 3.500", "3.56", "1.29"]
    assert lines["sockets", "[-1, 256]"][4] == "not measured"  # ours has no float16 there
    assert "not measured: no device" in Results([], rows).text()
    for row in rows:
        row.compute = []  # left out: then there are no totals to compare
    lines = {tuple(line[1:3]): line for line in table_2(rows).lines}
    assert lines["sockets", "[25, 10]"][4:] == ["4.00", "8.76", "not measured"]
    lines = {tuple(line[1:3]): line for line in table_4_5(rows).lines}
    assert lines["sockets", "[25, 10]"][6:] == [
        "2.00", "37.19 / 10.45", "not measured", "3.56", "not measured"
    ]  # fmt: skip


def test_the_page_shows_what_could_not_be_measured_and_hides_no_markup() -> None:
    rows = [made(Case((-1, -1)), 1.0), Row("<b>", "dma", "x", Case((-1, -1)), reason="a < b")]
    page = render_page(Results(["on & on"], rows), [plot_group(rows[:1])])
    assert page.count("<svg") == 1
    assert "on &amp; on" in page
    assert "&lt;b&gt;, dma, x: not measured: a &lt; b" in page
    assert "no matplotlib" in render_page(Results([], rows), [], "no matplotlib")


def test_rows_of_mini_batches() -> None:
    counts = [Fetched("mag", 100, (-1, -1), 900), Fetched("mag", 100, (10, 10), 300)]
    assert batches(counts).lines == [
        ["mag", "[-1, -1]", "900", "9.00", "1.00", "-"],
        ["mag", "[10, 10]", "300", "3.00", "3.00", "73.57"],
    ]


def test_cases() -> None:
    cases = make_cases([(25, 10), (-1,)], ("float32", "int8"), project=True)
    assert cases[0] == Case((-1, -1))
    assert len(cases) == len(set(cases)) == 4 + 8 + 4 + 1
    assert sum(case.root for case in cases) == 1
    assert not any(case.sampled for case in cases if case.fanouts[-1] < 0)
    # Sampling on the compute host changes nothing of what travels.
    assert Case((25, 10), "int8").key == Case((-1, -1), "int8").key
    assert Case((25, 10), "int8", sampled=True).key == Case((9, 10), "int8", sampled=True).key
    assert Case((-1,), projected=True).key != Case((-1, -1), projected=True).key


def test_fanouts() -> None:
    assert parse_fanouts(["25,10", "-1"], "mag") == [(25, 10), (-1,)]
    assert parse_fanouts([], "products") == [(25, 10), (15, 10, 5), (-1,), (2, 2)]
    assert parse_fanouts([], "g") == [(25, 10), (10, 10), (-1,), (2, 2)]
    assert fanout_option((25, 10)) == ["--fanout", "10,25"]
    assert fanout_option((-1, -1)) == []
    assert stage_option(Case((2, 2), "int8", True, True)) == ["--stage", "sample,project,int8"]
    assert stage_option(Case((2, 2))) == []
    for wrong in ("", "0", "a", "3,-2", "3,,2"):
        with pytest.raises(UsageError, match="--fanout"):
            parse_fanouts([wrong], "mag")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--only", "tape"], "--only tape"),
        (["--type", "float8"], "--type float8"),
        (["--shape", "papers"], "--shape papers"),
        (["--scale", "2"], "--scale 2"),
        (["--link", "fast"], "--link fast"),
    ],
)
def test_what_cannot_be_meant(arguments: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        CliRunner().invoke(
            transports, [*arguments, "--out", str(tmp_path)], catch_exceptions=False
        )  # fmt: skip


def test_the_rule_counts_the_rows_that_a_view_has(tmp_path: Path) -> None:
    """A small dense graph has many self loops and parallel edges."""
    files = write_graph(GraphSpec(300, 9, 4, shuffled=True), tmp_path / "graph")
    edges = str(files.indptr), str(files.indices)
    ingest(tmp_path / "g.vol", edges=edges, features=str(files.features))
    indptr, indices = np.load(files.indptr), np.load(files.indices)
    assert np.any(indices == np.repeat(np.arange(300), np.diff(indptr)))
    with Volume.open(FileBlocks(tmp_path / "g.vol", writable=False)) as volume:
        for fanout in (1, 2, 5, 9, 1000):
            sample = SampleSpec(fanout, 3, 0, ((0, 1),), "loops")
            view = open_volume_view(volume, "features", encoding="float32", sample=sample)
            needed = np.zeros(300, np.bool_)
            mark_kept(indptr, indices, fanout, 3, needed)
            assert int(needed.sum()) == int(view.head.counts.sum())
            view.close()


def test_a_volume_of_ones_own_is_asked_for_what_it_has(tmp_path: Path) -> None:
    files = write_graph(GraphSpec(200, 3, 8), tmp_path / "graph")
    edges = str(files.indptr), str(files.indices)
    ingest(tmp_path / "g.vol", edges=edges, features=str(files.features))
    subject = existing(tmp_path / "g.vol", 5)
    assert subject.shape == Shape("g", 200, 600, 8, 5)
    assert subject.model((25, 10), 16).widths == (8, 16, 5)
    assert subject.model((-1,), 16).widths == (8, 5)
    half = tmp_path / "half.npy"
    np.save(half, np.load(files.features).astype(np.float16))
    ingest(tmp_path / "half.vol", edges=edges, features=str(half))
    with pytest.raises(UsageError, match="features are float16; the baseline is float32"):
        existing(tmp_path / "half.vol", 5)
    ingest(tmp_path / "bare.vol", edges=edges)
    with pytest.raises(UsageError, match="no graph with features"):
        existing(tmp_path / "bare.vol", 5)
