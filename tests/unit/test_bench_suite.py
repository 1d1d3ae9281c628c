import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hyades.common.errors import UsageError
from hyades.common.units import GIB, MIB
from hyades.deploy.bench import suite
from hyades.deploy.bench.claims import TIGHT, TIGHTER, judge
from hyades.deploy.bench.eviction import PlannedRow, compare
from hyades.deploy.bench.graphs import GraphSpec, make_csc
from hyades.deploy.bench.measure import Measurement, skipped
from hyades.deploy.bench.output import (
    goals_table,
    peers_json,
    peers_table,
    plot_peers,
    plot_policies,
    policies_json,
    policies_table,
    write_json,
)
from hyades.deploy.bench.runner import Row, Run, run_case
from hyades.deploy.bench.seqread import SequentialRate
from hyades.deploy.bench.suite import Setting, full_suite, make_case, make_systems, run_suite
from hyades.deploy.bench.systems import Case, Detail, Workplace
from hyades.deploy.bench.weights import ModelSpec

TOY = Case("toy", ModelSpec("sage", (24, 16, 16)))
SAGE = ModelSpec("sage", (128, 128, 128))


class Fake:
    """A system that takes the seconds it is told to and returns a sample."""

    confined = True

    def __init__(self, name: str, seconds: list[float], log: list[str], code: str = "pass"):
        self.name = name
        self.seconds = list(seconds)
        self.log = log
        self.code = code
        self.answer = np.ones((4, 2), np.float32)
        self.why: str | None = None
        self.ingest: Measurement | None = None

    def obstacle(self, case: Case) -> str | None:
        return self.why

    def prepare(self, case: Case, work: Workplace) -> Measurement | None:
        return self.ingest

    def command(self, case: Case, work: Workplace) -> list[str]:
        self.log.append(self.name)
        return [sys.executable, "-I", "-S", "-c", self.code]

    def detail(self, work: Workplace) -> Detail:
        return Detail(self.seconds.pop(0), 10 * MIB, 3 * MIB, {"all": 1.0}, ["a note"], 9 * MIB)

    def sample(self, case: Case, work: Workplace) -> np.ndarray:
        return self.answer


def test_systems_take_turns_and_the_median_counts(tmp_path: Path) -> None:
    log: list[str] = []
    one, two = Fake("one", [5, 1, 2], log), Fake("two", [3, 3, 9], log)
    rows = run_case(TOY, [one, two], Workplace(tmp_path), repeat=3, cold=False)
    assert log == ["one", "two"] * 3
    assert [row.seconds for row in rows] == [2, 3]
    assert [row.spread for row in rows] == [5, 3]
    assert all(row.ok for row in rows)
    assert not any(run.measured.cold for row in rows for run in row.runs)


def test_what_cannot_run_or_fails_is_a_row_and_is_not_repeated(tmp_path: Path) -> None:
    log: list[str] = []
    absent, broken = Fake("absent", [], log), Fake("broken", [], log, "raise SystemExit('no luck')")
    unready = Fake("unready", [], log)
    good = Fake("good", [1, 1], log)
    absent.why = "not installed: install it"
    unready.ingest = Measurement("failed", "exit status 2: bad edges")
    rows = run_case(TOY, [absent, broken, unready, good], Workplace(tmp_path), repeat=2, cold=False)
    assert log == ["broken", "good", "good"]
    assert [row.ok for row in rows] == [False, False, False, True]
    text = peers_table(rows)
    assert "skipped: not installed: install it" in text
    assert "failed: exit status 1: no luck" in text
    assert "skipped: preparation: exit status 2: bad edges" in text
    assert text.count("\n") == 5  # title, head and a line for each system, no reference


def test_a_wrong_result_is_visible(tmp_path: Path) -> None:
    log: list[str] = []
    systems = [Fake(name, [1], log) for name in ("one", "wrong", "three")]
    systems[0].answer = systems[0].answer * 2
    systems[1].answer = systems[1].answer * 2 + [0, 5]
    systems[2].answer = systems[2].answer * 2 + 2e-6
    rows = run_case(TOY, systems, Workplace(tmp_path), repeat=1, cold=False)
    assert rows[1].difference == pytest.approx(2.5, rel=1e-4)
    assert max(rows[0].difference or 0, rows[2].difference or 0) < 2e-6
    text = peers_table(rows)
    assert "2.5e+00" in text
    assert "differences are from the median of 3 systems" in text


def test_two_results_are_compared_with_the_first_and_one_with_nothing(tmp_path: Path) -> None:
    one, two = Fake("one", [1], []), Fake("two", [1], [])
    two.answer = two.answer + 0.5
    rows = run_case(TOY, [one, two], Workplace(tmp_path), repeat=1, cold=False)
    assert [row.difference for row in rows] == [0, 0.5]
    (alone,) = run_case(TOY, [Fake("one", [1], [])], Workplace(tmp_path), repeat=1, cold=False)
    assert alone.difference is None


