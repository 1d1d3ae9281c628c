"""The host's end of one NVMe/RDMA queue: commands in, capsules out; responses in, completions out.

States: NEW -accepted-> READY -error or close-> CLOSED.  Rules:
1. Data never passes through here.  A command names the host's memory with one keyed descriptor
   (0x40: the key lives as long as the memory is registered, so it is never invalidated); the
   controller writes and reads that memory by itself.  It is free when the command has ended.
2. A write of at most `in_capsule` bytes carries its data; the capsule has a copy of it.
3. The rules of memory_host.py; never more commands are out than the controller said it has
   receives for.
4. A response that is none, or answers nothing, raises Violation, and the queue is closed.
5. No addresses of its own: *describe* gives address and key of memory.
Must stay in sync: rdma_target.py is the other end.
"""

from collections.abc import Callable
from typing import NamedTuple

from hyades.common.errors import UsageError
from hyades.common.nvme.commands import set_sgl
from hyades.common.nvme.host import State
from hyades.common.nvme.layout import SQE_CID, SQE_SGL, Sgl
from hyades.common.nvme.memory_host import MemoryHostQueue
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.rdma import MAX_LENGTH, RESPONSE_BYTES, keyed_sgl

Describe = Callable[[memoryview], tuple[int, int]]
_NOTHING = memoryview(b"")


class Capsule(NamedTuple):
    """One command capsule: the SQE and the data that goes along."""

    sqe: bytes
    data: memoryview


class RdmaHostQueue(MemoryHostQueue):
    """One connection; see the module."""

    def __init__(self, depth: int, describe: Describe, *, room: int = 1 << 20) -> None:
        """Keep up to *depth* commands out; a capsule has *room* for data."""
        super().__init__(depth, State.NEW)
        self._describe, self._capsule_room = describe, room
        self._out: list[Capsule] = []

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
        self._check_room()
        memory = into if into is not None else source
        nbytes = 0 if memory is None else memory.nbytes
        if nbytes > MAX_LENGTH:
            raise UsageError(f"{nbytes} bytes in one command, at most {MAX_LENGTH}")
        address, key = self._describe(memory) if memory is not None and nbytes else (0, 0)
        cid = self._begin(into, source, now)
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
        try:
            if len(response) != RESPONSE_BYTES:
                raise Violation(f"a response of {len(response)} bytes, not {RESPONSE_BYTES}")
            self._finish(*self._parse_answer(response))
        except Violation:
            self.state = State.CLOSED
            raise

    def close(self) -> list[int]:
        """Forget the connection and the memory; return the command ids that were out."""
        self._out = []
        return super().close()
