"""hyades ingest and hyades model describe through the command line."""

import tomllib
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from hyades.common.blocks import FileBlocks
from hyades.common.volume import Volume
from hyades.deploy.cli import cli
from hyades.deploy.commands.ingest import command
from hyades.deploy.ingest import IngestOptions


def hyades(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(a) for a in arguments], prog_name="hyades")


@pytest.fixture
def graph(tmp_path: Path) -> tuple[Path, Path]:
    rng = np.random.default_rng(1)
    edges, features = tmp_path / "edge_index.npy", tmp_path / "features.npy"
    np.save(edges, rng.integers(0, 300, (2, 2000)))
    np.save(features, rng.standard_normal((300, 8)).astype(np.float32))
    return edges, features


def test_the_three_words_of_the_manual_make_a_volume(
    graph: tuple[Path, Path], tmp_path: Path
) -> None:
    edges, features = graph
    volume = tmp_path / "g.vol"
    result = hyades("ingest", "--edges", edges, "--features", features, volume)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith(f"{volume}: 300 vertices, ")
    assert "features [300, 8] float32" in result.stdout
    out = tmp_path / "out.npy"
    assert hyades("export", volume, "features", out).exit_code == 0
    assert np.array_equal(np.load(out), np.load(features))
    assert hyades("inspect", volume, "--verify").exit_code == 0
    again = hyades("ingest", "--edges", edges, "--features", features, volume)
    assert again.exit_code == 2
    assert "--force" in again.stderr
    forced = hyades("ingest", "--edges", edges, volume, "--force", "--progress")
    assert forced.exit_code == 0
    assert "100%" in forced.stderr


def test_csc_pairs_are_two_edges_options(tmp_path: Path) -> None:
    np.save(tmp_path / "indptr.npy", np.array([0, 1, 3, 3]))
    np.save(tmp_path / "indices.npy", np.array([2, 0, 2], np.int32))
    volume = tmp_path / "g.vol"
    result = hyades(
        "ingest", "--edges", tmp_path / "indptr.npy", "--edges", tmp_path / "indices.npy", volume
    )
    assert result.exit_code == 0, result.stderr
    with Volume.open(FileBlocks(volume, writable=False)) as opened:
        assert opened.catalog.graph is not None
        assert (opened.catalog.graph.vertices, opened.catalog.graph.edges) == (3, 3)


def test_every_option_of_an_ingest_can_be_given() -> None:
    offered = {parameter.name for parameter in command.params}
    assert offered == {f.name for f in fields(IngestOptions)} | {"volume", "stripe", "progress"}


def test_bad_input_is_one_line(graph: tuple[Path, Path], tmp_path: Path) -> None:
    edges, features = graph
    volume = tmp_path / "g.vol"
    np.save(features, np.full((300, 2), np.nan, np.float32))
    result = hyades("ingest", "--edges", edges, "--features", features, volume)
    assert result.exit_code == 3
    assert result.stderr.startswith("hyades: ")
    assert result.stderr.count("\n") == 1
    assert not volume.exists()
    assert hyades("ingest", "--edges", tmp_path / "no.npy", volume).exit_code == 2
    columns = hyades("ingest", "--edges", edges, "--edge-columns", "src", volume)
    assert columns.exit_code == 2
    assert "write the two columns as source,target" in columns.stderr


def test_model_describe_says_what_keys_tell(tmp_path: Path) -> None:
    path = tmp_path / "gcn.pt"
    state = {"convs.0.lin.weight": torch.zeros(16, 8), "convs.0.bias": torch.zeros(16),
             "convs.1.lin.weight": torch.zeros(4, 16), "convs.1.bias": torch.zeros(4)}  # fmt: skip
    torch.save(state, path)
    result = hyades("model", "describe", path)
    assert result.exit_code == 0, result.stderr
    assert "GCN (PyG), 4 tensors" in result.stdout
    assert "hidden_channels = 16" in result.stdout
    only = hyades("model", "describe", path, "--toml")
    assert tomllib.loads(only.stdout)["class"] == "GCN"
    assert hyades("model", "describe", tmp_path / "no.pt").exit_code == 2
