"""hyades bench bandwidth: the same pages through every transport, side by side in one run."""

import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click
import numpy as np

from hyades.common.errors import BackendMissing, UsageError
from hyades.common.units import KIB, MIB
from hyades.deploy.bench.claims import Goal
from hyades.deploy.bench.graphs import GRAPHS, named_graph, write_graph
from hyades.deploy.bench.measure import Measurement, drop_page_cache, run_measured
from hyades.deploy.bench.output import goals_table, plot_bars, write_json
from hyades.deploy.bench.peers import DEFAULT_OUT, report_progress
from hyades.deploy.bench.serving import NQN, Server, plain_sender, served
from hyades.deploy.bench.weights import ModelSpec, write_weights
from hyades.deploy.commands.common import Size, table
from hyades.deploy.ingest.api import ingest

PLAIN = "sockets"
LOCAL = "file"
_WORKER = (sys.executable, "-m", "hyades.deploy.bench.bandwidth_worker")
_REFRESH = (sys.executable, "-m", "hyades.deploy.bench.refresh_worker")
_DEPTH = {"sequential": 8, "random": 32}
_PAGE = {"sequential": MIB, "random": 4 * KIB}
# name -> options of the URL; `file` and `sockets` are what the others are compared with
_URLS = {
    "nvme+tcp": "",
    "nvme+tcp digest=data": "&digest=data",
    "nvme+tcp digest=header,data": "&digest=header,data",
}
NAMES = (PLAIN, LOCAL, *_URLS)


@dataclass(slots=True)
class Rate:
    """What was read of one kind through one transport; every list has an entry a turn."""

    transport: str
    order: str  # "sequential", pages of 1 MiB, or "random", 4 KiB
    bytes_per_s: list[float] = field(default_factory=list)
    pages_per_s: list[float] = field(default_factory=list)
    reader_cpu_per_gb: list[float] = field(default_factory=list)
    server_cpu_per_gb: list[float] = field(default_factory=list)


@dataclass(slots=True)
class RefreshTime:
    """Seconds of whole refreshes of one volume, by where it lies."""

    transport: str
    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    server_cpu_s: list[float] = field(default_factory=list)
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Amount:
    """How much is measured: bytes and seconds bound a reading, turns repeat it."""

    nbytes: int
    seconds: float
    turns: int


def chosen(only: str | None) -> list[str]:
    """Return the transports that *only* (comma-separated) names, the plain sender first."""
    if only is None:
        return list(NAMES)
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in (PLAIN, LOCAL, "nvme+tcp")]
    if unknown or not names:
        raise UsageError(f"--only {only}: name some of {PLAIN}, {LOCAL} and nvme+tcp")
    found = [name for name in NAMES if name.split(" ")[0] in names]
    return [PLAIN, *(name for name in found if name != PLAIN)]


class Bench:
    """One file, read through each transport in turn."""

    def __init__(self, path: Path, amount: Amount, progress: Callable[[str], None]) -> None:
        self._path, self._amount, self._progress = path, amount, progress

    def rates(self, names: Sequence[str]) -> list[Rate]:
        """Measure sequential and random reads; the transports take turns."""
        rows = [
            Rate(name, order)
            for order in ("sequential", "random")
            for name in names
            if not (name == PLAIN and order == "random")
        ]
        with ExitStack() as stack:
            servers = {PLAIN: stack.enter_context(plain_sender(self._path))}
            if any(name in _URLS for name in names):
                server = stack.enter_context(served(self._path, ["--read-only"]))
                servers |= dict.fromkeys(_URLS, server)
            for turn in range(self._amount.turns):
                for row in rows:
                    self._progress(f"{row.transport}, {row.order}, turn {turn + 1}")
                    self._read(row, servers.get(row.transport))
        return rows

    def _read(self, row: Rate, server: Server | None) -> None:
        before = server.cpu_seconds() if server else 0.0
        found = self._worker(row, server)
        gigabytes = found["nbytes"] / 1e9
        row.bytes_per_s.append(found["nbytes"] / found["seconds"])
        row.pages_per_s.append(found["pages"] / found["seconds"])
        row.reader_cpu_per_gb.append(found["cpu_s"] / gigabytes)
        if server:
            row.server_cpu_per_gb.append((server.cpu_seconds() - before) / gigabytes)

    def _worker(self, row: Rate, server: Server | None) -> dict[str, float]:
        with tempfile.TemporaryDirectory(prefix="hyades-bench-") as folder:
            result = Path(folder, "result")
            spec = {
                "url": url_of(row.transport, self._path, server),
                "port": int(server.address) if server and row.transport == PLAIN else 0,
                "nbytes": self._amount.nbytes
                if row.order == "sequential"
                else self._amount.nbytes // 8,
                "seconds": self._amount.seconds,
                "page": _PAGE[row.order],
                "depth": _DEPTH[row.order],
                "order": row.order,
                "result": str(result),
            }
            path = Path(folder, "spec.json")
            path.write_text(json.dumps(spec))
            _require(run_measured([*_WORKER, str(path)], cold=False), row.transport)
            found: dict[str, float] = json.loads(result.read_text())
            return found


