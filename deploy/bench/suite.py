"""Which cases are measured, and running them all into tables, JSON and plots."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hyades.common.errors import UsageError
from hyades.common.units import GIB, MIB
from hyades.deploy.bench.claims import TIGHT, TIGHTER, Goal, judge
from hyades.deploy.bench.graphs import named_graph
from hyades.deploy.bench.output import (
    goals_table,
    peers_json,
    peers_table,
    plot_peers,
    write_json,
)
from hyades.deploy.bench.runner import Row, run_case
from hyades.deploy.bench.seqread import SequentialRate, sequential_rate
from hyades.deploy.bench.systems import Case, Hyades, HyadesInMemory, Peer, System, Workplace
from hyades.deploy.bench.weights import Kind, ModelSpec

SYSTEMS = (
    "hyades", "dgl-full", "pyg-full", "pyg-full-csr", "dgl-layerwise", "pyg-inference",
    "hyades-mem",
)  # fmt: skip
# In a cgroup the others have been seen to be killed; pyg-full stays to show it.
LIMITED_SYSTEMS = ("hyades", "dgl-layerwise", "pyg-full", "hyades-mem")
IN_MEMORY = 16 * GIB


@dataclass(frozen=True, slots=True)
class Setting:
    """How cases are run."""

    work: Path
    out: Path
    venv: Path
    repeat: int = 3
    timeout_s: float = 600.0
    cold: bool = True
    threads: int = 2
    batch: int = 4096
    memory: int = IN_MEMORY  # Hyades' budget where there is no limit


def make_case(graph: str, kind: Kind, limit: int | None, setting: Setting) -> Case:
    """Return the case of a two-layer model with hidden and output width 128 (less on a toy)."""
    width = named_graph(graph).width
    hidden = 128 if width >= 128 else max(1, 2 * width // 3)
    return Case(
        graph, ModelSpec(kind, (width, hidden, hidden)), limit, setting.threads, setting.batch
    )


def full_suite(setting: Setting) -> list[Case]:
    """Return the cases of `make bench`."""
    models: tuple[Kind, ...] = ("sage", "gcn")
    graphs = ("1M16M", "1M16M-shuffled", "4M64M", "wide")
    cases = [make_case(graph, kind, None, setting) for graph in graphs for kind in models]
    cases += [make_case("1M16M", kind, TIGHT, setting) for kind in models]
    cases += [make_case("1M16M-shuffled", kind, TIGHTER, setting) for kind in models]
    return cases


def make_systems(names: Sequence[str], setting: Setting) -> list[System]:
    """Return the systems of *names*; raise UsageError for unknown ones."""
    systems: list[System] = []
    for name in names:
        if name == "hyades":
            systems.append(Hyades(setting.memory, cold=setting.cold))
        elif name == "hyades-mem":
            systems.append(HyadesInMemory(setting.memory, cold=setting.cold))
        elif name in SYSTEMS:
            systems.append(Peer(name, setting.venv))
        else:
            raise UsageError(f"no system {name!r}: take {', '.join(SYSTEMS)}")
    return systems


def run_suite(
    cases: Sequence[Case],
    setting: Setting,
    *,
    names: Sequence[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[list[Row], list[Goal], str]:
    """Run the cases and write peers.txt, peers.json, peers.png and peers.svg after each.

    `names` are the systems; None takes all where there is no limit, else LIMITED_SYSTEMS.  Returns
    rows, goals and the text of the table.
    """
    work = Workplace(setting.work)
    everything = {system.name: system for system in make_systems(names or SYSTEMS, setting)}
    rows: list[Row] = []
    goals: list[Goal] = []
    rate: SequentialRate | None = None
    text = ""
    for case in cases:
        chosen = names or (SYSTEMS if case.limit is None else LIMITED_SYSTEMS)
        rows += run_case(
            case, [everything[name] for name in chosen], work, repeat=setting.repeat,
            timeout_s=setting.timeout_s, cold=setting.cold, progress=progress,
        )  # fmt: skip
        if rate is None and named_graph(case.graph).feature_bytes >= 64 * MIB:
            progress("sequential rate of the disk")
            rate = sequential_rate(work.graph(case.graph).features)
        goals = judge(rows, rate)
        text = _write(rows, goals, rate, setting)
    return rows, goals, text


def _write(
    rows: Sequence[Row], goals: Sequence[Goal], rate: SequentialRate | None, setting: Setting
) -> str:
    note = "sequential rate not measured: the features are smaller than 64 MiB"
    if rate is not None:
        note = f"sequential rate {rate.bytes_per_s / 1e9:.2f} GB/s ({rate.method})"
    legend = (
        "s: median of the runs, from the end of imports to the result; s whole: the same run's "
        "process, imports included; read, written: storage bytes after imports."
    )
    parts = [legend, note, peers_table(rows)]
    if goals:
        parts.append(goals_table(goals))
    text = "\n\n".join(parts) + "\n"
    setting.out.mkdir(parents=True, exist_ok=True)
    (setting.out / "peers.txt").write_text(text)
    content = peers_json(rows, goals)
    content["sequential"] = None if rate is None else asdict(rate)
    write_json(setting.out / "peers.json", content)
    plot_peers(rows, setting.out / "peers")
    return text
