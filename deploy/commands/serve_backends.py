"""`hyades serve` through a target that is not ours: the kernel's nvmet or an SPDK application."""

import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import click

from hyades.common.blocks import FileBlocks
from hyades.common.errors import UsageError
from hyades.deploy.ready import ready_file as keep_ready_file
from hyades.deploy.signals import one_signal_at_a_time
from hyades.target_side.provision.nvmet import ROOT, Nvmet, Tree
from hyades.target_side.provision.spdk import SOCKET, Client, Spdk
from hyades.target_side.provision.steps import (
    Backend,
    Export,
    Journal,
    Provision,
    describe_steps,
    journal_path,
)

BACKENDS = ("kernel", "spdk")


def serve_external(
    backend: str,
    export: Export,
    *,
    dry_run: bool = False,
    spdk_socket: Path = SOCKET,
    configfs: Path = ROOT,
    state: Path | None = None,
    ready_file: Path | None = None,
    wait: Callable[[], object] | None = None,
) -> None:
    """Export through ``kernel`` or ``spdk`` until SIGINT or SIGTERM, then undo what was made.

    *dry_run* prints the steps and changes nothing; *state* is the folder of the journals.  The
    files are locked meanwhile, as by any other writer: hosts write to them.
    """
    export.check()
    with ExitStack() as stack:
        target = _backend(backend, spdk_socket, configfs, stack)
        if dry_run:
            for line in describe_steps(target, export):
                click.echo(line)
            return
        stack.enter_context(one_signal_at_a_time())
        journal = stack.enter_context(closing(Journal(journal_path(backend, export.nqn, state))))
        for path in export.namespaces:
            stack.enter_context(closing(FileBlocks(path, writable=True)))
        provision = Provision(target, export, journal)
        applied = provision.start()
        try:
            for line in applied:
                click.echo(line)
            addresses = [f"{_bracket(host)}:{port}" for host, port in export.listen]
            click.echo(f"{export.nqn} is served at {', '.join(addresses)}; Ctrl-C ends that")
            with keep_ready_file(ready_file, addresses):
                (wait or signal.pause)()
        except KeyboardInterrupt:  # also SIGTERM: the way in which a server ends
            click.echo("stopping")
        finally:
            provision.stop()


def _backend(name: str, spdk_socket: Path, configfs: Path, stack: ExitStack) -> Backend:
    if name == "kernel":
        return Nvmet(Tree(configfs))
    if name == "spdk":
        return Spdk(stack.enter_context(closing(Client(spdk_socket))))
    raise UsageError(f"--backend is embedded, {' or '.join(BACKENDS)}, not {name!r}")


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host
