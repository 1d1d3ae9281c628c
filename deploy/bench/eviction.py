"""Per-vertex evict-and-reload, simulated on the topology alone, beside what Hyades plans.

What is simulated.  A layer scans the sources in order and adds each row to all its destinations, in
ascending order of destination.  A destination's partial aggregate is open from its first in-edge to
its last; then it is final and leaves memory at no cost.  Memory holds a fixed number of partial
aggregates.  When one is touched that is not resident and no place is free, the policy names a
resident victim, which is written to storage; touching an aggregate that was written reads it back.
Every edge is a touch of its own, so a victim may be needed again by the same source.

    min-pending  evicts the aggregate with the fewest in-edges still to come, as the published
                 out-of-core broadcast system (minimum pending messages) describes its policy
    belady       evicts the one whose next in-edge is farthest away: no policy has fewer reloads
    lru, fifo    evict the one touched, or brought in, longest ago
    random       evicts any, from a fixed seed

Ties go to the lowest vertex id.  An evicted aggregate has in-edges to come, so reloads always equal
evictions.  Bytes: `row_bytes` counts whole rows (as if the store packed them perfectly both ways),
`page_bytes` a 4 KiB block for each row moved (what a block device reads and writes for one row).
Both leave out the scan of the input and the final rows, which every system pays for alike.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import round_up
from hyades.deploy.bench import policy_kernels as kernels

POLICIES = {
    "min-pending": kernels.MIN_PENDING,
    "belady": kernels.BELADY,
    "lru": kernels.LRU,
    "fifo": kernels.FIFO,
    "random": kernels.RANDOM,
}
FRACTIONS = (1 / 16, 1 / 8, 1 / 4, 1 / 2)
LABEL = (
    "Simulation of topology only: edges are replayed against a bounded number of partial "
    "aggregates and evictions are counted; nothing was read, written or timed."
)

# indptr, indices -> order[new] = old
Reorder = Callable[[NDArray[np.int64], NDArray[np.int32]], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Topology:
    """A graph by destination (CSC) with the scan order that is to be simulated on it."""

    name: str  # of the order
    indptr: NDArray[np.int64]
    indices: NDArray[np.int32]
    order: NDArray[np.int64]  # order[new] = old

    @property
    def vertices(self) -> int:
        """Number of vertices."""
        return self.indptr.size - 1


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """What one policy moves at one budget."""

    order: str
    fraction: float
    budget_rows: int
    policy: str
    evictions: int
    reloads: int
    opened: int
    peak: int
    row_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class PlannedRow:
    """What a plan of Hyades moves beyond one read of the input, at one budget."""

    order: str
    fraction: float
    plan: str
    read_bytes: int
    write_bytes: int


# (topology, budget in bytes of lane states) -> [(plan, extra bytes read, extra bytes written)]
Planner = Callable[[Topology, int], Iterable[tuple[str, int, int]]]


@dataclass(frozen=True, slots=True)
class PolicyReport:
    """All rows of a comparison; `state_bytes` is the size of one partial aggregate."""

    vertices: int
    edges: int
    state_bytes: int
    simulated: list[PolicyRow]
    planned: list[PlannedRow]


def simulate(
    topology: Topology, policy: str, budget_rows: int, seed: int = 0
) -> tuple[int, int, int, int]:
    """Return evictions, reloads, aggregates opened and most residents at once of one replay."""
    return _Replay(topology).run(policy, budget_rows, seed)


def compare(
    indptr: NDArray[np.int64],
    indices: NDArray[np.int32],
    state_bytes: int,
    *,
    orders: Mapping[str, Reorder | None],
    policies: Sequence[str] = tuple(POLICIES),
    fractions: Sequence[float] = FRACTIONS,
    planner: Planner | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> PolicyReport:
    """Replay every order, budget and policy; `orders` maps a name to None (as given) or a function.

    A budget is a fraction of the states of all vertices.  `planner` is asked for each order and
    budget; without one the report has no planned rows.
    """
    report = PolicyReport(indptr.size - 1, indices.size, state_bytes, [], [])
    for name, reorder in orders.items():
        progress(f"order {name}")
        order = np.arange(report.vertices) if reorder is None else reorder(indptr, indices)
        topology = Topology(name, indptr, indices, order.astype(np.int64, copy=False))
        replay = _Replay(topology)
        for fraction in fractions:
            budget = max(1, int(report.vertices * fraction))
            for policy in policies:
                counts = replay.run(policy, budget, seed)
                report.simulated.append(
                    _policy_row(topology, fraction, budget, policy, counts, state_bytes)
                )
            if planner is not None:
                report.planned.extend(
                    PlannedRow(name, fraction, plan, read, written)
                    for plan, read, written in planner(topology, budget * state_bytes)
                )
    return report


class _Replay:
    """The event order of one topology, made once for all policies and budgets."""

    def __init__(self, topology: Topology) -> None:
        self._events = kernels.broadcast_events(topology.indptr, topology.indices, topology.order)
        self._degrees = np.diff(topology.indptr)[topology.order]
        self._following: NDArray[Any] = np.empty(0, np.int64)

    def run(self, policy: str, budget_rows: int, seed: int) -> tuple[int, int, int, int]:
        if policy not in POLICIES:
            raise UsageError(f"no policy {policy!r}: take {', '.join(POLICIES)}")
        if budget_rows < 1:
            raise UsageError(f"a budget of {budget_rows} partial aggregates holds none")
        if policy == "belady" and self._following.size == 0:
            self._following = kernels.next_uses(self._events, self._degrees.size)
        capacity = min(budget_rows, self._degrees.size)
        counts = kernels.simulate(
            self._events, self._following, self._degrees, capacity, POLICIES[policy],
            np.uint64(seed),
        )  # fmt: skip
        evictions, reloads, opened, peak = (int(count) for count in counts)
        return evictions, reloads, opened, peak


def _policy_row(
    topology: Topology,
    fraction: float,
    budget: int,
    policy: str,
    counts: tuple[int, int, int, int],
    state_bytes: int,
) -> PolicyRow:
    evictions, reloads, opened, peak = counts
    moved = evictions + reloads
    return PolicyRow(
        topology.name, fraction, budget, policy, evictions, reloads, opened, peak,
        moved * state_bytes, moved * round_up(state_bytes, BLOCK),
    )  # fmt: skip
