"""The command line: exit codes, one-line errors, help, inspect, export and doctor."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner, Result

from hyades import __version__
from hyades.common.blocks import FileBlocks
from hyades.common.catalog import GraphInfo, RunInfo
from hyades.common.errors import (
    BackendMissing,
    DataError,
    DeviceLost,
    HyadesError,
    PeerError,
    UsageError,
)
from hyades.common.volume import Volume
from hyades.deploy import cli as cli_module
from hyades.deploy import doctor
from hyades.deploy.cli import COMMANDS, cli


def hyades(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="hyades")


def python(script: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def volume_path(tmp_path: Path) -> Path:
    """A volume with a graph, features and one finished and one unfinished run."""
    path = tmp_path / "g.vol"
    with Volume.create(FileBlocks(path, create=True)) as volume:
        for name in ("features", "output/emb"):
            info = volume.allocate_rows(name, np.float32, 500, 4, 64)
            for page in range(info.pages):
                start, stop = info.shape().page_rows(page)
                rows = np.arange(start * 4, stop * 4, dtype=np.float32)
                volume.write_page(info, page, rows, stop - start)
        volume.catalog.graph = GraphInfo(500, 1234, 5, 64, 8, max_in_degree=77, undirected=True)
        volume.catalog.runs = {"emb": RunInfo("emb", "done"), "half": RunInfo("half")}
        volume.commit()
    return path


def raising(error: BaseException) -> click.Command:
    @click.command()
    def command() -> None:
        raise error

    return command


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `hyades doctor` raise what the test wants."""

    def fail(error: BaseException) -> Result:
        monkeypatch.setattr(
            cli_module.Commands, "get_command", lambda self, ctx, name: raising(error)
        )
        return hyades("doctor")

    return fail


@pytest.mark.parametrize(
    ("kind", "code"),
    [(UsageError, 2), (DataError, 3), (PeerError, 4), (BackendMissing, 5), (DeviceLost, 6)],
)
def test_each_error_has_its_code_and_one_line(
    kind: type[HyadesError], code: int, failing: Any
) -> None:
    result = failing(kind("g.vol: page 3\n  is  bad"))
    assert result.exit_code == code
    assert result.stderr == "hyades: g.vol: page 3 is bad\n"
    assert result.stdout == ""


def test_ctrl_c_says_how_to_go_on(failing: Any) -> None:
    result = failing(KeyboardInterrupt("add --resume"))
    assert (result.exit_code, result.stderr) == (130, "hyades: interrupted; add --resume\n")
    result = failing(KeyboardInterrupt())
    assert (result.exit_code, result.stderr) == (130, "hyades: interrupted\n")


