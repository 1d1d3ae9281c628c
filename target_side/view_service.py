"""Making views: those of the command line when serving begins, those of hosts on helper threads.

Rules:
1. All views share the memory of `StageOptions.memory`; one takes a quarter of it at most.  What
   its stage may use is reserved from before it is made until it is closed.
2. A host's view may take as long as reading all tiles.  So it is made by one of a few helpers,
   never by the thread of a connection and never with the lock of the controllers held;
   `ViewJob.done` is called exactly once, by the helper, unless the target ends before.
3. `ViewJob.stopped` ends a job at its next read, and the view that came of it.
4. torch is imported when a projection is asked for, and not before; so are the compiled kernels of
   the stage with the first view.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING

from hyades.common.encodings import ENCODINGS, check_encoding
from hyades.common.errors import BackendMissing, DataError, HyadesError, UsageError
from hyades.common.nvme.status import DNR, StatusCode
from hyades.common.nvme.vendor import Floats, ViewRequest, parse_request
from hyades.common.pages import DEFAULT_PAGE
from hyades.common.units import GIB, parse_size
from hyades.common.volume import Volume
from hyades.target_side.events import NullSink, Sink, ViewClosed
from hyades.target_side.limits import ViewLimits
from hyades.target_side.namespaces import Namespace
from hyades.target_side.stage.meter import SpanTimes
from hyades.target_side.stage.options import StageOptions
from hyades.target_side.view_namespace import NamespaceBlocks, ViewNamespace

if TYPE_CHECKING:
    from hyades.target_side.stage.viewpages import ViewPages

DEFAULT_MEMORY = GIB
_SHARES = 4
_HELPERS = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """A status code with the view (0) or the reason why there is none."""

    status: int
    view: ViewNamespace | None = None
    reason: str = ""


@dataclass(eq=False, slots=True)
class ViewJob:
    """A view to be made of the volume in *source*: *data* is the request.

    retired: views that are closed first, their memory is free then.
    """

    source: Namespace
    data: bytes
    done: "Callable[[ViewJob, Outcome], None]"
    retired: Sequence[Namespace] = ()
    stopped: threading.Event = field(default_factory=threading.Event)


class ViewService:
    """See the module."""

    def __init__(
        self, options: StageOptions | None = None, limits: ViewLimits | None = None,
        sink: Sink | None = None,
    ) -> None:  # fmt: skip
        """Share the memory of *options* among all views."""
        self.options = options or StageOptions(memory=DEFAULT_MEMORY)
        self.limits = limits or ViewLimits()
        self.sink = sink or NullSink()
        self.reserved = 0  # bytes
        self._times = SpanTimes()
        self._lock = threading.Lock()
        self._jobs: set[ViewJob] = set()
        self._over = False
        self._helpers = ThreadPoolExecutor(_HELPERS, "view")

    def open_static(self, source: Namespace, what: ViewRequest) -> ViewNamespace:
        """Return a view of the volume in *source*; any error."""
        return self._open(source, what, (), threading.Event(), lambda: None)

    def seconds(self) -> dict[str, float]:
        """Return the time that every operator of the stages has taken so far, on all threads."""
        return self._times.totals()

    def jobs(self) -> list[ViewJob]:
        """Return what helpers are doing or will do."""
        with self._lock:
            return list(self._jobs)

    def submit(self, job: ViewJob) -> None:
        """Have a helper do *job*."""
        with self._lock:
            if self._over:
                raise UsageError("the target stops")
            self._jobs.add(job)
            self._helpers.submit(self._run, job)

    def close(self) -> None:
        """Stop the helpers; views stay until they are closed."""
        with self._lock:
            self._over = True
            for job in self._jobs:
                job.stopped.set()
        self._helpers.shutdown(cancel_futures=True)

    # -- on a helper

    def _run(self, job: ViewJob) -> None:
        outcome = None
        try:
            outcome = self._make(job)
        finally:
            with self._lock:
                self._jobs.discard(job)
            if outcome is None:  # a fault of ours: the host is told all the same
                outcome = Outcome(StatusCode.INTERNAL, reason=repr(sys.exception()))
            job.done(job, outcome)

    def _make(self, job: ViewJob) -> Outcome:
        for view in job.retired:
            view.close()
        try:
            what, weights = parse_request(job.data)
        except DataError as error:
            return Outcome(StatusCode.INVALID_FIELD | DNR, reason=str(error))
        try:
            view = self._open(
                job.source, what, weights, job.stopped, self._forget(job.source, what)
            )
        except _NoMemoryError as error:
            return Outcome(StatusCode.NAMESPACE_NO_CAPACITY, reason=str(error))
        except (UsageError, BackendMissing) as error:
            return Outcome(StatusCode.INVALID_FIELD | DNR, reason=str(error))
        except HyadesError as error:
            stopped = job.stopped.is_set()
            status = StatusCode.ABORTED_QUEUE_DELETED if stopped else StatusCode.READ_ERROR
            return Outcome(status, reason=str(error))
        return Outcome(0, view)

    def _forget(self, source: Namespace, what: ViewRequest) -> Callable[[], None]:
        return lambda: self.sink.emit(ViewClosed(describe_view(source, what)))

    # -- the parts

    def _open(
        self, source: Namespace, what: ViewRequest, weights: Sequence[Floats],
        stopped: threading.Event, closed: Callable[[], None],
    ) -> ViewNamespace:  # fmt: skip
        from hyades.target_side.stage.viewpages import ViewPages, make_spec

        if weights:
            _need_torch()
        if source.identity:
            raise UsageError(f"{source.name} is a view itself: name the namespace of its volume")
        volume = Volume.open(NamespaceBlocks(source, stopped))
        spec = make_spec(
            volume.catalog, (str(volume.uuid), volume.generation), what.source,
            encoding=what.encoding, sample=what.sample, weights=weights, page_size=what.page_size,
        )  # fmt: skip
        share = self._reserve()
        try:
            # What can be refused by now is the memory: the spec has been made of this volume.
            pages = _build_pages(
                lambda: ViewPages(
                    spec, volume.catalog, volume.read_page, name=source.name, weights=weights,
                    options=replace(self.options, memory=share), sink=self._times,
                )
            )  # fmt: skip
        except BaseException:
            self._release(share)
            raise
        used = pages.plan.nbytes
        self._release(share - used)

        def end() -> None:
            self._release(used)
            closed()

        name = describe_view(source, what)
        return ViewNamespace(pages, name, stopped=stopped, sink=self.sink, closed=end)

    def _reserve(self) -> int:
        """Take a share of the memory, or what is left of it."""
        with self._lock:
            share = min(self.options.memory // _SHARES, self.options.memory - self.reserved)
            self.reserved += share
        return share

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self.reserved -= nbytes


class _NoMemoryError(UsageError):
    """There is too little stage memory for a view."""


def _build_pages(make: Callable[[], "ViewPages"]) -> "ViewPages":
    try:
        return make()
    except UsageError as error:
        raise _NoMemoryError(
            f"{error} (of which a view may take a quarter, or what the others leave)"
        ) from error


def parse_view(text: str) -> tuple[int, ViewRequest]:
    """Return what ``OBJECT[:ENCODING][,page=SIZE][,of=NSID]`` asks for, and of whom; UsageError."""
    name, nsid, page_size = text, 1, DEFAULT_PAGE
    while True:
        rest, comma, option = name.rpartition(",")
        if comma and option.startswith("page="):
            page_size = parse_size(option.removeprefix("page="))
        elif comma and option.startswith("of=") and option.removeprefix("of=").isdecimal():
            nsid = int(option.removeprefix("of="))
        else:
            break
        name = rest
    source, colon, encoding = name.rpartition(":")
    if not colon:
        source, encoding = name, "float32"
    if encoding not in ENCODINGS or not source:
        raise UsageError(
            f"--view {text}: OBJECT:ENCODING with one of {', '.join(ENCODINGS)}, and if need be"
            " ,page=256KiB and ,of=2 (the second --namespace)"
        )
    return nsid, ViewRequest(source, check_encoding(encoding), page_size)


def describe_view(source: Namespace, what: ViewRequest) -> str:
    """Return the name of a view, for people."""
    parts: list[str] = [what.encoding]
    if what.sample is not None:
        parts.append(f"sample={what.sample.fanout}@{what.sample.layer}")
    if what.weights:
        parts.append(f"project={sum(rows for rows, _ in what.weights)}")
    return f"{source.name}:{what.source}:{','.join(parts)}"


def _need_torch() -> None:
    try:
        import_module("torch")
    except ImportError as error:
        raise BackendMissing(
            f"projecting beside the data needs torch on the target ({error}): install it there, or"
            " ask for a view without weights"
        ) from error
