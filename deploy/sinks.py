"""Where a refresh's trace events go: the progress bar, the report, the caller's own sink."""

from hyades.common.trace import Advance, Event, Sink
from hyades.deploy.progress import Report


class ProgressSink:
    """Shows how far each pass has come, on a progress bar or any `(phase, done, total, unit)`."""

    def __init__(self, bar: Report, stages: int) -> None:
        self._bar = bar
        self._stages = stages

    def emit(self, event: Event) -> None:
        """Show an Advance; ignore the rest."""
        if isinstance(event, Advance):
            phase = f"stage {event.stage + 1} of {self._stages}, {event.name}"
            if event.passes > 1:
                phase += f", pass {event.pass_index + 1} of {event.passes}"
            self._bar(phase, event.done, event.total, event.unit)


class Several:
    """Hands every event to several sinks, in order."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def emit(self, event: Event) -> None:
        """Hand *event* on."""
        for sink in self._sinks:
            sink.emit(event)
