"""Tables, JSON files and plots of the benchmarks."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hyades.common.errors import BackendMissing
from hyades.common.units import format_size
from hyades.deploy.bench.claims import Goal
from hyades.deploy.bench.eviction import LABEL, PolicyReport
from hyades.deploy.bench.runner import Row
from hyades.deploy.commands.common import table

COLORS = ("#1b6ca8", "#d1495b", "#edae49", "#00798c", "#7d5ba6", "#6b705c", "#000000")


def peers_table(rows: Sequence[Row]) -> str:
    """Return one block of text for each case, one line a system."""
    blocks = []
    for title in dict.fromkeys(row.case.title for row in rows):
        chosen = [row for row in rows if row.case.title == title]
        head = ["system", "s", "s whole", "cpu s", "peak RSS", "read", "written", "max rel diff"]
        columns = table(head, [_peer_cells(row) for row in chosen]).splitlines()
        width = max(map(len, columns))
        notes = ["notes", *map(_peer_notes, chosen)]
        lines = [
            f"{line:{width}}  {note}".rstrip() for line, note in zip(columns, notes, strict=True)
        ]
        blocks.append("\n".join([title, *lines]))
        reference = next((row.reference for row in chosen if row.reference), "")
        prepared = next((row.prepared for row in chosen if row.prepared is not None), None)
        if reference:
            blocks[-1] += f"\n  differences are from the {reference}"
        if prepared is not None and prepared.outcome == "ok":
            blocks[-1] += (
                f"\n  hyades ingest, once for this graph: {prepared.wall_s:.1f} s, peak RSS "
                f"{format_size(prepared.peak_rss)}"
            )
    return "\n\n".join(blocks)


def _peer_cells(row: Row) -> list[str]:
    detail = row.median.detail if row.runs else None
    if detail is None:
        return [row.system, *["-"] * 7]
    measured = row.median.measured
    return [
        row.system, f"{detail.seconds:.2f}", f"{measured.wall_s:.2f}", f"{measured.cpu_s:.1f}",
        format_size(measured.peak_rss), format_size(detail.read_bytes),
        format_size(detail.written_bytes),
        "-" if row.difference is None else f"{row.difference:.1e}",
    ]  # fmt: skip


def _peer_notes(row: Row) -> str:
    if not row.runs:
        return "not run"
    measured, detail = row.median.measured, row.median.detail
    if detail is None:
        return f"{measured.outcome}: {measured.detail}"
    notes = [*detail.notes]
    if not measured.cold:
        notes.append("page cache not dropped")
    if row.spread > 1.2:
        notes.append(f"spread {row.spread:.2f}x")
    return "; ".join(notes)


def goals_table(goals: Sequence[Goal]) -> str:
    """Return one line a goal: met, MISSED or not judged."""
    words = {True: "met", False: "MISSED", None: "not judged"}
    lines = [[goal.name, goal.target, words[goal.met], goal.measured] for goal in goals]
    return table(["goal", "target", "", "measured"], lines, left=4)


def policies_table(report: PolicyReport) -> str:
    """Return the simulation's rows and, below each budget, what is planned for it."""
    body = []
    for order, fraction in dict.fromkeys((row.order, row.fraction) for row in report.simulated):
        budget = f"1/{1 / fraction:g}"
        for row in report.simulated:
            if (row.order, row.fraction) == (order, fraction):
                body.append([
                    order, budget, row.policy, "simulated", f"{row.reloads:,}",
                    format_size(row.row_bytes), format_size(row.page_bytes),
                ])  # fmt: skip
        for plan in report.planned:
            if (plan.order, plan.fraction) == (order, fraction):
                moved = format_size(plan.read_bytes + plan.write_bytes)
                body.append([order, budget, f"hyades {plan.plan}", "planned", "-", moved, moved])
    head = ["order", "budget", "policy", "", "reloads", "bytes, rows", "bytes, 4 KiB blocks"]
    scale = (
        f"{report.vertices:,} vertices, {report.edges:,} edges, partial aggregates of "
        f"{report.state_bytes} bytes; budget: share of all partial aggregates in memory."
    )
    beside = "Bytes are read plus written beyond one scan of the input and the final rows."
    return "\n".join([LABEL, scale, beside, table(head, body, left=4)])


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write *content* with an indent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def peers_json(rows: Sequence[Row], goals: Sequence[Goal]) -> dict[str, Any]:
    """Return everything that was measured, every run included."""
    return {
        "rows": [
            {
                "system": row.system,
                "title": row.case.title,
                "case": asdict(row.case),
                "seconds": row.seconds,
                "difference": row.difference,
                "reference": row.reference,
                "prepared": None if row.prepared is None else asdict(row.prepared),
                "runs": [
                    {
                        "measured": asdict(run.measured),
                        "detail": None if run.detail is None else asdict(run.detail),
                    }
                    for run in row.runs
                ],
            }
            for row in rows
        ],
        "goals": [asdict(goal) for goal in goals],
    }


