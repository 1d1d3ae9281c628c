"""report.json round trip, the numbers on the page, and that the page needs no network."""

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from hyades.common.errors import DataError, UsageError
from hyades.deploy.machine import cgroup_limit, this_machine
from hyades.deploy.report.model import (
    Candidate,
    Counters,
    Graph,
    Memory,
    Phase,
    Report,
    Span,
    Stage,
    Traffic,
    chosen,
    deviation,
)
from hyades.deploy.report.timeline import plot_phases, plot_timeline, thin_spans
from hyades.deploy.report.write import read_report, render, write_report

MIB = 1 << 20


def make_stage(index: int) -> Stage:
    return Stage(
        index=index, name=f"convs.{index} (SAGEConv)", in_channels=128, out_channels=64,
        plan="passes:2", order="project first", passes=2,
        predicted_read=300 * MIB, predicted_written=50 * MIB, bytes_read=303 * MIB,
        bytes_written=50 * MIB, seconds=1.5,
    )  # fmt: skip


def make_candidates(stage: int) -> list[Candidate]:
    common = {"stage": stage, "stage_name": f"convs.{stage} (SAGEConv)", "order": "project first"}
    return [
        Candidate(name="resident", bytes_read=300 * MIB, bytes_written=50 * MIB, seconds=1,
                  memory=2048 * MIB, fits=False, reason="needs more than the budget", **common),
        Candidate(name="passes:2", bytes_read=600 * MIB, bytes_written=50 * MIB, seconds=2,
                  memory=900 * MIB, chosen=True, reason="moves the fewest bytes", **common),
    ]  # fmt: skip


def make_report(spans: int = 200, **changes: object) -> Report:
    timeline = [
        Span(name=("read", "land", "tiles", "wait")[i % 4], worker=f"worker {i % 3}",
             t0=i * 3 / spans, t1=(i + 1.5) * 3 / spans)
        for i in range(spans)
    ]  # fmt: skip
    names = ("read", "land", "tiles", "finalise", "write")
    report = Report(
        out="sage", model="GraphSAGE, 2 layers 128 -> 64 -> 64", options={"memory": "1.0 GiB"},
        started="2026-01-02T03:04:05Z", seconds=3.0, resumed=False,
        graph=Graph(volume="g.vol", vertices=1_000_000, edges=16_000_000, feature_width=128,
                    feature_dtype="float32"),
        machine=this_machine("cpu, 2 threads"),
        memory=Memory(budget=1024 * MIB, predicted=900 * MIB, baseline=350 * MIB, peak=1250 * MIB),
        traffic=Traffic(intended=600 * MIB, read=606 * MIB, written=100 * MIB,
                        predicted_read=600 * MIB, predicted_written=100 * MIB),
        counters=Counters(items=1234, edges=32_000_000, misses=9, parks=8, resumes=8,
                          other={"spins": 77}),
        candidates=[c for i in range(2) for c in make_candidates(i)],
        stages=[make_stage(0), make_stage(1)],
        phases=[Phase(stage=i, name=name, seconds=0.1 * (k + 1), workers=2)
                for i in range(2) for k, name in enumerate(names)],
        timeline=timeline,
    )  # fmt: skip
    return msgspec.structs.replace(report, **changes)


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
