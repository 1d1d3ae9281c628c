"""hyades serve."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from hyades.common.errors import UsageError
from hyades.deploy.ready import ready_file
from hyades.deploy.serving import (
    Settings,
    build_server,
    check_external,
    parse_address,
    read_settings,
)
from hyades.target_side.events import LineSink, Metrics
from hyades.target_side.metrics import MetricsServer
from hyades.target_side.server import Server, format_address

_SWITCH_INTERVAL = 0.0005  # seconds; a connection's thread runs for microseconds between two calls


@click.command()
@click.option(
    "--namespace",
    "-n",
    multiple=True,
    metavar="FILE[,ro][,block=512]",
    help="A file, a block device, or mem:SIZE; repeatable: namespace 1, 2, ...",
)
@click.option(
    "--view",
    multiple=True,
    metavar="OBJECT:TYPE[,page=256KiB][,of=1]",
    help="One more namespace: a matrix of the first (or of=...) as float16, bfloat16, int8, "
    "converted when it is read; repeatable.",
)
@click.option("--views", type=int, help="That a host may ask for; 0: none. [8]")
@click.option("--view-host", multiple=True, metavar="NQN", help="Who may ask. [all that connect]")
@click.option("--stage-memory", metavar="SIZE", help="Of all views; one takes a quarter. [1GiB]")
@click.option("--stage-threads", type=int, help="Of a view, that compute ahead. [1]")
@click.option("--stage-cores", metavar="LIST", help="Where they run, such as 0,2-3. [anywhere]")
@click.option("--nqn", help="Name of the subsystem, such as nqn.2026-01.org.example:features.")
@click.option(
    "--listen",
    "-l",
    multiple=True,
    metavar="HOST:PORT",
    help="Where, repeatable; rdma:HOST:PORT over RDMA, dma:/PATH for hosts of this machine; port 0:"
    " any that is free. [127.0.0.1:4420]",
)
@click.option("--create", metavar="SIZE", help="Make files that do not exist, sparse, SIZE long.")
@click.option("--read-only", is_flag=True, default=None, help="Refuse writes to all namespaces.")
@click.option("--block-size", type=click.Choice(["512", "4096"]), help="Logical blocks. [4096]")
@click.option("--ready-file", metavar="F", help="Write the addresses there once hosts may connect.")
@click.option("--allow-host", multiple=True, metavar="NQN", help="A host that may connect.")
@click.option(
    "--allow-any-host",
    is_flag=True,
    default=None,
    help="Let any host connect, also from other machines.",
)
@click.option("--tls-psk", multiple=True, metavar="FILE", help="TLS 1.3 with this pre-shared key.")
@click.option("--advertise", metavar="HOST", help="The address that discovery tells.")
@click.option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics there.")
@click.option("--log", type=click.Choice(["text", "json"]), help="Form of the log. [text]")
@click.option(
    "--backend",
    type=click.Choice(["embedded", "spdk", "kernel"]),
    help="Who serves: this process, SPDK's target, or the kernel's. [embedded]",
)
@click.option("--spdk-socket", metavar="PATH", help="Of SPDK's JSON-RPC. [/var/tmp/spdk.sock]")
@click.option("--dry-run", is_flag=True, help="Print what spdk or kernel would be told.")
@click.option(
    "--fault",
    multiple=True,
    metavar="RULE",
    help="Fail on purpose, for tests: read:LBA, write:LBA, full:SIZE, drop:N, ...",
)
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="TOML with the names of these flags; flags win.",
)
@click.option("--max-transfer", metavar="SIZE", help="Of a command (MDTS). [1MiB]")
@click.option("--in-capsule", metavar="SIZE", help="Data along with a command. [8KiB]")
@click.option("--max-data-pdu", metavar="SIZE", help="Data in a PDU (MAXH2CDATA). [1MiB]")
@click.option("--buffers", metavar="SIZE", help="Memory for data on its way. [256MiB]")
@click.option("--dma-engine", metavar="NAME", help="memcpy, doca, doca:PCI-ADDRESS. [memcpy]")
@click.option("--dma-buffer", metavar="SIZE", help="At most, of a piece in shared memory. [1MiB]")
@click.option("--connections", type=int, help="At most. [1024]")
@click.option("--queues", type=int, help="I/O queues of a host. [16]")
@click.option("--depth", type=int, help="Entries of a queue. [128]")
@click.option("--handshake", type=float, help="Seconds that a host has to connect. [10]")
@click.option("--stall", type=float, help="Seconds after which a stuck host is cut. [30]")
@click.option("--grace", type=float, help="Seconds that a stop waits for commands. [10]")
def command(config: Path | None, block_size: str | None, dry_run: bool, **flags: Any) -> None:
    """Serve volumes, files and devices to NVMe hosts over TCP, RDMA and shared memory.

    Any NVMe/TCP or NVMe/RDMA host can connect: Hyades elsewhere, Linux (nvme connect), SPDK.  It
    listens on this machine only unless --listen says otherwise.  Ctrl-C and SIGTERM let commands in
    flight end; a second signal does not wait.

    \b
    hyades serve --namespace g.vol --nqn nqn.2026-01.org.example:g
    hyades serve --namespace g.vol,ro --view features:float16 --nqn nqn.2026-01.org.example:g
    hyades serve -n new.vol --create 10GiB --nqn nqn.2026-01.org.example:new -l 127.0.0.1:0
    hyades serve -n /dev/nvme1n1 --nqn nqn.2026-01.org.example:ssd -l 10.0.0.5 --tls-psk key.txt
    """  # fmt: skip
    if block_size is not None:
        flags["block_size"] = int(block_size)
    settings = read_settings(config, flags)
    if settings.backend != "embedded":
        _serve_external(settings, dry_run=dry_run)
        return
    if dry_run:
        raise UsageError("--dry-run prints the steps of --backend spdk or kernel: name one")
    sys.setswitchinterval(_SWITCH_INTERVAL)
    serve(settings)


def _serve_external(settings: Settings, *, dry_run: bool) -> None:
    """Let another target serve."""
    from hyades.deploy.commands.serve_backends import serve_external
    from hyades.target_side.provision.spdk import SOCKET
    from hyades.target_side.provision.steps import Export

    check_external(settings)
    export = Export(
        settings.nqn,
        tuple(Path(name) for name in settings.namespace),
        tuple(parse_address(text) for text in settings.listen),
        tuple(settings.allow_host),
    )
    serve_external(
        settings.backend,
        export,
        dry_run=dry_run,
        spdk_socket=Path(settings.spdk_socket) if settings.spdk_socket else SOCKET,
        ready_file=Path(settings.ready_file) if settings.ready_file else None,
    )


def serve(settings: Settings) -> None:
    """Serve until a signal comes."""
    sink = LineSink(sys.stderr, as_json=settings.log == "json")
    server = build_server(settings, sink)
    with _signals() as stop:
        try:
            server.start()
            path = Path(settings.ready_file) if settings.ready_file else None
            with _metrics(settings, server, sink), ready_file(path, _addresses(server)):
                stop.wait()
        finally:
            _stop(server, stop)


def _addresses(server: Server) -> list[str]:
    """Return where *server* listens, as texts that --listen takes."""
    rdma = [f"rdma:{format_address(address)}" for address in server.rdma_addresses]
    dma = [f"dma:{path}" for path in server.dma_paths]
    return [*map(format_address, server.addresses), *rdma, *dma]


@contextmanager
def _metrics(settings: Settings, server: Server, sink: LineSink) -> Iterator[None]:
    if not settings.metrics:
        yield
        return
    host, port = parse_address(settings.metrics)
    with MetricsServer(host, port, server.service, lambda: len(server.connections)) as metrics:
        sink.emit(Metrics(f"http://{format_address(metrics.address)}/metrics"))
        yield


class _Stop:
    """Counts signals: the first ends serving, the second the patience."""

    def __init__(self) -> None:
        self._first, self.second = threading.Event(), threading.Event()

    def take(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Handle a signal."""
        (self.second if self._first.is_set() else self._first).set()

    def wait(self) -> None:
        """Wait for the first signal."""
        self._first.wait()


@contextmanager
def _signals() -> Iterator[_Stop]:
    stop = _Stop()
    before = {n: signal.signal(n, stop.take) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(server: Server, stop: _Stop) -> None:
    """Stop the server; a second signal cuts what is left."""
    done = threading.Thread(target=server.stop)
    done.start()
    while done.is_alive():
        done.join(0.1)
        if stop.second.is_set():
            for connection in list(server.connections):
                connection.cut("the target stops")
