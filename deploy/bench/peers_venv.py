"""Makes the peers' own virtual environment: torch for the CPU, PyG with torch_sparse, and DGL.

DGL goes in without its dependencies, which are not needed to run it and pin older packages.
torch_sparse is compiled here (about ten minutes on two cores); PyG's `inference()` needs it, and
full-batch PyG is fastest with it.  Where it does not compile, the rows that need it say so.
"""

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click

from hyades.common.errors import BackendMissing

_CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
_BASE = (
    "torch==2.13.0", "torch_geometric==2.8.1", "numpy", "scipy", "psutil", "networkx", "requests",
    "tqdm", "setuptools", "wheel",
)  # fmt: skip
_DGL = ("--no-deps", "dgl==1.1.3")
_COMPILED = ("--no-deps", "--no-build-isolation", "torch_scatter==2.1.2", "torch_sparse==0.6.18")
_STAMP = ".hyades-peers.json"


def peers_python(venv: Path) -> Path:
    """Return the interpreter of the environment at *venv*."""
    return venv / "bin" / "python"


def peers_ready(venv: Path) -> str | None:
    """Return None when the environment is complete and current, or the reason and the fix."""
    stamp = venv / _STAMP
    if not stamp.exists():
        return f"no peers' environment in {venv}: run `make bench` or `hyades bench peers-venv`"
    if json.loads(stamp.read_text())["key"] != _key():
        return f"{venv} was made for other versions: run `hyades bench peers-venv`"
    return None


def missing_parts(venv: Path) -> dict[str, str]:
    """Return the optional parts that could not be installed, each with the reason."""
    found: dict[str, str] = json.loads((venv / _STAMP).read_text())["missing"]
    return found


def make_peers_venv(venv: Path, progress: Callable[[str], None]) -> None:
    """Create or update the environment; raise BackendMissing when a package cannot be had."""
    if peers_ready(venv) is None:
        return
    progress(f"creating {venv}")
    _run([sys.executable, "-m", "venv", str(venv)])
    pip = [str(peers_python(venv)), "-m", "pip", "install", "--quiet"]
    if _CONSTRAINTS.exists():
        pip += ["--constraint", str(_CONSTRAINTS)]
    progress("installing torch and PyG")
    _run([*pip, *_BASE])
    progress("installing DGL")
    _run([*pip, *_DGL])
    progress("compiling torch_sparse (about ten minutes)")
    missing = {}
    try:
        _run([*pip, *_COMPILED])
    except BackendMissing as error:
        missing["torch_sparse"] = str(error)
        progress(f"without torch_sparse: {error}")
    (venv / _STAMP).write_text(json.dumps({"key": _key(), "missing": missing}))


def _key() -> str:
    # Only what goes in there: another linter must not cost ten minutes of compiling.
    lines = _CONSTRAINTS.read_text().splitlines() if _CONSTRAINTS.exists() else []
    names = {entry.partition("==")[0] for entry in (*_BASE, *_DGL, *_COMPILED)}
    pinned = [line for line in lines if line.partition("==")[0] in names]
    text = repr((_BASE, _DGL, _COMPILED, pinned))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit status {done.returncode}"
        raise BackendMissing(f"`{' '.join(command[:6])} ...` failed: {last}")


@click.command()
@click.option(
    "--venv", type=click.Path(path_type=Path), default=Path(".venv-peers"), show_default=True
)
def command(venv: Path) -> None:
    """Make or update the virtual environment of PyG and DGL that `peers` runs."""
    make_peers_venv(venv, lambda text: click.echo(text, err=True))
    for name, reason in missing_parts(venv).items():
        click.echo(f"without {name}: {reason}", err=True)
