"""What all connections of a target share."""

import threading
from dataclasses import dataclass, field

from hyades.common.nvme.psk import Keyring
from hyades.target_side.admission import Target
from hyades.target_side.counters import Totals
from hyades.target_side.events import NullSink, Sink
from hyades.target_side.faulty import Faults
from hyades.target_side.limits import Limits
from hyades.target_side.pool import BufferPool
from hyades.target_side.view_service import ViewService


@dataclass(slots=True)
class Service:
    """Controllers (under `lock`), buffers, counts, where events go, keys, faults on purpose."""

    target: Target
    limits: Limits
    pool: BufferPool
    totals: Totals = field(default_factory=Totals)
    sink: Sink = field(default_factory=NullSink)
    keys: Keyring | None = None
    faults: Faults | None = None
    views: ViewService | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
