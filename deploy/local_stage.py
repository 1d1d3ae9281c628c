"""The stage on this machine: the blocks of a view, computed here from the raw pages of its volume.

What a run goes on with when the target that computed its view is gone and the raw namespace is
not.  The blocks are those of the target's view, byte for byte, because both come from the same
`ViewPages` of the same commit; what a link saves is lost.  Rules:
1. A thread of its own computes, one request after the other, so that polling never waits; the stage
   reads ahead and computes on its own threads, within its memory.
2. A page that cannot be read ends with Status.IO, a lost device with Status.LOST; `locate` says
   why.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import DataError, DeviceLost, HyadesError, UsageError
from hyades.common.layout import BLOCK, Status
from hyades.common.nvme.vendor import parse_request
from hyades.common.units import MIB, format_size
from hyades.common.viewspec import ViewHead
from hyades.deploy.volumes import open_volume
from hyades.proxy.arena import check_arena
from hyades.proxy.records import (
    FLUSH,
    completion_words,
    counter_dict,
    request_words,
)
from hyades.proxy.transport import Limits, Records
from hyades.proxy.transports.thread_engine import WorkerThreads
from hyades.target_side.stage.options import StageOptions
from hyades.target_side.stage.viewpages import ViewPages, make_spec

DEFAULT_MEMORY = 64 * MIB
_MAX_TRANSFER = 64 * MIB  # at least what any transport takes whose place this one takes
_MAX_INFLIGHT = 256
_KEPT = 64  # failures that are remembered, for messages


class LocalStageTransport:
    """Serves the blocks of a view that this process computes; see the module."""

    def __init__(
        self, pages: ViewPages, name: str, *, closing: Callable[[], None] = lambda: None,
        raw: Callable[[], dict[str, Any]] = dict,
    ) -> None:  # fmt: skip
        """Serve *pages*, which it closes, of the volume *name*.

        *closing* is called at the end, *raw* gives the counters of the volume's device.
        """
        self.head = pages.head
        self._pages, self._name, self._closing, self._raw = pages, name, closing, raw
        self._limits = Limits(_MAX_TRANSFER, _MAX_INFLIGHT, BLOCK)
        self._arena: NDArray[np.uint8] | None = None
        self._failures: dict[int, str] = {}
        self._closed = False
        self._worker = WorkerThreads(
            self._read, depth=_MAX_INFLIGHT, max_transfer=_MAX_TRANSFER, writable=False, threads=1,
            name="hyades-local-stage",
        )  # fmt: skip

    @property
    def limits(self) -> Limits:
        """What one request and the queue may hold."""
        return self._limits

    @property
    def nblocks(self) -> int:
        """Blocks of the view."""
        return self.head.nblocks

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the uint8 *arena* that request offsets index."""
        check_arena(arena, BLOCK, registered=self._arena is not None)
        self._arena = arena
        self._worker.register(arena)

    def submit(self, requests: Records) -> int:
        """Take a prefix of REQUEST[n]; return its length."""
        if self._closed:
            raise UsageError(f"{self.describe()} is closed")
        if self._arena is None:
            raise UsageError(f"{self.describe()} has no arena: call register first")
        return self._worker.submit(request_words(requests), self.nblocks)

    def poll(self, completions: Records) -> int:
        """Fill COMPLETION[n] with what has ended; return how many."""
        return self._worker.poll(completion_words(completions))

    def wait(self, timeout: float) -> None:
        """Sleep until a request has ended, at most *timeout* seconds."""
        self._worker.wait(timeout)

    def grow(self, nblocks: int) -> None:
        """Do nothing: a view has its size; UsageError where it is too small."""
        if nblocks > self.nblocks:
            raise UsageError(f"{self.describe()} does not get larger: a view has its size")

    def close(self) -> None:
        """Cancel what has not begun, wait for the rest, and end the stage."""
        if self._closed:
            return
        self._closed = True
        self._worker.close()
        try:
            self._pages.close()
        finally:
            self._closing()

    def locate(self, lba: int) -> str:
        """Return whose view it is, and why block *lba* could not be made."""
        why = self._failures.get(lba)
        return f"view of {self._name} computed here{f' ({why})' if why else ''}"

    def failed_lba(self, lba: int, nblocks: int) -> int:
        """Return the first block of that range whose request failed lately, else *lba*."""
        return min((x for x in tuple(self._failures) if lba <= x < lba + nblocks), default=lba)

    def stats(self) -> dict[str, Any]:
        """Return the counters of the view; `raw` has those of the volume's device."""
        counters = counter_dict(self._worker.counters)
        return {**counters, "raw": self._raw(), "describe": self.describe()}

    def describe(self) -> str:
        """Return one line for people."""
        spec = self.head.spec
        size = format_size(self.nblocks * BLOCK)
        return f"view of {self._name} computed here: {size} of {spec.source} as {spec.encoding}"

    # -- the thread

    def _read(self, request: np.void) -> tuple[int, int]:
        """Compute the blocks of one valid request; return its status and bytes."""
        lba, offset, nbytes = (int(request[name]) for name in ("lba", "offset", "nbytes"))
        assert self._arena is not None
        if request["op"] == FLUSH:
            return int(Status.OK), 0
        try:
            self._pages.read_into(lba, self._arena[offset : offset + nbytes].data)
        except (HyadesError, MemoryError) as error:
            if len(self._failures) >= _KEPT:
                del self._failures[next(iter(self._failures))]
            self._failures[lba] = str(error) or "no memory"
            return int(Status.LOST if isinstance(error, DeviceLost) else Status.IO), 0
        return int(Status.OK), nbytes


def open_local_view(
    url: str, request: bytes, expected: ViewHead, *, memory: int = DEFAULT_MEMORY
) -> LocalStageTransport:
    """Return the view that *request* asks for, computed here from the volume at *url*.

    UsageError where it is not the same as *expected*, block for block: the volume has changed, or
    the request is another one.  A sampled view reads all tiles first.  *memory* in bytes.
    """
    try:
        what, weights = parse_request(request)
    except DataError as error:
        raise UsageError(str(error)) from error
    volume = open_volume(url, writable=False)
    try:
        spec = make_spec(
            volume.catalog, (str(volume.uuid), volume.generation), what.source,
            encoding=what.encoding, sample=what.sample, weights=weights, page_size=what.page_size,
        )  # fmt: skip
        if spec != expected.spec:
            raise UsageError(
                f"{url} is not what the view was of: {spec}, not {expected.spec}: it has changed"
                " since the run began; start the run again"
            )
        pages = ViewPages(
            spec, volume.catalog, volume.read_page, name=volume.name, weights=weights,
            options=StageOptions(memory=memory),
        )  # fmt: skip
    except BaseException:
        volume.close()
        raise
    local = LocalStageTransport(
        pages, volume.name, closing=volume.close, raw=getattr(volume.blocks, "stats", dict)
    )
    if not np.array_equal(pages.head.counts, expected.counts):
        local.close()
        raise UsageError(f"{url}: other rows are needed than the target said: is it damaged?")
    return local
