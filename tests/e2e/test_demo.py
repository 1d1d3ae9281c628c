"""hyades demo from start to end, on a graph small enough for a test, and the commands it prints."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import hyades
from hyades.deploy.cli import cli
from hyades.deploy.report.write import read_report


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="hyades")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    folder = tmp_path_factory.mktemp("demo") / "demo-out"
    result = run("demo", "--dir", folder, "--vertices", "20000", "--memory", "24MiB", "--progress")
    assert result.exit_code == 0, result.stderr
    return folder, result.stdout, result.stderr


def test_it_shows_plan_bar_rows_and_amplification(demo: tuple[Path, str, str]) -> None:
    folder, out, err = demo
    assert "20,000 vertices, 320,000 edges" in out
    assert re.search(r"^\* (resident|passes|log)", out, re.MULTILINE)
    assert re.search(r"1/2 convs\.0.*100%.*/s", err)
    assert re.search(r"2/2 convs\.1.*100%", err)
    rows = re.findall(r"^ +(\d)  +-?\d\.\d{4}  ", out, re.MULTILINE)
    assert rows == [str(vertex) for vertex in range(10)]
    amplification = re.search(r"gather, batches of 4,096 rows +\S+ \S+  ([\d.]+) x", out)
    assert amplification is not None
    assert float(amplification[1]) > 1
    assert out.endswith(f"next:   hyades export {folder}/demo.vol sage sage.npy\n")


def test_its_report_is_there(demo: tuple[Path, str, str]) -> None:
    folder, _, _ = demo
    report = read_report(folder / "report")
    assert report.out == "sage"
    assert [stage.index for stage in report.stages] == [0, 1]
    with hyades.open(folder / "demo.vol") as volume:
        graph = volume.catalog.graph
    assert graph is not None
    assert report.graph.edges == graph.edges + graph.loops
    assert report.counters.edges == 2 * graph.edges  # self loops are factors, not tiles
    assert (folder / "report" / "report.html").stat().st_size > 5000


def test_every_command_it_prints_works_when_typed(
    demo: tuple[Path, str, str], tmp_path: Path
) -> None:
    _, out, _ = demo
    commands = re.findall(r"^\$ hyades (.*)$", out, re.MULTILINE)
    commands += re.findall(r"^next: +hyades (.*)$", out, re.MULTILINE)
    assert [shlex.split(c)[0] for c in commands] == ["ingest", "refresh", "refresh", "export"]
    extra = {
        "ingest": ["--force"],
        "refresh": ["--force", "--report", str(tmp_path / "report")],
    }
    first = np.array(re.findall(r"^ +0  +(.*)  \.\.\.$", out, re.MULTILINE)[0].split(), float)
    for line in commands:
        words = shlex.split(line)
        if words[0] == "export":
            words[-1] = str(tmp_path / words[-1])
        result = run(*words, *extra.get(words[0], []))
        assert result.exit_code == 0, result.stderr
    rows = np.load(tmp_path / "sage.npy")
    assert rows.shape == (20_000, 32)
    assert np.allclose(rows[0, : len(first)], first, atol=1e-4)


def test_a_second_demo_replaces_the_first(demo: tuple[Path, str, str]) -> None:
    folder, _, _ = demo
    again = run("demo", "--dir", folder, "--vertices", "20000", "--memory", "24MiB")
    assert again.exit_code == 0, again.stderr
    assert again.stderr == ""
