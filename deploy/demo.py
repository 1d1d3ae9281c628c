"""What `hyades demo` does: a generated graph through every step, with the commands a user types."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hyades.common.units import KIB, format_size
from hyades.deploy import api
from hyades.deploy.bench.amplification import GatherCost, gather_amplification
from hyades.deploy.bench.graphs import GRAPHS, GraphFiles, GraphSpec, write_graph
from hyades.deploy.bench.weights import ModelSpec, write_weights
from hyades.deploy.ingest import IngestOptions, run_ingest
from hyades.deploy.progress import ProgressBar
from hyades.deploy.report.model import Candidate, Report

Say = Callable[[str], None]
OUT = "sage"
_SHOWN_ROWS, _SHOWN_COLUMNS = 10, 6


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """Where the demo works, and how large it is."""

    folder: Path
    memory: int
    vertices: int = GRAPHS["demo"].vertices
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Demo:
    """The demo's files, made one after another."""

    options: DemoOptions
    say: Say
    bar: ProgressBar

    @property
    def volume(self) -> Path:
        """The volume that ingest makes."""
        return self.options.folder / "demo.vol"

    @property
    def report(self) -> Path:
        """The folder of the report."""
        return self.options.folder / "report"

    def make_inputs(self) -> tuple[GraphFiles, Path]:
        """Write a graph, its features and a model with random weights; return them."""
        standard = GRAPHS["demo"]
        spec = GraphSpec(self.options.vertices, standard.degree, standard.width)
        self.say(
            f"A power-law graph with locality: {spec.vertices:,} vertices, {spec.edges:,} edges, "
            f"features {spec.width} float32 ({format_size(spec.feature_bytes)}).\n"
        )
        graph = write_graph(spec, self.options.folder / "graph")
        widths = (spec.width, spec.width, spec.width // 2)
        model = write_weights(ModelSpec("sage", widths), self.options.folder / "model").model
        return graph, model

    def ingest(self, graph: GraphFiles) -> None:
        """Make the volume."""
        self.say(f"$ hyades ingest --edges {graph.directory} {self.volume}")
        options = IngestOptions(
            edges=str(graph.directory), features=str(graph.features), force=True
        )
        report = run_ingest(self.volume, options, self.bar)
        self.say("\n".join([*report.lines(), ""]))

    def explain(self, model: Path) -> list[Candidate]:
        """Return what the planner weighs."""
        self.say(f"$ hyades refresh {self._arguments(model)} --explain")
        with api.open(str(self.volume)) as volume:
            return api.explain(
                volume, model, memory=self.options.memory, threads=self.options.threads
            )

    def refresh(self, model: Path) -> Report:
        """Compute the embeddings."""
        self.say(f"$ hyades refresh {self._arguments(model)}")
        with api.open(str(self.volume), writable=True) as volume:
            return api.refresh(
                volume, model, out=OUT, memory=self.options.memory, threads=self.options.threads,
                progress=self.bar, report_dir=self.report,
            ).report  # fmt: skip

    def rows(self) -> str:
        """Return the first rows of the result as text."""
        with api.open(str(self.volume)) as volume:
            rows = volume.read(OUT, range(_SHOWN_ROWS))
        lines = [
            f"{vertex:>6}  "
            + "  ".join(f"{value:8.4f}" for value in row[:_SHOWN_COLUMNS])
            + "  ..."
            for vertex, row in enumerate(rows)
        ]
        return "\n".join(["vertex  embedding", *lines])

    def gathering(self, graph: GraphFiles) -> GatherCost:
        """Return what a system that gathers neighbours reads for one layer of this graph."""
        indptr = np.load(graph.indptr, mmap_mode="r")
        indices = np.load(graph.indices, mmap_mode="r")
        return gather_amplification(indptr, indices, graph.spec.width * 4)

    def _arguments(self, model: Path) -> str:
        memory = f"{self.options.memory // KIB}KiB"
        if self.options.memory % (KIB * KIB) == 0:
            memory = f"{self.options.memory // KIB // KIB}MiB"
        return f"{self.volume} --model {model} --out {OUT} --memory {memory}"


def best_of_each(candidates: list[Candidate]) -> list[Candidate]:
    """Return the plan of each kind that moves the fewest bytes, for each stage, and the chosen."""
    best: dict[tuple[int, str], Candidate] = {}
    for candidate in candidates:
        key = candidate.stage, candidate.name.partition(":")[0]
        if key not in best or _cost(candidate) < _cost(best[key]):
            best[key] = candidate
    return list(best.values())


def _cost(candidate: Candidate) -> tuple[bool, bool, int]:
    moved = candidate.bytes_read + candidate.bytes_written
    return not candidate.chosen, not candidate.fits, moved


def compare(cost: GatherCost) -> str:
    """Return one layer's reads as a gather and as a broadcast."""
    return (
        "One layer of this graph reads from storage:\n"
        f"  broadcast (Hyades)               {format_size(cost.broadcast_bytes):>10}\n"
        f"  gather, batches of 4,096 rows    {format_size(cost.gather_bytes):>10}  "
        f"{cost.amplification:.1f} x\n"
        f"  gather, a 4 KiB page per edge    {format_size(cost.per_edge_bytes):>10}  "
        f"{cost.per_edge_bytes / cost.broadcast_bytes:.1f} x"
    )
