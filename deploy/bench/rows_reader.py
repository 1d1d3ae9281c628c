"""Reads rows of a volume through a transport, raw or as a view, for `hyades bench transports`.

usage: python -m hyades.deploy.bench.rows_reader SPEC.json

A process of its own, on the compute host's side of a link.  The spec, a `Spec`, says what is read;
each reading takes place `turns` times, in turn with the others, and `result` gets a list of lists
of `Reading`.  The clock of a reading starts with the first request, when the view (if any) can be
read, and ends with the last completion.  Counters of the link and of the target are looked at
before and after, outside of the clock.
"""

import sys
import time
import urllib.request
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from hyades.common.layout import BLOCK
from hyades.common.units import MIB
from hyades.common.views import SparseShape
from hyades.common.viewspec import ViewHead
from hyades.deploy.bench.inflight import read_in_flight
from hyades.deploy.bench.link import Link, Speed
from hyades.deploy.volumes import open_volume
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport
from hyades.proxy.transport import Records, Transport
from hyades.proxy.views import open_view

_METRIC = 'hyades_stage_seconds_total{operator="'
_SCRAPE = 10.0  # seconds
_LARGEST = MIB  # of one request


class Wanted(msgspec.Struct, frozen=True):
    """One thing to read: the object itself, or a view by a request (common/nvme/vendor.py)."""

    name: str
    request: bytes = b""


class Spec(msgspec.Struct, frozen=True):
    """What a process reads; `link` are the names of the namespaces of a link, or empty."""

    url: str
    source: str
    wanted: list[Wanted]
    depth: int
    turns: int
    metrics: str
    link: tuple[str, ...]
    result: str


class Reading(msgspec.Struct, frozen=True):
    """What one reading cost; seconds of wall time, `stage` by operator of the target."""

    open_s: float  # until the view could be read
    transfer_s: float
    rows: int
    payload: int  # bytes of pages that arrived
    to_host: int = -1  # bytes on the wire; -1: not counted
    to_target: int = -1
    stage: dict[str, float] = {}


def read_all(spec: Spec) -> list[list[Reading]]:
    """Return the readings of each wanted thing."""
    found: list[list[Reading]] = [[] for _ in spec.wanted]
    for turn in range(-1, spec.turns):  # turn -1 loads and compiles, here and there: not counted
        for place, wanted in enumerate(spec.wanted):
            reading = _read(spec, wanted)
            if turn >= 0:
                found[place].append(reading)
    return found


def _read(spec: Spec, wanted: Wanted) -> Reading:
    link = None
    if spec.link:
        link = Link(Speed())
        link.target, link.host = spec.link
    stage, began = scrape(spec.metrics), time.monotonic()
    device: Transport
    if wanted.request:
        device = view = open_view(spec.url, wanted.request)
        pieces, rows = view_pieces(view.head)
    else:
        pieces, rows = _object_pieces(spec.url, spec.source)
        began = time.monotonic()  # the catalog is read for a view, too, by the target
        device = open_transport(spec.url, writable=False)
    try:
        open_s = time.monotonic() - began
        before = link.carried() if link is not None else None
        seconds = read_pieces(device, pieces, spec.depth)
        after = link.carried() if link is not None else None
        spent = scrape(spec.metrics)
    finally:
        device.close()
    wire = after - before if before is not None and after is not None else None
    return Reading(
        open_s, seconds, rows, int(pieces[:, 1].sum()),
        -1 if wire is None else wire.to_host, -1 if wire is None else wire.to_target,
        {name: value - stage.get(name, 0.0) for name, value in spent.items()},
    )  # fmt: skip


def _object_pieces(url: str, source: str) -> tuple[NDArray[np.int64], int]:
    with open_volume(url) as volume:
        info = volume.object(source)
        places = [(info.lba(page), info.page_bytes) for page in range(info.pages)]
        return np.array(places, np.int64).reshape(-1, 2), info.rows


def view_pieces(head: ViewHead) -> tuple[NDArray[np.int64], int]:
    """Return (LBA, bytes) [n, 2] of what a reader of the view needs, and the rows that it has."""
    shape = head.spec.shape()
    if not isinstance(shape, SparseShape):
        places = [(head.page_lba(page), shape.page_bytes) for page in range(shape.pages)]
        return np.array(places, np.int64).reshape(-1, 2), head.spec.rows
    places = []
    for index, total in enumerate(head.counts.tolist()):
        for place in range(shape.used_pages(total)):
            page = index * shape.pages_per_range + place
            nbytes = shape.used_bytes(shape.page_count(page, total))
            places.append((head.page_lba(page), nbytes))
    return np.array(places, np.int64).reshape(-1, 2), int(head.counts.sum())


def read_pieces(device: Transport, pieces: NDArray[np.int64], depth: int) -> float:
    """Read every piece in order, *depth* requests in flight; return the seconds."""
    limits = device.limits
    size, depth = min(limits.max_transfer, _LARGEST), min(depth, limits.max_inflight)
    device.register(allocate_arena(depth * size, shared=limits.shared_arena))
    parts = _cut(pieces, size)

    def fill(batch: Records, first: int) -> None:
        batch["lba"], batch["nbytes"] = parts[first : first + len(batch)].T

    begin = time.perf_counter()
    read_in_flight(device, fill, len(parts), size, depth)
    return time.perf_counter() - begin


def _cut(pieces: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return (LBA, bytes) [n, 2] of *pieces* in parts of at most *size* bytes."""
    parts = [
        (lba + at // BLOCK, min(size, nbytes - at))
        for lba, nbytes in pieces.tolist()
        for at in range(0, nbytes, size)
    ]
    return np.array(parts, np.int64).reshape(-1, 2)


def scrape(address: str) -> dict[str, float]:
    """Return the seconds that the target's operators have taken so far."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=_SCRAPE) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if line.startswith(_METRIC):
            name, _, value = line.removeprefix(_METRIC).partition('"} ')
            found[name] = float(value)
    return found


if __name__ == "__main__":
    what = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Spec)
    Path(what.result).write_bytes(msgspec.json.encode(read_all(what)))
