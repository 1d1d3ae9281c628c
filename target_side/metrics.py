"""Metrics for Prometheus, in its text format, over HTTP.

Source: Prometheus exposition formats, text format 0.0.4.  Counters only grow; what a scrape shows
may be a moment old, never torn.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from hyades.common.errors import UsageError
from hyades.common.nvme.layout import FABRICS, Admin, Opcode
from hyades.common.nvme.status import StatusCode
from hyades.target_side.counters import BOUNDS, Counters
from hyades.target_side.service import Service

_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TIMEOUT = 10.0  # seconds that a scraper has for its request


def render(service: Service, connections: int) -> str:
    """Return all metrics as text."""
    total = service.totals.sum()
    with service.lock:
        controllers = list(service.target.controllers.values())
        queues = sum(len([qid for qid in c.queues if qid]) for c in controllers)
    totals, pool = service.totals, service.pool
    lines = [
        *_single("connections", "gauge", "Open TCP connections.", connections),
        *_single("controllers", "gauge", "Associations of hosts.", len(controllers)),
        *_single("io_queues", "gauge", "Connected I/O queues.", queues),
        *_single("accepted_total", "counter", "Queues connected so far.", totals.accepted),
        *_single("refused_total", "counter", "Connections and Connects refused.", totals.refused),
        *_single(
            "violations_total", "counter", "Connections ended by a protocol violation.",
            totals.violations,
        ),
        *_single("expired_total", "counter", "Keep-alives that ran out.", totals.expired),
        *_single("stalled_total", "counter", "Connections cut as stuck.", totals.stalled),
        *_single("buffer_bytes", "gauge", "Buffers that data is on its way in.", pool.lent),
        *_single("buffer_waiters", "gauge", "Connections that wait for a buffer.", pool.waiting),
        *_single("read_bytes_total", "counter", "Bytes read by hosts.", total.bytes_read),
        *_single("written_bytes_total", "counter", "Bytes written by hosts.", total.bytes_written),
        *_commands(total),
        *_failures(total),
        *_latency(total),
        *_stage(service),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _single(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield from _head(name, kind, text)
    yield f"hyades_{name} {value}"


def _head(name: str, kind: str, text: str) -> Iterable[str]:
    return f"# HELP hyades_{name} {text}", f"# TYPE hyades_{name} {kind}"


def _commands(total: Counters) -> Iterator[str]:
    yield from _head("commands_total", "counter", "Commands that have ended.")
    for (admin, opcode), count in sorted(total.commands.items()):
        queue = "admin" if admin else "io"
        name = opcode_name(opcode, admin=admin)
        yield f'hyades_commands_total{{queue="{queue}",opcode="{name}"}} {count}'


def _failures(total: Counters) -> Iterator[str]:
    yield from _head("errors_total", "counter", "Commands that have failed, by status.")
    for code, count in sorted(total.failures.items()):
        name = StatusCode(code).name.lower() if code in StatusCode._value2member_map_ else "other"
        yield f'hyades_errors_total{{status="{code:#05x}",name="{name}"}} {count}'


def _stage(service: Service) -> Iterator[str]:
    if service.views is None:
        return
    text = "Time that the operators of views have taken, on all threads."
    yield from _head("stage_seconds_total", "counter", text)
    for name, seconds in sorted(service.views.seconds().items()):
        yield f'hyades_stage_seconds_total{{operator="{name}"}} {seconds:.6f}'


def _latency(total: Counters) -> Iterator[str]:
    yield from _head("latency_seconds", "histogram", "I/O commands, from arrival to answer.")
    below = 0
    for bound, count in zip(BOUNDS, total.latency, strict=False):
        below += count
        yield f'hyades_latency_seconds_bucket{{le="{bound:g}"}} {below}'
    below += total.latency[-1]
    yield f'hyades_latency_seconds_bucket{{le="+Inf"}} {below}'
    yield f"hyades_latency_seconds_sum {total.seconds:.6f}"
    yield f"hyades_latency_seconds_count {below}"


def opcode_name(opcode: int, *, admin: bool) -> str:
    """Return an opcode's name for people, or its number."""
    if opcode == FABRICS:
        return "fabrics"
    if opcode == Admin.KEEP_ALIVE:
        return "keep_alive"
    kind: type[Admin | Opcode] = Admin if admin else Opcode
    if opcode in kind._value2member_map_:
        return kind(opcode).name.lower()
    return f"{opcode:#04x}"


class MetricsServer:
    """Answers GET /metrics at an address; a thread of its own."""

    def __init__(
        self, host: str, port: int, service: Service, connections: Callable[[], int]
    ) -> None:
        """Listen; UsageError where the address cannot be had."""

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT

            def do_GET(self) -> None:
                if self.path.partition("?")[0] not in ("/", "/metrics"):
                    self.send_error(404)
                    return
                body = render(service, connections()).encode()
                self.send_response(200)
                self.send_header("Content-Type", _CONTENT_TYPE)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Scrapes are not worth a line."""

        try:
            self._server = ThreadingHTTPServer((host, port), Handler)
        except OSError as error:
            raise UsageError(
                f"--metrics: cannot listen on {host}:{port}: {error.strerror}"
            ) from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Where it listens."""
        host, port = self._server.server_address[:2]
        return str(host), port

    def __enter__(self) -> "MetricsServer":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)
