"""hyades bench bandwidth at toy size, and how its goals are judged."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hyades.common.errors import UsageError
from hyades.deploy.bench.bandwidth import PLAIN, Rate, RefreshTime, chosen, judge
from hyades.deploy.bench.bandwidth import command as bandwidth


@pytest.mark.slow
def test_all_transports_side_by_side(tmp_path: Path) -> None:
    arguments = ["--graph", "toy", "--size", "8MiB", "--seconds", "0.2", "--repeat", "1"]
    done = CliRunner().invoke(bandwidth, [*arguments, "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "bandwidth.json").read_text())
    rates = {(row["transport"], row["order"]): row for row in found["rates"]}
    assert (PLAIN, "random") not in rates
    for name in ("file", "nvme+tcp", "nvme+tcp digest=data", "nvme+tcp digest=header,data"):
        for order in ("sequential", "random"):
            assert rates[name, order]["bytes_per_s"][0] > 0
            assert bool(rates[name, order]["server_cpu_per_gb"]) == (name != "file")
    assert [row["transport"] for row in found["refresh"]] == ["file", "nvme+tcp"]
    assert all(row["seconds"][0] > 0 for row in found["refresh"])
    assert [goal["name"] for goal in found["goals"]] == [
        "sequential over nvme+tcp", "refresh over nvme+tcp",
    ]  # fmt: skip
    text = (tmp_path / "bandwidth.txt").read_text()
    assert "nvme+tcp digest=data" in text
    assert (tmp_path / "bandwidth.png").stat().st_size > 1000


def test_goals_are_judged_by_the_median_of_the_ratios_within_a_turn() -> None:
    ours = Rate("nvme+tcp", "sequential", [0.9e9, 1.0e9, 2.0e9])
    plain = Rate(PLAIN, "sequential", [1.0e9, 1.0e9, 1.0e9])
    times = [RefreshTime("file", [1.0, 2.0, 4.0]), RefreshTime("nvme+tcp", [1.4, 2.6, 8.0])]
    met = judge([plain, ours], times)
    assert [goal.met for goal in met] == [True, False]
    assert met[0].measured == "1.00 (0.90 to 2.00) of 1.00 GB/s"
    assert met[1].measured == "1.40 (1.30 to 2.00) of 2.00 s"
    slow = Rate("nvme+tcp", "sequential", [0.84e9, 0.84e9, 2.0e9])
    assert judge([plain, slow], []) == [
        type(met[0])(met[0].name, met[0].target, "0.84 (0.84 to 2.00) of 1.00 GB/s", False)
    ]
    assert judge([plain], times[:1]) == []


def test_what_is_measured_can_be_chosen() -> None:
    assert chosen("nvme+tcp")[:2] == [PLAIN, "nvme+tcp"]
    assert chosen("file") == [PLAIN, "file"]
    for wrong in ("", "tape", "file,tape"):
        with pytest.raises(UsageError, match="--only"):
            chosen(wrong)
