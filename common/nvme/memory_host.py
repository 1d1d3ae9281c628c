"""What the host's ends of queues share whose data moves between memories (RDMA, shared memory).

States: NEW -> READY -error or close-> CLOSED.  Rules:
1. At most `depth` commands are out; every one ends exactly once: in `completions`, or in what
   `close` returns.
2. An answer to a command that is not out raises Violation.
3. No I/O and no clock.
Must stay in sync: the interface is that of host.HostQueue, as far as the engine of the initiator
uses it.
"""

from hyades.common.errors import UsageError
from hyades.common.nvme.host import State
from hyades.common.nvme.layout import CQE, SQE_BYTES
from hyades.common.nvme.pdu import Violation


class MemoryHostQueue:
    """One queue; see the module."""

    def __init__(self, depth: int, state: State) -> None:
        self.state = state
        self.depth = depth
        self.in_capsule = 0  # bytes of data that a command may carry; the caller sets it (IOCCSZ)
        self.last_heard = 0.0
        self.completions: list[tuple[int, int, int]] = []  # (cid, status code, result)
        self.bytes_in = self.bytes_out = 0  # commands, answers, and the data that was moved
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

    def quiet_since(self) -> float | None:
        """Return when the controller was last heard of, None where it owes nothing."""
        return self.last_heard if self.outstanding else None

    def close(self) -> list[int]:
        """Forget the connection and the memory; return the command ids that were out."""
        self.state = State.CLOSED
        lost = [cid for cid in range(self.depth) if self._reads[cid] >= 0]
        self._reads = [-1] * len(self._reads)
        self._free = list(range(self.depth))[::-1]
        return lost

    # -- what a subclass calls

    def _check_room(self) -> None:
        if self.state is not State.READY or not self._free:
            raise UsageError(f"this queue is {self.state.value}, {self.outstanding} are out")

    def _begin(self, into: memoryview | None, source: memoryview | None, now: float) -> int:
        """Return the id of a command that is out from now on."""
        cid = self._free.pop()
        if self.outstanding == 1:
            self.last_heard = now
        self._reads[cid] = 0 if into is None else into.nbytes
        self.bytes_out += SQE_BYTES + (0 if source is None else source.nbytes)
        return cid

    def _parse_answer(self, entry: bytes | memoryview) -> tuple[int, int, int, int]:
        """Return id, status code and result of a completion, and what its command reads."""
        result, _, _, cid, status = CQE.unpack(entry)
        reads = self._reads[cid] if cid < self.depth else -1
        if reads < 0:
            raise Violation(f"an answer to command {cid}, which is not out")
        return cid, status >> 1, result, reads

    def _finish(self, cid: int, code: int, result: int, reads: int) -> None:
        """Note that a command is over."""
        self._reads[cid] = -1
        self._free.append(cid)
        self.bytes_in += CQE.size + (0 if code else reads)
        self.completions.append((cid, code, result))