def test_a_limit_holds_for_confined_systems_only(tmp_path: Path, monkeypatch) -> None:
    limits = []

    def measured(command, *, limit, **_):
        limits.append(limit)
        return Measurement("ok", limit=limit)

    monkeypatch.setattr("hyades.deploy.bench.runner.run_measured", measured)
    confined, free = Fake("confined", [1], []), Fake("free", [1], [])
    free.confined = False
    run_case(replace(TOY, limit=GIB), [confined, free], Workplace(tmp_path), repeat=1)
    assert limits == [GIB, None]


def setting(tmp_path: Path, **more) -> Setting:
    return Setting(tmp_path / "work", tmp_path, tmp_path / "venv", 1, cold=False, **more)


def test_a_suite_writes_table_json_and_plots(tmp_path: Path, monkeypatch) -> None:
    fakes = {"hyades": Fake("hyades", [1, 1], []), "dgl-full": Fake("dgl-full", [2.5, 1], [])}
    monkeypatch.setattr(suite, "make_systems", lambda names, _: [fakes[n] for n in names])
    options = setting(tmp_path)
    cases = [make_case("toy", "sage", None, options), make_case("toy", "gcn", None, options)]
    rows, goals, text = run_suite(cases, options, names=["hyades", "dgl-full"])
    assert (tmp_path / "peers.txt").read_text() == text
    assert "toy, SAGE 24-16-16" in text
    assert "toy, GCN 24-16-16" in text
    assert "sequential rate not measured" in text
    assert "2.50x (dgl-full 2.50 s / 1.00 s)" in text
    content = json.loads((tmp_path / "peers.json").read_text())
    assert [row["seconds"] for row in content["rows"]] == [1, 2.5, 1, 1]
    assert content["rows"][1]["runs"][0]["detail"]["read_bytes"] == 10 * MIB
    assert len(content["goals"]) == len(goals) == 6
    assert len(rows) == 4
    assert (tmp_path / "peers.png").read_bytes().startswith(b"\x89PNG")
    assert b"</svg>" in (tmp_path / "peers.svg").read_bytes()


def test_peers_are_skipped_with_a_reason_where_they_are_not_installed(tmp_path: Path) -> None:
    options = setting(tmp_path)
    names = ["dgl-full", "pyg-full", "pyg-full-csr", "dgl-layerwise", "pyg-inference"]
    for limit in (None, TIGHT):
        rows, _, text = run_suite([make_case("toy", "sage", limit, options)], options, names=names)
        assert {row.median.measured.outcome for row in rows} == {"skipped"}
        assert text.count("skipped: no peers' environment") == len(names)


def test_the_full_suite_has_the_cases_of_the_goals(tmp_path: Path) -> None:
    cases = full_suite(setting(tmp_path))
    assert len(cases) == len({case.title for case in cases}) == 12
    limits = {(case.graph, case.limit) for case in cases}
    assert ("1M16M", TIGHT) in limits
    assert ("1M16M-shuffled", TIGHTER) in limits
    widths = {case.graph: case.model.widths for case in cases}
    assert widths["4M64M"] == (128, 128, 128)
    assert widths["wide"] == (1024, 128, 128)


def test_unknown_systems_are_refused(tmp_path: Path) -> None:
    assert [s.name for s in make_systems(suite.SYSTEMS, setting(tmp_path))] == list(suite.SYSTEMS)
    with pytest.raises(UsageError, match="no system 'dgl'"):
        make_systems(["dgl"], setting(tmp_path))


def row(system: str, case: Case, seconds: float | None, **detail) -> Row:
    if seconds is None:
        return Row(system, case, [Run(skipped("not today", case.limit), None)])
    values = {"read_bytes": 10**9, "written_bytes": 5 * 10**8, **detail}
    return Row(system, case, [Run(Measurement("ok", limit=case.limit), Detail(seconds, **values))])


def verdicts(rows: list[Row], rate: SequentialRate | None = None) -> dict[str, tuple]:
    return {
        f"{goal.name}|{goal.target}": (goal.met, goal.measured.split(" ")[0])
        for goal in judge(rows, rate)
    }


def test_goals_in_memory() -> None:
    case = Case("1M16M", SAGE)
    rows = [
        row("hyades", case, 2.0), row("dgl-full", case, 2.0), row("pyg-full", case, 9.0),
        row("pyg-full-csr", case, 4.0), row("dgl-layerwise", case, 5.9),
    ]  # fmt: skip
    found = verdicts(rows)
    title = "1M16M, SAGE 128-128-128: faster than"
    assert found[f"{title} dgl-full|at least 1x"] == (False, "1.00x")
    # the faster of the two PyG variants counts
    assert found[f"{title} pyg-full|at least 2x"] == (True, "2.00x")
    assert found[f"{title} dgl-layerwise|aim for 3x"] == (False, "2.95x")


