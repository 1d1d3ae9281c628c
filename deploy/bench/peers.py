"""hyades bench peers: Hyades beside PyG and DGL, and `hyades bench all`'s larger half."""

from pathlib import Path

import click

from hyades.common.units import format_size
from hyades.deploy.bench.graphs import GRAPHS
from hyades.deploy.bench.suite import IN_MEMORY, SYSTEMS, Setting, full_suite, make_case, run_suite
from hyades.deploy.commands.common import Size

DEFAULT_OUT = Path("bench-results")
DEFAULT_VENV = Path(".venv-peers")


def report_progress(text: str) -> None:
    """Print one line on stderr: the tables go to stdout."""
    click.echo(text, err=True)


@click.command()
@click.option(
    "--graph", "graphs", multiple=True, metavar="NAME",
    help=f"One of {', '.join(GRAPHS)}, each also with -shuffled; default: the whole set.",
)  # fmt: skip
@click.option("--model", "models", multiple=True, type=click.Choice(["sage", "gcn"]))
@click.option(
    "--limit", "limits", multiple=True, type=Size(), metavar="SIZE",
    help="Run in a memory cgroup of this size; default: without.",
)  # fmt: skip
@click.option(
    "--system", "systems", multiple=True, metavar="NAME", help=f"Among {', '.join(SYSTEMS)}."
)
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--threads", default=2, show_default=True, type=click.IntRange(min=1))
@click.option(
    "--batch", default=4096, show_default=True, type=click.IntRange(min=1),
    help="Batch of the peers that work in batches.",
)  # fmt: skip
@click.option(
    "--memory", type=Size(), default=IN_MEMORY, metavar="SIZE",
    help=f"Budget of Hyades where there is no limit; default: {format_size(IN_MEMORY)}.",
)  # fmt: skip
@click.option("--timeout", default=600.0, show_default=True, help="Seconds for one run.")
@click.option("--warm", is_flag=True, help="Keep the page cache between runs.")
@click.option("--venv", type=click.Path(path_type=Path), default=DEFAULT_VENV, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULT_OUT, show_default=True)
def command(
    graphs: tuple[str, ...], models: tuple[str, ...], limits: tuple[int, ...],
    systems: tuple[str, ...], repeat: int, threads: int, batch: int, memory: int, timeout: float,
    warm: bool, venv: Path, out: Path,
) -> None:  # fmt: skip
    """Run Hyades, PyG and DGL side by side and write peers.txt, .json, .png and .svg.

    Every run is a process of its own; the systems take turns; the median of the runs counts.
    Graphs, volumes and scratch files are kept in the folder work of --out.

    \b
    hyades bench peers --graph 1M16M --model sage
    hyades bench peers --graph 1M16M --limit 1GiB --system hyades --system dgl-layerwise
    """
    setting = Setting(
        out / "work", out, venv, repeat, timeout, cold=not warm, threads=threads, batch=batch,
        memory=memory,
    )  # fmt: skip
    if graphs:
        cases = [
            make_case(graph, "gcn" if model == "gcn" else "sage", limit, setting)
            for graph in graphs
            for model in models or ("sage", "gcn")
            for limit in limits or (None,)
        ]
    else:
        cases = [
            case
            for case in full_suite(setting)
            if (not models or case.model.kind in models) and (not limits or case.limit in limits)
        ]
    _, _, text = run_suite(cases, setting, names=systems or None, progress=report_progress)
    click.echo(text)
    click.echo(f"written: {out / 'peers'}.txt, .json, .png, .svg")
