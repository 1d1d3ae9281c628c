"""One reader of `hyades bench bandwidth`, a process of its own.

usage: python -m hyades.deploy.bench.bandwidth_worker SPEC.json
       python -m hyades.deploy.bench.bandwidth_worker --serve FILE READY

The first reads as the Reading in SPEC.json says and writes what it found to the path `result` in
it.  The second is the plain sender that the transports are compared with: `sendfile` of FILE over
and over to whoever connects to the port that it writes to READY.
"""

import json
import os
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hyades.common.errors import DeviceLost
from hyades.common.layout import BLOCK
from hyades.common.units import MIB
from hyades.deploy.bench.inflight import read_in_flight
from hyades.proxy.arena import allocate_arena
from hyades.proxy.registry import open_transport
from hyades.proxy.transport import Records, Transport

_SEED = 20


def read_transport(spec: dict[str, Any]) -> dict[str, float]:
    """Read pages through a transport, `depth` in flight, until `nbytes` or `seconds` are over."""
    device = open_transport(spec["url"], writable=False)
    try:
        limit = device.limits
        page = min(spec["page"], limit.max_transfer)
        depth = min(spec["depth"] * spec["page"] // page, limit.max_inflight)
        arena = allocate_arena(depth * page, shared=limit.shared_arena)
        device.register(arena)
        pages = device.nblocks * BLOCK // page
        order = _order(spec["order"], pages, -(-spec["nbytes"] // page))
        _read_pages(device, order[: 2 * depth], page, depth, 60.0)  # connections, kernels
        before, began = _cpu(), time.monotonic()
        done = _read_pages(device, order, page, depth, spec["seconds"])
        return _result(done * page, done, time.monotonic() - began, _cpu() - before)
    finally:
        device.close()


def _order(kind: str, pages: int, count: int) -> NDArray[np.uint64]:
    if kind == "random":
        return np.random.default_rng(_SEED).integers(0, pages, count).astype(np.uint64)
    return (np.arange(count) % pages).astype(np.uint64)


def _read_pages(
    device: Transport, order: NDArray[np.uint64], page: int, depth: int, seconds: float
) -> int:
    """Return how many pages of *order* were read before *seconds* were over."""

    def fill(batch: Records, first: int) -> None:
        batch["lba"] = order[first : first + len(batch)] * np.uint64(page // BLOCK)
        batch["nbytes"] = page

    deadline = time.monotonic() + seconds
    return read_in_flight(device, fill, len(order), page, depth, deadline)


def read_sockets(spec: dict[str, Any]) -> dict[str, float]:
    """Receive from the plain sender, page by page into as many places as a transport would use."""
    page, depth = spec["page"], spec["depth"]
    arena = allocate_arena(depth * page)
    places = [arena.data[i * page : (i + 1) * page] for i in range(depth)]
    with socket.create_connection(("127.0.0.1", spec["port"])) as peer:
        _receive(peer, places, 2 * depth * page, 60.0)
        before, began = _cpu(), time.monotonic()
        got = _receive(peer, places, spec["nbytes"], spec["seconds"])
        return _result(got, got // page, time.monotonic() - began, _cpu() - before)


def _receive(peer: socket.socket, places: list[memoryview], nbytes: int, seconds: float) -> int:
    got, turn, deadline = 0, 0, time.monotonic() + seconds
    while got < nbytes and time.monotonic() < deadline:
        view = places[turn % len(places)]
        turn += 1
        while view:
            step = peer.recv_into(view)
            if not step:
                raise DeviceLost("the sender closed the connection")
            view, got = view[step:], got + step
    return got


def serve(path: Path, ready: Path) -> None:
    """Send the file at *path* over and over to one peer after another."""
    size = path.stat().st_size
    with socket.create_server(("127.0.0.1", 0)) as server, path.open("rb") as file:
        partial = ready.with_suffix(".partial")
        partial.write_text(str(server.getsockname()[1]))
        partial.replace(ready)
        while True:
            peer, _ = server.accept()
            with peer:
                _send_forever(peer, file.fileno(), size)


def _send_forever(peer: socket.socket, file: int, size: int) -> None:
    at = 0
    try:
        while True:
            at = (at + os.sendfile(peer.fileno(), file, at, min(MIB, size - at))) % size
    except (BrokenPipeError, ConnectionResetError):
        return


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _result(nbytes: int, pages: int, seconds: float, cpu: float) -> dict[str, float]:
    return {"nbytes": nbytes, "pages": pages, "seconds": seconds, "cpu_s": cpu}


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        what = json.loads(Path(sys.argv[1]).read_text())
        found = read_sockets(what) if what["port"] else read_transport(what)
        Path(what["result"]).write_text(json.dumps(found))