def test_goals_in_a_gibibyte() -> None:
    case = Case("1M16M", SAGE, TIGHT)
    rate = SequentialRate(1e9, "test")
    own = row("hyades", case, 2.0, planned_read=950_000_000)
    rows = [own, row("dgl-layerwise", case, 9.0), row("hyades-mem", case, 1.7)]
    title = "1M16M, SAGE 128-128-128, cgroup of 1024 MiB:"
    found = verdicts(rows, rate)
    assert found[f"{title} faster than dgl-layerwise|at least 4x"] == (True, "4.50x")
    assert found[f"{title} bytes read|at most 1.1x the plan's minimum"] == (True, "1.053x")
    overlap = next(value for name, value in found.items() if "overlap" in name)
    assert overlap == (True, "1.18x")  # 2.0 s against compute of 1.7 s, I/O of 1.5 s
    slow = verdicts([replace_seconds(own, 2.2), *rows[1:]], rate)
    assert next(value for name, value in slow.items() if "overlap" in name) == (False, "1.29x")
    wasteful = row("hyades", case, 2.0, planned_read=900_000_000)
    assert verdicts([wasteful])[f"{title} bytes read|at most 1.1x the plan's minimum"][0] is False


def replace_seconds(before: Row, seconds: float) -> Row:
    detail = before.runs[0].detail
    assert detail is not None
    run = Run(before.runs[0].measured, replace(detail, seconds=seconds))
    return Row(before.system, before.case, [run])


def test_goals_of_the_shuffled_graph_in_less_memory() -> None:
    case = Case("1M16M-shuffled", SAGE, TIGHTER)
    name = f"{case.title}: finishes; bytes read plus written|at most 3 GB"
    good = row("hyades", case, 9.0, read_bytes=2 * 10**9, written_bytes=10**9)
    assert verdicts([good])[name] == (True, "3.00")
    much = row("hyades", case, 9.0, read_bytes=3 * 10**9, written_bytes=10**9)
    assert verdicts([much])[name] == (False, "4.00")
    killed = Row("hyades", case, [Run(Measurement("killed", "killed for memory"), None)])
    assert verdicts([killed])[name] == (False, "killed")
    assert verdicts([row("hyades", case, None)])[name] == (None, "not")


def test_goal_of_linear_cost() -> None:
    small, large = Case("1M16M", SAGE), Case("4M64M", SAGE)
    name = "SAGE 128-128-128: time per edge-row, 4M/64M against 1M/16M|at most 1.15x"
    rows = [row("hyades", small, 2.0), row("hyades", large, 9.0)]
    assert verdicts(rows)[name] == (True, "1.125x")
    assert verdicts([rows[0], row("hyades", large, 9.6)])[name] == (False, "1.200x")
    assert verdicts(rows[:1])[name][0] is None


def test_a_goal_that_cannot_be_judged_says_why() -> None:
    case = Case("1M16M", SAGE, TIGHT)
    goals = judge([row("hyades", case, 2.0), row("dgl-layerwise", case, None)], None)
    assert {goal.met for goal in goals} == {None}
    text = goals_table(goals)
    assert "dgl-layerwise: not today" in text
    assert "hyades-mem was not run" in text
    assert "no planned bytes in the report" in text
    assert text.count("not judged") == 3


def test_policies_as_table_json_and_plot(tmp_path: Path) -> None:
    indptr, indices = make_csc(GraphSpec(300, 5, 1))
    report = compare(indptr, indices, 512, orders={"none": None}, fractions=(0.125, 0.5))
    report.planned.append(PlannedRow("none", 0.5, "log:4", 3 * MIB, MIB))
    text = policies_table(report)
    assert text.startswith("Simulation of topology only")
    assert "300 vertices, 1,500 edges" in text
    lines = text.splitlines()
    assert len(lines) == 4 + 10 + 1
    assert lines[-1].split() == [
        "none",
        "1/2",
        "hyades",
        "log:4",
        "planned",
        "-",
        "4.0",
        "MiB",
        "4.0",
        "MiB",
    ]
    assert lines[-2].split()[:4] == ["none", "1/2", "random", "simulated"]
    write_json(tmp_path / "new" / "p.json", policies_json(report))
    content = json.loads((tmp_path / "new" / "p.json").read_text())
    assert content["label"].startswith("Simulation")
    assert len(content["simulated"]) == 10
    assert content["planned"][0]["plan"] == "log:4"
    for path in plot_policies(report, tmp_path / "plot"):
        assert path.stat().st_size > 1000


def test_plots_need_matplotlib_and_say_so(tmp_path: Path, monkeypatch) -> None:
    from hyades.common.errors import BackendMissing

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(BackendMissing, match=r"pip install .*'\.\[bench\]'"):
        plot_peers([row("hyades", TOY, 1.0)], tmp_path / "p")


def test_json_of_rows_that_went_wrong() -> None:
    content = peers_json([row("hyades", TOY, None)], [])
    assert content["rows"][0]["seconds"] is None
    assert content["rows"][0]["runs"][0]["measured"]["detail"] == "not today"
    json.dumps(content)
