"""A flush of the device that a run writes to, through the ring.

The volume's commit flushes through a connection of its own.  That does not cover what the run's
device was told: a remote controller that was lost and came back may have lost writes that it had
completed, and only the connection that they went through knows (rule 5 of the transports).
"""

import time

import numpy as np

from hyades.common.layout import REQUEST, Op
from hyades.common.port import Port
from hyades.common.ring import FAILED
from hyades.gpu_side.lanestream import ReadFailed

_NAP = 5e-5  # seconds between two looks at the answer


class DeviceFlush:
    """Call it: what the writes that were answered moved is durable afterwards, or ReadFailed."""

    def __init__(self, port: Port, device: int) -> None:
        self._port = port
        self._record = np.zeros(1, REQUEST)
        self._record["op"], self._record["device"] = int(Op.FLUSH), device
        self._record["slot"] = self._record["cookie"] = port.flush_slot
        port.ready[port.flush_slot] = 0

    def __call__(self) -> None:
        """Flush, and wait for the answer."""
        port, record = self._port, self._record
        record["generation"] += 1
        generation = int(record["generation"][0])
        while not port.ring.push(record):
            self._nap()
        while (answer := int(port.ready[port.flush_slot])) != generation:
            if answer < 0:
                raise ReadFailed
            self._nap()

    def _nap(self) -> None:
        # STOP is no reason to leave: an interrupted run keeps what it has.
        if self._port.ring.control[FAILED] != 0:
            raise ReadFailed
        time.sleep(_NAP)
