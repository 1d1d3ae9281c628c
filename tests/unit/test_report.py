"""report.json round trip, the numbers on the page, and that the page needs no network."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from tests.reference.reports import MIB, make_report

from hyades.common.errors import DataError, UsageError
from hyades.deploy.machine import cgroup_limit
from hyades.deploy.report.model import Span, chosen, deviation
from hyades.deploy.report.timeline import plot_phases, plot_timeline, thin_spans
from hyades.deploy.report.write import read_report, render, write_report


class Loads(HTMLParser):
    """Collects everything that a browser would fetch, and whether tags close."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.found: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [(k, v) for k, v in attrs if k in ("src", "href", "xlink:href", "data")]


def test_the_json_gives_the_report_back(tmp_path: Path) -> None:
    report = make_report()
    json_path, html_path = write_report(report, tmp_path / "new" / "dir")
    again = read_report(json_path)
    thin = thin_spans(report.timeline, report.seconds)
    assert again == msgspec.structs.replace(report, timeline=thin)
    assert read_report(json_path.parent) == again
    assert html_path.read_text().startswith("<!doctype html>")
    assert sorted(p.name for p in json_path.parent.iterdir()) == ["report.html", "report.json"]


def test_a_report_of_another_schema_or_broken_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no report at"):
        read_report(tmp_path)
    path, _ = write_report(make_report(schema=99), tmp_path)
    with pytest.raises(DataError, match="schema 99, this version reads 1"):
        read_report(path)
    path.write_text(path.read_text().replace('"seconds"', '"second"'))
    with pytest.raises(DataError, match="seconds"):
        read_report(path)


def test_the_page_needs_no_network() -> None:
    text = render(make_report())
    loads = Loads()
    loads.feed(text)
    assert loads.found == []
    assert not {"script", "link", "img", "iframe", "object"} & set(loads.tags)
    assert "url(" not in text
    assert "@import" not in text
    assert "://" not in text


def test_the_page_shows_the_numbers() -> None:
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", render(make_report())))
    for shown in (
        "1,000,000 vertices", "16,000,000 edges", "606.0 MiB", "(+1.0%)", "1.01", "900.0 MiB",
        "needs more than the budget", "moves the fewest bytes", "128 → 64", "1,234", "spins",
        "plan: passes:2", "stage 2: convs.1 (SAGEConv)", "2: convs.1 (SAGEConv)",
    ):  # fmt: skip
        assert shown in text


def test_names_are_escaped() -> None:
    text = render(make_report(out="<script>alert(1)</script>"))
    assert "<script>" not in text


def test_the_drawings_are_well_formed_and_inside_their_frame() -> None:
    drawings = re.findall(r"<svg.*?</svg>", render(make_report()), re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        svg = ElementTree.fromstring(drawing)
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        rects = list(svg.iter("rect"))
        assert len(rects) > 5
        for rect in rects:
            x, y = float(rect.attrib["x"]), float(rect.attrib["y"])
            assert 0 <= x <= x + float(rect.attrib["width"]) <= width + 5
            assert 0 <= y <= height - 18


def test_a_long_timeline_is_merged_and_keeps_its_ends() -> None:
    spans = [Span(name="tiles", worker="w", t0=i * 1e-5, t1=(i + 1) * 1e-5) for i in range(100_000)]
    thin = thin_spans(spans, 1.0)
    assert len(thin) == 1
    assert (thin[0].t0, thin[0].t1) == (0.0, pytest.approx(1.0))
    apart = [Span(name="read", worker="w", t0=t, t1=t + 0.01) for t in (0.0, 0.5, 0.9)]
    assert thin_spans(apart, 1.0) == apart


def test_plots_survive_an_empty_run() -> None:
    assert plot_timeline([], 0.0).bars == []
    assert plot_phases([], []).rows == []
    report = make_report(timeline=[], phases=[], stages=[], candidates=[], seconds=0.0)
    assert "nothing to do" in render(report)


def test_derived_numbers() -> None:
    assert chosen(make_report()) == "passes:2"
    assert deviation(100, 102) == pytest.approx(0.02)
    assert deviation(0, 0) == 0
    assert deviation(0, 1) == float("inf")
    report = make_report()
    assert report.memory.used == 900 * MIB
    assert report.traffic.amplification == pytest.approx(1.01)


def test_the_lowest_limit_of_a_cgroup_and_its_parents_counts(tmp_path: Path) -> None:
    proc = tmp_path / "proc/self"
    proc.mkdir(parents=True)
    (proc / "cgroup").write_text("0::/a/b\n")
    leaf = tmp_path / "sys/fs/cgroup/a/b"
    leaf.mkdir(parents=True)
    (leaf / "memory.max").write_text("max\n")
    assert cgroup_limit(tmp_path) is None
    (leaf.parent / "memory.max").write_text("1073741824\n")
    assert cgroup_limit(tmp_path) == 1 << 30
    (proc / "cgroup").write_text("4:memory:/x\n0::/\n")
    v1 = tmp_path / "sys/fs/cgroup/memory/x"
    v1.mkdir(parents=True)
    (v1 / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert cgroup_limit(tmp_path) is None
    (v1 / "memory.limit_in_bytes").write_text("536870912\n")
    assert cgroup_limit(tmp_path) == 1 << 29
