"""Views that a host asks for through its own transport: targets, transports, whole reads."""

import contextlib

import numpy as np
from tests.contracts.transport import arena_for, finish, request
from tests.reference import nvme
from tests.reference.view_host import view_server

from hyades.common.layout import BLOCK, COMPLETION, Op, Status
from hyades.common.nvme.vendor import ViewRequest, build_request
from hyades.common.units import KIB
from hyades.proxy.views import open_view
from hyades.target_side.limits import ViewLimits

WHAT = ViewRequest("features", "float16", 64 * KIB)
NONE = ViewLimits(count=0)
# A loss is found soon; a target that is merely slow has time.
QUICK = {"kato": 4, "timeout": 4, "reconnect_delay": 0.02, "ctrl_loss_timeout": 600}


@contextlib.contextmanager
def serving(path):
    """Give a function that starts a target of the volume at *path* and returns (server, log,
    stop); what was not stopped is stopped at the end.
    """
    with contextlib.ExitStack() as stack:

        def start(*views, **how):
            inner = stack.enter_context(contextlib.ExitStack())
            server, log = inner.enter_context(view_server(path, *views, **how))
            return server, log, inner.close

        yield start


@contextlib.contextmanager
def opening():
    """Give `open_view` with quick options; what it opens is closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(*servers, what=WHAT, weights=(), **options):
            addresses = [server.addresses[0] for server in servers]
            url = nvme.address_url(*addresses, **{**QUICK, **options})
            view = open_view(url, build_request(what, weights))
            stack.callback(view.close)
            return view

        yield start


def reads_of(device):
    """Register an arena for the whole of *device*; return it and a read of each block."""
    arena = arena_for(device, device.nblocks * BLOCK)
    device.register(arena)
    blocks = range(device.nblocks)
    return arena, np.concatenate([request(Op.READ, b, 1, b * BLOCK, b) for b in blocks])


def read_again(device, arena, reads):
    """Return all bytes."""
    arena[:] = 0xEE
    assert finish(device, reads) == dict.fromkeys(range(len(reads)), (Status.OK, BLOCK))
    return arena[: len(reads) * BLOCK].tobytes()


def live(view, count):
    """Let *view* take what its paths have, and say whether so many are live."""
    view.poll(np.zeros(0, COMPLETION))
    return len(view._engine.links) == count


class Begun:
    """A transport whose first *count* requests have been submitted before."""

    def __init__(self, device, count):
        self._device, self._count = device, count
        self.poll, self.wait = device.poll, device.wait

    def submit(self, requests):
        if count := self._count:
            self._count = 0
            return count
        return self._device.submit(requests)
