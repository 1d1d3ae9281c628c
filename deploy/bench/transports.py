"""hyades bench transports: which transport and which stage setting pays, on which link."""

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import click

from hyades.common.encodings import ENCODINGS as KNOWN
from hyades.common.encodings import Encoding
from hyades.common.errors import BackendMissing, UsageError
from hyades.deploy.bench.comparison import ENCODINGS, Fetched, Row, groups, make_cases
from hyades.deploy.bench.comparison_page import Results, plot_group, render_page
from hyades.deploy.bench.comparison_run import (
    TRANSPORTS,
    Comparison,
    Plan,
    Subject,
    existing,
    fill_compute,
    prepare,
)
from hyades.deploy.bench.link import Speed, parse_speed
from hyades.deploy.bench.output import write_json
from hyades.deploy.bench.peers import DEFAULT_OUT, report_progress
from hyades.deploy.bench.published import TABLE_2, Fanouts
from hyades.deploy.bench.shapes import SHAPES, scaled
from hyades.deploy.machine import cores

_FEW: Fanouts = (2, 2)  # few enough that rows drop out of a whole refresh


def parse_fanouts(texts: Sequence[str], name: str) -> list[Fanouts]:
    """Return the lists of fanouts in *texts*; the published ones of graph *name* without any."""
    if not texts:
        known = [cell.fanouts for cell in TABLE_2 if cell.dataset == name]
        return [*dict.fromkeys(known or [(25, 10), (10, 10), (-1,)]), _FEW]
    found = []
    for text in texts:
        try:
            fanouts = tuple(int(part) for part in text.split(","))
        except ValueError:
            fanouts = ()
        if not fanouts or any(k == 0 or k < -1 for k in fanouts):
            raise UsageError(f"--fanout {text}: such as 25,10, from a vertex outward; -1: all")
        found.append(fanouts)
    return found


def _about(
    subjects: Sequence[Subject], speed: Speed, scale: float, plan: Plan, *, widths: bool
) -> list[str]:
    shapes = []
    for subject in subjects:
        shape = subject.shape
        full = SHAPES.get(shape.name) if subject.files is not None else None
        of = f" (of {full.describe()})" if full is not None else ""
        shapes.append(f"{shape.name}: {shape.describe()}{of}")
    what = "vertices, edges, features and classes" if widths else "vertices and edges"
    made = any(subject.files is not None for subject in subjects)
    return [
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {cores()} cores, {platform.machine()}, Linux "
        f"{platform.release()}, load {os.getloadavg()[0]:.1f} when it began",
        *([f"Generated graphs: {what} times {scale:g}."] if made else []),
        *shapes,
        f"Link of nvme+tcp: {speed.text}; medians of {plan.turns} turns; {plan.depth} requests of "
        f"up to 1 MiB in flight; GraphSAGE with mean, hidden width {plan.hidden}.",
    ]  # fmt: skip


def _only(text: str | None) -> list[str]:
    names = [name.strip() for name in (text or ",".join(TRANSPORTS)).split(",")]
    if unknown := [name for name in names if name not in TRANSPORTS]:
        raise UsageError(f"--only {unknown[0]}: some of {', '.join(TRANSPORTS)}")
    return names


def _encodings(text: str) -> list[Encoding]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in KNOWN]:
        raise UsageError(f"--type {unknown[0]}: some of {', '.join(KNOWN)}")
    # The base is float32.
    return cast("list[Encoding]", list(dict.fromkeys(["float32", *names])))


def write_results(results: Results, out: Path) -> tuple[str, str]:
    """Write transports.txt, .json and .html; return the text, and why plots lack if they do."""
    out.mkdir(parents=True, exist_ok=True)
    text = results.text()
    (out / "transports.txt").write_text(text)
    write_json(out / "transports.json", results.json())
    plots, note = [], ""
    try:
        plots = [plot_group(rows) for first, rows in groups(results.rows) if not first.reason]
    except BackendMissing as error:  # the figures are there, whatever became of their picture
        note = str(error)
    (out / "transports.html").write_text(render_page(results, plots, note))
    return text, note