def test_an_unexpected_exception_keeps_its_traceback(failing: Any) -> None:
    result = failing(ZeroDivisionError("bug"))
    assert isinstance(result.exception, ZeroDivisionError)
    script = (
        "from hyades.deploy import cli\n"
        "cli.Commands.invoke = lambda self, ctx: 1 // 0\n"
        "import sys; sys.argv = ['hyades', 'doctor']; cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_version_and_help_import_no_command() -> None:
    assert hyades("--version").output == f"hyades, version {__version__}\n"
    script = (
        "import sys\n"
        "from hyades.deploy.cli import cli\n"
        "cli(['--help'], standalone_mode=False)\n"
        "heavy = {'torch', 'numba', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    for name, text in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", done.stdout, re.MULTILINE)


def test_unknown_commands_and_options_are_usage() -> None:
    assert hyades("refesh").exit_code == 2
    result = hyades("export", "--fast")
    assert result.exit_code == 2
    assert "No such option" in result.stderr


def test_inspect_shows_graph_objects_and_runs(volume_path: Path) -> None:
    result = hyades("inspect", volume_path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"{volume_path}: generation 2, ")
    assert "graph: 500 vertices, 1,234 edges, 5 self loops, undirected" in lines
    assert "8 ranges of 64 rows, largest in-degree 77, order: none" in lines[2]
    assert re.search(r"^features +rows +float32 +500 +4 +8 ", result.stdout, re.MULTILINE)
    assert re.search(r"^emb +done$", result.stdout, re.MULTILINE)
    assert re.search(r"^half +running$", result.stdout, re.MULTILINE)


def test_inspect_one_object_as_json(volume_path: Path) -> None:
    result = hyades("inspect", volume_path, "features", "--json", "--verify")
    content = json.loads(result.stdout)
    assert list(content["objects"]) == ["features"]
    assert content["objects"]["features"]["rows"] == 500
    assert content["graph"]["vertices"] == 500
    assert content["runs"]["half"]["state"] == "running"
    assert result.stderr.endswith("nothing is wrong\n")


def test_inspect_names_what_there_is(volume_path: Path) -> None:
    result = hyades("inspect", volume_path, "feature")
    assert result.exit_code == 2
    assert "it has: features, output/emb" in result.stderr
    missing = hyades("inspect", volume_path.with_name("no.vol"))
    assert missing.exit_code == 2
    assert missing.stderr.startswith("hyades: ")
    assert missing.stderr.count("\n") == 1


def test_verify_finds_a_wrong_byte(volume_path: Path) -> None:
    assert hyades("inspect", volume_path, "--verify").exit_code == 0
    with Volume.open(FileBlocks(volume_path, writable=False)) as volume:
        lba = volume.object("features").lba(3)
    with volume_path.open("r+b") as file:
        file.seek(lba * 4096 + 5)
        file.write(b"\xff")
    result = hyades("inspect", volume_path, "--verify")
    assert result.exit_code == 3
    finding, last = result.stderr.splitlines()
    assert f"object 'features' page 3 (LBA {lba})" in finding
    assert last == f"hyades: {volume_path}: 1 of the checksums or structures are wrong"
    # Reading the other object only does not trip over it.
    assert hyades("inspect", volume_path, "output/emb", "--verify").exit_code == 0


def test_a_file_that_is_no_volume_is_bad_data(tmp_path: Path) -> None:
    path = tmp_path / "x.vol"
    path.write_bytes(b"hello" * 10_000)
    result = hyades("inspect", path)
    assert result.exit_code == 3
    assert result.stderr.count("\n") == 1


def test_export_and_its_refusals(volume_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.npy"
    result = hyades("export", volume_path, "emb", out)
    assert result.exit_code == 0
    assert result.stdout == f"{out}: 500 rows x 4 float32, 7.9 KiB\n"
    assert result.stderr == ""
    assert np.array_equal(np.load(out), np.arange(2000, dtype=np.float32).reshape(500, 4))
    again = hyades("export", volume_path, "emb", out)
    assert (again.exit_code, again.stderr) == (
        2,
        f"hyades: {out} exists: add --force to replace it\n",
    )
    assert hyades("export", volume_path, "emb", out, "--force", "--progress").stderr.count("100%")
    assert hyades("export", volume_path, "nope", out).exit_code == 2
    assert hyades("export", volume_path, "emb", out, "--memory", "lots").exit_code == 2
    assert hyades("export", volume_path, "emb", out, "--memory", "0").exit_code == 2


def test_a_volume_may_be_a_url(volume_path: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    result = hyades("export", f"file://{volume_path}?direct=0", "features", out)
    assert result.exit_code == 0, result.stderr
    unknown = hyades("inspect", "gopher://x")
    assert unknown.exit_code == 2
    assert "no transport gopher://" in unknown.stderr


def test_doctor_prints_a_table_or_json(monkeypatch: pytest.MonkeyPatch) -> None:
    result = hyades("doctor")
    assert result.exit_code == 0
    assert re.search(r"^ok +numba ", result.stdout, re.MULTILINE)
    checks = json.loads(hyades("doctor", "--json").stdout)
    assert {"name", "status", "detail", "needed_for", "fix", "required"} <= set(checks[0])
    bad = doctor.Check(
        name="numba", status="missing", detail="gone", needed_for="all", required=True
    )
    monkeypatch.setattr("hyades.deploy.commands.doctor.examine", lambda: [bad])
    assert hyades("doctor").exit_code == 5


def test_bench_finds_its_commands() -> None:
    result = hyades("bench", "--help")
    assert result.exit_code == 0
    for name in ("all", "peers", "peers-venv", "policies"):
        assert re.search(rf"^  {name} ", result.stdout, re.MULTILINE)
    assert " graphs " not in result.stdout
    assert hyades("bench", "peers-venv", "--help").exit_code == 0
    assert hyades("bench", "graphs").exit_code == 2
    assert hyades("bench", "__main__").exit_code == 2
