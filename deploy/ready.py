"""The file that says that a target accepts connections, and where."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hyades.common.errors import UsageError


@contextmanager
def ready_file(path: Path | None, addresses: Sequence[str]) -> Iterator[None]:
    """Keep *addresses*, one a line, in the file at *path* for the time of the block.

    It appears whole.  UsageError where it cannot be written; with no *path* nothing is.
    """
    if path is None:
        yield
        return
    _write(path, "".join(f"{address}\n" for address in addresses))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # somebody removed it or its folder
            path.unlink()


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UsageError(f"--ready-file {path}: cannot write it: {error.strerror}") from error
