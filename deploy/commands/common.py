"""What several commands share."""

from typing import Any

import click

from hyades.common.errors import UsageError
from hyades.common.units import parse_size


class Size(click.ParamType):  # type: ignore[type-arg]
    """A number of bytes such as 512MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes, or say how to write them."""
        try:
            size = parse_size(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)
        if size <= 0:
            self.fail(f"{value!r} is no size: write for example 512MiB or 2GiB", param, ctx)
        return size


def memory_option(default: str, text: str) -> Any:
    """Return ``--memory SIZE``."""
    return click.option(
        "--memory", type=Size(), default=default, show_default=True, metavar="SIZE", help=text
    )


progress_option = click.option(
    "--progress/--no-progress",
    default=None,
    help="Show progress bars; the default is to show them on a terminal.",
)


def table(head: list[str], rows: list[list[str]], *, left: int = 1) -> str:
    """Return aligned columns, the first *left* of them to the left."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def line(cells: list[str]) -> str:
        padded = [
            cell.ljust(width) if i < left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(line, [head, *rows]))