@click.command()
@click.option("--only", metavar="NAMES", help=f"Comma-separated among {', '.join(TRANSPORTS)}.")
@click.option(
    "--shape", "shapes", multiple=True, metavar="NAME",
    help=f"Generated graph like {', '.join(SHAPES)}; default: all three.",
)  # fmt: skip
@click.option("--scale", default=0.02, show_default=True, help="Of vertices and edges.")
@click.option("--scale-widths", is_flag=True, help="Scale features and classes, too.")
@click.option(
    "--volume", type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A volume instead of generated graphs.",
)  # fmt: skip
@click.option("--classes", default=47, show_default=True, help="Of --volume: columns of results.")
@click.option(
    "--fanout", "fanouts", multiple=True, metavar="LIST",
    help="From a vertex outward, such as 25,10; repeatable; default: those of LGNNIC, and 2,2.",
)  # fmt: skip
@click.option("--type", "types", default=",".join(ENCODINGS), show_default=True, metavar="NAMES")
@click.option("--project/--no-project", default=True, help="With projection beside the data.")
@click.option("--hidden", default=128, show_default=True, type=click.IntRange(min=1))
@click.option("--link", metavar="RATE", help="Of nvme+tcp, such as 1gbit; default: unshaped.")
@click.option("--delay", default=0.0, show_default=True, help="Milliseconds, each way.")
@click.option("--rdma", metavar="HOST", help="Address of this machine with an RDMA device.")
@click.option(
    "--compute/--no-compute", default=True, help="Refresh in memory; without, totals lack it."
)
@click.option("--refresh", is_flag=True, help="Refresh over each transport, too: takes long.")
@click.option("--depth", default=8, show_default=True, type=click.IntRange(min=1))
@click.option("--memory", default="2GiB", show_default=True, help="Of a refresh.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULT_OUT, show_default=True)
def command(**options: Any) -> None:
    """Compare transports, and what sampling, projecting and rounding beside the data saves.

    For each transport the rows of the features are read raw and as views; docs/benchmarks.md says
    what the columns mean. Published figures stand beside ours. A link is made of two network
    namespaces (root, ip and tc), so that its bytes are counted and its speed can be chosen;
    shared memory (dma) has none.

    \b
    hyades bench transports --link 1gbit
    hyades bench transports --shape mag --only nvme+tcp,dma --no-project
    hyades bench transports --volume g.vol --fanout 10,10 --link 10gbit
    """
    out: Path = options["out"]
    speed = parse_speed(options["link"], options["delay"])
    names, encodings = _only(options["only"]), _encodings(options["types"])
    plan = Plan(
        out / "work", speed, options["repeat"], options["depth"], options["hidden"],
        options["memory"], options["rdma"], options["refresh"],
    )  # fmt: skip
    scale, widths = options["scale"], options["scale_widths"]
    if options["volume"] is not None:
        subjects = [existing(options["volume"], options["classes"])]
    else:
        chosen = [scaled(name, scale, widths=widths) for name in options["shapes"] or SHAPES]
        subjects = [prepare(shape, plan.work, report_progress) for shape in chosen]
    about = _about(subjects, speed, scale, plan, widths=widths)
    rows: list[Row] = []
    fetched: list[Fetched] = []
    text = note = ""
    for subject in subjects:
        fanouts = parse_fanouts(options["fanouts"], subject.shape.name)
        cases = make_cases(fanouts, encodings, project=options["project"])
        comparison = Comparison(subject, plan, report_progress)
        seconds = comparison.compute(cases) if options["compute"] else {}
        fetched += comparison.fetched(cases)
        for name in names:
            found = comparison.rows(name, cases)
            fill_compute(found, seconds)
            rows += found
            text, note = write_results(Results(about, rows, fetched), out)
    click.echo(text)
    if note:
        click.echo(note)
    click.echo(f"written: {out / 'transports'}.txt, .json, .html")
