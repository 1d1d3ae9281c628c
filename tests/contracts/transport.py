"""The one suite that every transport passes; a subclass says how to make its device.

Rules under test: the list in hyades/proxy/transport.py.
"""

import itertools
import time
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hyades.common.errors import UsageError
from hyades.common.layout import BLOCK, COMPLETION, REQUEST, Op, Status
from hyades.common.units import MIB
from hyades.proxy.arena import allocate_arena

BLOCKS = 64
ARENA = MIB
DEADLINE = 20.0


def request(op, lba=0, nblocks=1, offset=0, cookie=0, nbytes=None):
    """Return one REQUEST record as an array of length 1."""
    record = np.zeros(1, REQUEST)
    record["op"], record["lba"], record["offset"], record["cookie"] = op, lba, offset, cookie
    record["nbytes"] = nblocks * BLOCK if nbytes is None else nbytes
    return record


def arena_for(transport, nbytes):
    """Return an arena that *transport* may register."""
    return allocate_arena(nbytes, shared=transport.limits.shared_arena)


def finish(transport, requests, chunk=64):
    """Submit all *requests* and return {cookie: (status, nbytes)}; each must complete once."""
    results, due = {}, set()
    completions = np.zeros(chunk, COMPLETION)
    deadline = time.monotonic() + DEADLINE
    while len(requests) or due:
        if len(requests):
            accepted = transport.submit(requests)
            assert 0 <= accepted <= len(requests)
            due.update(requests["cookie"][:accepted].tolist())
            requests = requests[accepted:]
        count = transport.poll(completions)
        for done in completions[:count]:
            cookie = int(done["cookie"])
            assert cookie in due, f"cookie {cookie} was not given, or came twice"
            due.remove(cookie)
            results[cookie] = (int(done["status"]), int(done["nbytes"]))
        if not count:
            transport.wait(0.01)
        assert time.monotonic() < deadline, f"not complete after {DEADLINE} s: {due}"
    return results


def sweep(transport):
    """Poll until nothing more comes; return [(cookie, status)]."""
    completions = np.zeros(16, COMPLETION)
    found = []
    while count := transport.poll(completions):
        found += [(int(c["cookie"]), int(c["status"])) for c in completions[:count]]
    return found


