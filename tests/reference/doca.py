"""DOCA for tests: a stand-in that is compiled here."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from hyades.common.dma.library import VARIABLE

SOURCE = Path(__file__).with_name("doca_standin.c")
FAULTS = "HYADES_STANDIN_DOCA"
PARTS = {"PART_COMMON": "common", "PART_DMA": "dma"}


@functools.cache
def build(*, without: str = "") -> Path:
    """Return a folder with the stand-in's libraries, built once a test process.

    *without* is a function that they do not have.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc) to build the stand-in of DOCA: install gcc")
    folder = Path(tempfile.mkdtemp(prefix="hyades-standin-"))
    _folders.append(folder)
    hide = [f"-D{without}=somewhere_else"] if without else []
    for part, name in PARTS.items():
        subprocess.run(
            [compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", f"-D{part}", *hide,
             "-o", str(folder / f"libdoca_{name}.so"), str(SOURCE)],
            check=True,
        )  # fmt: skip
    return folder


_folders: list[Path] = []


def remove_builds() -> None:
    """Delete what `build` made."""
    build.cache_clear()
    while _folders:
        shutil.rmtree(_folders.pop())


def use(monkeypatch: pytest.MonkeyPatch, faults: str = "") -> Path:
    """Let DOCA be the stand-in, with *faults*; return its folder."""
    folder = build()
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setenv(FAULTS, faults)
    _common(folder).standin_reset()
    return folder


def leaks() -> int:
    """Return how many objects of the stand-in are not freed."""
    return int(_common(build()).standin_leaks())


def _common(folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(folder / "libdoca_common.so"))
