"""hyades doctor."""

import click
import msgspec

from hyades.deploy.doctor import Status, examine, healthy, table

_COLOURS = {"ok": "green", "degraded": "yellow", "missing": "red"}
_UNHEALTHY = 5  # as for BackendMissing


def _paint(text: str, status: Status) -> str:
    return click.style(text, fg=_COLOURS[status])


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a list of objects for programs.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """Show what this machine can do and what is missing.

    Each line says ok, degraded (works, but slower) or missing, what it is needed for and the
    command that fixes it. The exit code is 5 when something without which nothing works is
    missing, else 0.

    \b
    hyades doctor
    hyades doctor --json | jq -r '.[] | select(.status != "ok") | .fix'
    """
    checks = examine()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(checks), indent=2).decode())
    else:
        click.echo("\n".join(table(checks, _paint)))
    if not healthy(checks):
        ctx.exit(_UNHEALTHY)
