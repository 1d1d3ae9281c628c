"""The command `hyades`: parses, calls the library, prints.

Exit codes: 0 done, 2 usage, 3 bad data, 4 a peer broke the protocol, 5 something is not installed,
6 a device was lost, 130 interrupted, 143 terminated.  An unexpected exception keeps its traceback.
"""

import signal
from importlib import import_module
from typing import Any, NoReturn

import click

from hyades import __version__
from hyades.common.errors import (
    BackendMissing,
    DataError,
    DeviceLost,
    HyadesError,
    PeerError,
    UsageError,
)
from hyades.deploy.signals import Terminated, terminate

EXIT_CODES: dict[type[HyadesError], int] = {
    UsageError: 2,
    DataError: 3,
    PeerError: 4,
    BackendMissing: 5,
    DeviceLost: 6,
}
INTERRUPTED, TERMINATED = 130, 143

# In the order of `hyades --help`; a module is imported when its command runs.
COMMANDS = {
    "demo": "make a graph, refresh it and show the result",
    "ingest": "turn edges and features into a volume",
    "refresh": "compute the embeddings of every vertex",
    "export": "write embeddings to .npy, .parquet or .safetensors",
    "serve": "serve volumes to other machines over NVMe/TCP",
    "discover": "show what a storage host offers",
    "inspect": "show what a volume holds, and verify its checksums",
    "model": "show what a checkpoint holds",
    "doctor": "show what this machine can do and what is missing",
    "bench": "measure",
}


class Commands(click.Group):
    """Commands that are imported when used, and errors that become one line and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return the names in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import and return a command."""
        if cmd_name not in COMMANDS:
            return None
        found: click.Command = import_module(f"hyades.deploy.commands.{cmd_name}").command
        return found

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the list of commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run, and turn errors that are meant for the user into a line on stderr."""
        try:
            return super().invoke(ctx)
        except HyadesError as error:
            _fail(ctx, str(error), exit_code(error))
        except Terminated as stop:
            _fail(ctx, "; ".join(["terminated", *map(str, stop.args)]), TERMINATED)
        except KeyboardInterrupt as stop:
            _fail(ctx, "; ".join(["interrupted", *map(str, stop.args)]), INTERRUPTED)


def exit_code(error: HyadesError) -> int:
    """Return the exit code that says whose fault *error* is."""
    return next(code for kind, code in EXIT_CODES.items() if isinstance(error, kind))


def _fail(ctx: click.Context, text: str, code: int) -> NoReturn:
    click.echo(f"hyades: {' '.join(text.split())}", err=True)
    ctx.exit(code)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="VOLUME is a path or a URL: nvme+tcp://HOST:4420/NQN, blk:/dev/nvme1n1, stripe:URL,URL, "
    "file:///data/g.vol?direct=0; docs/api.md has them all. Every command has examples: "
    "hyades refresh --help",
)
@click.version_option(__version__, prog_name="hyades")
def cli() -> None:
    """Refresh the embeddings of every vertex of a graph that does not fit in memory.

    \b
    hyades ingest --edges edge_index.npy --features features.npy g.vol
    hyades refresh g.vol --model model.toml --out NAME --memory 2GiB
    hyades export g.vol NAME out.npy
    """


def main() -> None:
    """Run the command line; SIGTERM ends a command as Ctrl-C does."""
    signal.signal(signal.SIGTERM, terminate)
    cli(prog_name="hyades")


if __name__ == "__main__":
    main()
