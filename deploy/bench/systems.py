"""How each system is run: its command, and what it says of its own run afterwards."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hyades.common.units import MIB
from hyades.deploy.bench.graphs import GraphFiles, named_graph, write_graph
from hyades.deploy.bench.measure import Measurement, run_measured
from hyades.deploy.bench.peers_venv import peers_python, peers_ready
from hyades.deploy.bench.weights import ModelSpec, WeightFiles, write_weights
from hyades.deploy.original import read_original
from hyades.deploy.report.write import read_report
from hyades.deploy.volumes import open_volume

_WORKER = Path(__file__).with_name("peer_worker.py")
_WORKER_COMMAND = (sys.executable, "-m", "hyades.deploy.bench.refresh_worker")
_SAMPLED_ROWS = 20_000
# PyG's inference() keeps about 0.45 KB an edge; above this it would not fit a 24 GiB machine.
_INFERENCE_EDGES = 20_000_000
# What a process holds after imports, before its budget begins.
PROCESS_BYTES = 288 * MIB


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the comparison, for whichever system runs it."""

    graph: str  # a name of graphs.GRAPHS, perhaps with -shuffled
    model: ModelSpec
    limit: int | None = None  # of the memory cgroup, bytes
    threads: int = 2
    batch: int = 4096  # of the peers that work in batches
    plan: str | None = None  # forces Hyades' plan

    @property
    def title(self) -> str:
        """What a table calls it."""
        limit = "" if self.limit is None else f", cgroup of {self.limit // MIB} MiB"
        return f"{self.graph}, {self.model.title}{limit}"


@dataclass(frozen=True, slots=True)
class Detail:
    """What a system says of one run: after its imports, until its result exists."""

    seconds: float
    read_bytes: int
    written_bytes: int
    phases: dict[str, float] = field(default_factory=dict)
    notes: Sequence[str] = ()
    planned_read: int | None = None
    planned_written: int | None = None


class Workplace:
    """The folder that holds graphs, weights, volumes and the files of the current run."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.scratch = root / "scratch"
        self.scratch.mkdir(parents=True, exist_ok=True)
        # cache keeps a graph's files for the many cases that share it
        self.graph = cache(self._graph)
        self.weights = cache(self._weights)
        self.ingested: dict[str, Measurement] = {}  # by graph
        self.warm: set[str] = set()  # kinds of model whose kernels are compiled

    def _graph(self, name: str) -> GraphFiles:
        return write_graph(named_graph(name), self.root / "graphs" / name)

    def _weights(self, spec: ModelSpec) -> WeightFiles:
        widths = "-".join(str(width) for width in spec.widths)
        return write_weights(spec, self.root / "weights" / f"{spec.kind}-{widths}-{spec.seed}")

    def volume(self, graph: str) -> Path:
        """Where the volume of *graph* lies."""
        return self.root / "volumes" / f"{graph}.vol"

    def rows(self, graph: str) -> NDArray[np.int64]:
        """Return the vertices whose results are compared, int64, evenly spread."""
        vertices = named_graph(graph).vertices
        return np.unique(np.linspace(0, vertices - 1, _SAMPLED_ROWS).astype(np.int64))


class System(Protocol):
    """One system under test."""

    name: str
    confined: bool  # whether a case's limit holds for it

    def obstacle(self, case: Case, /) -> str | None:
        """Return why *case* cannot run, or None."""
        ...

    def prepare(self, case: Case, work: Workplace, /) -> Measurement | None:
        """Make what the system needs besides the graph's files; return what that cost."""
        ...

    def command(self, case: Case, work: Workplace, /) -> list[str]:
        """Return the command that is measured."""
        ...

    def detail(self, work: Workplace, /) -> Detail:
        """Return what the run that has just ended says of itself."""
        ...

    def sample(self, case: Case, work: Workplace, /) -> NDArray[np.float32] | None:
        """Return the result for `work.rows` of the run that has just ended, where it is kept."""
        ...


class Peer:
    """PyG or DGL, by one method of peer_worker.py in the interpreter of *venv*."""

    confined = True

    def __init__(self, method: str, venv: Path) -> None:
        self.name = method
        self._venv = venv

    def obstacle(self, case: Case) -> str | None:
        """Say where the environment is missing or the run would exhaust the machine."""
        if self.name == "pyg-inference" and named_graph(case.graph).edges > _INFERENCE_EDGES:
            return "would not fit this machine's memory"
        return peers_ready(self._venv)

    def prepare(self, _case: Case, _work: Workplace) -> Measurement | None:
        """Need nothing but the graph's files."""
        return None

    def command(self, case: Case, work: Workplace) -> list[str]:
        """Write the job and return the worker's command."""
        np.save(work.scratch / "rows.npy", work.rows(case.graph))
        job: dict[str, Any] = {
            "method": self.name,
            "model": case.model.kind,
            "graph": str(work.graph(case.graph).directory),
            "weights": str(work.weights(case.model).npz),
            "threads": case.threads,
            "batch": case.batch,
            "scratch": str(work.scratch),
            "rows": str(work.scratch / "rows.npy"),
            "sample": str(work.scratch / "sample.npy"),
            "result": str(work.scratch / "result.json"),
        }
        (work.scratch / "job.json").write_text(json.dumps(job))
        return [str(peers_python(self._venv)), str(_WORKER), str(work.scratch / "job.json")]

    def detail(self, work: Workplace) -> Detail:
        """Read the worker's result."""
        result = json.loads((work.scratch / "result.json").read_text())
        return Detail(
            result["seconds"], result["read_bytes"], result["written_bytes"], result["phases"],
            result["notes"],
        )  # fmt: skip

    def sample(self, _case: Case, work: Workplace) -> NDArray[np.float32]:
        """Read the worker's sample."""
        rows: NDArray[np.float32] = np.load(work.scratch / "sample.npy")
        return rows


