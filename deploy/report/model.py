"""The content of a report.  Bytes are bytes, times are seconds, shapes are (rows, columns).

`report.json` is exactly this structure; `read_report` gives it back.
"""

import msgspec

SCHEMA = 1


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run a stage that the planner weighed, with what it predicted."""

    stage: int
    stage_name: str  # "convs.0 (SAGEConv)"
    name: str  # "resident", "passes:4", "log:64"
    order: str  # "project first", "aggregate first", or "" where the stage has no product
    bytes_read: int
    bytes_written: int
    seconds: float
    memory: int
    fits: bool = True
    chosen: bool = False
    reason: str = ""  # why it was taken, or why it was not


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One scan: a convolution or operations on rows; what was planned and what happened."""

    index: int  # from 0
    name: str  # "convs.0 (SAGEConv)"
    in_channels: int
    out_channels: int
    plan: str  # name of the chosen candidate
    order: str
    passes: int
    predicted_read: int
    predicted_written: int
    bytes_read: int
    bytes_written: int
    seconds: float


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Time of one kind of work in one stage, summed over its workers."""

    stage: int
    name: str  # "land", "scan", "finalise", "merge", "write", ...
    seconds: float
    workers: int = 1


class Span(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One bar of the timeline: times count from the start of the refresh."""

    name: str
    worker: str
    t0: float
    t1: float


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """How often the scheduler did what, over the whole run."""

    items: int = 0  # tile pieces that ran
    edges: int = 0  # edges that were aggregated
    misses: int = 0  # a worker found the next tile's pages or rows absent
    parks: int = 0  # it was set aside
    resumes: int = 0  # and taken up again
    requests: int = 0  # that the proxy sent to devices, after coalescing
    retries: int = 0  # of requests that failed or landed corrupted
    logged_rows: int = 0  # partial states written to the log
    other: dict[str, int] = {}


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """The budget and what was used of it."""

    budget: int
    predicted: int
    baseline: int  # resident before the refresh: interpreter, torch, compiled kernels
    peak: int  # highest resident size of the process

    @property
    def used(self) -> int:
        """Peak above the baseline: what the budget bounds."""
        return max(0, self.peak - self.baseline)


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the whole run."""

    intended: int  # one scan of the input and topology of every stage
    read: int
    written: int
    predicted_read: int
    predicted_written: int

    @property
    def amplification(self) -> float:
        """Bytes read for each byte of one scan of everything: passes and logs read more."""
        return self.read / self.intended if self.intended else 1.0


class VolumeTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of the whole run that went to and came from one volume, and connections lost."""

    volume: str
    read: int
    written: int
    losses: int = 0
    last_loss: str = ""


class Graph(msgspec.Struct, frozen=True, kw_only=True):
    """The volume's graph."""

    volume: str
    vertices: int
    edges: int
    feature_width: int
    feature_dtype: str
    reorder: str = "none"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran."""

    host: str
    cpu: str
    cores: int
    memory: int
    kernel: str
    device: str  # "cpu, 2 threads"
    versions: dict[str, str]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about one refresh."""

    schema: int = SCHEMA
    out: str
    model: str
    options: dict[str, str]  # as given: fanout, seed, threads, dtype, plan, memory
    started: str  # ISO 8601, UTC
    seconds: float
    resumed: bool
    graph: Graph
    machine: Machine
    memory: Memory
    traffic: Traffic
    counters: Counters
    candidates: list[Candidate]
    stages: list[Stage]
    phases: list[Phase]
    timeline: list[Span] = []
    volumes: list[VolumeTraffic] = []  # the graph's, then that of the outputs where it is another


def chosen(report: Report) -> str:
    """Return the names of the plans that ran, in the order of the stages, without repeats."""
    return ", ".join(dict.fromkeys(stage.plan for stage in report.stages)) or "nothing to do"


def deviation(predicted: float, measured: float) -> float:
    """Return how far *measured* lies from *predicted*, relative to the prediction."""
    if predicted == measured:
        return 0.0
    return (measured - predicted) / predicted if predicted else float("inf")
