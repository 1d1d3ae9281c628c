"""The parts of a refresh that belong to no side: devices, arena, memory watch, report."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hyades.common.interrupts import undisturbed
from hyades.common.trace import Event
from hyades.deploy.machine import this_machine
from hyades.deploy.outage import losses
from hyades.deploy.report import build
from hyades.deploy.report.model import Graph, Memory, Report, Traffic, VolumeTraffic
from hyades.gpu_side.models.ir import Model
from hyades.gpu_side.plan import RunPlan
from hyades.gpu_side.price import PlanRequest
from hyades.gpu_side.refresh import Refresh
from hyades.proxy.arena import allocate_arena
from hyades.proxy.proxy import Proxy
from hyades.proxy.registry import open_transport
from hyades.proxy.stripes import map_members
from hyades.proxy.transport import Transport
from hyades.proxy.transports.nvme_url import with_patience


def open_devices(source: str, outputs: str | None = None) -> list[Transport]:
    """Open device 0, the volume's pages, and device 1 where outputs lie elsewhere.

    Both are open as volumes already: a target that is away just now is waited for.
    """
    source = map_members(source, with_patience)
    outputs = outputs and map_members(outputs, with_patience)
    if outputs is None:
        return [open_transport(source)]
    devices = [open_transport(source, writable=False)]
    try:
        return [*devices, open_transport(outputs)]
    except BaseException:
        devices[0].close()
        raise


@contextmanager
def opened_devices(source: str, outputs: str | None = None) -> Iterator[list[Transport]]:
    """Open the devices of a run for the time of a block."""
    devices = open_devices(source, outputs)
    try:
        yield devices
    finally:
        for device in devices:
            device.close()


def make_arena(plan: RunPlan, devices: Sequence[Transport]) -> NDArray[np.uint8]:
    """Allocate the arena of a plan for *devices*: what its stages use in turn, then hidden rows."""
    shared = any(device.limits.shared_arena for device in devices)
    return allocate_arena(plan.arena_bytes + plan.kept_bytes, shared=shared)


def volume_traffic(proxy: Proxy) -> tuple[int, int]:
    """Return the bytes that all devices have read and written so far."""
    stats = proxy.stats()
    return int(stats["bytes_read"]), int(stats["bytes_written"])


def traffic_by_volume(proxy: Proxy, urls: Sequence[str]) -> list[VolumeTraffic]:
    """Return what was moved to and from each volume; *urls* are those of the devices."""
    found = []
    for url, moved in zip(urls, proxy.stats()["devices"], strict=True):
        count, last = losses(moved["transport"])
        read, written = moved["bytes_read"], moved["bytes_written"]
        found.append(
            VolumeTraffic(volume=url, read=read, written=written, losses=count, last_loss=last)
        )
    return found


def _resident() -> int:
    """Return the bytes of memory that this process holds, without pages of mapped files.

    Those are code of Python, torch and others, which comes in as it is first used and which the
    kernel drops when it wants to.
    """
    held = 0
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("RssAnon:", "RssShmem:")):
            held += int(line.split()[1]) * 1024
    return held


class MemoryWatch:
    """Samples the resident size of this process; a context manager."""

    def __init__(self, period: float = 0.02) -> None:
        self.baseline = self.peak = _resident()
        self._period = period
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hyades-memory", daemon=True)

    def _run(self) -> None:
        while not self._stop.wait(self._period):
            self.sample()

    def __enter__(self) -> "MemoryWatch":
        with undisturbed():
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def sample(self) -> None:
        """Look once more, now."""
        self.peak = max(self.peak, _resident())


@dataclass(frozen=True, slots=True)
class Finished:
    """What a report is made of."""

    urls: list[str]  # of the volume, and of the output volume where there is one
    out: str
    model: Model
    request: PlanRequest
    plan: RunPlan
    run: Refresh
    proxy: Proxy
    watch: MemoryWatch
    events: list[Event]
    options: dict[str, str]
    started: str
    began: float
    resumed: bool


def make_report(done: Finished) -> Report:
    """Return the report of a finished run."""
    graph, features = done.request.graph, done.request.features
    done.watch.sample()
    stats = done.proxy.stats()
    read, written = volume_traffic(done.proxy)
    stages = [
        build.stage_of(plan, bytes_read=moved[0], bytes_written=moved[1], seconds=seconds)
        for plan, moved, seconds in zip(
            done.plan.stages, done.run.counters.stage_bytes, done.run.counters.stage_seconds,
            strict=True,
        )
    ]  # fmt: skip
    return Report(
        out=done.out,
        model=done.model.description or "model",
        options=done.options,
        started=done.started,
        seconds=time.perf_counter() - done.began,
        resumed=done.resumed,
        graph=Graph(
            volume=done.urls[0], vertices=graph.vertices, edges=graph.edges + graph.loops,
            feature_width=features.width, feature_dtype=features.dtype, reorder=graph.reorder,
        ),
        machine=this_machine(f"cpu, {done.request.workers} threads"),
        memory=Memory(
            budget=done.request.memory, predicted=done.plan.peak_bytes,
            baseline=done.watch.baseline, peak=done.watch.peak,
        ),
        traffic=Traffic(
            intended=done.plan.scan_bytes, read=read, written=written,
            predicted_read=done.plan.bytes_read, predicted_written=done.plan.bytes_written,
        ),
        volumes=traffic_by_volume(done.proxy, done.urls),
        counters=build.counters_of(
            done.events, requests=stats["requests"], retries=stats["retries"]
        ),
        candidates=build.candidates_of(done.plan),
        stages=stages,
        phases=build.phases_of(done.events),
        timeline=build.spans_of(done.events, done.began),
    )  # fmt: skip
