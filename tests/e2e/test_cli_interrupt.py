"""Ctrl-C in the middle of hyades refresh: exit code, the line on how to go on, and going on."""

import re
import signal
import subprocess
import sys
from io import BufferedReader
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import hyades
from hyades.deploy.bench.graphs import GraphSpec, write_graph
from hyades.deploy.bench.weights import ModelSpec, write_weights
from hyades.deploy.cli import cli


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="hyades")


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """What comes after `hyades refresh` for a run of 30 passes a stage."""
    graph = write_graph(GraphSpec(120_000, 8, 64), tmp_path / "graph")
    model = write_weights(ModelSpec("sage", (64, 64, 32)), tmp_path / "model").model
    assert run("ingest", "--edges", graph.directory, tmp_path / "g.vol").exit_code == 0
    options = ["--memory", "48MiB", "--plan", "passes:30", "--no-report"]
    return [str(tmp_path / "g.vol"), "--model", str(model), *options]


def interrupt_in_second_pass(arguments: list[str]) -> tuple[int, str]:
    """Run `hyades refresh`, send SIGINT when its bar shows the second pass; (exit code, stderr)."""
    command = [sys.executable, "-c", "from hyades.deploy.cli import main; main()", "refresh"]
    everything = [*command, *arguments, "--out", "cut", "--progress"]
    with subprocess.Popen(everything, stderr=subprocess.PIPE) as process:
        assert isinstance(process.stderr, BufferedReader)
        seen = b""
        while b"pass 2/" not in seen:
            piece = process.stderr.read1()
            assert piece, f"ended early: {seen.decode()}"
            seen += piece
        process.send_signal(signal.SIGINT)
        seen += process.stderr.read()
        return process.wait(60), seen.decode()


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in place", "outputs elsewhere"])
def test_ctrl_c_and_resume(arguments: list[str], tmp_path: Path, elsewhere: bool) -> None:
    outputs = arguments[0]
    if elsewhere:
        outputs = str(tmp_path / "out.vol")
        arguments = [*arguments, "--output-volume", outputs]
    code, text = interrupt_in_second_pass(arguments)
    assert code == 130
    assert text.endswith(
        "hyades: interrupted; what was done is kept: add --resume to the same command to continue\n"
    )
    assert "Traceback" not in text
    assert re.search(r"^cut +running$", run("inspect", outputs).stdout, re.MULTILINE)
    again = run("refresh", *arguments, "--out", "cut")
    assert again.exit_code == 2
    assert "--resume" in again.stderr
    resumed = run("refresh", *arguments, "--out", "cut", "--resume")
    assert resumed.exit_code == 0, resumed.stderr
    assert run("refresh", *arguments, "--out", "whole").exit_code == 0
    with hyades.open(outputs) as volume:
        assert np.array_equal(volume.read("cut"), volume.read("whole"))
