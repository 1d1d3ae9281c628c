"""hyades bench all: what `make bench` runs."""

from pathlib import Path

import click

from hyades.deploy.bench.peers import DEFAULT_OUT, DEFAULT_VENV
from hyades.deploy.bench.peers import command as peers
from hyades.deploy.bench.peers_venv import command as peers_venv
from hyades.deploy.bench.policies import command as policies

_POLICY_GRAPHS = ("1M16M", "1M16M-shuffled")


@click.command()
@click.option("--venv", type=click.Path(path_type=Path), default=DEFAULT_VENV, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULT_OUT, show_default=True)
@click.option("--quick", is_flag=True, help="The toy graph, once each: shows that all of it runs.")
@click.pass_context
def command(ctx: click.Context, venv: Path, out: Path, quick: bool) -> None:
    """Make the peers' environment, run every comparison and the policy simulation.

    Takes one to two hours and 40 GB of disk on two cores; results land in --out.
    """
    ctx.invoke(peers_venv, venv=venv)
    if quick:
        ctx.invoke(peers, graphs=("toy",), repeat=1, venv=venv, out=out)
        ctx.invoke(policies, graph="toy", out=out)
        return
    ctx.invoke(peers, venv=venv, out=out)
    for graph in _POLICY_GRAPHS:
        ctx.invoke(policies, graph=graph, out=out / f"policies-{graph}")
