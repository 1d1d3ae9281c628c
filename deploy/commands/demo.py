"""hyades demo."""

from pathlib import Path

import click

from hyades.deploy.commands.common import memory_option, progress_option
from hyades.deploy.commands.refresh import explain_table, summary
from hyades.deploy.demo import Demo, DemoOptions, best_of_each, compare
from hyades.deploy.progress import ProgressBar
from hyades.deploy.report.write import HTML_NAME


@click.command()
@click.option(
    "--dir", "folder", type=click.Path(path_type=Path, file_okay=False), default="demo-out",
    show_default=True, help="Folder for everything that the demo makes.",
)  # fmt: skip
@click.option(
    "--vertices", type=click.IntRange(min=20), default=200_000, show_default=True,
    help="Size of the graph.",
)  # fmt: skip
@memory_option("64MiB", "Budget of the refresh.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads; default: every core.")
@progress_option
def command(
    folder: Path, vertices: int, memory: int, threads: int | None, progress: bool | None
) -> None:
    """Make a power-law graph, refresh a GraphSAGE model over it and show the result.

    The weights are random: what is shown is how the work is planned and what is read. Each step
    is printed as the command that does it, to be tried by hand afterwards.
    """
    with ProgressBar(force=progress) as bar:
        demo = Demo(DemoOptions(folder, memory, vertices, threads), click.echo, bar)
        graph, model = demo.make_inputs()
        demo.ingest(graph)
        click.echo(explain_table(best_of_each(demo.explain(model))) + "\n")
        report = demo.refresh(model)
    click.echo(summary(report) + "\n")
    click.echo(demo.rows() + "\n")
    click.echo(compare(demo.gathering(graph)) + "\n")
    click.echo(f"report: {demo.report / HTML_NAME}")
    click.echo(f"next:   hyades export {demo.volume} sage sage.npy")
