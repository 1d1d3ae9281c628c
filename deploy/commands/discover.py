"""hyades discover."""

import click

from hyades.common.errors import HyadesError
from hyades.common.nvme.layout import DISCOVERY_NQN
from hyades.deploy.commands.common import table
from hyades.proxy.transports.nvme_discovery import discover
from hyades.proxy.transports.nvme_url import SCHEME, parse
from hyades.proxy.urls import Url

_TRANSPORTS = {1: "rdma", 2: "fc", 3: "tcp"}
_KINDS = {1: "discovery", 2: "volumes", 3: "discovery"}


@click.command()
@click.argument("address", metavar="HOST[:PORT]")
@click.option("--hostnqn", metavar="NQN", help="The host to ask as; default: this machine's name.")
@click.option("--tls-psk", metavar="FILE", help="TLS 1.3 with this pre-shared key.")
def command(address: str, hostnqn: str | None, tls_psk: str | None) -> None:
    """Show what a storage host offers over NVMe/TCP.

    \b
    hyades discover 192.0.2.1
    hyades discover 127.0.0.1:4420 --hostnqn nqn.2026-01.org.example:host
    """
    options = {"hostnqn": hostnqn, "tls": tls_psk, "timeout": "10"}
    query = "&".join(f"{key}={value}" for key, value in options.items() if value)
    asked = parse(Url(f"{SCHEME}://{address}/{DISCOVERY_NQN}?{query}"))
    where = str(asked.addresses[0])
    try:
        found = discover(asked, asked.addresses[0])
    except HyadesError as error:
        if where in str(error):
            raise
        raise type(error)(f"{where}: {error}") from error
    rows = [
        [
            entry.subnqn, _KINDS.get(entry.subtype, str(entry.subtype)),
            _TRANSPORTS.get(entry.transport, str(entry.transport)),
            f"{entry.address}:{entry.service}", "yes" if entry.secure else "no",
        ]
        for entry in found
    ]  # fmt: skip
    if not rows:
        click.echo(f"{where} offers nothing to {asked.hostnqn}")
        return
    click.echo(table(["subsystem", "kind", "transport", "address", "TLS"], rows, left=5))
