"""Views over NVMe/TCP as a host has them, and targets that offer views, for tests."""

import contextlib
from dataclasses import dataclass, field

import numpy as np
from tests.reference.nvme import NQN
from tests.reference.stage import make_volume, random_edges

from hyades.common.blocks import FileBlocks, MemoryBlocks
from hyades.common.layout import BLOCK
from hyades.common.nvme import commands
from hyades.common.nvme.identify import (
    parse_active_list,
    parse_controller,
    parse_namespace,
)
from hyades.common.nvme.vendor import (
    ViewRequest,
    build_request,
    create_view,
    delete_view,
    parse_answer,
)
from hyades.common.units import KIB, MIB
from hyades.common.viewspec import SampleSpec, parse_head
from hyades.common.volume import Volume
from hyades.target_side.limits import Limits, ViewLimits
from hyades.target_side.namespaces import FileNamespace
from hyades.target_side.server import Server
from hyades.target_side.stage.options import StageOptions
from hyades.target_side.stage.viewpages import open_volume_view
from hyades.target_side.subsystem import Subsystem
from hyades.target_side.view_service import ViewService, parse_view

VERTICES, WIDTH, RANGE = 1282, 50, 512
EDGES = random_edges(VERTICES, 6000, seed=2)
X = (np.random.default_rng(5).standard_normal((VERTICES, WIDTH)) * 50).astype(np.float32)
W = np.random.default_rng(6).standard_normal((16, WIDTH)).astype(np.float32)


OTHER = "nqn.2026-01.org.example:other"
SAMPLE = SampleSpec(1, 4, 1, ((0, 1),), "none")
FIRST = 2  # id of the first view of a host, behind the volume
HALF = ViewRequest("features", "float16")


def write_volume(path):
    """Write a volume file with a graph and features of several pages a range."""
    volume = make_volume(EDGES, X, page_size=64 * KIB, range_rows=RANGE)
    assert isinstance(volume.blocks, MemoryBlocks)
    path.write_bytes(volume.blocks.data.tobytes())
    return path


def made_here(path, what, weights=()):
    """Return the bytes of the same view, made from the file."""
    volume = Volume.open(FileBlocks(path, writable=False))
    view = open_volume_view(
        volume, what.source, encoding=what.encoding, sample=what.sample, weights=weights,
        page_size=what.page_size,
    )  # fmt: skip
    data = bytes(view.read(0, view.nblocks))
    view.close()
    volume.close()
    return data


@dataclass
class Log:
    """Keeps the events."""

    events: list = field(default_factory=list)

    def emit(self, event):
        self.events.append(event)

    def named(self, *kinds):
        return [event for event in self.events if isinstance(event, kinds)]


@contextlib.contextmanager
def view_server(
    path, *views, space=None, memory=64 * MIB, limits=None, threads=1, dma=(), rdma=(), port=0,
    keys=None, **server,
):  # fmt: skip
    """Serve the volume at *path* as namespace 1, static *views* behind it; give (server, log)."""
    log = Log()
    service = ViewService(
        StageOptions(memory=memory, threads=threads), limits or ViewLimits(), sink=log
    )
    spaces = {1: space or FileNamespace(path, read_only=True)}
    for text in views:
        nsid, what = parse_view(text)
        spaces[len(spaces) + 1] = service.open_static(spaces[nsid], what)
    target = Server(
        [Subsystem(NQN, spaces)], [("127.0.0.1", port)], sink=log, views=service,
        limits=Limits(**server), dma=dma, rdma=rdma, keys=keys,
    )  # fmt: skip
    target.start()
    try:
        yield target, log
    finally:
        target.stop(grace=1.0)


def send_request(host, data, nsid=1, most=MIB, in_capsule=False):
    """Return (status code, result) of the last part, or of the first that is refused."""
    code = result = 0
    for sqe, part in create_view(nsid, data, most):
        code, result, _ = host.admin.run(sqe, source=part, in_capsule=in_capsule)
        if code:
            break
    return code, result


def ask(host, what, weights=(), **how):
    """Return the namespace id of a view that must come about."""
    code, result = send_request(host, build_request(what, weights), **how)
    assert code == 0, hex(code)
    return parse_answer(result)


def delete(host, nsid):
    """Return the status code."""
    return host.admin.run(delete_view(nsid))[0]


def namespaces(host):
    """Return the ids that Identify lists."""
    return parse_active_list(host.admin.run(commands.identify(2), 4096)[2])


def identify(host, nsid):
    """Return what Identify Namespace says."""
    code, _, data = host.admin.run(commands.identify(0, nsid), 4096)
    assert code == 0
    return parse_namespace(data)


def identify_controller(host):
    """Return what Identify Controller says."""
    return parse_controller(host.admin.run(commands.identify(1), 4096)[2])


def read_whole(queue, nsid, blocks, step=37):
    """Return all bytes of a namespace, read *step* blocks at a time."""
    parts = []
    for lba in range(0, blocks, step):
        code, data = queue.read(lba, min(step, blocks - lba), nsid)
        assert code == 0, hex(code)
        parts.append(data)
    return b"".join(parts)


class ServedView:
    """A view's bytes, with what tests.reference.stage.read_view wants of ViewPages."""

    def __init__(self, data):
        self.data, self.head = data, parse_head(data)
        self.spec = self.head.spec

    def read(self, lba, count):
        return self.data[lba * BLOCK : (lba + count) * BLOCK]
