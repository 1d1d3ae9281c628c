"""hyades bench: the benchmarks in deploy/bench, each a module with a click command `command`."""

import pkgutil
from importlib import import_module

import click

from hyades.deploy import bench


class Benches(click.Group):
    """Finds the modules of deploy/bench that can be run."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of the modules with a command."""
        names = [module.name for module in pkgutil.iter_modules(bench.__path__)]
        return [name for name in sorted(names) if _command(name) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return the command of one benchmark."""
        names = {module.name for module in pkgutil.iter_modules(bench.__path__)}
        return _command(cmd_name) if cmd_name in names else None


def _command(name: str) -> click.Command | None:
    found = getattr(import_module(f"{bench.__name__}.{name}"), "command", None)
    return found if isinstance(found, click.Command) else None


@click.group(cls=Benches)
def command() -> None:
    """Measure, and write tables, JSON and plots.

    \b
    hyades bench policies --help
    """
