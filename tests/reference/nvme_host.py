"""A plain NVMe/TCP host for tests of targets: blocking sockets, any commands at a time."""

import socket
import time
from typing import Any

import numpy as np

from hyades.common.nvme import bringup, commands
from hyades.common.nvme.host import HostQueue, State
from hyades.common.nvme.layout import ANY_CONTROLLER, DISCOVERY_NQN, Opcode

NQN = "nqn.2026-01.org.example:pages"
HOST = "nqn.2026-01.org.example:host"
TIMEOUT = 30.0


class ClosedError(EOFError):
    """The target closed the connection."""


def await_that(condition, what):
    """Return when *condition* holds; AssertionError with *what* after 30 s."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class Queue:
    """One connection and its queue; `run` and `batch` give (status code, result, data)."""

    def __init__(self, address, depth=32, wrap=None, **digests: Any) -> None:
        self.sock = socket.create_connection(address, TIMEOUT)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if wrap is not None:
            self.sock = wrap(self.sock)
        self.plain = wrap is None
        self.queue = HostQueue(depth, **digests)
        self.queue.start()
        self.send()
        while self.queue.state is not State.READY:
            self.receive()

    def __del__(self):
        if hasattr(self, "sock"):
            self.sock.close()

    def send(self):
        for segment in self.queue.take_output():
            self.sock.sendall(segment)

    def receive(self):
        """Take one piece of the stream."""
        if self.plain:
            count = self.sock.recvmsg_into(self.queue.buffers())[0]
        else:
            count = self.sock.recv_into(self.queue.buffers()[0])
        if not count:
            raise ClosedError
        self.queue.received(count)
        self.send()

    def wait(self, cids):
        """Return {cid: (code, result)} once all *cids* have ended."""
        found = {}
        while set(cids) - set(found):
            while not self.queue.completions:
                self.receive()
            for cid, code, result in self.queue.completions:
                found[cid] = (code, result)
            self.queue.completions.clear()
        return found

    def start(self, sqe, **data: Any):
        cid = self.queue.submit(sqe, **data)
        self.send()
        return cid

    def run(self, sqe, reads=0, source=None, in_capsule=False):
        """Run one command."""
        data = bytearray(reads)
        into = memoryview(data) if reads else None
        view = memoryview(source) if source is not None else None
        cid = self.start(sqe, into=into, source=view, in_capsule=in_capsule)
        code, result = self.wait([cid])[cid]
        return code, result, bytes(data)

    def talk(self, conversation):
        """Drive a conversation of hyades.common.nvme.bringup."""
        try:
            call = next(conversation)
            while True:
                time.sleep(call.pause)
                source = call.source or None
                answer = self.run(call.sqe, call.reads, source, bool(call.source))
                call = conversation.send(answer)
        except StopIteration as end:
            return end.value

    def read(self, lba, blocks, nsid=1, block=4096):
        """Return (status code, bytes)."""
        sqe = commands.transfer(Opcode.READ, nsid, lba, blocks)
        code, _, data = self.run(sqe, blocks * block)
        return code, data

    def write(self, lba, data, nsid=1, block=4096, in_capsule=False):
        """Return the status code."""
        sqe = commands.transfer(Opcode.WRITE, nsid, lba, len(data) // block)
        return self.run(sqe, source=data, in_capsule=in_capsule)[0]

    def flush(self, nsid=1):
        return self.run(commands.flush(nsid))[0]

    def close(self):
        self.sock.close()

    def closed_by_peer(self):
        """Wait until the target closes; return True."""
        try:
            while True:
                self.receive()
        except (ClosedError, ConnectionError):
            return True


class Host:
    """An association: an admin queue and I/O queues."""

    def __init__(
        self, address, queues=1, depth=32, host=HOST, nqn=NQN, kato=0, wrap=None, **digests
    ):
        self.address, self.depth = address, depth
        self.host, self.nqn, self.wrap, self.digests = host, nqn, wrap, digests
        self.admin = Queue(address, 32, wrap, **digests)
        self.controller = self.admin.talk(
            bringup.bring_up(self.want(0, ANY_CONTROLLER, 32, kato), queues)
        )
        self.queues = [self.connect(qid) for qid in range(1, self.controller.queues + 1)]

    def want(self, qid, cntlid, depth=None, kato=0, **other):
        """Return what to connect."""
        fields = {
            "qid": qid, "depth": depth or self.depth, "subnqn": self.nqn, "hostnqn": self.host,
            "hostid": bytes(16), "cntlid": cntlid, "kato": kato, **other,
        }  # fmt: skip
        return commands.Connect(**fields)

    def connect(self, qid, **other):
        """Return a new I/O queue."""
        queue = Queue(self.address, self.depth, self.wrap, **self.digests)
        queue.talk(bringup.connect_queue(self.want(qid, self.controller.cntlid, **other)))
        queue.queue.in_capsule = self.controller.info.in_capsule
        return queue

    @property
    def io(self):
        """The first I/O queue."""
        return self.queues[0]

    def close(self):
        for queue in [*self.queues, self.admin]:
            queue.close()


def discover(address, host=HOST, wrap=None):
    """Return the entries of the discovery log."""
    queue = Queue(address, 32, wrap)
    want = commands.Connect(0, 32, DISCOVERY_NQN, host, bytes(16))
    queue.talk(bringup.bring_up(want, 0))
    entries = queue.talk(bringup.read_discovery_log())
    queue.close()
    return entries


def pattern(nbytes, seed=1):
    """Return reproducible bytes."""
    return np.random.default_rng(seed).bytes(nbytes)