def pattern(nbytes, seed):
    """Return reproducible bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class TransportContract:
    """Inherit, and implement `make`."""

    keeps_data = True  # what is written can be read
    fixed_size = False  # grow raises UsageError

    def make(self, folder: Path, nblocks: int):
        """Return an open transport of *nblocks* zero blocks without an arena."""
        raise NotImplementedError

    @pytest.fixture
    def device(self, tmp_path):
        transport = self.make(tmp_path, BLOCKS)
        yield transport
        transport.close()

    @pytest.fixture
    def arena(self, device):
        arena = arena_for(device, ARENA)
        device.register(arena)
        return arena

    # -- data

    def test_limits_and_size(self, device):
        limits = device.limits
        assert limits.alignment % 512 == 0
        assert limits.max_inflight >= 1
        assert limits.max_transfer >= BLOCK
        assert limits.max_transfer % BLOCK == 0
        assert device.nblocks == BLOCKS

    @pytest.mark.parametrize("nblocks", [1, 2, 3, 16, BLOCKS])
    def test_write_then_read(self, device, arena, nblocks):
        data = pattern(nblocks * BLOCK, nblocks)
        arena[: len(data)] = data
        assert finish(device, request(Op.WRITE, 0, nblocks, 0, 7)) == {7: (0, len(data))}
        target = BLOCKS * BLOCK
        arena[target : target + len(data)] = 0xEE
        assert finish(device, request(Op.READ, 0, nblocks, target, 8)) == {8: (0, len(data))}
        if self.keeps_data:
            assert np.array_equal(arena[target : target + len(data)], data)
        assert (arena[target + len(data) : target + len(data) + 64] == 0).all()

    def test_fresh_blocks_are_zero(self, device, arena):
        arena[:] = 0x55
        finish(device, request(Op.READ, 0, BLOCKS, 0, 1))
        if self.keeps_data:
            assert not arena[: BLOCKS * BLOCK].any()
        assert (arena[BLOCKS * BLOCK :] == 0x55).all()

    def test_last_block(self, device, arena):
        arena[:BLOCK] = 9
        assert finish(device, request(Op.WRITE, BLOCKS - 1, 1, 0, 1))[1][0] == Status.OK
        last = ARENA - BLOCK
        assert finish(device, request(Op.READ, BLOCKS - 1, 1, last, 2))[2][0] == Status.OK
        if self.keeps_data:
            assert (arena[last:] == 9).all()

    def test_a_whole_batch_in_any_order(self, device, arena):
        order = np.random.default_rng(1).permutation(BLOCKS)
        for block in range(BLOCKS):
            arena[block * BLOCK : (block + 1) * BLOCK] = block + 1
        writes = np.concatenate([request(Op.WRITE, b, 1, b * BLOCK, 100 + b) for b in order])
        assert set(finish(device, writes)) == set(range(100, 100 + BLOCKS))
        arena[:] = 0
        reads = np.concatenate([request(Op.READ, b, 1, b * BLOCK, b) for b in order[::-1]])
        results = finish(device, reads)
        assert results == dict.fromkeys(range(BLOCKS), (0, BLOCK))
        if self.keeps_data:
            got = arena[: BLOCKS * BLOCK].reshape(BLOCKS, BLOCK)
            assert (got == np.arange(1, BLOCKS + 1)[:, None]).all()

    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def test_against_a_model(self, tmp_path_factory, data):
        self.check_model(tmp_path_factory, data)

    def check_model(self, tmp_path_factory, data):
        transport = self.make(tmp_path_factory.mktemp("model"), BLOCKS)
        try:
            arena = arena_for(transport, BLOCKS * BLOCK)
            transport.register(arena)
            model = np.zeros((BLOCKS, BLOCK), np.uint8)
            rows = arena.reshape(BLOCKS, BLOCK)
            for step in range(data.draw(st.integers(1, 4))):
                self._model_step(transport, data, model, rows, step)
        finally:
            transport.close()

    def _model_step(self, transport, data, model, rows, step):
        # Disjoint ranges: requests in flight to the same block have no order.
        cuts = sorted(data.draw(st.sets(st.integers(0, BLOCKS), min_size=2, max_size=10)))
        batch, expected = [], {}
        model_after, rows_after = model.copy(), rows.copy()
        rows[:] = np.random.default_rng(step).integers(0, 256, rows.shape, np.uint8)
        rows_after[:] = rows
        for start, end in itertools.pairwise(cuts):
            op = data.draw(st.sampled_from([Op.READ, Op.WRITE]))
            batch.append(request(op, start, end - start, start * BLOCK, start))
            expected[start] = (0, (end - start) * BLOCK)
            if op == Op.WRITE:
                model_after[start:end] = rows[start:end]
            else:
                rows_after[start:end] = model[start:end]
        assert finish(transport, np.concatenate(batch)) == expected
        if self.keeps_data:
            assert np.array_equal(rows, rows_after)
        model[:] = model_after

    # -- queues and cookies

    def test_cookies_come_back_unchanged_and_once(self, device, arena):
        cookies = [0, 1, 2**32, 2**63, 2**64 - 1]
        batch = np.concatenate(
            [request(Op.READ, i, 1, i * BLOCK, c) for i, c in enumerate(cookies)]
        )
        assert set(finish(device, batch)) == set(cookies)
        time.sleep(0.01)
        assert sweep(device) == []

    def test_more_than_the_queue_holds(self, device, arena):
        count = 3 * device.limits.max_inflight + 5
        batch = np.concatenate(
            [request(Op.READ, i % BLOCKS, 1, i % BLOCKS * BLOCK, i) for i in range(count)]
        )
        accepted = device.submit(batch)
        assert 0 < accepted <= device.limits.max_inflight
        results = dict.fromkeys((c for c, _ in self._collect(device, accepted)), (0, BLOCK))
        results.update(finish(device, batch[accepted:]))
        assert results == dict.fromkeys(range(count), (0, BLOCK))

    def _collect(self, device, count):
        found, deadline = [], time.monotonic() + DEADLINE
        while len(found) < count:
            found += sweep(device)
            device.wait(0.01)
            assert time.monotonic() < deadline
        return found

    def test_one_completion_at_a_time(self, device, arena):
        batch = np.concatenate([request(Op.READ, i, 1, i * BLOCK, i) for i in range(5)])
        assert set(finish(device, batch, chunk=1)) == set(range(5))

    def test_empty_batch(self, device, arena):
        assert device.submit(np.zeros(0, REQUEST)) == 0
        assert device.poll(np.zeros(0, COMPLETION)) == 0
        assert device.poll(np.zeros(4, COMPLETION)) == 0

    def test_the_callers_records_are_copied(self, device, arena):
        arena[:BLOCK] = 3
        finish(device, request(Op.WRITE, 5, 1, 0, 1))
        strided = np.zeros(8, REQUEST)
        strided[::2] = np.concatenate(
            [request(Op.READ, 5, 1, (1 + i) * BLOCK, 10 + i) for i in range(4)]
        )
        view = strided[::2]
        accepted = device.submit(view)
        view["lba"] = 10**9
        view["cookie"] = 999
        left = view[accepted:].copy()
        left["cookie"], left["lba"] = np.arange(10 + accepted, 14), 5
        cookies = {c for c, status in self._collect(device, accepted) if status == 0}
        cookies |= set(finish(device, left)) if len(left) else set()
        assert cookies == {10, 11, 12, 13}

    def test_wait(self, device, arena):
        start = time.monotonic()
        device.wait(0.02)
        assert time.monotonic() - start >= 0.015  # nothing in flight: no busy loop
        assert device.submit(request(Op.READ, 0, 1, 0, 1)) == 1
        for _ in range(400):
            device.wait(0.05)
            if sweep(device):
                return
        pytest.fail("no completion")

    def test_another_thread(self, device, arena):
        results = {}
        thread = Thread(target=lambda: results.update(finish(device, request(Op.READ, 1, 2, 0, 5))))
        thread.start()
        thread.join()
        results.update(finish(device, request(Op.READ, 1, 2, 0, 6)))
        assert results == {5: (0, 2 * BLOCK), 6: (0, 2 * BLOCK)}

    # -- refusals

    @pytest.mark.parametrize(
        "bad",
        [
            request(Op.READ, BLOCKS),
            request(Op.READ, BLOCKS - 1, 2),
            request(Op.READ, 2**64 - 1),
            request(Op.READ, 2**52),
            request(Op.WRITE, BLOCKS),
            request(Op.READ, nbytes=0),
            request(Op.READ, nbytes=100),
            request(Op.READ, nbytes=BLOCK + 512),
            request(Op.READ, offset=8),
            request(Op.READ, offset=512),
            request(Op.READ, offset=ARENA),
            request(Op.READ, 0, 2, ARENA - BLOCK),
            request(Op.READ, offset=2**64 - BLOCK),
            request(Op.READ, nbytes=2**32 - BLOCK),
            request(0),
            request(4),
            request(255),
        ],
        ids=lambda r: f"{r['op'][0]}-{r['lba'][0]}-{r['offset'][0]}-{r['nbytes'][0]}",
    )
    def test_invalid_requests(self, device, arena, bad):
        arena[:] = 0x77
        bad = bad.copy()
        bad["cookie"] = 1
        good = request(Op.READ, 3, 1, BLOCK, 2)
        results = finish(device, np.concatenate([bad, good]))
        assert results[1] == (Status.INVALID, 0)
        assert results[2] == (Status.OK, BLOCK)
        assert (arena[:BLOCK] == 0x77).all()
        assert (arena[2 * BLOCK :] == 0x77).all()
        assert device.stats()["errors"] == 1

    def test_longer_than_max_transfer(self, tmp_path):
        device = self.make(tmp_path, BLOCKS)
        limit = device.limits.max_transfer
        device.grow(limit // BLOCK + 8)
        device.register(arena_for(device, limit + BLOCK))
        assert finish(device, request(Op.READ, nbytes=limit, cookie=1))[1] == (0, limit)
        assert finish(device, request(Op.READ, nbytes=limit + BLOCK, cookie=2))[2][0] == -7
        device.close()

    def test_register_rules(self, device):
        with pytest.raises(UsageError, match="arena"):
            device.submit(request(Op.READ))
        arena = arena_for(device, ARENA)
        for wrong in (arena[1:], arena.view(np.int32), arena[::2], arena.reshape(2, -1)):
            with pytest.raises(UsageError, match="arena"):
                device.register(wrong)
        device.register(arena)
        with pytest.raises(UsageError, match="arena"):
            device.register(arena)

    # -- flush, growth, close, counters

    def test_flush(self, device, arena):
        assert finish(device, request(Op.WRITE, 0, 4, 0, 1))[1][0] == Status.OK
        assert finish(device, request(Op.FLUSH, cookie=2))[2][0] == Status.OK
        odd = request(Op.FLUSH, lba=2**40, offset=3, cookie=3, nbytes=77)  # meaningless, ignored
        assert finish(device, odd)[3][0] == Status.OK

    def test_grow(self, device, arena):
        arena[:BLOCK] = 4
        finish(device, request(Op.WRITE, 0, 1, 0, 1))
        if self.fixed_size:
            with pytest.raises(UsageError, match="larger"):
                device.grow(BLOCKS + 1)
            return
        device.grow(BLOCKS + 30)
        device.grow(3)
        assert device.nblocks == BLOCKS + 30
        arena[BLOCK:] = 0xAA
        batch = [request(Op.READ, 0, 1, BLOCK, 2), request(Op.READ, BLOCKS + 28, 2, 2 * BLOCK, 3)]
        assert finish(device, np.concatenate(batch)) == {2: (0, BLOCK), 3: (0, 2 * BLOCK)}
        if self.keeps_data:
            assert (arena[BLOCK : 2 * BLOCK] == 4).all()
            assert not arena[2 * BLOCK : 4 * BLOCK].any()
        assert finish(device, request(Op.WRITE, BLOCKS + 29, 1, 0, 4))[4][0] == Status.OK

    def test_close_reports_what_was_accepted(self, device, arena):
        batch = np.concatenate([request(Op.READ, i, 1, i * BLOCK, i) for i in range(BLOCKS)])
        accepted = device.submit(batch)
        device.close()
        after = arena.copy()
        with pytest.raises(UsageError, match="closed"):
            device.submit(batch[:1])
        time.sleep(0.02)
        found = sweep(device)
        assert sorted(c for c, _ in found) == list(range(accepted))
        assert {status for _, status in found} <= {Status.OK, Status.CANCELLED}
        assert np.array_equal(arena, after), "a buffer changed after close"
        device.close()
        assert sweep(device) == []

    def test_close_without_arena(self, device):
        device.close()
        with pytest.raises(UsageError, match="closed"):
            device.submit(request(Op.READ))

    def test_counters(self, device, arena):
        finish(device, request(Op.WRITE, 0, 3, 0, 1))
        finish(device, request(Op.READ, 0, 2, 0, 2))
        finish(device, request(Op.FLUSH, cookie=3))
        stats = device.stats()
        assert stats["bytes_written"] == 3 * BLOCK
        assert stats["bytes_read"] == 2 * BLOCK
        assert stats["requests"] == 3
        assert stats["errors"] == 0
        assert isinstance(stats["describe"], str)
