"""hyades model describe."""

from pathlib import Path

import click

from hyades.gpu_side.models import describe


@click.group()
def command() -> None:
    """Look into trained models."""


@command.command("describe")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--toml", is_flag=True, help="Print only the model file to start from.")
def describe_command(checkpoint: Path, toml: bool) -> None:
    """Say what the keys and shapes of CHECKPOINT (.pt, .safetensors) tell, and what they do not.

    Ends with a model file to start from: put in what the keys do not tell, and give it to hyades
    refresh --model.

    \b
    hyades model describe gcn.pt
    hyades model describe gcn.pt --toml > model.toml
    """
    found = describe(checkpoint)
    click.echo(found.toml.rstrip() if toml else found.text())