def url_of(name: str, path: Path, server: Server | None) -> str:
    """Return the URL of the file at *path* through transport *name*."""
    if server is None or name not in _URLS:
        return str(path)
    return f"nvme+tcp://{server.address}/{NQN}?ns=1{_URLS[name]}"


def refreshes(
    graph: str, work: Path, names: Sequence[str], turns: int, progress: Callable[[str], None]
) -> list[RefreshTime]:
    """Refresh one volume in place and over each network transport in turn, from a cold cache."""
    volume, model = _prepare(graph, work, progress)
    rows = [RefreshTime(name) for name in (LOCAL, "nvme+tcp") if name in names]
    for turn in range(-1, turns):  # turn -1 compiles what is not compiled, and is not counted
        for row in rows if turn >= 0 else rows[:1]:
            progress(f"{row.transport}, refresh of {graph}, turn {turn + 1}")
            with _opened(row.transport, volume) as (url, server):
                cold = drop_page_cache() is None
                before = server.cpu_seconds() if server else 0.0
                result = work / "refresh.json"
                measured = run_measured(
                    [*_REFRESH, str(result), url, "--model", str(model), "--out", "bench",
                     "--memory", "4GiB", "--force", "--no-report"],
                    cold=cold,
                )  # fmt: skip
                _require(measured, row.transport)
                if turn < 0:
                    continue
                row.seconds.append(json.loads(result.read_text())["seconds"])
                row.cpu_s.append(measured.cpu_s)
                row.server_cpu_s.append(server.cpu_seconds() - before if server else 0.0)
    return rows


