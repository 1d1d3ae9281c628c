"""Targets for hosts of this machine over shared memory, for tests."""

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.reference import nvme

from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import Namespace
from hyades.target_side.server import Server
from hyades.target_side.subsystem import Subsystem

_numbers = itertools.count()


def socket_path() -> str:
    """Return a short path that nothing has: a socket's path has at most 107 bytes."""
    folder = Path(tempfile.gettempdir())
    return str(folder / f"hyades-{os.getpid()}-{next(_numbers)}.sock")


def start(
    namespaces: dict[int, Namespace], *, path: str = "", engine: str = "memcpy",
    epoch: bytes = bytes(16), **limits: Any,
) -> Server:  # fmt: skip
    """Return a started server of *namespaces*."""
    server = Server(
        [Subsystem(nvme.NQN, namespaces, epoch=epoch)], [], dma=[path or socket_path()],
        dma_engine=engine, limits=Limits(**limits),
    )  # fmt: skip
    server.start()
    return server


def url(server: Server, **options: Any) -> str:
    """Return the URL of namespace 1."""
    return path_url(server.dma_paths[0], **options)


def path_url(path: str, **options: Any) -> str:
    """Return the URL of namespace 1 of the target at *path*."""
    options = {"hostnqn": nvme.HOST, **options}
    return f"dma://{path}/{nvme.NQN}?" + "&".join(f"{k}={v}" for k, v in options.items())
