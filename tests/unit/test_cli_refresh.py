"""hyades refresh: what the options become, the tables it prints, and how it is interrupted."""

from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tests.reference.reports import make_candidates, make_report

from hyades.common.errors import UsageError
from hyades.deploy.cli import cli
from hyades.deploy.commands import refresh as refresh_command
from hyades.deploy.commands.refresh import explain_table, summary
from hyades.deploy.report.model import Candidate
from hyades.deploy.signals import Terminated


class FakeApi:
    """Stands for hyades.deploy.api and keeps what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: BaseException | None = None
        self.catalog = SimpleNamespace(runs={"x": SimpleNamespace(state="running")})

    def open(self, url: str, writable: bool = False) -> "FakeApi":
        self.calls.append(("open", {"url": url, "writable": writable}))
        return self

    def __enter__(self) -> "FakeApi":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.calls.append(("close", {}))

    def refresh(self, volume: Any, model: Path, **options: Any) -> SimpleNamespace:
        assert volume is self
        self.calls.append(("refresh", {"model": model, **options}))
        options["progress"]("layer 1 of 2", 3, 3, "B")
        if self.error:
            raise self.error
        return SimpleNamespace(report=make_report())

    def explain(self, volume: Any, model: Path, **options: Any) -> list[Candidate]:
        assert volume is self
        self.calls.append(("explain", {"model": model, **options}))
        return make_candidates(0) + make_candidates(1)

    def asked(self, what: str) -> dict[str, Any]:
        return next(options for name, options in self.calls if name == what)


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> FakeApi:
    fake = FakeApi()
    monkeypatch.setattr(refresh_command, "api", fake)
    return fake


def hyades(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, prog_name="hyades")


def test_defaults(api: FakeApi) -> None:
    result = hyades("refresh", "g.vol", "--model", "model.toml", "--out", "sage")
    assert result.exit_code == 0, result.stderr
    assert api.calls[0] == ("open", {"url": "g.vol", "writable": True})
    assert api.calls[-1][0] == "close"
    asked = api.asked("refresh")
    del asked["progress"]
    assert asked == {
        "model": Path("model.toml"), "out": "sage", "memory": 2 << 30, "fanout": None, "seed": 0,
        "threads": None, "dtype": "float32", "plan": None, "resume": False, "force": False,
        "report_dir": Path("sage-report"), "output_volume": None,
    }  # fmt: skip
    assert result.stderr == ""
    assert result.stdout.endswith("report: sage-report/report.html\n")


def test_every_option_arrives(api: FakeApi) -> None:
    result = hyades(
        "refresh", "g.vol", "--model", "m.pt", "--out", "x", "--fanout", "10,5", "--seed", "7",
        "--memory", "512MiB", "--threads", "3", "--dtype", "float16", "--plan", "passes:4",
        "--resume", "--force", "--report", "there", "--progress",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    asked = api.asked("refresh")
    assert asked["fanout"] == (10, 5)
    assert (asked["seed"], asked["threads"], asked["memory"]) == (7, 3, 512 << 20)
    assert (asked["dtype"], asked["plan"]) == ("float16", "passes:4")
    assert asked["resume"] is asked["force"] is True
    assert asked["report_dir"] == Path("there")
    assert "layer 1 of 2: 100%" in result.stderr


def test_no_report(api: FakeApi) -> None:
    result = hyades("refresh", "g.vol", "--model", "m.pt", "--out", "x", "--no-report")
    assert api.asked("refresh")["report_dir"] is None
    assert "report" not in result.stdout


@pytest.mark.parametrize(
    "wrong",
    [["--fanout", "10;5"], ["--memory", "much"], ["--threads", "0"], ["--dtype", "int8"]],
)
def test_wrong_values_are_usage(wrong: list[str], api: FakeApi) -> None:
    result = hyades("refresh", "g.vol", "--model", "m.pt", "--out", "x", *wrong)
    assert result.exit_code == 2
    assert wrong[0] in result.stderr
    assert api.calls == []


def test_a_run_needs_a_name(api: FakeApi) -> None:
    result = hyades("refresh", "g.vol", "--model", "m.pt")
    assert result.exit_code == 2
    assert "Missing option '--out'" in result.stderr
    assert api.calls == []


def test_explain_prints_every_plan_and_runs_none(api: FakeApi) -> None:
    result = hyades("refresh", "g.vol", "--model", "m.pt", "--explain")
    assert result.exit_code == 0
    assert api.calls[0] == ("open", {"url": "g.vol", "writable": False})
    assert "refresh" not in [name for name, _ in api.calls]
    assert "memory" in api.asked("explain")
    assert result.stdout.splitlines()[:4] == [
        "stage 1: convs.0 (SAGEConv)",
        "  plan      order               read   written     memory    time  why",
        "  resident  project first  300.0 MiB  50.0 MiB    2.0 GiB  1.00 s  "
        "needs more than the budget",
        "* passes:2  project first  600.0 MiB  50.0 MiB  900.0 MiB  2.00 s  moves the fewest bytes",
    ]
    assert explain_table([]) == ""


def test_the_summary_has_a_line_a_stage_and_the_totals() -> None:
    lines = summary(make_report()).splitlines()
    assert " ".join(lines[1].split()) == (
        "1 convs.0 (SAGEConv) 128 -> 64 passes:2 project first 303.0 MiB +1.0% 50.0 MiB 1.50 s"
    )
    assert lines[4] == (
        "sage: 1,000,000 rows in 3.00 s, 606.0 MiB read (1.01 x one scan), 100.0 MiB written"
    )
    assert lines[5] == "memory: 900.0 MiB of 1.0 GiB; missed 9, parked 8, resumed 8"


def test_an_interrupted_run_says_how_to_resume(api: FakeApi) -> None:
    api.error = KeyboardInterrupt()
    result = hyades("refresh", "g.vol", "--model", "m.pt", "--out", "x")
    assert result.exit_code == 130
    assert result.stderr == (
        "hyades: interrupted; what was done is kept: add --resume to the same command to continue\n"
    )
    assert api.calls[-1][0] == "close"


def test_an_interrupt_before_the_run_exists_promises_nothing(api: FakeApi) -> None:
    api.error = KeyboardInterrupt()
    result = hyades("refresh", "g.vol", "--model", "m.pt", "--out", "other")
    assert (result.exit_code, result.stderr) == (130, "hyades: interrupted\n")


def test_sigterm_is_treated_as_ctrl_c(api: FakeApi) -> None:
    api.error = Terminated()
    result = hyades("refresh", "g.vol", "--model", "m.pt", "--out", "x")
    assert result.exit_code == 143
    assert result.stderr.startswith("hyades: terminated; what was done is kept: add --resume")


def test_an_error_is_one_line(api: FakeApi) -> None:
    api.error = UsageError("output 'x' exists: add --force")
    result = hyades("refresh", "g.vol", "--model", "m.pt", "--out", "x")
    assert (result.exit_code, result.stderr) == (2, "hyades: output 'x' exists: add --force\n")
