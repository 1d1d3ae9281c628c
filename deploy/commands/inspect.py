"""hyades inspect."""

import click
import msgspec

from hyades.common.catalog import ObjectInfo
from hyades.common.errors import DataError
from hyades.common.layout import BLOCK
from hyades.common.units import format_size
from hyades.common.volume import Volume
from hyades.deploy.commands.common import progress_option, table
from hyades.deploy.outputs import source_of
from hyades.deploy.progress import Counted, ProgressBar
from hyades.deploy.volumes import open_volume


@click.command()
@click.argument("volume")
@click.argument("objects", nargs=-1)
@click.option("--verify", is_flag=True, help="Read everything and compare every checksum.")
@click.option("--json", "as_json", is_flag=True, help="Print the catalog for programs.")
@progress_option
def command(
    volume: str, objects: tuple[str, ...], verify: bool, as_json: bool, progress: bool | None
) -> None:
    """Show the graph, the objects and the runs in a volume; OBJECTS limits what is shown.

    With --verify every superblock, catalog, page table and page is read and its checksum
    compared; the exit code is 3 when one is wrong.

    \b
    hyades inspect g.vol
    hyades inspect g.vol --verify
    hyades inspect g.vol features --json
    """
    with open_volume(volume) as opened:
        infos = [opened.object(name) for name in objects or sorted(opened.catalog.objects)]
        if as_json:
            click.echo(_json(opened, infos))
        else:
            click.echo("\n".join(_describe(opened, infos)))
        if verify:
            with ProgressBar(force=progress) as bar:
                _verify(opened, infos, list(objects) or None, bar)


def _describe(volume: Volume, infos: list[ObjectInfo]) -> list[str]:
    catalog = volume.catalog
    nbytes = volume.blocks.nblocks * BLOCK
    lines = [
        f"{volume.name}: generation {volume.generation}, {format_size(nbytes)}, "
        f"{format_size(volume.free_blocks * BLOCK)} free, "
        f"pages of {format_size(catalog.page_size)}, uuid {volume.uuid}"
    ]
    if (source := source_of(volume)) is not None:
        lines.append(f"outputs of {source[0]}, uuid {source[1]}: features and topology lie there")
    if (graph := catalog.graph) is not None:
        kind = "undirected" if graph.undirected else "directed"
        order = graph.reorder
        if graph.span_before and graph.span_after:
            order += f" (span {graph.span_before:,} -> {graph.span_after:,})"
        lines += [
            f"graph: {graph.vertices:,} vertices, {graph.edges:,} edges, {graph.loops:,} self "
            f"loops, {kind}{', weighted' if graph.weighted else ''}",
            f"       {graph.chunks:,} ranges of {graph.range_rows:,} rows, largest in-degree "
            f"{graph.max_in_degree:,}, order: {order}",
        ]
    rows = [
        [i.name, i.kind, i.dtype, f"{i.rows:,}", str(i.width), f"{i.pages:,}",
         format_size(i.page_bytes), format_size(i.nbytes)]
        for i in infos
    ]  # fmt: skip
    head = ["object", "kind", "dtype", "rows", "width", "pages", "page", "size"]
    lines += ["", table(head, rows, left=3)]
    if catalog.runs:
        runs = [[run.name, run.state] for run in catalog.runs.values()]
        lines += ["", table(["run", "state"], runs, left=2)]
    return lines


def _json(volume: Volume, infos: list[ObjectInfo]) -> str:
    content = {
        "volume": volume.name,
        "uuid": str(volume.uuid),
        "generation": volume.generation,
        "bytes": volume.blocks.nblocks * BLOCK,
        "free_bytes": volume.free_blocks * BLOCK,
        "page_size": volume.catalog.page_size,
        "graph": volume.catalog.graph,
        "objects": {info.name: info for info in infos},
        "runs": volume.catalog.runs,
        "attributes": volume.catalog.attributes,
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode()


def _verify(
    volume: Volume, infos: list[ObjectInfo], names: list[str] | None, bar: ProgressBar
) -> None:
    total = sum(info.nbytes for info in infos)
    wrong = 0
    for finding in volume.verify(names, progress=Counted(bar, "verify", total)):
        wrong += 1
        click.echo(finding.text, err=True)
    bar.close()
    if wrong:
        raise DataError(f"{volume.name}: {wrong} of the checksums or structures are wrong")
    click.echo(
        f"verified: {format_size(total)} in {len(infos)} objects, nothing is wrong", err=True
    )