class Hyades:
    """`hyades refresh`, unchanged, in refresh_worker.py; ingest is measured once for each graph."""

    name = "hyades"
    confined = True

    def __init__(self, memory: int, *, cold: bool = True) -> None:
        self._memory = memory  # budget where the case has no limit
        self._cold = cold  # whether the page cache is dropped before an ingest

    def obstacle(self, case: Case) -> str | None:
        """Say where a limit leaves no memory beside the process itself."""
        if case.limit is not None and case.limit <= PROCESS_BYTES:
            return f"{case.limit // MIB} MiB are less than the process holds after its imports"
        return None

    def budget(self, case: Case) -> int:
        """Return what `--memory` is given: the limit less what the process holds anyway."""
        return self._memory if case.limit is None else case.limit - PROCESS_BYTES

    def prepare(self, case: Case, work: Workplace) -> Measurement | None:
        """Compile the kernels of this kind of model, once, and ingest the graph, once."""
        failed = self._warm_up(case, work)
        if failed is not None:
            return failed
        if case.graph not in work.ingested:
            work.ingested[case.graph] = self._ingest(case.graph, work.volume(case.graph), work)
        return work.ingested[case.graph]

    def _ingest(self, graph: str, volume: Path, work: Workplace, *more: str) -> Measurement:
        files = work.graph(graph)
        volume.parent.mkdir(parents=True, exist_ok=True)
        command = [
            _cli(), "ingest", "--edges", str(files.indptr), "--edges", str(files.indices),
            "--features", str(files.features), "--memory", "1GiB", "--force", *more, str(volume),
        ]  # fmt: skip
        return run_measured(command, cold=self._cold)

    def _warm_up(self, case: Case, work: Workplace) -> Measurement | None:
        """Refresh the toy graph with a resident plan and with a log; return what failed."""
        if case.model.kind in work.warm or case.graph == "toy":
            return None
        volume = work.root / "volumes" / "warm-up.vol"
        runs = [self._ingest("toy", volume, work, "--range-rows", "256")]
        width = named_graph("toy").width
        model = work.weights(ModelSpec(case.model.kind, (width, width, width))).model
        for plan in ("resident", "log:2"):
            command = [
                _cli(), "refresh", str(volume), "--model", str(model), "--out", "warm", "--force",
                "--no-report", "--memory", "1GiB", "--plan", plan,
            ]  # fmt: skip
            runs.append(run_measured(command, cold=False))
        for run in runs:
            if run.outcome != "ok":
                return run
        work.warm.add(case.model.kind)
        return None

    def command(self, case: Case, work: Workplace) -> list[str]:
        """Return the command line."""
        volume, result = str(work.volume(case.graph)), str(work.scratch / "result.json")
        return [*_WORKER_COMMAND, result, volume, *self.options(case, work)]

    def options(self, case: Case, work: Workplace) -> list[str]:
        """Return the options of `hyades refresh`."""
        (work.scratch / "report.json").unlink(missing_ok=True)
        options = [
            "--model", str(work.weights(case.model).model), "--out", "bench", "--force",
            "--memory", str(self.budget(case)), "--threads", str(case.threads),
            "--report", str(work.scratch),
        ]  # fmt: skip
        return options if case.plan is None else [*options, "--plan", case.plan]

    def detail(self, work: Workplace) -> Detail:
        """Read the worker's result, and the plan and phases from report.json."""
        result = json.loads((work.scratch / "result.json").read_text())
        report = read_report(work.scratch / "report.json")
        phases: dict[str, float] = {}
        for phase in report.phases:
            phases[phase.name] = phases.get(phase.name, 0.0) + phase.seconds / phase.workers
        plans = dict.fromkeys(stage.plan for stage in report.stages)
        return Detail(
            result["seconds"], result["read_bytes"], result["written_bytes"], phases,
            [f"plan {', '.join(plans)}"], report.traffic.predicted_read,
            report.traffic.predicted_written,
        )  # fmt: skip

    def sample(self, case: Case, work: Workplace) -> NDArray[np.float32] | None:
        """Read the output from the volume."""
        with open_volume(str(work.volume(case.graph))) as volume:
            rows: NDArray[np.float32] = read_original(volume, "bench", work.rows(case.graph))
        return rows


class HyadesInMemory(Hyades):
    """The same refresh on a copy of the volume in memory: the time of its compute alone."""

    name = "hyades-mem"
    confined = False  # the copy itself would not fit

    def command(self, case: Case, work: Workplace) -> list[str]:
        """Return the command line with the copy in memory."""
        volume, result = str(work.volume(case.graph)), str(work.scratch / "result.json")
        return [*_WORKER_COMMAND, "--in-memory", result, volume, *self.options(case, work)]

    def sample(self, case: Case, work: Workplace) -> None:
        """Keep nothing: the output went with the process."""
        del case, work


def _cli() -> str:
    """Return the `hyades` command of this environment."""
    return str(Path(sys.executable).with_name("hyades"))
