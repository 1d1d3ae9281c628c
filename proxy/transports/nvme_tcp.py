"""A namespace of an NVMe/TCP target: ``nvme+tcp://host:port/subnqn?ns=1`` (options: nvme_url.py).

The thread that calls the transport encodes commands and moves their data between the sockets and
the arena, without a copy (nvme_engine.py).  A thread a path connects, keeps alive, and connects
again after a loss (nvme_paths.py, nvme_session.py).
"""

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.checksum import hardware
from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK
from hyades.common.units import format_size
from hyades.common.viewspec import ViewHead
from hyades.proxy.arena import check_arena
from hyades.proxy.records import completion_words, counter_dict, request_words
from hyades.proxy.transport import Limits, Records
from hyades.proxy.transports.nvme_engine import STALLED, NvmeEngine
from hyades.proxy.transports.nvme_links import Link
from hyades.proxy.transports.nvme_paths import Path, Paths
from hyades.proxy.transports.nvme_session import MakeSession, Session
from hyades.proxy.transports.nvme_table import Table
from hyades.proxy.transports.nvme_url import Options, own_name, parse
from hyades.proxy.urls import Url

_MAX_BLOCKS = 1 << 16  # logical blocks of one command


class NvmeTcpTransport:
    """Moves pages between an arena and a remote namespace."""

    def __init__(
        self, options: Options, *, writable: bool = True, session: MakeSession = Session
    ) -> None:
        """Connect; UsageError or PeerError where no path leads to the namespace."""
        self.options = options
        self._paths = Paths(options, session)
        self._paths.open()
        self._writable = writable
        try:
            self._limits = self._measure()
        except BaseException:
            self._paths.close()
            raise
        info = self._paths.namespace
        self._nblocks = info.blocks * info.block_bytes // BLOCK
        self._table = Table(self._limits.max_inflight)
        self._engine = NvmeEngine(self._paths, self._table)
        self._arena: NDArray[np.uint8] | None = None
        self._closed = False
        self._engine.look(time.monotonic())

    @property
    def limits(self) -> Limits:
        """What one request and the queues may hold."""
        return self._limits

    @property
    def nblocks(self) -> int:
        """Whole 4096-byte blocks of the namespace."""
        return self._nblocks

    @property
    def head(self) -> ViewHead:
        """The head of the view that this is; UsageError where it is a plain namespace."""
        head = self._paths.head
        if head is None:
            raise UsageError(f"{self._name()} is no view that was asked for")
        return head

    def register(self, arena: NDArray[np.uint8]) -> None:
        """Take the uint8 *arena* that request offsets index."""
        self._refuse_closed()
        check_arena(arena, BLOCK, registered=self._arena is not None)
        self._arena, self._engine.memory = arena, arena.data

    def submit(self, requests: Records) -> int:
        """Take a prefix of REQUEST[n] and send what the queues and sockets take."""
        self._refuse_closed()
        if self._arena is None:
            raise UsageError(f"{self._name()} has no arena: call register first")
        bounds = (self._nblocks, len(self._arena), self._limits.max_transfer, self._writable)
        count = self._table.accept(request_words(requests), bounds)
        if count:
            self._engine.look(now := time.monotonic())
            self._engine.dispatch(now)
        return count

    def poll(self, completions: Records) -> int:
        """Take what has arrived; fill COMPLETION[n] and return how many."""
        if not self._closed:
            engine = self._engine
            engine.look(now := time.monotonic())
            engine.receive(now)
            engine.dispatch(now)
        return self._table.report(completion_words(completions))

    def wait(self, timeout: float) -> None:
        """Sleep until something arrives or may be sent, at most *timeout* seconds."""
        if self._table.ended:
            return
        if self._closed or not self._table.open:  # a late ring is nothing to wake for
            time.sleep(timeout)
        else:
            self._engine.wait(timeout)

    def grow(self, nblocks: int) -> None:
        """Do nothing: a namespace has a fixed size; UsageError where it is too small."""
        self._refuse_closed()
        if nblocks > self._nblocks:
            size, wanted = self._nblocks * BLOCK, nblocks * BLOCK
            raise UsageError(
                f"{self._name()} has {format_size(size)}; {format_size(wanted)} are needed: serve"
                " a larger device, or a file that `truncate -s SIZE` has made longer"
            )

    def close(self) -> None:
        """Cancel what is under way, and leave the controllers in order."""
        if self._closed:
            return
        self._closed = True
        self._engine.close()
        self._paths.close()

    def locate(self, lba: int) -> str:
        """Return the target, namespace and logical block of *lba*, and how it failed if it did."""
        return self._engine.locate(lba)

    def failed_lba(self, lba: int, nblocks: int) -> int:
        """Return the first block of that range whose request failed lately, else *lba*."""
        return self._engine.failed_lba(lba, nblocks)

    def flush_failure(self) -> str:
        """Return why the last flush failed."""
        return self._engine.flush_failure

    @property
    def patience(self) -> float:
        """Seconds after which a request has ended, with Status.LOST if need be.

        A target may take any time to make a view again, while it shows that it is alive.
        """
        options = self.options
        if options.view:
            return math.inf
        return 2 * STALLED * options.timeout + options.ctrl_loss_timeout

    def stats(self) -> dict[str, Any]:
        """Return the counters, what became of the connections, and each path."""
        engine = self._engine
        links = {link.path: link for link in tuple(engine.links)}
        return {
            **counter_dict(self._table.counters),
            "describe": self.describe(),
            "reconnects": sum(max(0, path.connects - 1) for path in self._paths.paths),
            "losses": engine.losses,
            "last_loss": engine.last_loss,
            "replays": engine.replays,
            "digest_errors": engine.digest_errors,
            "last_failure": engine.last_failure,
            "paths": [_path_stats(path, links.get(path)) for path in self._paths.paths],
        }

    def describe(self) -> str:
        """Return one line for people."""
        options, info = self.options, self._paths.namespace
        digests = [d for d in ("header", "data") if getattr(options, f"{d}_digest")]
        extras = [f"{' and '.join(digests)} digests"] if digests else []
        extras += ["TLS"] if options.psk is not None else []
        extras += [self._engine.gone] if self._engine.gone else []
        return ", ".join([
            self._name(),
            f"{format_size(self._nblocks * BLOCK)} in blocks of {info.block_bytes}",
            f"{len(self._engine.links)} of {len(options.addresses)} paths live",
            f"{options.queues} queues of {options.depth}", *extras,
        ])  # fmt: skip

    def _measure(self) -> Limits:
        options, info = self.options, self._paths.namespace
        what = options.place(options.addresses[0])
        if self._writable and info.read_only:
            raise UsageError(
                f"{what} is served read-only: nothing can be written there; a refresh reads it with"
                " --output-volume"
            )
        if info.metadata_bytes:
            raise UsageError(
                f"{what} has {info.metadata_bytes} bytes of metadata a block: format it without"
            )
        if info.block_bytes > BLOCK:
            raise UsageError(f"{what} has blocks of {info.block_bytes} bytes, at most {BLOCK} work")
        limit = min(options.max_transfer, _MAX_BLOCKS * info.block_bytes)
        limit = min(limit, self._paths.max_transfer or limit)
        inflight = options.queues * options.depth * len(options.addresses)
        return Limits(limit, inflight, BLOCK)

    def _refuse_closed(self) -> None:
        if self._closed:
            raise UsageError(f"{self._name()} is closed")

    def _name(self) -> str:
        options = self.options
        where = "+".join(map(str, options.addresses))
        what = "view of ns" if options.view else "ns"
        return f"{options.scheme}://{where}/{options.subnqn} {what} {options.nsid}"


def _path_stats(path: Path, link: Link | None) -> dict[str, Any]:
    return {
        "address": str(path.address),
        "live": link is not None,
        "problem": "" if link is not None or path.problem is None else str(path.problem),
        "connects": path.connects,
        "connect_seconds": path.connect_seconds,
        **(link.stats() if link is not None else {}),
    }


def open_url(url: Url, *, create: bool, writable: bool) -> NvmeTcpTransport:  # noqa: ARG001
    """Open a namespace, which exists already: *create* means nothing."""
    return NvmeTcpTransport(parse(url), writable=writable)


def open_view(url: Url, request: bytes) -> NvmeTcpTransport:
    """Open the view that *request* asks for of the volume in a namespace."""
    return NvmeTcpTransport(replace(parse(url), view=request), writable=False)


def probe() -> str | None:
    """Return None: sockets are everywhere."""
    return None


def detail() -> str:
    """Return what digests cost on this machine, and its name."""
    digests = "in hardware" if hardware() else "in software, slow"
    return f"this host is {own_name()}; digests by CRC32C {digests}"
