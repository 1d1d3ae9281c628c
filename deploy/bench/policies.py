"""hyades bench policies: simulated evict-and-reload beside what Hyades plans."""

from pathlib import Path

import click
import numpy as np

from hyades.common.units import format_size
from hyades.deploy.bench.eviction import POLICIES, compare
from hyades.deploy.bench.graphs import GRAPHS, named_graph, write_graph
from hyades.deploy.bench.output import plot_policies, policies_json, policies_table, write_json
from hyades.deploy.bench.peers import DEFAULT_OUT, report_progress
from hyades.deploy.bench.planned import ORDERS, HyadesPlanner


@click.command()
@click.option(
    "--graph", default="demo", show_default=True, metavar="NAME",
    help=f"One of {', '.join(GRAPHS)}, each also with -shuffled.",
)  # fmt: skip
@click.option(
    "--order", "orders", multiple=True, type=click.Choice(ORDERS), help="Default: all of them."
)
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(list(POLICIES)),
    help="Default: all of them.",
)  # fmt: skip
@click.option(
    "--width", default=128, show_default=True, type=click.IntRange(min=1),
    help="Columns of a partial aggregate, float32.",
)  # fmt: skip
@click.option(
    "--input-width", type=click.IntRange(min=1), help="Columns of the input; default: --width."
)
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULT_OUT, show_default=True)
def command(
    graph: str, orders: tuple[str, ...], policies: tuple[str, ...], width: int,
    input_width: int | None, out: Path,
) -> None:  # fmt: skip
    """Simulate per-vertex evict-and-reload on the topology, beside the plans of Hyades.

    Counts what an out-of-core broadcast writes and reads again when memory holds 1/16 to 1/2 of the
    partial aggregates, for five eviction policies. Nothing is read, written or timed. The rows
    'planned' are the bytes that Hyades' passes and log move at the same budget.

    \b
    hyades bench policies --graph 1M16M
    """
    files = write_graph(named_graph(graph), out / "work" / "graphs" / graph)
    indptr, indices = np.load(files.indptr), np.load(files.indices)
    planner = HyadesPlanner(files, out / "work" / "volumes", width, input_width or width)
    report = compare(
        indptr, indices, 4 * width, orders=planner.orders(orders or ORDERS),
        policies=policies or tuple(POLICIES), planner=planner, progress=report_progress,
    )  # fmt: skip
    text = f"{graph}, input rows of {format_size(4 * (input_width or width))}\n"
    for name in sorted(planner.kept):
        text += f"order {name}: that of the input, since none was found that beats it\n"
    text += policies_table(report) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "policies.txt").write_text(text)
    write_json(out / "policies.json", {"graph": graph, **policies_json(report)})
    plot_policies(report, out / "policies")
    click.echo(text)
    click.echo(f"written: {out / 'policies'}.txt, .json, .png, .svg")