def policies_json(report: PolicyReport) -> dict[str, Any]:
    """Return the report with its label."""
    return {"label": LABEL, **asdict(report)}


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of that many inches; BackendMissing without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendMissing(
            "plots need matplotlib, which is not installed: pip install -c constraints.txt -e"
            " '.[bench]'"
        ) from error
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> list[Path]:
    """Write PNG and SVG beside each other and return both paths."""
    path.parent.mkdir(parents=True, exist_ok=True)
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    for target in paths:
        figure.savefig(target, dpi=130)
    return paths


def plot_peers(rows: Sequence[Row], path: Path) -> list[Path]:
    """Draw seconds after imports, one panel a case, one bar a system."""
    titles = list(dict.fromkeys(row.case.title for row in rows))
    counts = [sum(row.case.title == title for row in rows) for title in titles]
    figure = new_figure(9, 0.9 * len(titles) + 0.32 * sum(counts) + 0.6)
    panels = figure.subplots(len(titles), 1, squeeze=False, height_ratios=counts)[:, 0]
    systems = list(dict.fromkeys(row.system for row in rows))
    for panel, title in zip(panels, titles, strict=True):
        chosen = [row for row in rows if row.case.title == title]
        colors = [COLORS[systems.index(row.system) % len(COLORS)] for row in chosen]
        seconds = [row.seconds or 0.0 for row in chosen]
        panel.barh([row.system for row in chosen], seconds, color=colors)
        for place, row in enumerate(chosen):
            text = f" {row.seconds:.2f} s" if row.seconds is not None else f" {_outcome(row)}"
            panel.text(seconds[place], place, text, va="center", fontsize=8)
        panel.invert_yaxis()
        panel.margins(x=0.15)
        panel.set_title(title, fontsize=9, loc="left")
        panel.tick_params(labelsize=8)
    panels[-1].set_xlabel("seconds after imports, median", fontsize=8)
    return _save(figure, path)


def plot_bars(names: Sequence[str], values: Sequence[float], label: str, path: Path) -> list[Path]:
    """Draw one bar a name."""
    figure = new_figure(8, 0.4 * len(names) + 0.9)
    panel = figure.subplots()
    panel.barh(names, values, color=[COLORS[i % len(COLORS)] for i in range(len(names))])
    for place, value in enumerate(values):
        panel.text(value, place, f" {value:.2f}", va="center", fontsize=8)
    panel.invert_yaxis()
    panel.margins(x=0.12)
    panel.set_xlabel(label, fontsize=8)
    return _save(figure, path)


def _outcome(row: Row) -> str:
    return row.median.measured.outcome if row.runs else "not run"


def plot_policies(report: PolicyReport, path: Path) -> list[Path]:
    """Draw bytes moved against the budget: a column of panels an order, a line a policy or plan.

    The upper panels count whole rows, the lower ones a 4 KiB block for each row moved.
    """
    orders = list(dict.fromkeys(row.order for row in report.simulated))
    figure = new_figure(4.2 * len(orders) + 1.6, 7.6)
    panels = figure.subplots(2, len(orders), squeeze=False, sharey=True, sharex=True)
    for place, order in enumerate(orders):
        for upper, panel in zip((True, False), panels[:, place], strict=True):
            _draw_policies(panel, report, order, rows=upper)
        panels[0][place].set_title(f"order: {order}", fontsize=9)
        panels[1][place].set_xlabel("share of partial aggregates in memory", fontsize=8)
    panels[0][0].set_ylabel("GB moved beyond one scan, whole rows", fontsize=8)
    panels[1][0].set_ylabel("GB moved beyond one scan, 4 KiB blocks", fontsize=8)
    panels[0][-1].legend(fontsize=7)
    figure.suptitle("topology-only simulation of evict-and-reload; plans of Hyades", fontsize=9)
    return _save(figure, path)


def _draw_policies(panel: Any, report: PolicyReport, order: str, *, rows: bool) -> None:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in report.simulated:
        if row.order == order:
            point = (row.fraction, row.row_bytes if rows else row.page_bytes)
            lines.setdefault(f"{row.policy} (simulated)", []).append(point)
    for plan in report.planned:
        if plan.order == order:
            name = f"Hyades {plan.plan.partition(':')[0]} (planned)"
            lines.setdefault(name, []).append((plan.fraction, plan.read_bytes + plan.write_bytes))
    for number, (name, points) in enumerate(lines.items()):
        x, y = zip(*sorted(points), strict=True)
        style = "--s" if name.startswith("Hyades") else "-o"
        color = COLORS[number % len(COLORS)]
        panel.plot(x, [value / 1e9 for value in y], style, markersize=4, color=color, label=name)
    panel.set_xscale("log", base=2)
    panel.set_yscale("symlog", linthresh=1e-3)
    panel.grid(alpha=0.3)
