"""The memory and the messages that the SPDK process shares with its caller.

Rules:
1. One memory file holds the words below, a ring of REQUEST records (caller to process) and a ring
   of completions (process to caller): rings of common/ring.py, each with one producer and one
   consumer.  Both have room for `depth`, which bounds what is out, so neither is ever full.
2. Every word has one writer.  A side about to sleep sets its *_SLEEPS word, fences, looks once
   more, and sleeps on its eventfd; a side that has put something into a ring fences, reads the
   other's word and, where it is set, writes the other's eventfd.
3. A request's cookie is its slot in the caller's table and that slot's generation, so an answer
   that comes too late is told from one that is due.
4. The request ring's STOP word asks the process to end; its FAILED word is not used: the caller
   watches the process itself.
5. Opening goes over a socket, one JSON message each: Settings ->, <- Opened or Refused;
   Register with the arena's descriptor ->, <- Ready or Refused.
"""

import mmap
import os
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from hyades.common.ring import CONTROL_WORDS, LINE, Ring

# int64 words of the header, a line each but for the counters, which only the process writes
_REQUESTS, _ANSWERS = 0, CONTROL_WORDS  # control words of the two rings
PROCESS_SLEEPS = 2 * CONTROL_WORDS
CALLER_SLEEPS = PROCESS_SLEEPS + LINE
LOST = CALLER_SLEEPS + LINE  # 1: the device is gone for good
COUNTS = LOST + LINE
RECONNECTS, REPLAYED, PARTIAL, LATE = range(COUNTS, COUNTS + 4)
_HEADER_WORDS = 512
_HEADER = 8 * _HEADER_WORDS

# words of an answer, behind the ring's sequence
AN_COOKIE, AN_STATUS, AN_NBYTES = 1, 2, 3

SLOT_BITS = 32
SLOT_MASK = (1 << SLOT_BITS) - 1
GENERATION_MASK = 0x7FFFFFFF  # so that a cookie is no negative int64

MESSAGE = 1 << 16  # bytes that a message may have

assert RECONNECTS + 4 <= _HEADER_WORDS


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Both rings and the words, on the memory file *fd*."""

    fd: int
    words: NDArray[np.int64]
    requests: Ring
    answers: Ring

    @classmethod
    def create(cls, depth: int) -> "SharedMemory":
        """Return new memory for *depth* requests; the caller owns the descriptor."""
        capacity = max(2, 1 << (depth - 1).bit_length())
        fd = os.memfd_create("hyades-spdk", os.MFD_CLOEXEC)
        os.ftruncate(fd, _HEADER + 2 * 64 * capacity)
        memory = cls.attach(fd)
        for ring in (memory.requests, memory.answers):
            ring.words[:, 0] = np.arange(capacity)
        return memory

    @classmethod
    def attach(cls, fd: int) -> "SharedMemory":
        """Map what `create` made."""
        nbytes = os.fstat(fd).st_size
        words = np.frombuffer(mmap.mmap(fd, nbytes, mmap.MAP_SHARED), np.int64)
        capacity = (nbytes - _HEADER) // (2 * 64)
        rings = words[_HEADER_WORDS:].reshape(2, capacity, 8)
        return cls(
            fd,
            words[:_HEADER_WORDS],
            Ring(rings[0], words[_REQUESTS : _REQUESTS + CONTROL_WORDS]),
            Ring(rings[1], words[_ANSWERS : _ANSWERS + CONTROL_WORDS]),
        )


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the process opens."""

    transport: str  # TCP, RDMA or PCIE
    address: str
    service: str  # the port; empty for PCIe
    subnqn: str
    namespace: int  # 0: the first active one
    queues: int
    depth: int
    max_transfer: int
    header_digest: bool
    data_digest: bool
    hostnqn: str
    kato: float  # seconds: keep-alive timeout
    timeout: float  # seconds without any completion until the path counts as lost
    ctrl_loss_timeout: float  # seconds of reconnecting until the device counts as lost
    trust_cache: bool  # what the target completed is taken for written, whatever happens to it
    huge_pages: bool
    memory: int  # MiB for SPDK itself, without huge pages

    def trid(self) -> str:
        """Return SPDK's text for it."""
        if self.transport == "PCIE":
            return f"trtype:PCIe traddr:{self.address}"
        family = "IPv6" if ":" in self.address else "IPv4"
        return (
            f"trtype:{self.transport} adrfam:{family} traddr:{self.address}"
            f" trsvcid:{self.service} subnqn:{self.subnqn}"
        )


class Opened(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The device is there."""

    release: str
    namespace: int
    nblocks: int
    sector: int  # bytes
    max_transfer: int


class Register(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An arena, whose descriptor comes with the message."""

    offset: int  # where it begins in its file
    nbytes: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Requests may come."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """It cannot be done; *kind* is the name of the error to raise."""

    kind: str
    text: str


Answer = Opened | Ready | Refused