def _prepare(graph: str, work: Path, progress: Callable[[str], None]) -> tuple[Path, Path]:
    spec = named_graph(graph)
    files = write_graph(spec, work / "graphs" / graph)
    volume = work / "volumes" / f"{graph}-bandwidth.vol"
    if not volume.exists():
        progress(f"ingest of {graph}")
        volume.parent.mkdir(parents=True, exist_ok=True)
        ingest(
            volume, edges=(str(files.indptr), str(files.indices)), features=str(files.features),
        )  # fmt: skip
    hidden = 128 if spec.width >= 128 else max(1, 2 * spec.width // 3)
    weights = write_weights(ModelSpec("sage", (spec.width, hidden, hidden)), work / "weights")
    return volume, weights.model


@contextmanager
def _opened(name: str, volume: Path) -> Iterator[tuple[str, Server | None]]:
    if name == LOCAL:
        yield str(volume), None
        return
    # A namespace does not grow, and a volume gives back what it does not use when it is closed.
    with volume.open("r+b") as file:
        file.truncate(2 * volume.stat().st_size + 64 * MIB)
    with served(volume) as server:
        yield url_of(name, volume, server), server


def _require(measured: Measurement, name: str) -> None:
    if measured.outcome != "ok":
        raise UsageError(f"{name}: {measured.outcome}: {measured.detail}")


def judge(rates: Sequence[Rate], times: Sequence[RefreshTime]) -> list[Goal]:
    """Compare NVMe/TCP with the plain sender, and a remote refresh with a local one."""
    goals = []
    sequential = {row.transport: row for row in rates if row.order == "sequential"}
    ours, plain = sequential.get("nvme+tcp"), sequential.get(PLAIN)
    if ours and plain:
        ratio, text = _ratio(ours.bytes_per_s, plain.bytes_per_s)
        text += f" of {statistics.median(plain.bytes_per_s) / 1e9:.2f} GB/s"
        goals.append(
            Goal("sequential over nvme+tcp", "at least 0.85 of plain sockets", text, ratio >= 0.85)
        )
    wall = {row.transport: row for row in times}
    if "nvme+tcp" in wall and LOCAL in wall:
        ratio, text = _ratio(wall["nvme+tcp"].seconds, wall[LOCAL].seconds)
        text += f" of {statistics.median(wall[LOCAL].seconds):.2f} s"
        goals.append(
            Goal("refresh over nvme+tcp", "at most 1.3 x local, same disk", text, ratio <= 1.3)
        )
    return goals


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, str]:
    """Return the median of the turns' ratios, and it with the least and the greatest as text."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    middle = statistics.median(ratios)
    return middle, f"{middle:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def rates_table(rates: Sequence[Rate]) -> str:
    """Return one line a transport and order, medians of the turns."""
    lines = []
    for row in rates:
        mid = statistics.median
        server = f"{mid(row.server_cpu_per_gb):.2f}" if row.server_cpu_per_gb else "-"
        lines.append([
            row.transport, row.order, f"{mid(row.bytes_per_s) / 1e9:.2f}",
            f"{mid(row.pages_per_s):,.0f}", f"{mid(row.reader_cpu_per_gb):.2f}", server,
        ])  # fmt: skip
    head = ["transport", "reads", "GB/s", "pages/s", "reader cpu s/GB", "server cpu s/GB"]
    return table(head, lines, left=2)


def refresh_table(times: Sequence[RefreshTime]) -> str:
    """Return one line a transport, medians of the turns."""
    mid = statistics.median
    lines = [
        [row.transport, f"{mid(row.seconds):.2f}", f"{mid(row.cpu_s):.1f}",
         f"{mid(row.server_cpu_s):.1f}"]
        for row in times
    ]  # fmt: skip
    return table(["volume on", "refresh s", "cpu s, whole", "server cpu s"], lines, left=1)


def sample_file(path: Path, nbytes: int) -> Path:
    """Make a file of random bytes and leave it in the page cache: links are compared, not disks."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.stat().st_size != nbytes:
        rng = np.random.default_rng(1)
        with path.open("wb") as file:
            for _ in range(nbytes // MIB):
                file.write(rng.bytes(MIB))
    with path.open("rb") as file:
        while file.read(16 * MIB):
            pass
    return path


@click.command()
@click.option("--only", metavar="NAMES", help=f"Comma-separated among {PLAIN}, {LOCAL}, nvme+tcp.")
@click.option(
    "--graph", default="1M16M", show_default=True, metavar="NAME",
    help=f"Of the refresh: one of {', '.join(GRAPHS)}; 'none' leaves it out.",
)  # fmt: skip
@click.option(
    "--size", type=Size(), default=512 * MIB, metavar="SIZE", help="Of the file; default 512 MiB."
)
@click.option("--seconds", default=3.0, show_default=True, help="Most for one reading.")
@click.option("--repeat", default=3, show_default=True, type=click.IntRange(min=1))
@click.option("--out", type=click.Path(path_type=Path), default=DEFAULT_OUT, show_default=True)
def command(
    only: str | None, graph: str, size: int, seconds: float, repeat: int, out: Path
) -> None:  # fmt: skip
    """Compare transports with plain sockets and with the local disk, on loopback.

    Reads: a file in the page cache, 1 MiB pages in order with 8 in flight and 4 KiB pages at
    random with 32. `file` goes past the cache, to the disk. Refresh: a cold cache, the volume on
    the local disk, then the same file served by `hyades serve`. Ratios are within a turn.

    \b
    hyades bench bandwidth --only file,nvme+tcp
    hyades bench bandwidth --only nvme+tcp --graph none
    """
    names = chosen(only)
    work = out / "work"
    path = sample_file(work / "bandwidth.bin", max(size // MIB, 1) * MIB)
    bench = Bench(path, Amount(4 * size, seconds, repeat), report_progress)
    rates = bench.rates(names)
    times = [] if graph == "none" else refreshes(graph, work, names, repeat, report_progress)
    goals = judge(rates, times)
    parts = [rates_table(rates)]
    if times:
        parts.append(f"{graph}, SAGE\n{refresh_table(times)}")
    if goals:
        parts.append(goals_table(goals))
    text = "\n\n".join(parts) + "\n"
    out.mkdir(parents=True, exist_ok=True)
    (out / "bandwidth.txt").write_text(text)
    write_json(
        out / "bandwidth.json",
        {"rates": [asdict(r) for r in rates], "refresh": [asdict(t) for t in times],
         "goals": [asdict(g) for g in goals]},
    )  # fmt: skip
    sequential = [row for row in rates if row.order == "sequential"]
    click.echo(text)
    try:
        plots = plot_bars(
            [row.transport for row in sequential],
            [statistics.median(row.bytes_per_s) / 1e9 for row in sequential],
            "GB/s, 1 MiB pages in order, median", out / "bandwidth",
        )  # fmt: skip
    except BackendMissing as error:  # the figures are there, whatever became of their picture
        plots = []
        click.echo(str(error))
    suffixes = [".txt", ".json", *(path.suffix for path in plots)]
    click.echo(f"written: {out / 'bandwidth'}{', '.join(suffixes)}")
