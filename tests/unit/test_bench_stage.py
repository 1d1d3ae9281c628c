import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hyades.common.errors import UsageError
from hyades.deploy.bench.stage import OPERATORS, Case, Cost, cases, costs_table
from hyades.deploy.commands.bench import command as bench


def test_a_toy_run_writes_table_json_and_plot(tmp_path: Path) -> None:
    arguments = [
        "stage", "--vertices", "3000", "--degree", "6", "--width", "24", "--project", "8",
        "--fanout", "2", "--repeat", "1", "--out", str(tmp_path),
    ]  # fmt: skip
    result = CliRunner().invoke(bench, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    text = (tmp_path / "stage.txt").read_text()
    assert text in result.output
    found = json.loads((tmp_path / "stage.json").read_text())
    views = {view["case"]["name"]: view for view in found["views"]}
    assert list(views) == [case.name for case in cases(2, 8)]
    for view in views.values():
        assert set(view["seconds"]) == set(OPERATORS)
        assert view["whole"] > 0 < view["seconds"]["read"]
        assert view["seconds"]["pages"] > 0
    plain, half = views["float32"], views["float16"]
    assert plain["rows"] == half["rows"] == 3000
    assert plain["seconds"]["quantise"] == 0 < half["seconds"]["quantise"]
    assert half["view_bytes"] < 0.6 * plain["view_bytes"]
    assert views["sample 2"]["rows"] < 3000
    assert views["sample 2"]["index"] > 0 == plain["index"]
    assert views["project 8"]["seconds"]["project"] > 0
    assert views["project 8"]["view_bytes"] < 0.4 * plain["view_bytes"]
    assert {path.name for path in tmp_path.glob("stage.*")} == {
        "stage.txt", "stage.json", "stage.png", "stage.svg"
    }  # fmt: skip


def test_where_a_view_pays_is_its_rate() -> None:
    cost = Cost(Case("half", "float16"), 4_000_000_000, 2_000_000_000, 10, {}, 2.0, 0.5)
    cost.seconds = dict.fromkeys(OPERATORS, 0.2)
    head, line = costs_table([cost]).splitlines()
    assert line.split()[-4:] == ["0.500", "0.125", "0.500", "16.0"]
    assert line.split()[1:7] == ["0.050"] * 6
    assert head.split()[:7] == ["view", *OPERATORS]


def test_a_core_that_is_not_there(tmp_path: Path) -> None:
    arguments = ["stage", "--vertices", "9", "--degree", "1", "--width", "2", "--core", "4095"]
    with pytest.raises(UsageError, match="--core 4095: this process may use"):
        CliRunner().invoke(bench, [*arguments, "--out", str(tmp_path)], catch_exceptions=False)
