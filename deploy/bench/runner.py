"""Runs systems side by side: alternating, several times each, compared with one another."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hyades.deploy.bench.measure import Measurement, run_measured, skipped
from hyades.deploy.bench.systems import Case, Detail, System, Workplace

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """One process: what was measured from outside, and what the system says of itself."""

    measured: Measurement
    detail: Detail | None  # None unless the outcome is "ok"


@dataclass(slots=True)
class Row:
    """All runs of one system on one case."""

    system: str
    case: Case
    runs: list[Run] = field(default_factory=list)
    prepared: Measurement | None = None
    sample: NDArray[np.float32] | None = None
    difference: float | None = None  # from `reference`, largest absolute over largest magnitude
    reference: str = ""

    @property
    def ok(self) -> bool:
        """Whether every run ended well."""
        return bool(self.runs) and all(run.detail is not None for run in self.runs)

    @property
    def median(self) -> Run:
        """The run with the median time after imports, or the first that went wrong."""
        for run in self.runs:
            if run.detail is None:
                return run
        ordered = sorted(self.runs, key=lambda run: run.detail.seconds if run.detail else 0.0)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def seconds(self) -> float | None:
        """Median time after imports, None when a run went wrong."""
        detail = self.median.detail if self.runs else None
        return None if detail is None else detail.seconds

    @property
    def spread(self) -> float:
        """Longest over shortest time after imports."""
        times = [run.detail.seconds for run in self.runs if run.detail is not None]
        return max(times) / min(times) if times and min(times) > 0 else 1.0


def run_case(
    case: Case,
    systems: Sequence[System],
    work: Workplace,
    *,
    repeat: int = 3,
    timeout_s: float = 600.0,
    cold: bool = True,
    progress: Progress = lambda _: None,
) -> list[Row]:
    """Run every system *repeat* times, taking turns, and compare their results.

    A system that cannot run, or whose run goes wrong, has a row that says why and is not run again.
    Temporary files are left in the workplace's scratch folder.
    """
    rows = [Row(system.name, case) for system in systems]
    for turn in range(repeat):
        for system, row in zip(systems, rows, strict=True):
            if turn > 0 and not row.ok:
                continue
            progress(f"{case.title}: {system.name}, run {turn + 1} of {repeat}")
            row.runs.append(_run(system, row, work, timeout_s=timeout_s, cold=cold))
    compare(rows)
    return rows


def _run(system: System, row: Row, work: Workplace, *, timeout_s: float, cold: bool) -> Run:
    case = row.case
    obstacle = system.obstacle(case)
    if obstacle is not None:
        return Run(skipped(obstacle, case.limit), None)
    work.graph(case.graph)
    row.prepared = system.prepare(case, work)
    if row.prepared is not None and row.prepared.outcome != "ok":
        return Run(skipped(f"preparation: {row.prepared.detail}", case.limit), None)
    measured = run_measured(
        system.command(case, work), limit=case.limit if system.confined else None,
        timeout_s=timeout_s, cold=cold, env=thread_environment(case.threads),
    )  # fmt: skip
    if measured.outcome != "ok":
        return Run(measured, None)
    run = Run(measured, system.detail(work))
    if row.sample is None:
        row.sample = system.sample(case, work)
    return run


def thread_environment(threads: int) -> dict[str, str]:
    """Return the variables that hold OpenMP and MKL to *threads*."""
    return {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}


def compare(rows: Sequence[Row]) -> None:
    """Set each row's difference from the median of all results, which one wrong row cannot move.

    With two results both show their distance to the first.
    """
    samples = [(row.system, row.sample) for row in rows if row.sample is not None]
    if len(samples) < 2:
        return
    if len(samples) == 2:
        reference, name = samples[0][1], samples[0][0]
    else:
        reference = np.median(np.stack([sample for _, sample in samples]), axis=0)
        name = f"median of {len(samples)} systems"
    scale = float(np.abs(reference).max()) or 1.0
    for row in rows:
        if row.sample is not None:
            row.difference = float(np.abs(row.sample - reference).max()) / scale
            row.reference = name
