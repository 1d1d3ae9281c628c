"""A host queue against a target queue over a disk, in any order, against a model.

Commands are submitted, executed and answered in any order and the streams are cut anywhere; data
may be damaged on the way where there are data digests.  Rules: every command ends exactly once, a
read gives what one of the writes around it left, what was acknowledged is on the disk.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.reference.nvme_pdus import BLOCK, Disk, joined_stream

from hyades.common.nvme import commands
from hyades.common.nvme.host import HostQueue, State
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.pdu import feed
from hyades.common.nvme.status import StatusCode
from hyades.common.nvme.target import TargetQueue

BLOCKS = 24
COMMANDS = st.tuples(
    st.sampled_from(["write", "read", "write", "flush"]),
    st.integers(0, BLOCKS - 1),
    st.sampled_from([1, 2, 5, 9, 16, 24]),
)


class SlowDisk(Disk):
    """Answers commands in any order, and some of them late."""

    def __init__(self, queue):
        super().__init__(queue, BLOCKS)
        self.waiting = []  # commands and writes whose data is there

    def collect(self):
        self.waiting += self.queue.commands + self.queue.arrived
        self.queue.commands, self.queue.arrived = [], []

    def execute(self, index):
        item = self.waiting.pop(index % len(self.waiting))
        if len(item) == 3:
            self.start(*item)
        else:
            self.queue.arrived.append(item)
            self.run()

    def abort(self, index):
        """Answer a command that was not begun with an abort."""
        found = [item for item in self.waiting if len(item) == 3]
        if found:
            item = found[index % len(found)]
            self.waiting.remove(item)
            self.queue.complete(item[0].cid, StatusCode.ABORTED)


class Pending:
    """What the model knows of a command that is out."""

    def __init__(self, kind, first, blocks, memory):
        self.kind, self.first, self.blocks, self.memory = kind, first, blocks, memory
        self.possible = []  # of a read: for each block, what it may hold


class Queues(RuleBasedStateMachine):
    """The rules."""

    @initialize(
        digests=st.integers(0, 3), depth=st.integers(1, 6), max_h2c=st.sampled_from([4096, 8192]),
        in_capsule=st.sampled_from([0, 512, 4096]), flow_control=st.booleans(),
        target_allows=st.sampled_from([512, 8192]),
    )  # fmt: skip
    def connect(self, digests, depth, max_h2c, in_capsule, flow_control, target_allows):
        self.host = HostQueue(depth, header_digest=bool(digests & 1), data_digest=bool(digests & 2))
        self.target = TargetQueue(depth=depth, in_capsule=target_allows, max_h2c=max_h2c)
        self.disk = SlowDisk(self.target)
        self.digests = digests
        self.host.start()
        feed(self.target, joined_stream(self.host.take_output()))
        feed(self.host, joined_stream(self.target.take_output()))
        self.target.configure(1, depth + 1, flow_control=flow_control)
        self.host.in_capsule = min(in_capsule, target_allows)
        self.wires = {"host": bytearray(), "target": bytearray()}
        self.pending = {}
        self.ended = self.submitted = self.stamp = 0
        self.damage = self.damaged = self.failed = self.aborted = 0
        zero = bytes(BLOCK)
        self.settled = [{zero} for _ in range(BLOCKS)]  # what each block may hold

    def writers(self, block):
        return [
            p.memory[(block - p.first) * BLOCK :][:BLOCK].tobytes()
            for p in self.pending.values()
            if p.kind == "write" and p.first <= block < p.first + p.blocks
        ]

    @rule(batch=st.lists(COMMANDS, min_size=1, max_size=6))
    def submit_some(self, batch):
        for command in batch:
            self.submit(*command)

    def submit(self, kind, first, blocks):
        if not self.host.room:
            return
        blocks = min(blocks, BLOCKS - first)
        self.stamp += 1
        memory = np.full(blocks * BLOCK, self.stamp % 251 + 1, np.uint8)
        memory[::BLOCK] = np.arange(blocks)
        pending = Pending(kind, first, blocks, memory)
        if kind == "flush":
            cid = self.host.submit(commands.flush(1))
        elif kind == "read":
            memory[:] = 0xEE
            pending.possible = [
                set(self.settled[block]) | set(self.writers(block))
                for block in range(first, first + blocks)
            ]
            cid = self.host.submit(
                commands.transfer(Opcode.READ, 1, first, blocks), into=memory.data
            )
        else:
            cid = self.host.submit(
                commands.transfer(Opcode.WRITE, 1, first, blocks), source=memory.data
            )
            for other in self.pending.values():
                if other.kind == "read":
                    for block in range(first, first + blocks):
                        if other.first <= block < other.first + other.blocks:
                            at = (block - first) * BLOCK
                            other.possible[block - other.first].add(
                                memory[at : at + BLOCK].tobytes()
                            )
        assert cid not in self.pending
        self.pending[cid] = pending
        self.submitted += 1

    @rule()
    def out_of_range(self):
        if self.host.room:
            sqe = commands.transfer(Opcode.READ, 1, BLOCKS, 1)
            cid = self.host.submit(sqe, into=memoryview(bytearray(BLOCK)))
            self.pending[cid] = Pending("bad", 0, 0, None)
            self.submitted += 1

    @rule(side=st.sampled_from(["host", "target"]), nbytes=st.one_of(
        st.integers(1, 60), st.sampled_from([24, 72, 512, 5000, 10**6])))  # fmt: skip
    def carry(self, side, nbytes):
        """Carry some bytes to *side*."""
        queue, other = (self.host, self.target)[:: 1 if side == "host" else -1]
        wire = self.wires[side]
        wire += joined_stream(map(self.spoil, other.take_output()))
        feed(queue, bytes(wire[:nbytes]))
        del wire[:nbytes]
        self.disk.collect()
        self.settle()

    @precondition(lambda self: self.digests & 2 and self.damaged + self.damage < 2)
    @rule()
    def spoil_data(self):
        """Damage the next piece of data that is sent."""
        self.damage += 1

    @rule()
    def catch_up(self):
        """Let all that is out end."""
        self.drain()

    def spoil(self, segment):
        if not self.damage or not isinstance(segment, memoryview):
            return segment
        self.damage -= 1
        self.damaged += 1
        changed = bytearray(segment)
        changed[self.damaged * 7919 % len(changed)] ^= 1
        return changed

    @precondition(lambda self: self.disk.waiting)
    @rule(index=st.integers(0, 100))
    def execute(self, index):
        self.disk.execute(index)

    @precondition(lambda self: self.disk.waiting)
    @rule(index=st.integers(0, 100))
    def abort(self, index):
        self.disk.abort(index)

    def settle(self):
        """Take the completions and hold them against the model."""
        done, self.host.completions = self.host.completions, []
        for cid, code, _ in done:
            pending = self.pending.pop(cid)
            self.ended += 1
            if pending.kind == "bad":
                assert code in (StatusCode.LBA_OUT_OF_RANGE, StatusCode.ABORTED)
                continue
            self.aborted += code == StatusCode.ABORTED
            self.failed += code == StatusCode.TRANSIENT_TRANSPORT
            assert code in (0, StatusCode.ABORTED, StatusCode.TRANSIENT_TRANSPORT)
            if pending.kind == "read" and not code:
                for index, possible in enumerate(pending.possible):
                    at = index * BLOCK
                    assert pending.memory[at : at + BLOCK].tobytes() in possible
            if pending.kind == "write" and not code:
                for index in range(pending.blocks):
                    at = index * BLOCK
                    block = pending.first + index
                    made = pending.memory[at : at + BLOCK].tobytes()
                    others = self.writers(block)
                    overlapped = self.settled[block] if others or pending.possible else set()
                    self.settled[block] = {made} | set(others) | overlapped
                for other in self.pending.values():  # an overlapping write may land before or after
                    if other.kind == "write" and overlap(pending, other):
                        other.possible = [True]
                    if other.kind == "read":
                        for block in range(other.first, other.first + other.blocks):
                            other.possible[block - other.first] |= self.settled[block]

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "host"):
            return
        assert self.failed <= self.damaged
        assert self.host.state is State.READY
        assert not self.target.closed
        assert self.ended + len(self.pending) == self.submitted
        assert self.host.outstanding == len(self.pending) <= self.host.depth
        assert self.target.outstanding <= self.host.outstanding

    def teardown(self):
        """Let everything end, and read the disk through the queue."""
        if not hasattr(self, "host"):
            return
        self.drain()
        self.damage = 0
        assert self.failed or self.aborted or not self.damaged
        for block in range(BLOCKS):
            self.submit("read", block, 1)
            self.drain()
        assert self.ended == self.submitted
        assert self.host.close() == []

    def drain(self):
        for _ in range(1000):
            if not self.pending:
                return
            while self.disk.waiting:
                self.disk.execute(0)
            self.carry("target", 10**9)
            self.carry("host", 10**9)
        raise AssertionError("commands do not end")


def overlap(one, other):
    return one.first < other.first + other.blocks and other.first < one.first + one.blocks


Queues.TestCase.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
TestQueues = Queues.TestCase
