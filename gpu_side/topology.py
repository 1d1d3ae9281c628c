"""The directory of tiles as planner and scans see it: pieces by page, by lane and by chunk."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import DataError
from hyades.common.jit import jit
from hyades.common.volume import Volume

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Topology:
    """Directory and page index of a graph, in memory: 16 bytes a piece, 24 a page."""

    chunks: int
    directory: NDArray[np.void]  # layout.DIRECTORY, in page order
    page_pieces: Ints  # [pages + 1]
    chunk_pages: Ints  # [chunks + 1]
    page_chunk: Ints  # [pages]
    lowest_lane: Ints  # [pages]: first lane in the page
    highest_lane: Ints  # [pages]
    lane_pieces: Ints  # [chunks]: pieces of each lane
    windows: "dict[int, Windows]" = field(default_factory=dict, repr=False)  # found, by length

    @property
    def pages(self) -> int:
        """Number of tile pages."""
        return len(self.page_chunk)

    def pages_of(self, first_lane: int, last_lane: int) -> Ints:
        """Return the tile pages that may hold a lane in [first, last), ascending."""
        return np.flatnonzero((self.highest_lane >= first_lane) & (self.lowest_lane < last_lane))


def load_topology(volume: Volume) -> Topology:
    """Read the directory of *volume*; DataError where it contradicts itself."""
    graph = volume.catalog.graph
    assert graph is not None
    directory = volume.read_table("directory")
    page_pieces = volume.read_table("page_pieces").astype(np.int64)
    chunk_pages = volume.read_table("chunk_pages").astype(np.int64)
    pages = len(page_pieces) - 1
    sound = (
        len(chunk_pages) == graph.chunks + 1
        and int(chunk_pages[-1]) == pages
        and int(page_pieces[-1]) == len(directory)
        and bool(np.all(np.diff(page_pieces) > 0))
        and bool(np.all(np.diff(chunk_pages) > 0))
        and (len(directory) == 0 or int(directory["lane"].max()) < graph.chunks)
    )
    if not sound:
        raise DataError(
            f"{volume.name}: directory, page_pieces and chunk_pages contradict each other"
        )
    lanes = directory["lane"].astype(np.int64)
    return Topology(
        graph.chunks,
        directory,
        page_pieces,
        chunk_pages,
        np.repeat(np.arange(graph.chunks), np.diff(chunk_pages)),
        lanes[page_pieces[:-1]],
        lanes[page_pieces[1:] - 1],
        np.bincount(lanes, minlength=graph.chunks),
    )


@dataclass(frozen=True, slots=True)
class Windows:
    """Where each lane is resident under a log plan, and what is logged.

    opens, closes: first and last piece (by sequence) of each lane's window; start: its first chunk.
    slots: state slot of each lane; follows: next lane + 1 in the slot's chain, 0 at its end.
    """

    length: int
    start: Ints
    opens: Ints
    closes: Ints
    slots: Ints
    follows: Ints
    first_owner: Ints  # [slot_count]: first lane of each chain
    slot_count: int
    logged_rows: Ints  # by lane
    whole: NDArray[np.bool_]


@jit
def _best_windows(
    chunk: Any, segments: Any, order: Any, lane_start: Any, chunks: Any, length: Any,
    start: Any, opens: Any, closes: Any, outside: Any,
) -> None:  # fmt: skip
    """For each lane find the run of *length* chunks around its own that holds most pairs."""
    mass = np.zeros(chunks + 1, np.int64)
    count = np.zeros(chunks + 1, np.int64)
    for index in range(chunks):
        mass[:] = 0
        count[:] = 0
        for place in range(lane_start[index], lane_start[index + 1]):
            piece = order[place]
            mass[chunk[piece] + 1] += segments[piece]
            count[chunk[piece] + 1] += 1
        for at in range(chunks):
            mass[at + 1] += mass[at]
            count[at + 1] += count[at]
        lowest = max(0, index - length + 1)
        highest = min(index, max(0, chunks - length))
        lowest = min(lowest, highest)
        best, best_mass = lowest, np.int64(-1)
        for at in range(lowest, highest + 1):
            inside = mass[min(at + length, chunks)] - mass[at]
            if inside > best_mass:
                best, best_mass = at, inside
        start[index] = best
        opens[index] = count[best]
        closes[index] = count[min(best + length, chunks)] - 1
        outside[index] = mass[chunks] - best_mass


def choose_windows(topology: Topology, length: int, rows: Ints) -> Windows:
    """Place a window of *length* chunks for every lane; *rows* are the vertices of each lane."""
    if length in topology.windows:
        return topology.windows[length]
    chunks = topology.chunks
    lanes = topology.directory["lane"].astype(np.int64)
    order = np.argsort(lanes, kind="stable")
    lane_start = np.concatenate(([0], np.cumsum(topology.lane_pieces)))
    start, opens, closes, outside = (np.zeros(chunks, np.int64) for _ in range(4))
    _best_windows(
        topology.directory["chunk"].astype(np.int64),
        topology.directory["segments"].astype(np.int64), order, lane_start, chunks, length, start,
        opens, closes, outside,
    )  # fmt: skip
    whole = (opens == 0) & (closes == topology.lane_pieces - 1)
    slots, follows, owners = _chain(start, length)
    logged = np.where(whole, 0, outside + rows)
    topology.windows[length] = Windows(
        length, start, opens, closes, slots, follows, owners, len(owners), logged, whole
    )  # fmt: skip
    return topology.windows[length]


def _chain(start: Ints, length: int) -> tuple[Ints, Ints, Ints]:
    """Assign state slots to windows so that no two that overlap share one (greedy, optimal)."""
    slots = np.zeros(len(start), np.int64)
    follows = np.zeros(len(start), np.int64)
    last: list[int] = []  # last lane of each slot
    free: list[tuple[int, int]] = []  # (end, slot), ascending: windows have one length
    owners: list[int] = []
    head = 0
    for lane in np.argsort(start, kind="stable"):
        lane = int(lane)
        if head < len(free) and free[head][0] <= start[lane]:
            slot = free[head][1]
            head += 1
            follows[last[slot]] = lane + 1
            last[slot] = lane
        else:
            slot = len(owners)
            owners.append(lane)
            last.append(lane)
        slots[lane] = slot
        free.append((int(start[lane]) + length, slot))
    return slots, follows, np.array(owners, np.int64)
