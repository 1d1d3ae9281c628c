"""Runs the comparison of `hyades bench transports`: targets, links, readers and refreshes.

Order of work for a graph: the volume is made once; the computation is timed with the volume in
memory, once for each list of fanouts; then, for each transport, a target is started, and a reader
on the other side of the link reads everything that the cases need.
"""

import json
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hyades.common.blocks import FileBlocks
from hyades.common.errors import BackendMissing, UsageError
from hyades.common.jit import jit
from hyades.common.nvme.vendor import ViewRequest, build_request
from hyades.common.sampling import keeps, sample_key
from hyades.common.viewspec import Own, SampleSpec
from hyades.common.volume import Volume
from hyades.deploy.bench.batches import count_fetched
from hyades.deploy.bench.comparison import Case, Fetched, Row, describe
from hyades.deploy.bench.graphs import GraphFiles, write_graph
from hyades.deploy.bench.link import TARGET, Link, Speed, joined, probe
from hyades.deploy.bench.measure import run_measured
from hyades.deploy.bench.published import Fanouts
from hyades.deploy.bench.rows_reader import Reading, Spec, Wanted
from hyades.deploy.bench.serving import NQN, served
from hyades.deploy.bench.shapes import Shape
from hyades.deploy.bench.weights import ModelSpec, make_weights, write_weights
from hyades.deploy.ingest.api import ingest
from hyades.proxy.registry import probe_all

