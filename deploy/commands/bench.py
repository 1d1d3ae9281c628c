"""hyades bench: the benchmarks in deploy/bench, each a module with a click command `command`."""

import pkgutil
from importlib import import_module

import click

from hyades.deploy import bench


class Benches(click.Group):
    """Finds the modules of deploy/bench that can be run."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names of the modules with a command."""
        return [name for name in sorted(_modules()) if _command(name) is not None]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return the command of one benchmark."""
        return _command(cmd_name) if cmd_name in _modules() else None


def _modules() -> dict[str, str]:
    names = [module.name for module in pkgutil.iter_modules(bench.__path__)]
    return {name.replace("_", "-"): name for name in names if not name.startswith("_")}


def _command(name: str) -> click.Command | None:
    module = import_module(f"{bench.__name__}.{_modules()[name]}")
    found = getattr(module, "command", None)
    return found if isinstance(found, click.Command) else None


@click.group(cls=Benches)
def command() -> None:
    """Measure, and write tables, JSON and plots.

    \b
    hyades bench all --quick      shows that all of it runs
    hyades bench policies --help
    """
