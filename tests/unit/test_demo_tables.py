"""What the demo picks from the plans, and how it compares gather and broadcast."""

from hyades.deploy.bench.amplification import GatherCost
from hyades.deploy.demo import best_of_each, compare
from hyades.deploy.report.model import Candidate

MIB = 1 << 20


def plan(
    stage: int, name: str, moved: int, *, fits: bool = True, chosen: bool = False
) -> Candidate:
    return Candidate(
        stage=stage, stage_name="s", name=name, order="", bytes_read=moved, bytes_written=0,
        seconds=1.0, memory=1, fits=fits, chosen=chosen,
    )  # fmt: skip


def test_the_best_of_each_kind_and_stage_is_shown() -> None:
    found = best_of_each(
        [
            plan(0, "resident", 1, fits=False),
            plan(0, "passes:2", 5, fits=False),
            plan(0, "passes:3", 9),
            plan(0, "passes:3", 10, chosen=True),
            plan(0, "log:1", 90),
            plan(0, "log:2", 80),
            plan(1, "passes:2", 4, chosen=True),
        ]
    )
    assert [(c.stage, c.name, c.bytes_read) for c in found] == [
        (0, "resident", 1),
        (0, "passes:3", 10),  # the chosen one, though another moves less
        (0, "log:2", 80),
        (1, "passes:2", 4),
    ]


def test_gather_is_compared_with_broadcast() -> None:
    cost = GatherCost(
        gather_bytes=40 * MIB, needed_bytes=MIB, per_edge_bytes=400 * MIB, broadcast_bytes=10 * MIB
    )
    lines = compare(cost).splitlines()
    assert lines[1].split()[-2:] == ["10.0", "MiB"]
    assert lines[2].split()[-4:] == ["40.0", "MiB", "4.0", "x"]
    assert lines[3].split()[-4:] == ["400.0", "MiB", "40.0", "x"]
