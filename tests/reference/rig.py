"""A proxy with its ring, ready table and arena, driven from a test."""

import time

import numpy as np

from hyades.common.checksum import crc32c
from hyades.common.layout import BLOCK, REQUEST, Op, RequestFlag, Status
from hyades.common.ring import Ring
from hyades.proxy.arena import allocate_arena
from hyades.proxy.proxy import Proxy
from hyades.proxy.transports.mem import MemoryStore, MemTransport

DEADLINE = 60.0  # compiling the kernels counts


def store_of(nblocks, seed=1):
    """Return a MemoryStore of reproducible bytes."""
    store = MemoryStore(nblocks)
    store.data[: nblocks * BLOCK] = np.random.default_rng(seed).integers(
        0, 256, nblocks * BLOCK, np.uint8
    )
    return store


class Rig:
    """Slot i owns arena bytes [i, i + 1) * page_bytes; requests are posted by slot."""

    def __init__(
        self, devices=None, *, slots=64, page_blocks=2, capacity=256, start=True, **options
    ):
        self.page = page_blocks * BLOCK
        self.page_blocks = page_blocks
        self.store = None
        if devices is None:
            self.store = store_of(slots * page_blocks)
            devices = [MemTransport(self.store)]
        self.ring = Ring.create(capacity)
        self.ready = np.zeros(slots, np.int64)
        self.crcs = np.zeros(slots, np.uint32)
        self.arena = allocate_arena(slots * self.page)
        self.proxy = Proxy(self.ring, self.ready, self.arena, devices, crcs=self.crcs, **options)
        self.generation = 0
        if start:
            self.proxy.start()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.proxy.stop(drain=kind is None)

    def slot(self, slot, count=1):
        """Return the arena bytes of *count* slots from *slot*."""
        return self.arena[slot * self.page : (slot + count) * self.page]

    def page_crc(self, page):
        """Return the checksum of *page* of the store."""
        return crc32c(self.store.data[page * self.page : (page + 1) * self.page])

    def request(self, op, slot, page=0, *, crc=None, flags=0, device=0, nbytes=None, lba=None):
        """Return one REQUEST; reads with *crc* are checked."""
        record = np.zeros(1, REQUEST)
        self.generation += 1
        record["op"], record["slot"], record["device"] = op, slot, device
        record["lba"] = page * self.page_blocks if lba is None else lba
        record["nbytes"] = self.page if nbytes is None else nbytes
        record["offset"] = slot * self.page
        record["generation"], record["object"], record["page"] = self.generation, 7, page
        if crc is not None:
            flags |= RequestFlag.CHECK_CRC
            record["crc"] = crc
        record["flags"] = flags
        return record

    def reads(self, pages, *, checked=True):
        """Return reads of *pages* into slots 0, 1, ..."""
        return np.concatenate(
            [
                self.request(Op.READ, i, p, crc=self.page_crc(p) if checked else None)
                for i, p in enumerate(pages)
            ]
        )

    def post(self, *records):
        """Clear the ready words of the records' slots and push them; return the records."""
        batch = np.concatenate(records)
        self.ready[batch["slot"]] = 0
        assert self.ring.push(batch) == len(batch)
        return batch

    def results(self, batch):
        """Wait for the answers to *batch*; return OK or the negative status for each."""
        deadline = time.monotonic() + DEADLINE
        while not self.ready[batch["slot"]].all():
            assert time.monotonic() < deadline, f"no answer: {self.proxy.stats()}"
            time.sleep(0.0005)
        words = self.ready[batch["slot"]]
        good = words == batch["generation"]
        assert (good | (words < 0)).all(), "a ready word of another generation"
        return [Status.OK if g else Status(int(w)) for g, w in zip(good, words, strict=True)]

    def run(self, *records):
        """Post and wait."""
        return self.results(self.post(*records))
