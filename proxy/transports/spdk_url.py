"""What a spdk+tcp://, spdk+rdma:// or spdk+pcie:// URL asks for."""

import re

from hyades.common.addresses import resolve
from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import MIB
from hyades.proxy.transports.spdk_memory import Settings
from hyades.proxy.urls import Url

_TRANSPORTS = {"spdk+tcp": "TCP", "spdk+rdma": "RDMA", "spdk+pcie": "PCIE"}
_PCI = re.compile(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")
_FABRIC = re.compile(
    r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<host>[^:/\[\]]+)):(?P<port>\d+)/(?P<nqn>.+)"
)


def settings_of(url: Url) -> Settings:
    """Return what *url* asks for; UsageError where it cannot be meant.

    Options: ns (the first active one), queues (1), depth (128) commands in flight, digest (none;
    header, data or both), max_transfer (4MiB, and never more than the controller takes), hostnqn,
    hugepages (0; 1 for PCIe), memory (256MiB) that SPDK allocates where it has no huge pages; in
    seconds: kato (10, keep-alive), timeout (30, without an answer), ctrl_loss_timeout (60, without
    a path); trust_cache (0): a new connection after a loss need not show that the target's volatile
    write cache is still the old one.
    """
    transport = _TRANSPORTS[url.scheme]
    pcie = transport == "PCIE"
    address, service, subnqn = _place(url, pcie)
    digests = {part for text in url.take_all("digest") for part in text.split(",")} - {"", "none"}
    if digests - {"header", "data"}:
        raise UsageError(f"{url}: digest is header, data or both, as digest=header,data")
    settings = Settings(
        transport=transport,
        address=address,
        service=service,
        subnqn=subnqn,
        namespace=url.integer("ns", 0),
        queues=url.integer("queues", 1, least=1),
        depth=url.integer("depth", 128, least=1),
        max_transfer=_whole_blocks(url, url.size("max_transfer", 4 * MIB)),
        header_digest="header" in digests,
        data_digest="data" in digests,
        hostnqn=url.text("hostnqn", ""),
        kato=url.seconds("kato", 10.0, least=1.0),
        timeout=url.seconds("timeout", 30.0, least=0.01),
        ctrl_loss_timeout=url.seconds("ctrl_loss_timeout", 60.0),
        trust_cache=url.flag("trust_cache", False),
        huge_pages=url.flag("hugepages", pcie),
        memory=max(1, url.size("memory", 256 * MIB) // MIB),
    )
    url.refuse_unused()
    return settings


def _place(url: Url, pcie: bool) -> tuple[str, str, str]:
    if pcie:
        if not _PCI.fullmatch(url.path):
            raise UsageError(
                f"{url}: write spdk+pcie://DOMAIN:BUS:DEVICE.FUNCTION, as 0000:01:00.0"
            )
        return url.path, "", ""
    found = _FABRIC.fullmatch(url.path)
    if found is None:
        raise UsageError(f"{url}: write {url.scheme}://HOST:PORT/SUBSYSTEM-NQN?ns=1")
    if len(found["nqn"]) > 223:
        raise UsageError(f"{url}: an NQN has at most 223 characters")
    host, port = found["v6"] or found["host"], found["port"]
    if not 0 < int(port) < 1 << 16:
        raise UsageError(f"{url}: {port} is no port")
    try:
        resolved = resolve(host, int(port))
    except OSError as error:
        raise UsageError(f"{url}: no address for {host}:{port}: {error}") from error
    return str(resolved[0][4][0]), port, found["nqn"]


def _whole_blocks(url: Url, nbytes: int) -> int:
    if nbytes < BLOCK:
        raise UsageError(f"{url}: max_transfer is at least {BLOCK}")
    return nbytes // BLOCK * BLOCK
