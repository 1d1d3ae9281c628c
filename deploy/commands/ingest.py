"""hyades ingest."""

from typing import Any

import click

from hyades.deploy.commands.common import Size, memory_option, progress_option
from hyades.deploy.ingest import IngestOptions, run_ingest
from hyades.deploy.progress import ProgressBar


class Columns(click.ParamType):  # type: ignore[type-arg]
    """Two column names or numbers: src,dst."""

    name = "columns"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        """Return both, or say how to write them."""
        source, comma, target = value.partition(",")
        if not comma or not source or not target or "," in target:
            self.fail(f"{value!r}: write the two columns as source,target", param, ctx)
        return source, target


@click.command()
@click.argument("volume", required=False)
@click.option(
    "--stripe", metavar="URL,URL,...",
    help="Instead of VOLUME: deal it out over several devices; it is then called stripe:URL,URL.",
)  # fmt: skip
@click.option(
    "--edges", required=True, multiple=True, metavar="PATH",
    help="File or dataset folder; twice for indptr and indices, by destination.",
)  # fmt: skip
@click.option(
    "--features", metavar="PATH",
    help="File with one row a vertex; the default is what comes with the edges, else none.",
)  # fmt: skip
@click.option("--weights", metavar="PATH|COLUMN", help="Edge weights: a file, or a column.")
@click.option("--vertices", type=click.IntRange(min=1), help="Number of vertices.")
@click.option(
    "--edge-layout", type=click.Choice(["source-target", "pairs"]),
    help="[2, E] or [E, 2], where the shape could be either.",
)  # fmt: skip
@click.option(
    "--edge-columns", type=Columns(), metavar="SRC,DST",
    help="Columns of an edge table, by name or number.",
)  # fmt: skip
@click.option(
    "--feature-key", metavar="NAME", help="Array in an .npz, or column in a parquet file."
)
@click.option("--feature-shape", metavar="V,F", help="Shape of a headerless feature file.")
@click.option("--feature-dtype", metavar="DTYPE", help="Dtype of a headerless feature file.")
@click.option("--undirected", is_flag=True, help="Add the reverse of every edge.")
@click.option("--dedup", is_flag=True, help="Keep the first of equal edges.")
@click.option("--relabel", is_flag=True, help="Ids are any integers; export gives them back.")
@click.option("--ids", metavar="PATH", help="The id of each feature row; implies --relabel.")
@click.option(
    "--reorder", type=click.Choice(["none", "rcm", "hyades"]), default="none", show_default=True,
    help="Bring neighbours close together, so that less goes to the log; export undoes it.",
)  # fmt: skip
@click.option("--range-rows", type=click.IntRange(min=1), help="Vertices of a chunk (2^n).")
@click.option("--page-size", type=Size(), default="1MiB", show_default=True, help="Largest page.")
@click.option("--allow-nonfinite", is_flag=True, help="Let NaN and inf pass.")
@memory_option("1GiB", "Budget of the ingest itself.")
@click.option(
    "--scratch", metavar="DIR",
    help="Folder for temporary files; default: VOLUME's, for a device or URL /var/tmp.",
)  # fmt: skip
@click.option("--force", is_flag=True, help="Replace VOLUME if it exists.")
@progress_option
def command(
    volume: str | None, stripe: str | None, progress: bool | None, edges: tuple[str, ...],
    **options: Any,
) -> None:  # fmt: skip
    """Make VOLUME, a file, device or URL, from edges and features.

    Edges: .npy [2, E] or [E, 2], .csv or .txt (also .gz), parquet, scipy .npz, indptr and indices,
    or a folder of OGB, GraphBolt, DiskGNN or Ginex. Features: .npy, raw, .npz or parquet; float16
    stays float16, float64 becomes float32. Edges point from source to destination, as in PyG.

    The result is complete or absent: a bad input, a full disk or Ctrl-C leaves nothing behind. A
    device or URL is written in place: it must be blank, or --force given.

    \b
    hyades ingest --edges edge_index.npy --features features.npy g.vol
    hyades ingest --edges edges.csv.gz --relabel --undirected --dedup --features x.npy g.vol
    hyades ingest --edges indptr.npy --edges indices.npy --features x.npy --reorder hyades g.vol
    hyades ingest --edges products/ g.vol
    hyades ingest --edges products/ --stripe /disk1/g.part,/disk2/g.part
    """
    if (volume is None) == (stripe is None):
        raise click.UsageError("Name the volume: VOLUME, or --stripe URL,URL, not both.")
    target = volume if volume is not None else f"stripe:{stripe}"
    given: Any = edges[0] if len(edges) == 1 else list(edges)
    with ProgressBar(force=progress) as bar:
        report = run_ingest(target, IngestOptions(edges=given, **options), bar)
    click.echo("\n".join(report.lines()))
