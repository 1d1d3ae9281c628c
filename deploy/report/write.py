"""Writing and reading reports."""

from pathlib import Path

import jinja2
import msgspec

from hyades.common.errors import DataError, UsageError
from hyades.common.units import format_size
from hyades.deploy.report.model import SCHEMA, Report, chosen, deviation
from hyades.deploy.report.timeline import plot_phases, plot_timeline, thin_spans

JSON_NAME, HTML_NAME = "report.json", "report.html"


def write_report(report: Report, directory: Path) -> tuple[Path, Path]:
    """Write report.json and report.html into *directory* (made if need be); return their paths."""
    thin = msgspec.structs.replace(report, timeline=thin_spans(report.timeline, report.seconds))
    paths = directory / JSON_NAME, directory / HTML_NAME
    texts = msgspec.json.format(msgspec.json.encode(thin), indent=1), render(thin).encode()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, text in zip(paths, texts, strict=True):
            partial = path.with_name(f".{path.name}.partial")
            try:
                partial.write_bytes(text)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(
            f"output {report.out!r} is complete, but its report cannot be written to {directory}:"
            f" {error.strerror}"
        ) from error
    return paths


def read_report(path: Path) -> Report:
    """Return the report in a report.json, or in the directory that holds one."""
    if path.is_dir():
        path = path / JSON_NAME
    try:
        report = msgspec.json.decode(path.read_bytes(), type=Report)
    except FileNotFoundError as error:
        raise UsageError(f"there is no report at {path}") from error
    except msgspec.MsgspecError as error:
        raise DataError(f"{path}: {error}") from error
    if report.schema != SCHEMA:
        raise DataError(f"{path}: schema {report.schema}, this version reads {SCHEMA}")
    return report


def render(report: Report) -> str:
    """Return report.html: one page that needs nothing from anywhere."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": format_size, "seconds": _seconds, "percent": _percent}
    stages = [f"stage {stage.index + 1}" for stage in report.stages]
    return environment.get_template("report.html").render(
        r=report,
        plan=chosen(report),
        deviation=deviation,
        phases=plot_phases(report.phases, stages),
        timeline=plot_timeline(report.timeline, report.seconds),
    )


def _seconds(value: float) -> str:
    """Return a time with the digits that matter."""
    if value >= 100:
        return f"{value:.0f} s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _percent(value: float) -> str:
    return f"{value:+.1%}"
