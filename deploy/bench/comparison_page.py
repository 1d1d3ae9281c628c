"""The results of `hyades bench transports`: text, JSON, and one HTML page with plots.

The page needs nothing beside it: plots are SVG inside of it.  Published figures stand beside ours
and are never mixed with them; where ours were not measured, the cell says so.
"""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from typing import Any

from hyades.common.encodings import Encoding
from hyades.common.units import MIB
from hyades.deploy.bench import published
from hyades.deploy.bench.batches import BATCH
from hyades.deploy.bench.comparison import (
    HEAD,
    Case,
    Fetched,
    Row,
    base_of,
    cells,
    describe,
    fanout_text,
    find,
    groups,
)
from hyades.deploy.bench.output import COLORS, new_figure
from hyades.deploy.bench.published import TABLE_1, TABLE_2, TABLE_5, Fanouts
from hyades.deploy.commands.common import table

MECHANISM = {"nvme+tcp": "sockets", "dma": "dma"}
_MISSING = "not measured"
_BESIDE = (
    "LGNNIC trains on mini-batches: each batch of 1024 vertices fetches its own neighbourhood, and "
    "without sampling nearly all of the graph, again and again. A refresh fetches a row once for "
    "all vertices, so it starts from far less, and sampling can only drop rows that no vertex "
    "keeps. Its seconds are of other machines, of whole graphs; ours of scaled ones."
)


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table with a title and a remark."""

    title: str
    head: tuple[str, ...]
    lines: list[list[str]]
    remark: str = ""
    left: int = 3

    def text(self) -> str:
        """Return it as text."""
        parts = [self.title, table(list(self.head), self.lines, left=self.left)]
        return "\n".join([*parts, self.remark] if self.remark else parts)

    def html(self) -> str:
        """Return it as HTML."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.head)
        body = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in line) + "</tr>\n"
            for line in self.lines
        )
        remark = f"<p>{escape(self.remark)}</p>" if self.remark else ""
        return f"<h2>{escape(self.title)}</h2>\n<table><tr>{head}</tr>\n{body}</table>{remark}\n"


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured; `about` are lines on when, where and how."""

    about: list[str]
    rows: list[Row]
    fetched: list[Fetched] = field(default_factory=list)

    def sheets(self) -> list[Sheet]:
        """Return all tables."""
        ours = [measured(first, rows) for first, rows in groups(self.rows)]
        beside = table_2(self.rows), batches(self.fetched), table_4_5(self.rows)
        return [*ours, *(sheet for sheet in beside if sheet.lines)]

    def text(self) -> str:
        """Return everything as text."""
        return "\n\n".join(["\n".join(self.about), *(s.text() for s in self.sheets())]) + "\n"

    def json(self) -> dict[str, Any]:
        """Return everything, each reading included."""
        return {
            "about": self.about,
            "published": published.SOURCE,
            "fetched": [asdict(line) for line in self.fetched],
            "rows": [_row_json(row, self.rows) for row in self.rows],
        }


def measured(first: Row, rows: Sequence[Row]) -> Sheet:
    """Return the main table of one shape, transport and link."""
    title = f"{first.shape}, {first.transport}, {first.link}"
    if first.reason:
        return Sheet(f"{title}: {_MISSING}: {first.reason}", HEAD, [], left=4)
    lines = [cells(row, base_of(row, rows)) for row in rows]
    remark = ""
    if any(row.case.root for row in rows):
        remark = (
            "root: the layer has a weight for a vertex's own row, so every row is needed and "
            "sampling drops none."
        )
    return Sheet(title, HEAD, lines, remark, left=4)


def _row_json(row: Row, rows: Sequence[Row]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "shape": row.shape, "transport": row.transport, "link": row.link, "case": asdict(row.case),
        "reason": row.reason, "compute": row.compute, "refresh": row.refresh,
        "refresh_wire": row.refresh_wire, "predicted_rows": row.predicted_rows,
        "readings": [
            {name: getattr(reading, name) for name in reading.__struct_fields__}
            for reading in row.readings
        ],
    }  # fmt: skip
    if not row.reason:
        found |= {
            "prepare_s": row.prepare_s, "open_s": row.open_s, "transfer_s": row.transfer_s,
            "compute_s": row.compute_s, "total_s": row.total_s, "rows": row.rows, "wire": row.wire,
            "wire_counted": row.counted,
        }  # fmt: skip
        base = base_of(row, rows)
        if base is not None:
            found["transfer_speedup"] = base.transfer_s / row.transfer_s
            found["total_speedup"] = base.total_s / row.total_s
    return found


def _ours(
    rows: Sequence[Row], shape: str, mechanism: str, fanouts: Fanouts, encoding: Encoding
) -> Row | None:
    """Return our row of a published one: sampled beside the data where the layer has a fanout."""
    if fanouts == TABLE_1[shape].base:
        fanouts = (-1, -1)
    case = Case(fanouts, encoding, sampled=fanouts[-1] > 0)
    for row in rows:
        if row.shape == shape and MECHANISM.get(row.transport) == mechanism:
            return find(rows, row, case)
    return None


def table_2(rows: Sequence[Row]) -> Sheet:
    """Return table 2: what sampling beside the data saves, at float32."""
    shapes = {row.shape for row in rows}
    lines = []
    for cell in (cell for cell in TABLE_2 if cell.dataset in shapes):
        ours = _ours(rows, cell.dataset, cell.mechanism, cell.fanouts, "float32")
        base = base_of(ours, rows) if ours is not None else None
        mine = [_MISSING, _MISSING]
        if ours is not None and base is not None:
            mine[0] = f"{base.transfer_s / ours.transfer_s:.2f}"
            if ours.compute and base.compute:
                mine[1] = f"{base.total_s / ours.total_s:.2f}"
        lines.append([
            cell.dataset, cell.mechanism, fanout_text(cell.fanouts),
            f"{cell.transfer_speedup:.2f}", mine[0], f"{cell.total_speedup:.2f}", mine[1],
        ])  # fmt: skip
    head = (
        "data set", "by", "fanout", "transfer x, LGNNIC", "transfer x, ours", "total x, LGNNIC",
        "total x, ours",
    )  # fmt: skip
    title = f"Sampling beside the data, beside table 2 of {published.SOURCE}"
    return Sheet(title, head, lines, _BESIDE)


def batches(fetched: Sequence[Fetched]) -> Sheet:
    """Return what mini-batches would fetch of the same graphs."""
    whole = {line.shape: line.rows for line in fetched if line.fanouts == (-1, -1)}
    lines = []
    for line in fetched:
        cell = published.sampled(line.shape, "sockets", line.fanouts)
        lines.append([
            line.shape, fanout_text(line.fanouts), f"{line.rows:,}",
            f"{line.rows / line.vertices:.2f}", f"{whole[line.shape] / line.rows:.2f}",
            f"{cell.transfer_speedup:.2f}" if cell is not None else "-",
        ])  # fmt: skip
    head = (
        "data set", "fanout", "rows of an epoch", "times a refresh's", "fewer than [-1, -1] by",
        "transfer x, LGNNIC, sockets",
    )  # fmt: skip
    remark = "A small graph is soon reached whole by a batch: the factor grows with the scale."
    title = f"What mini-batches of {BATCH} would fetch of these graphs (counted, not run)"
    return Sheet(title, head, lines, remark, left=2)


def table_4_5(rows: Sequence[Row]) -> Sheet:
    """Return tables 4 and 5: what float16 saves, each list of fanouts against itself."""
    shapes = {row.shape for row in rows}
    lines = []
    for line in (line for line in TABLE_5 if line.dataset in shapes):
        where = rows, line.dataset, line.mechanism, line.fanouts
        full, half = _ours(*where, "float32"), _ours(*where, "float16")
        mine = [_MISSING] * 4
        if full is not None and half is not None:
            mine[0] = f"{full.transfer_s:.3f} / {half.transfer_s:.3f}"
            mine[1] = f"{full.transfer_s / half.transfer_s:.2f}"
            if full.compute and half.compute:
                mine[2] = f"{full.total_s:.3f} / {half.total_s:.3f}"
                mine[3] = f"{full.total_s / half.total_s:.2f}"
        lines.append([
            line.dataset, line.mechanism, fanout_text(line.fanouts),
            f"{line.transfer32:g} / {line.transfer16:g}", mine[0],
            f"{line.transfer_speedup:.2f}", mine[1], f"{line.total32:g} / {line.total16:g}",
            mine[2], f"{line.total_speedup:.2f}", mine[3],
        ])  # fmt: skip
    head = (
        "data set", "by", "fanout", "transfer s, LGNNIC", "transfer s, ours", "x, LGNNIC",
        "x, ours", "total s, LGNNIC", "total s, ours", "x, LGNNIC", "x, ours",
    )  # fmt: skip
    title = f"float32 / float16, beside tables 4 and 5 of {published.SOURCE}"
    remark = "Where LGNNIC's Reddit has [-1, 256], ours has every edge."
    return Sheet(title, head, lines, remark)


def plot_group(rows: Sequence[Row]) -> str:
    """Return an SVG of one shape and transport: seconds stacked on the left, bytes on the right."""
    chosen: dict[tuple[Any, ...], Row] = {}
    for row in rows:  # cases that transfer the same thing and compute the same are drawn once
        chosen.setdefault((row.case.key, row.case.fanouts), row)
    shown = list(chosen.values())
    names = [describe(row.case) for row in shown]
    figure = new_figure(11, 0.26 * len(shown) + 1.1)
    seconds, wire = figure.subplots(1, 2, sharey=True, width_ratios=(2, 1))
    left = [0.0] * len(shown)
    for color, part in zip(COLORS, ("open", "transfer", "compute"), strict=False):
        values = [
            0.0 if part == "open" and row.case.raw else getattr(row, f"{part}_s") for row in shown
        ]
        seconds.barh(names, values, left=left, color=color, label=part)
        left = [a + b for a, b in zip(left, values, strict=True)]
    seconds.set_xlabel("seconds, one after the other", fontsize=8)
    seconds.legend(fontsize=7)
    seconds.invert_yaxis()
    seconds.margins(y=0.01)
    wire.barh(names, [row.wire / MIB for row in shown], color=COLORS[3])
    wire.set_xlabel("MiB towards the host", fontsize=8)
    for panel in (seconds, wire):
        panel.tick_params(labelsize=7)
    text = io.StringIO()
    figure.savefig(text, format="svg")
    return text.getvalue().partition("<svg")[1] + text.getvalue().partition("<svg")[2]


_STYLE = (
    "body{font:14px sans-serif;margin:2em;max-width:110em}"
    "table{border-collapse:collapse;font-size:12px}"
    "td,th{padding:2px 8px;border-bottom:1px solid #ddd;text-align:right}"
    "td:nth-child(-n+3),th:nth-child(-n+3){text-align:left}svg{max-width:100%;height:auto}"
)


def render_page(results: Results, plots: Sequence[str], note: str = "") -> str:
    """Return the HTML page; *plots* are one SVG for each measured group, *note* why they lack."""
    about = "".join(f"<p>{escape(line)}</p>\n" for line in results.about)
    parts = []
    drawn = iter(plots)
    for sheet in results.sheets():
        parts.append(sheet.html())
        if sheet.head == HEAD and sheet.lines:
            parts.append(next(drawn, f"<p>{escape(note)}</p>" if note else ""))
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>Transports compared</title><style>{_STYLE}</style></head>\n<body>"
        f"<h1>Transports and the stage compared</h1>\n{about}{''.join(parts)}</body></html>\n"
    )
