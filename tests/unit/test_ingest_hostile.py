"""Inputs that once ended in a traceback, a wrong id or a lost device node."""

import os
from pathlib import Path

import numpy as np
import pytest

from hyades.common.errors import DataError, UsageError
from hyades.deploy.export import export
from hyades.deploy.ingest import ingest
from hyades.gpu_side.models.loader import load_model

EDGES = np.array([[0, 1, 2], [1, 2, 0]])
FEATURES = np.ones((3, 2), np.float32)


def write_npy(path: Path, shape: str) -> Path:
    """Write a .npy whose header claims *shape*."""
    np.save(path, EDGES)
    data = path.read_bytes()
    old = b"'shape': (2, 3), }"
    new = f"'shape': {shape}, }}".encode()
    header = data[10:128].replace(old, new).rstrip(b" \n").ljust(117) + b"\n"
    path.write_bytes(data[:10] + header + data[128:])
    return path


@pytest.mark.parametrize("shape", ["(2, -5)", "(2, 99999999999999999999)", "(2**0, 3)"])
def test_shapes_that_cannot_be(tmp_path: Path, shape: str) -> None:
    path = write_npy(tmp_path / "edges.npy", shape)
    with pytest.raises(DataError):
        ingest(tmp_path / "g.vol", edges=path, features=FEATURES)
    assert not (tmp_path / "g.vol").exists()


def test_ids_beyond_int64_are_not_wrapped(tmp_path: Path) -> None:
    edges = EDGES.astype(np.uint64)
    edges[0, 0] = 2**64 - 1
    np.save(tmp_path / "edges.npy", edges)
    with pytest.raises(DataError, match="18446744073709551615"):
        ingest(tmp_path / "g.vol", edges=tmp_path / "edges.npy", relabel=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="making a device node needs root")
def test_a_device_node_is_not_replaced(tmp_path: Path) -> None:
    node = tmp_path / "null.npy"
    os.mknod(node, 0o020666, os.makedev(1, 3))
    with pytest.raises(UsageError, match="neither a file nor a block device"):
        ingest(node, edges=EDGES, features=FEATURES, force=True)
    from hyades.deploy import api

    ingest(tmp_path / "g.vol", edges=EDGES, features=FEATURES)
    with api.open(tmp_path / "g.vol") as volume, pytest.raises(UsageError, match="regular file"):
        export(volume, "features", node, force=True)
    assert node.is_char_device()


def test_a_model_file_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text("[" * 100_000)
    with pytest.raises(DataError, match="nested"):
        load_model(path)
