"""hyades refresh."""

from contextlib import ExitStack
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from hyades.common.units import format_size
from hyades.deploy import api
from hyades.deploy.commands.common import memory_option, progress_option, table
from hyades.deploy.progress import ProgressBar
from hyades.deploy.report.model import Candidate, Report, deviation
from hyades.deploy.report.write import HTML_NAME
from hyades.proxy.stripes import map_members
from hyades.proxy.transports.nvme_url import with_ctrl_loss_timeout


class Fanout(click.ParamType):  # type: ignore[type-arg]
    """Neighbours kept in each layer: 10,10."""

    name = "fanout"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers, or say how to write them."""
        try:
            return tuple(int(part) for part in value.split(","))
        except ValueError:
            self.fail(f"{value!r}: write one number a layer, for example 10,10", param, ctx)


@click.command()
@click.argument("volume")
@click.option(
    "--model",
    required=True,
    type=click.Path(path_type=Path),
    help="A model file (.toml, .json), or a checkpoint whose keys tell everything.",
)
@click.option("--out", metavar="NAME", help="Name of the output in the volume.")
@memory_option("2GiB", "Budget for rows, states and buffers; Python and torch come on top.")
@click.option(
    "--fanout", type=Fanout(), metavar="K,K,...",
    help="Keep K random in-edges of each vertex, a number for each layer; the default is exact.",
)  # fmt: skip
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the sample.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads; default: every core.")
@click.option(
    "--dtype", type=click.Choice(["float32", "float16"]), default="float32", show_default=True,
    help="How outputs are stored; the arithmetic is float32.",
)  # fmt: skip
@click.option(
    "--plan", metavar="PLAN",
    help="Force a plan: resident, passes:P (the features are read P times) or log.",
)  # fmt: skip
@click.option("--explain", is_flag=True, help="Print every plan with what it would cost, and stop.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run of this NAME.")
@click.option("--force", is_flag=True, help="Replace an output or unfinished run of this NAME.")
@click.option(
    "--report", "report_dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Folder for report.html and report.json; default: NAME-report.",
)  # fmt: skip
@click.option(
    "--output-volume", metavar="URL",
    help="Where the output, hidden rows and the run's state go; VOLUME is then only read.",
)  # fmt: skip
@click.option(
    "--ctrl-loss-timeout", type=click.FloatRange(min=0), metavar="SECONDS",
    help="How long nvme+tcp:// volumes may be out of reach before the run ends; default: 60.",
)  # fmt: skip
@click.option("--no-report", is_flag=True, help="Write no report.")
@progress_option
def command(
    volume: str, model: Path, out: str | None, memory: int, fanout: tuple[int, ...] | None,
    seed: int, threads: int | None, dtype: str, plan: str | None, explain: bool, resume: bool,
    force: bool, report_dir: Path | None, output_volume: str | None,
    ctrl_loss_timeout: float | None, no_report: bool, progress: bool | None,
) -> None:  # fmt: skip
    """Compute the embeddings of every vertex in VOLUME and store them in it as output NAME.

    The features are read in order as often as the plan says, never once per edge, and memory stays
    within the budget. An interrupted run (Ctrl-C, kill, power) is continued with --resume and
    gives the same bits. With --output-volume, made where there is none, VOLUME may lie on a host
    that lets it be read only, and several runs may read it at once.

    \b
    hyades refresh g.vol --model model.toml --out sage
    hyades refresh g.vol --model model.toml --memory 512MiB --explain
    hyades refresh g.vol --model gcn.pt --out sampled --fanout 10,10 --seed 7
    hyades refresh nvme+tcp://host:4420/nqn --model gcn.pt --out x --output-volume local.vol
    """
    if ctrl_loss_timeout is not None:
        patient = partial(with_ctrl_loss_timeout, seconds=ctrl_loss_timeout)
        volume = map_members(volume, patient)
        output_volume = output_volume and map_members(output_volume, patient)
    options: dict[str, Any] = {
        "memory": memory, "fanout": fanout, "seed": seed, "threads": threads, "dtype": dtype,
        "plan": plan,
    }  # fmt: skip
    if explain:
        with api.open(volume) as opened:
            click.echo(explain_table(api.explain(opened, model, **options)))
        return
    if out is None:
        raise click.UsageError("Missing option '--out': the name of the output.")
    folder = None if no_report else report_dir or Path(f"{out}-report")
    with ExitStack() as stack:
        opened = stack.enter_context(api.open(volume, writable=output_volume is None))
        target = opened
        if output_volume is not None:
            target = stack.enter_context(api.open_output(output_volume, opened))
        bar = stack.enter_context(ProgressBar(force=progress))
        try:
            result = api.refresh(
                opened, model, out=out, resume=resume, force=force, progress=bar,
                report_dir=folder, output_volume=None if target is opened else target, **options,
            )  # fmt: skip
        except KeyboardInterrupt as stop:
            run = target.catalog.runs.get(out)
            if run is None or run.state != "running":  # not yet, or no longer
                raise
            hint = "what was done is kept: add --resume to the same command to continue"
            raise type(stop)(hint) from None
    click.echo(summary(result.report))
    if folder is not None:
        click.echo(f"report: {folder / HTML_NAME}")


def explain_table(candidates: list[Candidate]) -> str:
    """Return the plans of each stage as a table; a star marks the one that is taken."""
    lines = []
    for _, group in groupby(candidates, key=lambda c: c.stage):
        plans = list(group)
        rows = [
            [
                f"{'*' if c.chosen else ' '} {c.name}", c.order, format_size(c.bytes_read),
                format_size(c.bytes_written), format_size(c.memory), f"{c.seconds:.2f} s",
            ]
            for c in plans
        ]  # fmt: skip
        head = ["  plan", "order", "read", "written", "memory", "time"]
        reasons = ["why", *(c.reason for c in plans)]
        lines.append(f"stage {plans[0].stage + 1}: {plans[0].stage_name}")
        lines += [
            f"{line}  {reason}".rstrip()
            for line, reason in zip(table(head, rows, left=2).splitlines(), reasons, strict=True)
        ]
        lines.append("")
    return "\n".join(lines[:-1])


def summary(report: Report) -> str:
    """Return what a refresh did: a line a stage, then the totals."""
    rows = [
        [
            f"{stage.index + 1}", stage.name, f"{stage.in_channels} -> {stage.out_channels}",
            stage.plan, stage.order, format_size(stage.bytes_read),
            f"{deviation(stage.predicted_read, stage.bytes_read):+.1%}",
            format_size(stage.bytes_written), f"{stage.seconds:.2f} s",
        ]
        for stage in report.stages
    ]  # fmt: skip
    head = ["stage", "", "shape", "plan", "order", "read", "vs plan", "written", "time"]
    traffic, memory, counters = report.traffic, report.memory, report.counters
    where = [
        f"{v.volume}: {format_size(v.read)} read, {format_size(v.written)} written"
        for v in report.volumes
    ]
    lost = [
        f"{v.volume}: a connection was lost and found again {v.losses} x, last: {v.last_loss}"
        for v in report.volumes
        if v.losses
    ]
    return "\n".join(
        [
            table(head, rows, left=5),
            "",
            f"{report.out}: {report.graph.vertices:,} rows in {report.seconds:.2f} s, "
            f"{format_size(traffic.read)} read ({traffic.amplification:.2f} x one scan), "
            f"{format_size(traffic.written)} written",
            f"memory: {format_size(memory.used)} of {format_size(memory.budget)}; "
            f"missed {counters.misses:,}, parked {counters.parks:,}, "
            f"resumed {counters.resumes:,}",
            *(where if len(where) > 1 else ()),
            *lost,
        ]
    )
