"""The commands by which a host asks for views and ends them, on one admin queue.

Rules:
1. A part of a request ends when its data is here; the last part ends when a helper has made the
   view (view_service.py), and other commands of the queue go on meanwhile: keep-alive above all.
2. A helper puts what it has made into `_made` and wakes the connection, whose thread ends the
   command in `finish`.  What comes after `abandon`, or after a reset of the controller, is closed.
3. A connection that drains does not wait for views: they are stopped, and end as aborted.
Must stay in sync: executor.py calls this; host_views.py counts and numbers.
"""

import threading
from collections import deque
from collections.abc import Callable

from hyades.common.errors import DataError, UsageError
from hyades.common.nvme.layout import Sgl, Vendor
from hyades.common.nvme.status import DNR, StatusCode, describe
from hyades.common.nvme.vendor import parse_part
from hyades.target_side.controller import Controller
from hyades.target_side.events import ViewOpened, ViewRefused
from hyades.target_side.execution import capsule_data
from hyades.target_side.host_views import Request
from hyades.target_side.view_service import Outcome, ViewJob
from hyades.target_side.work import Owner, Work

End = Callable[[Work, int, int], None]  # with a status code and a result


class ViewCommands:
    """See the module; `start`, `arrived`, `finish` and `abandon` are the connection's thread's."""

    def __init__(self, owner: Owner, end: End) -> None:
        """Take the commands of *owner* and *end* them."""
        self._owner, self._service, self._end = owner, owner.service, end
        self._jobs: dict[ViewJob, tuple[Work, Controller, Request]] = {}
        self._lock = threading.Lock()
        self._made: deque[tuple[ViewJob, Outcome]] = deque()
        self._over = False

    @property
    def busy(self) -> bool:
        """Whether views are being made."""
        return bool(self._jobs)

    def start(self, work: Work) -> bool | memoryview:
        """Start a command: False where it must wait for a buffer, or where its data is to go."""
        controller, command = self._controller(), work.command
        if problem := self._permit(controller):
            self._refuse(work, *problem)
        elif command.opcode == Vendor.DELETE_VIEW:
            self._delete(work, controller)
        elif command.sgl == Sgl.IN_CAPSULE:
            data = capsule_data(command, work.data)
            if data is None:
                self._refuse(work, StatusCode.INVALID_OFFSET | DNR, "data outside of its capsule")
            elif self._check(work, controller):
                self._take(work, controller, data)
        elif command.sgl != Sgl.TRANSPORT:
            self._refuse(work, StatusCode.SGL_TYPE_INVALID | DNR, f"SGL type {command.sgl:#04x}")
        elif self._check(work, controller):
            work.buffer = self._service.pool.acquire(command.sgl_bytes, self._owner)
            return False if work.buffer is None else work.buffer.view
        return True

    def arrived(self, work: Work, *, intact: bool) -> None:
        """Go on with the data of a part, which is in its buffer."""
        buffer = work.buffer
        assert buffer is not None
        try:
            if intact:
                self._take(work, self._controller(), buffer.view)
            else:
                self._end(work, StatusCode.TRANSIENT_TRANSPORT, 0)
        finally:
            self._service.pool.release(buffer)

    def finish(self) -> None:
        """End the commands whose views have been made, or could not be."""
        if self._owner.draining:
            for job in self._jobs:
                job.stopped.set()
        while self._made:
            job, outcome = self._made.popleft()
            work, controller, request = self._jobs.pop(job)
            self._finish(work, controller, request, outcome)

    def abandon(self) -> None:
        """The connection is over: stop what is being made."""
        with self._lock:
            self._over = True
        for job in self._jobs:
            job.stopped.set()
        for _, outcome in self._made:
            _close(outcome)
        self._jobs.clear()
        self._made.clear()

    # -- the parts

    def _controller(self) -> Controller:
        controller = self._owner.controller
        assert controller is not None
        return controller

    def _permit(self, controller: Controller) -> tuple[int, str] | None:
        """Return status and reason where this host may not ask for views."""
        service, host = self._service.views, controller.connected.hostnqn
        if service is None or controller.subsystem is None:
            return StatusCode.INVALID_OPCODE | DNR, "there are no views here"
        if not controller.ready:
            return StatusCode.SEQUENCE_ERROR | DNR, "the controller has not been enabled"
        if not service.limits.admits(host):
            return StatusCode.OPERATION_DENIED | DNR, "this host may not ask for views"
        return None

    def _check(self, work: Work, controller: Controller) -> bool:
        """Refuse a part that cannot be taken; return whether it can."""
        command = work.command
        try:
            part = parse_part(command)
        except DataError as error:
            self._refuse(work, StatusCode.INVALID_FIELD | DNR, str(error))
            return False
        if part.nbytes > self._service.limits.max_transfer:
            text = f"a part of {part.nbytes} bytes, at most {self._service.limits.max_transfer}"
            self._refuse(work, StatusCode.INVALID_FIELD | DNR, text)
            return False
        with self._service.lock:
            status, reason = controller.views.check(command.nsid, part)
        if status:
            self._refuse(work, status, reason)
        return not status

    def _take(self, work: Work, controller: Controller, data: memoryview) -> None:
        """Take the data of a part; after the last one, have the view made."""
        command, part = work.command, parse_part(work.command)
        with self._service.lock:
            # Others may have come since, or the controller may be gone.
            status, reason = controller.views.check(command.nsid, part)
            taken = reason if status else controller.views.take(command.nsid, part, data)
            whole = isinstance(taken, Request)
            retired = self._service.target.take_retired() if whole else []
        if isinstance(taken, str):
            self._refuse(work, status or StatusCode.INVALID_FIELD | DNR, taken)
        if not isinstance(taken, Request):
            if taken is None:
                self._end(work, 0, 0)
            return
        source = controller.namespaces[command.nsid]
        job = ViewJob(source, taken.data, self._done, retired)
        self._jobs[job] = work, controller, taken
        assert self._service.views is not None
        try:
            self._service.views.submit(job)
        except UsageError as error:
            del self._jobs[job]
            outcome = Outcome(StatusCode.ABORTED_QUEUE_DELETED, reason=str(error))
            self._finish(work, controller, taken, outcome)

    def _done(self, job: ViewJob, outcome: Outcome) -> None:
        """Take what a helper has made, on its thread."""
        with self._lock:
            over = self._over
            if not over:
                self._made.append((job, outcome))
                self._owner.wake()
        if over:
            _close(outcome)

    def _finish(
        self, work: Work, controller: Controller, request: Request, outcome: Outcome
    ) -> None:
        view, status = outcome.view, outcome.status
        with self._service.lock:
            wanted = controller.views.finish(request, view)
        if view is None:
            self._refuse(work, status, outcome.reason)
        elif not wanted:
            view.close()
            self._refuse(work, StatusCode.ABORTED, "the controller was reset meanwhile")
        else:
            host, cntlid = controller.connected.hostnqn, controller.cntlid
            self._service.sink.emit(
                ViewOpened(host, cntlid, request.nsid, view.name, view.blocks, view.memory)
            )
            self._end(work, 0, request.nsid)

    def _delete(self, work: Work, controller: Controller) -> None:
        nsid = work.command.nsid
        with self._service.lock:
            found = controller.views.delete(nsid)
        if found:
            self._end(work, 0, 0)
        else:
            status = StatusCode.INVALID_NAMESPACE | DNR
            self._refuse(work, status, f"namespace {nsid} is no view of this host")

    def _refuse(self, work: Work, status: int, reason: str) -> None:
        controller, command = self._controller(), work.command
        host = controller.connected.hostnqn
        self._service.sink.emit(ViewRefused(host, controller.cntlid, describe(status), reason))
        with self._service.lock:
            controller.errors.add(0, command.cid, status, nsid=command.nsid)
        self._end(work, status, 0)


def _close(outcome: Outcome) -> None:
    if outcome.view is not None:
        outcome.view.close()
