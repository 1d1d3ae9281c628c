"""hyades export."""

from pathlib import Path

import click

from hyades.common.units import format_size
from hyades.deploy.commands.common import memory_option, progress_option
from hyades.deploy.export import export, export_bytes
from hyades.deploy.progress import Counted, ProgressBar
from hyades.deploy.volumes import open_volume


@click.command()
@click.argument("volume")
@click.argument("name")
@click.argument("path", type=click.Path(path_type=Path))
@memory_option("256MiB", "Memory for rows on their way; more saves a pass over a reordered graph.")
@click.option("--force", is_flag=True, help="Replace PATH if it exists.")
@progress_option
def command(
    volume: str, name: str, path: Path, memory: int, force: bool, progress: bool | None
) -> None:
    """Write the rows of output NAME to PATH, row i for vertex i of the input.

    The suffix of PATH chooses the format: .npy, .parquet (columns id and embedding) or
    .safetensors (tensor embeddings). Where ingest ran with --relabel, the user's ids are the
    column id, the tensor ids, or a second file (out.ids.npy beside out.npy). NAME may be any
    object with rows, such as features.

    \b
    hyades export g.vol sage sage.npy
    hyades export g.vol sage sage.parquet --force
    """
    with open_volume(volume) as opened, ProgressBar(force=progress) as bar:
        total = export_bytes(opened, name, memory)
        advance = Counted(bar, f"export {name}", total)
        done = export(opened, name, path, force=force, memory=memory, advance=advance)
    click.echo(
        f"{done.path}: {done.rows:,} rows x {done.width} {done.dtype}, {format_size(done.nbytes)}"
    )
    if done.ids_path is not None:
        click.echo(f"{done.ids_path}: the id of each row")
