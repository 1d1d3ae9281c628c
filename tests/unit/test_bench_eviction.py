from functools import cache

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hyades.common.errors import UsageError
from hyades.deploy.bench import policy_kernels as kernels
from hyades.deploy.bench.eviction import FRACTIONS, POLICIES, Topology, compare, simulate
from hyades.deploy.bench.graphs import GraphSpec, make_csc

KEYED = ("min-pending", "belady", "lru", "fifo")


def csc(vertices: int, edges: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Edges are (source, destination)."""
    by_destination = sorted(edges, key=lambda edge: edge[1])
    counts = np.bincount([d for _, d in by_destination], minlength=vertices)
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return indptr, np.array([s for s, _ in by_destination], np.int32)


def topology(vertices: int, edges: list[tuple[int, int]], order: list[int] | None = None):
    chosen = np.arange(vertices) if order is None else np.array(order)
    return Topology("test", *csc(vertices, edges), chosen.astype(np.int64))


def touches(vertices: int, edges: list[tuple[int, int]], order: list[int]) -> list[int]:
    """The destinations in scan order, from the definition."""
    place = {old: new for new, old in enumerate(order)}
    return [d for _, d in sorted((place[s], place[d]) for s, d in edges)]


def replay(events: list[int], capacity: int, policy: str) -> tuple[int, int]:
    """Evictions and reloads, by scanning everything at every step."""
    resident: dict[int, tuple[int, int]] = {}  # vertex -> (arrival, last touch)
    written: set[int] = set()
    evictions = reloads = 0

    def rank(v: int, now: int) -> tuple[int, int]:
        future = events[now:]
        if policy == "min-pending":
            return future.count(v), v
        if policy == "belady":
            return -future.index(v), v
        return resident[v][policy == "lru"], v

    for now, v in enumerate(events):
        if v not in resident:
            if len(resident) == capacity:
                victim = min(resident, key=lambda u: rank(u, now))
                del resident[victim]
                written.add(victim)
                evictions += 1
            if v in written:
                written.remove(v)
                reloads += 1
            resident[v] = (now, now)
        resident[v] = (resident[v][0], now)
        if v not in events[now + 1 :]:
            del resident[v]
    assert not resident
    assert not written
    return evictions, reloads


def fewest_reloads(events: list[int], capacity: int) -> int:
    """The optimum over every possible choice of victims."""

    @cache
    def best(now: int, resident: frozenset[int]) -> int:
        if now == len(events):
            return 0
        v = events[now]
        cost = 0 if v in resident or v not in events[:now] else 1

        def after(kept: frozenset[int]) -> int:
            ended = v not in events[now + 1 :]
            return best(now + 1, kept - {v} if ended else kept | {v})

        if v in resident or len(resident) < capacity:
            return cost + after(resident)
        return cost + min(after(resident - {victim}) for victim in resident)

    return best(0, frozenset())


@st.composite
def small_graphs(draw: st.DrawFn, vertices: int = 12, edges: int = 60):
    n = draw(st.integers(1, vertices))
    edge = st.tuples(st.integers(0, n - 1), st.integers(0, n - 1))
    return n, draw(st.lists(edge, max_size=edges)), draw(st.permutations(range(n)))


@given(small_graphs())
@settings(max_examples=150, deadline=None)
def test_events_are_the_scan_in_the_new_order(graph) -> None:
    n, edges, order = graph
    indptr, indices = csc(n, edges)
    events = kernels.broadcast_events(indptr, indices, np.array(order, np.int64))
    assert events.tolist() == touches(n, edges, order)
    following = kernels.next_uses(events, n)
    for t, v in enumerate(events):
        later = [u for u in range(t + 1, len(events)) if events[u] == v]
        assert following[t] == (later[0] if later else len(events))


@given(small_graphs(), st.integers(1, 6))
@settings(max_examples=250, deadline=None)
@example((3, [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)], [0, 1, 2]), 1)
def test_each_policy_does_what_its_definition_says(graph, capacity: int) -> None:
    n, edges, order = graph
    events = touches(n, edges, order)
    for policy in KEYED:
        evictions, reloads, opened, peak = simulate(topology(n, edges, order), policy, capacity)
        assert (evictions, reloads) == replay(events, capacity, policy), policy
        assert opened == len(set(events))
        assert peak <= capacity


@given(small_graphs(vertices=6, edges=14), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_belady_is_the_optimum(graph, capacity: int) -> None:
    n, edges, order = graph
    reloads = simulate(topology(n, edges, order), "belady", capacity)[1]
    assert reloads == fewest_reloads(touches(n, edges, order), capacity)


@given(small_graphs(vertices=40, edges=400), st.integers(1, 20), st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_no_policy_reloads_less_than_belady(graph, capacity: int, seed: int) -> None:
    graph_topology = topology(*graph)
    best = simulate(graph_topology, "belady", capacity)[1]
    for policy in POLICIES:
        evictions, reloads, _, _ = simulate(graph_topology, policy, capacity, seed)
        assert evictions == reloads >= best, policy


@pytest.mark.parametrize("shuffled", [False, True])
def test_on_a_power_law_graph(shuffled: bool) -> None:
    spec = GraphSpec(3000, 10, 1, shuffled=shuffled)
    indptr, indices = make_csc(spec)
    order = np.random.default_rng(0).permutation(spec.vertices)
    report = compare(indptr, indices, 512, orders={"none": None, "drawn": lambda *_: order})
    assert len(report.simulated) == 2 * len(FRACTIONS) * len(POLICIES)
    best = {(r.order, r.fraction): r.reloads for r in report.simulated if r.policy == "belady"}
    for row in report.simulated:
        assert row.evictions == row.reloads >= best[row.order, row.fraction] > 0
        assert row.peak == row.budget_rows == int(spec.vertices * row.fraction)
        assert row.row_bytes == 2 * row.reloads * 512
        assert row.page_bytes == 2 * row.reloads * 4096
    for policy in ("belady", "lru"):  # stack algorithms: more memory never costs more
        reloads = [r.reloads for r in report.simulated if (r.policy, r.order) == (policy, "none")]
        assert reloads == sorted(reloads, reverse=True)


def test_random_evicts_by_its_seed() -> None:
    graph = Topology("none", *make_csc(GraphSpec(500, 8, 1)), np.arange(500))
    assert simulate(graph, "random", 40, seed=1) == simulate(graph, "random", 40, seed=1)
    assert simulate(graph, "random", 40, seed=1) != simulate(graph, "random", 40, seed=2)


def test_nothing_moves_when_everything_fits() -> None:
    indptr, indices = make_csc(GraphSpec(400, 6, 1))
    graph = Topology("none", indptr, indices, np.arange(400))
    unlimited = [simulate(graph, policy, 10**9) for policy in POLICIES]
    assert {counts[:2] for counts in unlimited} == {(0, 0)}
    peak = unlimited[0][3]
    assert {counts[3] for counts in unlimited} == {peak}
    assert simulate(graph, "belady", peak)[1] == 0
    assert simulate(graph, "belady", peak - 1)[1] > 0


def test_a_chain_needs_one_place_only() -> None:
    edges = [(v, v + 1) for v in range(9)]
    for policy in POLICIES:
        assert simulate(topology(10, edges), policy, 1) == (0, 0, 9, 1)


def test_the_planner_is_asked_for_each_order_and_budget() -> None:
    asked = []

    def planner(graph: Topology, budget: int):
        asked.append((graph.name, budget))
        return [("log", 10, 20), ("passes:2", 30, 0)]

    indptr, indices = make_csc(GraphSpec(64, 4, 1))
    report = compare(
        indptr, indices, 100, orders={"none": None}, policies=["lru"], planner=planner,
        fractions=(0.25, 0.5),
    )  # fmt: skip
    assert asked == [("none", 1600), ("none", 3200)]
    assert [(r.fraction, r.plan, r.read_bytes, r.write_bytes) for r in report.planned] == [
        (0.25, "log", 10, 20), (0.25, "passes:2", 30, 0), (0.5, "log", 10, 20),
        (0.5, "passes:2", 30, 0),
    ]  # fmt: skip


def test_unknown_policies_and_empty_budgets_are_refused() -> None:
    graph = topology(2, [(0, 1)])
    with pytest.raises(UsageError, match="no policy 'mru'"):
        simulate(graph, "mru", 1)
    with pytest.raises(UsageError, match="holds none"):
        simulate(graph, "lru", 0)
