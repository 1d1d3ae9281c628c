"""Targets for tests, and relays that damage what passes between a host and a target."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyades.common.layout import BLOCK
from hyades.common.nvme.psk import Keyring
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import FileNamespace, Namespace
from hyades.target_side.server import Server
from hyades.target_side.subsystem import Subsystem

NQN = "nqn.2026-01.org.example:pages"
HOST = "nqn.2026-01.org.example:host"
_names = itertools.count()


def file_server(
    folder: Path, nblocks: int, *, block_bytes: int = BLOCK, keys: Keyring | None = None,
    listeners: int = 1, read_only: bool = False, epoch: bytes = bytes(16), **limits: Any,
) -> Server:  # fmt: skip
    """Return a started server of one zeroed file of *nblocks* 4096-byte blocks."""
    path = folder / f"namespace-{next(_names)}"
    path.write_bytes(bytes(nblocks * BLOCK))
    namespace = FileNamespace(path, block_bytes=block_bytes, read_only=read_only)
    return start({1: namespace}, keys=keys, listeners=listeners, epoch=epoch, **limits)


def start(
    namespaces: dict[int, Namespace], *, keys: Keyring | None = None, listeners: int = 1,
    port: int = 0, epoch: bytes = bytes(16), hosts: frozenset[str] | None = None, **limits: Any,
) -> Server:  # fmt: skip
    """Return a started server of *namespaces* on the loopback interface."""
    server = Server(
        [Subsystem(NQN, namespaces, hosts, epoch=epoch)],
        [("127.0.0.1", port)] * listeners, limits=Limits(**limits), keys=keys,
    )  # fmt: skip
    server.start()
    return server


def url(*servers: Server, **options: Any) -> str:
    """Return the URL of namespace 1 through every listener of *servers*."""
    return address_url(*(a for server in servers for a in server.addresses), **options)


def address_url(*addresses: tuple[str, int], **options: Any) -> str:
    """Return the URL of namespace 1 through *addresses*."""
    where = "+".join(f"{host}:{port}" for host, port in addresses)
    options = {"hostnqn": HOST, **options}
    return f"nvme+tcp://{where}/{NQN}?" + "&".join(f"{k}={v}" for k, v in options.items())


@contextlib.contextmanager
def stopped_at_end() -> Iterator[list[Server]]:
    """Give a list; stop the servers in it at the end."""
    servers: list[Server] = []
    try:
        yield servers
    finally:
        for server in servers:
            server.stop(grace=1.0)