TRANSPORTS = ("nvme+tcp", "dma", "nvme+rdma")
_READER = (sys.executable, "-m", "hyades.deploy.bench.rows_reader")
_REFRESH = (sys.executable, "-m", "hyades.deploy.bench.refresh_worker")
_BATCHES = 32  # that are counted; more would say the same
_PORT, _METRICS = 4420, 9420  # in a namespace of its own every port is free
SEED = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured, and where."""

    work: Path
    speed: Speed
    turns: int
    depth: int  # requests in flight
    hidden: int
    memory: str
    rdma: str | None = None  # address of an RDMA device of this machine
    refresh: bool = False  # refresh over the transports, too


@dataclass(frozen=True, slots=True)
class Subject:
    """A volume in a file, with what is known of it."""

    shape: Shape
    volume: Path
    files: GraphFiles | None = None  # None: the volume was there before
    source: str = "features"  # the object that is read

    def model(self, fanouts: Fanouts, hidden: int, *, root: bool = False) -> ModelSpec:
        """Return GraphSAGE with as many layers as *fanouts*, without weights for own rows."""
        inner = [hidden] * (len(fanouts) - 1)
        widths = (self.shape.features, *inner, self.shape.classes)
        return ModelSpec("sage", widths, SEED, root)


def prepare(shape: Shape, work: Path, progress: Callable[[str], None]) -> Subject:
    """Return a volume of a generated graph, made once."""
    name = f"{shape.name}-{shape.vertices}-{shape.edges}-{shape.features}"
    files = write_graph(shape.graph(), work / "graphs" / name)
    volume = work / "volumes" / f"{name}.vol"
    if not volume.exists():
        progress(f"ingest of {shape.name}: {shape.describe()}")
        volume.parent.mkdir(parents=True, exist_ok=True)
        edges = str(files.indptr), str(files.indices)
        ingest(volume, edges=edges, features=str(files.features))
    return Subject(shape, volume, files)


def existing(path: Path, classes: int) -> Subject:
    """Return what the volume at *path* holds; UsageError where it has no float32 features."""
    with Volume.open(FileBlocks(path, writable=False)) as volume:
        graph = volume.catalog.graph
        if graph is None or graph.features not in volume.catalog.objects:
            raise UsageError(f"{path} holds no graph with features: run `hyades ingest` first")
        info = volume.object(graph.features)
        if info.dtype != "float32":
            raise UsageError(f"{path}: its features are {info.dtype}; the baseline is float32")
        edges = graph.edges + graph.loops
        shape = Shape(path.stem, graph.vertices, edges, info.width, classes)
        return Subject(shape, path, source=info.name)


class Comparison:
    """Measures the cases of one graph; `progress` is told what it does."""

    def __init__(self, subject: Subject, plan: Plan, progress: Callable[[str], None]) -> None:
        self._subject, self._plan, self._progress = subject, plan, progress

    def compute(self, cases: Sequence[Case]) -> dict[tuple[Fanouts, bool], list[float]]:
        """Return the seconds of refreshes with the volume in memory, by fanouts and root."""
        found: dict[tuple[Fanouts, bool], list[float]] = {}
        wanted = list(dict.fromkeys((case.fanouts, case.root) for case in cases))
        for turn in range(-1, self._plan.turns):  # turn -1 compiles kernels and is not counted
            for fanouts, root in wanted if turn >= 0 else wanted[:1]:
                self._progress(f"{self._subject.shape.name}: compute {fanouts}, turn {turn + 1}")
                seconds = self._refresh(fanouts, root)
                if turn >= 0:
                    found.setdefault((fanouts, root), []).append(seconds)
        return found

    def _refresh(self, fanouts: Fanouts, root: bool) -> float:
        """Return the seconds of the scans with the volume in memory."""
        return self._run_refresh(
            ["--in-memory"], str(self._subject.volume), fanouts, root, [], list
        )

    def _run_refresh(
        self, first: Sequence[str], url: str, fanouts: Fanouts, root: bool, more: Sequence[str],
        inside: Callable[[Sequence[str]], Sequence[str]],
    ) -> float:  # fmt: skip
        plan = self._plan
        model = self._subject.model(fanouts, plan.hidden, root=root)
        name = "-".join(map(str, (*model.widths, int(root))))
        weights = write_weights(model, plan.work / "weights" / name)
        with tempfile.TemporaryDirectory(prefix="hyades-bench-") as folder:
            command = [
                *_REFRESH, *first, f"{folder}/result.json", url, "--model", str(weights.model),
                "--out", "bench", "--memory", plan.memory, "--force", "--report", folder,
                *fanout_option(fanouts), *more,
            ]  # fmt: skip
            _require(run_measured(inside(command), cold=False))
            report = json.loads(Path(folder, "report.json").read_text())
        return float(sum(stage["seconds"] for stage in report["stages"]))

    def _refresh_over(self, url: str, link: Link | None, rows: Sequence[Row]) -> None:
        """Refresh over the transport, for every row; outputs stay on this host."""
        for turn in range(-1, self._plan.turns):
            for row in rows if turn >= 0 else rows[:1]:
                case = row.case
                where = f"{row.shape}: refresh over {row.transport}"
                self._progress(f"{where}, {describe(case)}, turn {turn + 1}")
                with tempfile.TemporaryDirectory(dir=self._plan.work) as folder:
                    more = ["--output-volume", f"{folder}/out.vol", *stage_option(case)]
                    before = link.carried() if link is not None else None
                    inside = list if link is None else link.at_host
                    seconds = self._run_refresh([], url, case.fanouts, case.root, more, inside)
                if turn < 0:
                    continue
                row.refresh.append(seconds)
                if link is not None and before is not None:
                    row.refresh_wire = (link.carried() - before).to_host

    def fetched(self, cases: Sequence[Case]) -> list[Fetched]:
        """Return what mini-batches would fetch of a generated graph, for each list of fanouts."""
        files, name = self._subject.files, self._subject.shape.name
        if files is None:
            return []
        indptr, indices = np.load(files.indptr), np.load(files.indices)
        return [
            Fetched(name, self._subject.shape.vertices, fanouts,
                    count_fetched(indptr, indices, fanouts, most=_BATCHES))
            for fanouts in dict.fromkeys(case.fanouts for case in cases)
        ]  # fmt: skip

    def rows(self, transport: str, cases: Sequence[Case]) -> list[Row]:
        """Return a row for each case; with the reason where *transport* cannot run here."""
        name, link = self._subject.shape.name, self._link_text(transport)
        rows = [Row(name, transport, link, case) for case in cases]
        reason = why_not(transport, self._plan.rdma)
        if not reason:
            try:
                self._measure(transport, rows)
            except BackendMissing as error:
                reason = str(error)
        for row in rows:
            row.reason = reason
        return rows

    def _link_text(self, transport: str) -> str:
        if transport == "dma":
            return "shared memory"
        return "RDMA device" if transport == "nvme+rdma" else self._plan.speed.text

    def _measure(self, transport: str, rows: Sequence[Row]) -> None:
        requests = {row.case.key: self._request(row.case) for row in rows}
        with self._target(transport) as (url, metrics, link):
            for row in rows if transport == "nvme+tcp" else ():
                note = "" if link is None else link.note
                row.link = "loopback" if link is None else ", ".join(filter(None, (row.link, note)))
            wanted = [Wanted(str(key), data) for key, data in requests.items()]
            count = f"{len(wanted)} readings, {self._plan.turns} turns"
            self._progress(f"{self._subject.shape.name}: {transport}, {count}")
            readings = dict(zip(requests, self._read(url, metrics, link, wanted), strict=True))
            if self._plan.refresh:
                self._refresh_over(url, link, rows)
        predicted = {key: self._predict(key) for key in requests}
        for row in rows:
            row.readings = readings[row.case.key]
            row.predicted_rows = predicted[row.case.key]

    def _request(self, case: Case) -> bytes:
        """Return what the host asks of the target; nothing where raw rows travel."""
        if case.raw:
            return b""
        sample = None
        if case.sampled:
            with Volume.open(FileBlocks(self._subject.volume, writable=False)) as volume:
                graph = volume.catalog.graph
                assert graph is not None
                lanes = ((0, graph.chunks),)
            own: Own = "all" if case.root else "loops"
            sample = SampleSpec(case.fanouts[-1], SEED, 0, lanes, own)
        weights = []
        if case.projected:
            made = make_weights(self._subject.model(case.fanouts, self._plan.hidden))
            weights = [made["0.neighbour"]]
        return build_request(
            ViewRequest(self._subject.source, case.encoding, sample=sample), weights
        )

    def _predict(self, key: tuple[int, str, int, bool]) -> int:
        """Return how many rows the rule of sampling leaves; -1 where that is not known here."""
        fanout, _, _, root = key
        files = self._subject.files
        if not fanout or root:
            return self._subject.shape.vertices
        if files is None:
            return -1
        indptr, indices = np.load(files.indptr, mmap_mode="r"), np.load(files.indices)
        needed = np.zeros(self._subject.shape.vertices, np.bool_)
        mark_kept(np.ascontiguousarray(indptr), indices, fanout, SEED, needed)
        return int(needed.sum())

    @contextmanager
    def _target(self, transport: str) -> Iterator[tuple[str, str, Link | None]]:
        """Serve the volume; give the URL, the address of the metrics, and the link if any."""
        volume, plan = self._subject.volume, self._plan
        with ExitStack() as stack:
            options = ["--read-only", "--stage-memory", "1GiB", "--metrics"]
            if transport == "nvme+tcp" and (plan.speed != Speed() or probe() is None):
                link = stack.enter_context(joined(plan.speed))
                metrics, listen = f"{TARGET}:{_METRICS}", f"{TARGET}:{_PORT}"
                stack.enter_context(
                    served(volume, [*options, metrics, "--allow-any-host"], listen=listen,
                           inside=link.at_target)
                )  # fmt: skip
                yield f"nvme+tcp://{listen}/{NQN}?ns=1", metrics, link
                return
            metrics = f"127.0.0.1:{_free_port()}"
            if transport == "dma":
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hyades-bench-"))
                path = f"{folder}/target.sock"
                stack.enter_context(served(volume, [*options, metrics], listen=f"dma:{path}"))
                yield f"dma://{path}/{NQN}?ns=1", metrics, None
                return
            host = plan.rdma if transport == "nvme+rdma" else "127.0.0.1"
            place = f"{host}:{_free_port()}"
            listen = f"rdma:{place}" if transport == "nvme+rdma" else place
            more = ["--allow-any-host"] if transport == "nvme+rdma" else []
            stack.enter_context(served(volume, [*options, metrics, *more], listen=listen))
            yield f"{transport}://{place}/{NQN}?ns=1", metrics, None

    def _read(
        self, url: str, metrics: str, link: Link | None, wanted: list[Wanted]
    ) -> list[list[Reading]]:
        with tempfile.TemporaryDirectory(prefix="hyades-bench-") as folder:
            path, result = Path(folder, "spec.json"), Path(folder, "result.json")
            names = () if link is None else (link.target, link.host)
            spec = Spec(
                url, self._subject.source, wanted, self._plan.depth, self._plan.turns, metrics,
                names, str(result),
            )  # fmt: skip
            path.write_bytes(msgspec.json.encode(spec))
            command = [*_READER, str(path)]
            _require(
                run_measured(command if link is None else link.at_host(command), cold=False)
            )  # fmt: skip
            return msgspec.json.decode(result.read_bytes(), type=list[list[Reading]])


def why_not(transport: str, rdma: str | None) -> str:
    """Return why rows of *transport* cannot be had here and what helps, or nothing."""
    problem = next((found.problem for found in probe_all() if found.scheme == transport), "unknown")
    if problem:
        return problem
    if transport == "nvme+rdma" and rdma is None:
        return "say which address has an RDMA device: --rdma HOST"
    return ""


def fanout_option(fanouts: Fanouts) -> list[str]:
    """Return *fanouts*, written from a vertex outward, as `hyades refresh` takes them."""
    if max(fanouts) < 0:
        return []
    return ["--fanout", ",".join(str(fanout) for fanout in reversed(fanouts))]


def stage_option(case: Case) -> list[str]:
    """Return what `hyades refresh` is told of the stage."""
    names = [*(["sample"] if case.sampled else []), *(["project"] if case.projected else [])]
    names += [case.encoding] if case.encoding != "float32" else []
    return ["--stage", ",".join(names)] if names else []


@jit
def mark_kept(indptr: Any, indices: Any, fanout: Any, seed: Any, needed: Any) -> None:
    """Set *needed* of every source of an edge that layer 0 keeps.

    In a volume a vertex's self loops come behind its other in-edges, so their ranks do, too.
    """
    for vertex in range(indptr.size - 1):
        first, stop = indptr[vertex], indptr[vertex + 1]
        degree, key = stop - first, sample_key(seed, 0, vertex)
        loop = degree
        for at in range(first, stop):
            if indices[at] == vertex:
                loop -= 1
        rank = 0
        for at in range(first, stop):
            source = indices[at]
            if source == vertex:
                kept = keeps(key, loop, degree, fanout)
                loop += 1
            else:
                kept = keeps(key, rank, degree, fanout)
                rank += 1
            if kept:
                needed[source] = True


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _require(measured: Any) -> None:
    if measured.outcome != "ok":
        raise UsageError(f"{measured.outcome}: {measured.detail}")


def fill_compute(rows: Sequence[Row], seconds: dict[tuple[Fanouts, bool], list[float]]) -> None:
    """Put the seconds of the computation, where it was timed, into every row."""
    for row in rows:
        row.compute = seconds.get((row.case.fanouts, row.case.root), [])
