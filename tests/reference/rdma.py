"""RDMA devices of this machine, for tests, and targets on them."""

from ipaddress import IPv6Address
from pathlib import Path
from typing import Any

import pytest
from tests.reference import nvme

from hyades.common.rdma.library import probe
from hyades.target_side.limits import Limits
from hyades.target_side.namespaces import Namespace
from hyades.target_side.server import Server
from hyades.target_side.subsystem import Subsystem


def address() -> str:
    """Return an IPv4 address of an RDMA device; skip with the reason where there is none."""
    problem = probe()
    if problem is not None:
        pytest.skip(problem)
    for path in sorted(Path("/sys/class/infiniband").glob("*/ports/1/gids/*")):
        mapped = IPv6Address(path.read_text().strip()).ipv4_mapped
        if mapped is not None:
            return str(mapped)
    pytest.skip("the RDMA devices of this machine have no IPv4 address")


def start(namespaces: dict[int, Namespace], host: str, port: int = 0, **limits: Any) -> Server:
    """Return a started server of *namespaces* on the RDMA device of *host*."""
    server = Server(
        [Subsystem(nvme.NQN, namespaces)], [], rdma=[(host, port)], limits=Limits(**limits)
    )
    server.start()
    return server


def url(server: Server, **options: Any) -> str:
    """Return the URL of namespace 1."""
    host, port = server.rdma_addresses[0]
    options = {"hostnqn": nvme.HOST, **options}
    text = "&".join(f"{key}={value}" for key, value in options.items())
    return f"nvme+rdma://{host}:{port}/{nvme.NQN}?{text}"
