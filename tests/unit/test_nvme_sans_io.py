"""The NVMe core does no I/O: no module of it has sockets, a clock, threads or files."""

import ast
import sys
from pathlib import Path

import pytest

import hyades.common.nvme

FOLDER = Path(hyades.common.nvme.__file__).parent
# TLS is sockets by nature, and keys lie in files; both are beside the core, which must not need
# them.
BESIDE = {"tls", "psk"}
PURE = {
    "array", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "itertools",
    "struct", "typing", "uuid",
}  # fmt: skip


def imports(path: Path) -> set[str]:
    """Return the modules that the file at *path* imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


CORE = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in BESIDE)


def test_all_of_the_core_is_looked_at() -> None:
    assert {"pdu", "commands", "identify", "host", "target", "bringup"} <= set(CORE)


@pytest.mark.parametrize("module", CORE)
def test_nothing_but_computing(module: str) -> None:
    found = imports(FOLDER / f"{module}.py")
    standard = {name.partition(".")[0] for name in found} & sys.stdlib_module_names
    assert standard <= PURE
    assert not {f"hyades.common.nvme.{name}" for name in BESIDE} & found
    others = {name.partition(".")[0] for name in found} - sys.stdlib_module_names - {"hyades"}
    assert others <= {"msgspec", "numpy"}
