"""Damaged and hostile checkpoints and model files: one clear line, and no code is run."""

import io
import os
import pickle
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from hyades.common.errors import DataError, HyadesError, UsageError
from hyades.gpu_side.models import describe, load_model
from hyades.gpu_side.models.schema import ModelFile, PygKwargs, convert

TENSORS = {
    "lin_l.weight": torch.arange(20.0).reshape(4, 5),
    "lin_l.bias": torch.ones(4),
    "lin_r.weight": torch.ones(4, 5),
}


def torch_bytes(value: Any, zipped: bool = True) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, _use_new_zipfile_serialization=zipped)
    return buffer.getvalue()


class Evil:
    """A pickle that runs a command when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("wrap", [True, False])
def test_hostile_pickle_is_not_run(tmp_path: Path, wrap: bool) -> None:
    path, proof = tmp_path / "w.pt", tmp_path / "proof"
    evil = {**TENSORS, "evil": Evil(proof)}
    path.write_bytes(torch_bytes(evil) if wrap else pickle.dumps(evil))
    with pytest.raises(DataError, match=r"w\.pt: ") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)
    assert not proof.exists()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.nn.Linear(2, 2), "pickled torch.nn.modules.linear.Linear.*save model.state_dict()"),
        ({"a": torch.relu_, "b": 1}, "not a readable|pickled"),
        ([1, 2], "holds a list, not a state_dict"),
        (torch.ones(3), "holds a Tensor, not a state_dict"),
        ({}, "holds no tensors"),
        ({"a.weight": 3}, "entry 'a.weight' is a int"),
        ({**TENSORS, "epoch": 3}, "entry 'epoch' is a int"),
        ({0: torch.ones(1)}, "entry 0 is a Tensor"),
    ],
)
def test_what_is_not_a_state_dict(tmp_path: Path, value: Any, text: str) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(torch_bytes(value))
    with pytest.raises(DataError, match=text) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    with pytest.raises(DataError, match=text):
        describe(path)


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("content", [b"", b"x", b"PK\x03\x04", b"\xff" * 4096, b"<html></html>"])
def test_not_a_checkpoint(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a readable") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_truncated_at_any_byte(tmp_path: Path, kind: str) -> None:
    whole = save(TENSORS) if kind == "safetensors" else torch_bytes(TENSORS, kind == "zip")
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    for length in range(0, len(whole) - 1, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=r"not a readable|holds"):
            load_model(path)


@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_damaged_bytes_never_escape_as_another_error(tmp_path: Path, kind: str) -> None:
    whole = save(TENSORS) if kind == "safetensors" else torch_bytes(TENSORS, kind == "zip")
    path = tmp_path / ("w.safetensors" if kind == "safetensors" else "w.pt")
    generator = random.Random(5)
    failed = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(generator.choice([1, 3])):
            damaged[generator.randrange(len(damaged))] = generator.randrange(256)
        path.write_bytes(bytes(damaged))
        try:
            load_model(path)
        except HyadesError:
            failed += 1
    assert failed > 20


def test_absent_files(tmp_path: Path) -> None:
    for name in ("w.pt", "w.safetensors", "model.toml", "model.json"):
        with pytest.raises(UsageError, match="no such"):
            load_model(tmp_path / name)
    (tmp_path / "model.toml").write_text('class = "GCN"\nweights = "gone.pt"\n')
    with pytest.raises(UsageError, match=r"gone\.pt: no such file; `weights` is taken relative"):
        load_model(tmp_path / "model.toml")
    with pytest.raises(UsageError, match="no such"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [("m.toml", b"class = "), ("m.toml", b"\xff\xfe"), ("m.json", b"{"), ("m.json", b"\xff")],
)
def test_broken_model_files(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"m\.(toml|json): not valid (TOML|JSON)"):
        load_model(tmp_path / name)


def test_a_json_file_that_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text("[1]")
    with pytest.raises(UsageError, match="Expected `object`, got `array`"):
        load_model(tmp_path / "m.json")


def test_checkpoints_load_without_torch_geometric(tmp_path: Path) -> None:
    (tmp_path / "w.pt").write_bytes(torch_bytes(TENSORS))
    code = (
        "import sys; sys.modules['torch_geometric'] = sys.modules['dgl'] = None\n"
        "from hyades.gpu_side.models import load_model\n"
        f"assert load_model({str(tmp_path / 'w.pt')!r}).out_channels == 4\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_model_files_in_the_documentation_are_valid() -> None:
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    blocks = [part.split("```")[0] for part in text.split("```toml")[1:]]
    assert len(blocks) == 2
    files = [convert(ModelFile, tomllib.loads(block), "docs") for block in blocks]
    assert convert(PygKwargs, files[0].kwargs, "docs").norm_kwargs == {"eps": 1e-5}
    assert files[1].layer == [{}, {"activation": "none"}]
