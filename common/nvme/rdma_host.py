"""The host's end of one NVMe/RDMA queue: commands in, capsules out; responses in, completions out.

States: NEW -accepted-> READY -error or close-> CLOSED.  Rules:
1. Data never passes through here.  A command names the host's memory with one keyed descriptor
   (0x40: the key lives as long as the memory is registered, so it is never invalidated); the
   controller writes and reads that memory by itself.  It is free when the command has ended.
2. A write of at most `in_capsule` bytes carries its data; the capsule has a copy of it.
3. At most `depth` commands are out, and never more than the controller said it has receives for.
   Every one ends exactly once: in `completions`, or in what `close` returns.
4. A response that answers nothing raises Violation, and the queue is closed.
5. No I/O, no clock, no addresses of its own: *describe* gives address and key of memory.
Must stay in sync: rdma_target.py is the other end.  It has the interface of host.HostQueue as far
as the engine of the initiator uses it.
"""

from collections.abc import Callable
from typing import NamedTuple

from hyades.common.errors import UsageError
from hyades.common.nvme.commands import set_sgl
from hyades.common.nvme.host import State
from hyades.common.nvme.layout import CQE, SQE_BYTES, SQE_CID, SQE_SGL, Sgl
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.rdma import MAX_LENGTH, RESPONSE_BYTES, keyed_sgl

Describe = Callable[[memoryview], tuple[int, int]]
_NOTHING = memoryview(b"")


class Capsule(NamedTuple):
    """One command capsule: the SQE and the data that goes along."""

    sqe: bytes
    data: memoryview


class RdmaHostQueue:
    """One connection; see the module."""

    def __init__(self, depth: int, describe: Describe, *, room: int = 1 << 20) -> None:
        """Keep up to *depth* commands out; a capsule has *room* for data."""
        self.state = State.NEW
        self.depth = depth
        self.in_capsule = 0  # bytes of data that a command may carry; the caller sets it (IOCCSZ)
        self.last_heard = 0.0
        self.completions: list[tuple[int, int, int]] = []  # (cid, status code, result)
        self.bytes_in = self.bytes_out = 0  # capsules, and the data that the controller moved
        self._describe, self._capsule_room = describe, room
        self._out: list[Capsule] = []
        self._reads: list[int] = [-1] * depth  # bytes that a command that is out reads; -1: free
        self._free = list(range(depth))[::-1]

    @property
    def outstanding(self) -> int:
        """Commands that are out."""
        return self.depth - len(self._free)

    @property
    def room(self) -> int:
        """Commands that `submit` would take now."""
        return len(self._free) if self.state is State.READY else 0

    def accepted(self, receives: int, now: float = 0.0) -> None:
        """Begin; the controller has *receives* receives for commands."""
        assert self.state is State.NEW
        self.depth = min(self.depth, receives)
        self._free = list(range(self.depth))[::-1]
        self.state, self.last_heard = State.READY, now

    def submit(
        self, sqe: bytearray, *, into: memoryview | None = None, source: memoryview | None = None,
        in_capsule: bool = False, now: float = 0.0,
    ) -> int:  # fmt: skip
        """Send a command (its SGL and command id are filled in) and return its command id.

        *into* takes what it reads, *source* is what it writes.  *in_capsule* means nothing here: on
        an admin queue nothing says that a controller takes data in a capsule.
        """
        del in_capsule
        if self.state is not State.READY or not self._free:
            raise UsageError(f"this queue is {self.state.value}, {self.outstanding} are out")
        memory = into if into is not None else source
        nbytes = 0 if memory is None else memory.nbytes
        if nbytes > MAX_LENGTH:
            raise UsageError(f"{nbytes} bytes in one command, at most {MAX_LENGTH}")
        address, key = self._describe(memory) if memory is not None and nbytes else (0, 0)
        cid = self._free.pop()
        if self.outstanding == 1:
            self.last_heard = now
        self._reads[cid] = 0 if into is None else nbytes
        self.bytes_out += SQE_BYTES + (0 if source is None else nbytes)
        if source is not None and 0 < nbytes <= min(self.in_capsule, self._capsule_room):
            set_sgl(sqe, cid, nbytes, Sgl.IN_CAPSULE)
            self._out.append(Capsule(bytes(sqe), source))
        else:
            sqe[SQE_CID : SQE_CID + 2] = cid.to_bytes(2, "little")
            sqe[SQE_SGL : SQE_SGL + 16] = keyed_sgl(address, nbytes, key)
            self._out.append(Capsule(bytes(sqe), _NOTHING))
        return cid

    def take_output(self) -> list[Capsule]:
        """Return and forget what is to be sent, in order."""
        out, self._out = self._out, []
        return out

    def received(self, response: bytes | memoryview, now: float = 0.0) -> None:
        """Take one response capsule; raises Violation."""
        if self.state is State.CLOSED:
            raise UsageError("this queue is closed")
        self.last_heard = now
        if len(response) != RESPONSE_BYTES:
            self.state = State.CLOSED
            raise Violation(f"a response of {len(response)} bytes, not {RESPONSE_BYTES}")
        result, _, _, cid, status = CQE.unpack(response)
        reads = self._reads[cid] if cid < self.depth else -1
        if reads < 0:
            self.state = State.CLOSED
            raise Violation(f"an answer to command {cid}, which is not out")
        self._reads[cid] = -1
        self._free.append(cid)
        code = status >> 1
        self.bytes_in += RESPONSE_BYTES + (0 if code else reads)
        self.completions.append((cid, code, result))

    def quiet_since(self) -> float | None:
        """Return when the controller was last heard of, None where it owes nothing."""
        return self.last_heard if self.outstanding else None

    def close(self) -> list[int]:
        """Forget the connection and the memory; return the command ids that were out."""
        self.state, self._out = State.CLOSED, []
        lost = [cid for cid in range(self.depth) if self._reads[cid] >= 0]
        self._reads = [-1] * len(self._reads)
        self._free = list(range(self.depth))[::-1]
        return lost
