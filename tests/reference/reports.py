"""Reports of runs that never were."""

import msgspec

from hyades.deploy.machine import this_machine
from hyades.deploy.report.model import (
    Candidate,
    Counters,
    Graph,
    Memory,
    Phase,
    Report,
    Span,
    Stage,
    Traffic,
)

MIB = 1 << 20


def make_stage(index: int) -> Stage:
    return Stage(
        index=index, name=f"convs.{index} (SAGEConv)", in_channels=128, out_channels=64,
        plan="passes:2", order="project first", passes=2,
        predicted_read=300 * MIB, predicted_written=50 * MIB, bytes_read=303 * MIB,
        bytes_written=50 * MIB, seconds=1.5,
    )  # fmt: skip


def make_candidates(stage: int) -> list[Candidate]:
    common = {"stage": stage, "stage_name": f"convs.{stage} (SAGEConv)", "order": "project first"}
    return [
        Candidate(name="resident", bytes_read=300 * MIB, bytes_written=50 * MIB, seconds=1,
                  memory=2048 * MIB, fits=False, reason="needs more than the budget", **common),
        Candidate(name="passes:2", bytes_read=600 * MIB, bytes_written=50 * MIB, seconds=2,
                  memory=900 * MIB, chosen=True, reason="moves the fewest bytes", **common),
    ]  # fmt: skip


def make_report(spans: int = 200, **changes: object) -> Report:
    timeline = [
        Span(name=("read", "land", "tiles", "wait")[i % 4], worker=f"worker {i % 3}",
             t0=i * 3 / spans, t1=(i + 1.5) * 3 / spans)
        for i in range(spans)
    ]  # fmt: skip
    names = ("read", "land", "tiles", "finalise", "write")
    report = Report(
        out="sage", model="GraphSAGE, 2 layers 128 -> 64 -> 64", options={"memory": "1.0 GiB"},
        started="2026-01-02T03:04:05Z", seconds=3.0, resumed=False,
        graph=Graph(volume="g.vol", vertices=1_000_000, edges=16_000_000, feature_width=128,
                    feature_dtype="float32"),
        machine=this_machine("cpu, 2 threads"),
        memory=Memory(budget=1024 * MIB, predicted=900 * MIB, baseline=350 * MIB, peak=1250 * MIB),
        traffic=Traffic(intended=600 * MIB, read=606 * MIB, written=100 * MIB,
                        predicted_read=600 * MIB, predicted_written=100 * MIB),
        counters=Counters(items=1234, edges=32_000_000, misses=9, parks=8, resumes=8,
                          other={"spins": 77}),
        candidates=[c for i in range(2) for c in make_candidates(i)],
        stages=[make_stage(0), make_stage(1)],
        phases=[Phase(stage=i, name=name, seconds=0.1 * (k + 1), workers=2)
                for i in range(2) for k, name in enumerate(names)],
        timeline=timeline,
    )  # fmt: skip
    return msgspec.structs.replace(report, **changes)
