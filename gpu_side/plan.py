"""Choose, for every stage, how its lane states fit the memory budget, in bytes read and written.

With S the bytes of all lane states, F those of the input, B the budget:
  resident   S <= B: one scan.
  passes:P   lanes in P groups, the input is scanned once a group.
  log:N      each lane is resident for a window of N chunks; what falls outside goes to the log.
The topology is known, so every candidate is priced exactly from the directory, not guessed: the
report sets these numbers beside the measured ones.  What memory is left keeps hidden rows off the
volume, and input chunks from being read again.
"""

from dataclasses import dataclass, replace

from hyades.common.errors import UsageError
from hyades.common.pages import PageShape, shape_pages
from hyades.common.units import MIB, format_size
from hyades.gpu_side.hidden import HiddenRows, place_hidden
from hyades.gpu_side.price import (
    Candidate,
    Pages,
    PlanRequest,
    StagePricer,
    kept_bytes,
    price_rows,
)
from hyades.gpu_side.program import FEATURES, Stage
from hyades.gpu_side.temporaries import working_bytes
from hyades.gpu_side.topology import Topology


@dataclass(frozen=True, slots=True)
class StagePlan:
    """The chosen candidate of a stage, and the others for `--explain`."""

    stage: Stage
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    output: PageShape
    output_itemsize: int
    kept: int = 0  # the first lanes, whose hidden rows stay in memory
    hidden_at: int = 0  # their first byte behind the arena of the stages

    @property
    def keeps_output(self) -> bool:
        """Say whether all hidden rows stay in memory: nothing of them is on the volume."""
        return 0 < self.kept == self.output.ranges

    @property
    def arena_bytes(self) -> int:
        """Arena bytes this stage needs: rings, lane states and pinned chunks."""
        return self.chosen.memory


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Plans of all stages and what they hold in common."""

    stages: tuple[StagePlan, ...]
    table_bytes: int
    temporaries: int  # bytes of intermediate results, of the ring and of the workers' threads
    memory: int

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena that serves every stage."""
        return max(s.arena_bytes for s in self.stages)

    @property
    def kept_bytes(self) -> int:
        """Bytes of hidden rows kept in memory, at most at once."""
        ends = [s.hidden_at + kept_bytes(s.output, s.kept) for s in self.stages if s.kept]
        return max(ends, default=0)

    @property
    def peak_bytes(self) -> int:
        """Bytes that the run holds at its peak, as predicted."""
        return self.table_bytes + self.temporaries + self.arena_bytes + self.kept_bytes

    @property
    def scan_bytes(self) -> int:
        """Bytes that would be read if every stage scanned its input and topology once."""
        return sum(s.chosen.scan_bytes for s in self.stages)

    @property
    def bytes_read(self) -> int:
        """Bytes that all stages read from storage."""
        return sum(s.chosen.bytes_read for s in self.stages)

    @property
    def bytes_written(self) -> int:
        """Bytes that all stages write to storage."""
        return sum(s.chosen.bytes_written for s in self.stages)

    @property
    def bytes_moved(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


def table_bytes(request: PlanRequest, topology: Topology) -> int:
    """Return the bytes of per-vertex tables, factors, scores and the directory."""
    vertices = request.graph.vertices
    heads = max((s.conv.attention.heads for s in request.stages if s.conv and s.conv.attention),
                default=0)  # fmt: skip
    sampled, weighted = any(request.fanouts), request.graph.weighted
    name = 8 if request.graph.reorder != "none" else 0
    # Three degrees, the weights' sum, the original id; then the factors and scores of a stage.
    per_vertex = 12 + (4 if weighted else 0) + name + 12 + 4 * heads
    # Then one of: the factors before they are copied; what sampling needs in a pass; kept weights.
    per_vertex += max(8, 8 + name if sampled else 0, 16 if sampled and weighted else 0)
    pieces = topology.directory.nbytes + 8 * (4 * topology.pages + topology.chunks)
    return vertices * per_vertex + pieces


def parse_forced(plan: str | None) -> str | None:
    """Check `--plan`; return it, or None for automatic."""
    if plan is None or plan == "auto":
        return None
    kind, _, count = plan.partition(":")
    good = (kind == "resident" and not count) or (
        kind in ("passes", "log")
        and ((count.isdigit() and int(count) > 0) or kind == plan == "log")
    )
    if not good:
        raise UsageError(f"--plan {plan!r}: write resident, passes:P or log (or log:CHUNKS)")
    return plan


def plan_run(request: PlanRequest, topology: Topology) -> RunPlan:
    """Return the cheapest plan within the budget; UsageError says what memory would do."""
    shapes: dict[int, PageShape] = {}
    last = len(request.stages) - 1
    for stage in request.stages:
        itemsize = request.output_itemsize if stage.index == last else 4
        shapes[stage.index] = shape_pages(
            request.graph.vertices, stage.width * itemsize, request.graph.range_rows,
            request.page_size,
        )  # fmt: skip
    tables = table_bytes(request, topology)
    temporaries = working_bytes(
        request.stages, request.graph.range_rows, request.workers, request.decoded
    )
    budget = request.memory - tables - temporaries
    found = [_candidates(request, topology, s, shapes, budget, {}) for s in request.stages]
    _check_memory(request, tables + temporaries, found)
    plans = [
        _choose(request, stage, candidates, shapes[stage.index], {})
        for stage, candidates in zip(request.stages, found, strict=True)
    ]
    plan = RunPlan(tuple(plans), tables, temporaries, request.memory)
    return _keep_hidden(request, topology, plan, shapes)


def _check_memory(request: PlanRequest, always: int, found: list[list[Candidate]]) -> None:
    """Raise UsageError naming the stage that needs most, where one has no candidate that fits.

    *always* are the bytes that a run holds in every stage.
    """
    least = [min(c.memory for c in candidates) for candidates in found]
    if all(any(c.fits for c in candidates) for candidates in found):
        return
    most = max(range(len(least)), key=least.__getitem__)
    need = least[most] + always
    forced = f", --plan {request.forced}" if request.forced else ""
    raise UsageError(
        f"stage {most + 1} ({request.stages[most].name}) needs at least"
        f" --memory {-(-need // MIB)}MiB"
        f" (asked for {format_size(request.memory)}{forced})"
    )


def _candidates(
    request: PlanRequest, topology: Topology, stage: Stage, shapes: dict[int, PageShape],
    budget: int, kept: dict[int, int],
) -> list[Candidate]:  # fmt: skip
    output = shapes[stage.index]
    if stage.conv is None:
        return [price_rows(request, stage, shapes, output, kept, budget)]
    source = stage.inputs[0].stage
    pages: Pages = request.feature_shape() if source == FEATURES else shapes[source]
    return StagePricer(
        request, topology, stage, pages, output, budget, kept.get(source, 0)
    ).candidates()


def _choose(
    request: PlanRequest, stage: Stage, candidates: list[Candidate], output: PageShape,
    kept: dict[int, int],
) -> StagePlan:  # fmt: skip
    fitting = [c for c in candidates if c.fits]
    chosen = min(fitting, key=lambda c: (c.bytes_moved, c.seconds, c.memory))
    # A little more traffic is worth much less arithmetic.
    close = [c for c in fitting if c.bytes_moved <= 1.01 * chosen.bytes_moved]
    least = min(c.arithmetic for c in close)
    close = [c for c in close if c.arithmetic <= 1.02 * least]
    # Projected states are the smaller ones: fewer pages to touch, and more left for hidden rows.
    chosen = min(close, key=lambda c: (c.memory, c.arithmetic, c.bytes_moved))
    lanes = kept.get(stage.index, 0)
    if lanes:
        written = chosen.bytes_written - kept_bytes(output, lanes)
        chosen = replace(chosen, bytes_written=written)
    itemsize = request.output_itemsize if stage is request.stages[-1] else 4
    return StagePlan(stage, chosen, tuple(candidates), output, itemsize, lanes)


def _keep_hidden(
    request: PlanRequest, topology: Topology, plan: RunPlan, shapes: dict[int, PageShape]
) -> RunPlan:
    """Keep hidden rows in memory where that moves fewer bytes in all."""
    readers = {s.index: s.index for s in request.stages}
    for stage in request.stages:
        for source in stage.inputs:
            readers[source.stage] = stage.index
    kept: list[HiddenRows] = []
    for stage in request.stages[:-1]:
        shape = shapes[stage.index]
        for lanes in (shape.ranges, _lanes_that_fit(request, plan, kept, shape)):
            if lanes < 1:
                continue
            nbytes = kept_bytes(shape, lanes)
            rows = HiddenRows(stage.index, readers[stage.index], nbytes, lanes)
            other = _plan_holding(request, topology, shapes, plan, [*kept, rows])
            if other is not None and other.bytes_moved < plan.bytes_moved:
                plan, kept = other, [*kept, rows]
                break
    return plan


def _lanes_that_fit(
    request: PlanRequest, plan: RunPlan, held: list[HiddenRows], shape: PageShape
) -> int:
    """Return how many lanes of a hidden object fit beside the plan's scans and what is held."""
    scans = max(s.chosen.memory - s.chosen.pinned_bytes for s in plan.stages)
    spare = request.memory - plan.table_bytes - plan.temporaries - scans
    spare -= sum(rows.nbytes for rows in held)
    lane = shape.pages_per_range * shape.page_bytes
    return max(0, min(spare // lane, shape.ranges - 1)) if lane else 0


def _plan_holding(
    request: PlanRequest, topology: Topology, shapes: dict[int, PageShape], plan: RunPlan,
    held: list[HiddenRows],
) -> RunPlan | None:  # fmt: skip
    """Return *plan* with *held* kept in memory, or None where that leaves too little."""
    places, total = place_hidden(held)
    budget = request.memory - plan.table_bytes - plan.temporaries - total
    kept = {rows.stage: rows.lanes for rows in held}
    stages = []
    for stage in request.stages:
        candidates = _candidates(request, topology, stage, shapes, budget, kept)
        if not any(c.fits for c in candidates):
            return None
        chosen = _choose(request, stage, candidates, shapes[stage.index], kept)
        stages.append(replace(chosen, hidden_at=places.get(stage.index, 0)))
    return replace(plan, stages=tuple(stages))
