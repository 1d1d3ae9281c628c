"""What `hyades bench transports` compares, and what its columns mean.

A case says what travels of the features: raw rows, or a view, sampled, multiplied or rounded beside
the data.  Fanouts are written as LGNNIC writes them, from a vertex outward; the last one is that of
the layer that reads the features, and -1 keeps every edge.  Columns:
- prepare: seconds of the target's operators for the view (its meter, all threads; waiting and
  reading the medium left out).  Where the compute host samples there is none: its scan does that.
- open: wall seconds until the view can be read; a sampled one looks at all edges first.
- transfer: wall seconds from the first request to the last page.  A view is computed meanwhile.
- compute: wall seconds of the scans of a refresh with the volume in this host's memory.
- total: open (of a view), transfer and compute, one after the other, as LGNNIC adds its phases;
  what of `prepare` runs during the others counts once.
- wire: bytes towards the host that the link has sent, frames and headers included; "~" where there
  is no link, then it is the bytes of the pages.
- refresh: wall seconds of the scans of a refresh over the transport, where all of this overlaps.
Speedups are against `base`: raw float32 rows, every edge, the same transport and link.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median

from hyades.common.encodings import Encoding
from hyades.common.units import MIB
from hyades.deploy.bench.published import Fanouts
from hyades.deploy.bench.rows_reader import Reading

ENCODINGS: tuple[Encoding, ...] = ("float32", "float16", "int8")
_PREPARING = ("sample", "decode", "project", "quantise", "pages")


@dataclass(frozen=True, slots=True)
class Case:
    """What travels, and what is computed; `root`: the layer has a weight for a vertex's own row."""

    fanouts: Fanouts
    encoding: Encoding = "float32"
    sampled: bool = False  # beside the data
    projected: bool = False
    root: bool = False

    @property
    def key(self) -> tuple[int, str, int, bool]:
        """What tells one reading from another: cases that differ in compute alone share it."""
        width = len(self.fanouts) if self.projected else 0  # one layer projects to the classes
        fanout = self.fanouts[-1] if self.sampled else 0
        return fanout, self.encoding, min(width, 2), self.root and self.sampled

    @property
    def raw(self) -> bool:
        """Say whether the stored rows travel as they are."""
        return self.encoding == "float32" and not self.sampled and not self.projected


@dataclass(slots=True)
class Row:
    """A case with what it cost through one transport; `reason` where it was not measured."""

    shape: str
    transport: str
    link: str
    case: Case
    readings: list[Reading] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    refresh: list[float] = field(default_factory=list)  # the whole, overlapped
    refresh_wire: int = -1
    predicted_rows: int = -1  # by the rule of sampling, counted on this host
    reason: str = ""

    @property
    def open_s(self) -> float:
        """Seconds until the view could be read, median."""
        return median(r.open_s for r in self.readings)

    @property
    def prepare_s(self) -> float:
        """Seconds of the target's operators, median."""
        return median(sum(r.stage.get(n, 0.0) for n in _PREPARING) for r in self.readings)

    @property
    def transfer_s(self) -> float:
        """Seconds of the transfer, median."""
        return median(r.transfer_s for r in self.readings)

    @property
    def compute_s(self) -> float:
        """Seconds of the computation, median; 0 where it was left out."""
        return median(self.compute) if self.compute else 0.0

    @property
    def total_s(self) -> float:
        """Opening, transfer and computation one after the other."""
        return (self.open_s if not self.case.raw else 0.0) + self.transfer_s + self.compute_s

    @property
    def wire(self) -> int:
        """Bytes towards the host, median; of the pages where nothing counts the wire."""
        counted = [r.to_host for r in self.readings]
        return int(median(counted if self.counted else [r.payload for r in self.readings]))

    @property
    def counted(self) -> bool:
        """Say whether a link counted the bytes."""
        return all(r.to_host >= 0 for r in self.readings)

    @property
    def rows(self) -> int:
        """Rows that travelled."""
        return self.readings[0].rows


@dataclass(frozen=True, slots=True)
class Fetched:
    """Rows that an epoch of mini-batches would fetch; counted, not measured."""

    shape: str
    vertices: int
    fanouts: Fanouts
    rows: int


def fanout_text(fanouts: Fanouts) -> str:
    """Return ``[25, 10]``."""
    return f"[{', '.join(map(str, fanouts))}]"


def describe(case: Case) -> str:
    """Return ``[25, 10] float16 sampled projected``."""
    parts = [fanout_text(case.fanouts), case.encoding]
    parts += ["sampled"] if case.sampled else []
    parts += ["projected"] if case.projected else []
    return " ".join([*parts, "root"] if case.root else parts)


def make_cases(
    fanouts: Sequence[Fanouts], encodings: Sequence[Encoding], *, project: bool
) -> list[Case]:
    """Return every case: the base first, then each of *fanouts* with its variants."""
    cases = []
    for chosen in dict.fromkeys([(-1, -1), *fanouts]):
        for sampled in (False, True) if chosen[-1] > 0 else (False,):
            for projected in (False, True) if project else (False,):
                cases += [Case(chosen, name, sampled, projected) for name in encodings]
    first = next((chosen for chosen in fanouts if chosen[-1] > 0), None)
    if first is not None:
        cases.append(Case(first, "float32", sampled=True, root=True))
    return cases


def base_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """Return the row that speedups of *row* are against."""
    return find(rows, row, Case((-1, -1)))


def find(rows: Sequence[Row], like: Row, case: Case) -> Row | None:
    """Return the measured row of *case* with the shape, transport and link of *like*."""
    wanted = (like.shape, like.transport, like.link, case)
    for row in rows:
        if (row.shape, row.transport, row.link, row.case) == wanted and not row.reason:
            return row
    return None


def groups(rows: Sequence[Row]) -> Iterator[tuple[Row, list[Row]]]:
    """Yield the first row of every shape, transport and link, and all of them."""
    keys = dict.fromkeys((row.shape, row.transport, row.link) for row in rows)
    for key in keys:
        chosen = [row for row in rows if (row.shape, row.transport, row.link) == key]
        yield chosen[0], chosen


def cells(row: Row, base: Row | None) -> list[str]:
    """Return the cells of a line of the main table."""
    case = row.case
    place = "target" if case.sampled else ("host" if max(case.fanouts) > 0 else "-")
    head = [
        fanout_text(case.fanouts) + (" root" if case.root else ""), place,
        "yes" if case.projected else "-", case.encoding,
    ]  # fmt: skip
    if row.reason:
        return [*head, *["-"] * 10]
    ratio = [f"{base.transfer_s / row.transfer_s:.2f}", f"{base.total_s / row.total_s:.2f}"] if (
        base is not None
    ) else ["-", "-"]  # fmt: skip
    wire = f"{'' if row.counted else '~'}{row.wire / MIB:.2f}"
    return [
        *head, f"{row.rows:,}", f"{row.prepare_s:.3f}", f"{row.open_s:.3f}",
        f"{row.transfer_s:.3f}",
        f"{row.compute_s:.3f}" if row.compute else "-", f"{row.total_s:.3f}", wire, *ratio,
        f"{median(row.refresh):.3f}" if row.refresh else "-",
    ]  # fmt: skip


HEAD = (
    "fanout", "sampled at", "project", "type", "rows", "prepare s", "open s", "transfer s",
    "compute s",
    "total s", "wire MiB", "transfer x", "total x", "refresh s",
)  # fmt: skip
