"""Both ends of a queue over shared memory, joined on plain memory."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reference.dma import Pair

from hyades.common.errors import PeerError, UsageError
from hyades.common.nvme import commands, dma
from hyades.common.nvme.dma import HEADER, Hello, Kind, Shape
from hyades.common.nvme.dma_target import DmaTargetQueue
from hyades.common.nvme.host import State
from hyades.common.nvme.layout import Opcode, Sgl
from hyades.common.nvme.pdu import Violation

PAGE = 4096


def pattern(nbytes, seed=0):
    return memoryview(bytearray(random.Random(seed).randbytes(nbytes)))


def read(pair, into):
    return pair.host.submit(commands.transfer(Opcode.READ, 1, 0, 1), into=into)


def write(pair, source):
    return pair.host.submit(commands.transfer(Opcode.WRITE, 1, 0, 1), source=source)


def take(pair):
    """Let the target take what was published; return its commands by id."""
    pair.host.publish()
    pair.turn()
    found = {command.cid: command for command, _, _ in pair.target.commands}
    pair.target.commands.clear()
    return found


def finish(pair, turns=500):
    """Let both go on until nothing moves; return the completions."""
    for _ in range(turns):
        pair.turn()
        if not (pair.host.advance(2.0) | pair.host.publish()):
            break
    done, pair.host.completions = pair.host.completions, []
    return done


@pytest.mark.parametrize("nbytes", [1, 512, 4096, 4097, 5 * 4096 - 3, 100_003])
@pytest.mark.parametrize("buffer", [4096, 5001, 1 << 16])
def test_a_read_in_chunks(nbytes, buffer):
    pair = Pair(buffer=buffer)
    into, data = memoryview(bytearray(nbytes)), pattern(nbytes)
    cid = read(pair, into)
    (command,) = take(pair).values()
    assert (command.sgl, command.sgl_bytes) == (Sgl.TRANSPORT, nbytes)
    pair.target.send_data(cid, data, success=True)
    assert finish(pair) == [(cid, 0, 0)]
    assert into == data
    assert pair.host.chunks == -(-nbytes // buffer)
    assert pair.host.bytes_in == 16 + nbytes


@pytest.mark.parametrize("nbytes", [1, 4097, 100_003])
def test_a_write_in_chunks(nbytes):
    pair = Pair(buffers=1)
    data, into = pattern(nbytes), memoryview(bytearray(nbytes))
    cid = write(pair, data)
    take(pair)
    pair.target.request_data(cid, into)
    assert finish(pair) == []
    assert pair.target.arrived == [(cid, True)]
    assert into == data
    pair.target.complete(cid)
    assert finish(pair) == [(cid, 0, 0)]


def test_a_chunk_waits_until_its_command_has_memory_and_reads_go_on():
    pair = Pair(buffers=1)
    data, into, other = pattern(3 * PAGE), memoryview(bytearray(3 * PAGE)), pattern(PAGE, 1)
    first, second = write(pair, data), read(pair, landed := memoryview(bytearray(PAGE)))
    take(pair)
    pair.target.send_data(second, other, success=True)
    assert finish(pair) == [(second, 0, 0)]
    assert landed == other
    pair.target.request_data(first, into)
    finish(pair)
    assert into == data


def test_chunks_of_a_command_that_has_ended_are_skipped():
    pair = Pair(buffers=1)
    refused, good = pattern(5 * PAGE), pattern(2 * PAGE, 1)
    first, second = write(pair, refused), write(pair, good)
    take(pair)
    pair.target.complete(first, 0x4080)
    pair.target.request_data(second, into := memoryview(bytearray(2 * PAGE)))
    assert finish(pair) == [(first, 0x4080, 0)]
    assert into == good


def test_slots_are_named_by_their_place():
    pair = Pair()
    pair.target.arena_bytes = len(pair.arena)
    cid = read(pair, pair.arena[8192 : 8192 + 5000])
    data = pattern(5000)
    (command,) = take(pair).values()
    assert (command.sgl, command.sgl_bytes) == (Sgl.TRANSPORT, 5000)
    assert pair.host.direct
    pair.target.send_data(cid, data, success=True)
    assert finish(pair) == [(cid, 0, 0)]
    assert pair.arena[8192 : 8192 + 5000] == data
    assert not pair.host.direct
    assert pair.host.chunks == 0
    other = write(pair, pair.arena[100:200])
    take(pair)
    pair.target.request_data(other, into := memoryview(bytearray(100)))
    finish(pair)
    assert into == pair.arena[100:200]


def test_an_arena_that_is_heard_of_with_the_first_command_that_names_it():
    """It is announced before the command is written, perhaps after the target looked for it."""
    pair = Pair()
    read(pair, pair.arena[8192 : 8192 + 5000])
    heard = []

    def hear():
        heard.append(len(pair.target.commands))
        pair.target.arena_bytes = len(pair.arena)

    assert not pair.target.advance(0.0, hear)  # nothing is published
    pair.host.publish()
    assert pair.target.advance(0.0, hear)
    assert heard == [0]
    ((command, _, _),) = pair.target.commands
    assert (command.sgl, command.sgl_bytes) == (Sgl.TRANSPORT, 5000)


@pytest.mark.parametrize("arena_bytes", [0, 8192 + 4999])
def test_a_place_outside_the_arena_is_no_descriptor_that_anybody_takes(arena_bytes):
    pair = Pair()
    pair.target.arena_bytes = arena_bytes
    read(pair, pair.arena[8192 : 8192 + 5000])
    (command,) = take(pair).values()
    assert command.sgl not in (Sgl.TRANSPORT, Sgl.IN_CAPSULE)


def run(pair, seed):
    """Move random reads and writes; return what came wrong."""
    rng, wrong, open_now = random.Random(seed), 0, {}
    for turn in range(60):
        while pair.host.room and rng.random() < 0.7:
            nbytes = rng.choice([7, 4096, 4097, 20_000])
            data, into = pattern(nbytes, rng.random()), memoryview(bytearray(nbytes))
            reads = rng.random() < 0.5
            cid = read(pair, into) if reads else write(pair, data)
            open_now[cid] = (reads, data, into)
        for cid in take(pair):
            reads, data, into = open_now[cid]
            if reads:
                pair.target.send_data(cid, data, success=True)
            else:
                pair.target.request_data(cid, into)
        if turn % 3:
            pair.host.advance(1.0)  # else the target goes on with what it has
        for cid, _ in pair.target.arrived:
            pair.target.complete(cid)
        pair.target.arrived.clear()
        for cid, code, _ in pair.host.completions:
            _, data, into = open_now.pop(cid)
            wrong += code != 0 or into != data
        pair.host.completions.clear()
    return wrong


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("buffers", [1, 3])
def test_no_buffer_is_written_again_before_it_was_counted_as_emptied(buffers, seed):
    assert run(Pair(buffers=buffers), seed) == 0


def test_a_target_that_does_not_wait_for_the_count_is_found_out(monkeypatch):
    """The test before this one can fail."""

    def careless(self, nbytes):
        self._reserved += 1
        return self._memory.data(self._reserved - 1, nbytes, outward=False)

    monkeypatch.setattr(DmaTargetQueue, "reserve", careless)
    with pytest.raises(Violation):
        assert run(Pair(buffers=1), 0) == 0


def test_a_host_that_does_not_wait_for_the_count_is_found_out():
    pair = Pair(buffers=1)
    write(pair, pattern(4 * PAGE))
    pair.host._buffers = 2
    with pytest.raises(Violation, match="buffers to the target filled"):
        take(pair)
    assert pair.target.closed


def test_more_commands_than_the_queue_holds():
    pair = Pair(depth=2)
    read(pair, pattern(10))
    read(pair, pattern(10))
    with pytest.raises(UsageError, match="2 are out"):
        read(pair, pattern(10))


def test_closing_tells_what_was_out():
    pair = Pair()
    cids = [read(pair, pattern(10)), write(pair, pattern(10))]
    take(pair)
    assert sorted(pair.host.close()) == cids
    assert pair.host.state is State.CLOSED
    pair.target.close()
    pair.target.complete(cids[0])  # dropped without a word
    assert not pair.host.advance()


def test_sleeping_is_refused_where_there_is_something_to_do():
    pair = Pair()
    assert pair.host.sleep()
    assert pair.target.sleep(blocked=False)
    cid = read(pair, memoryview(bytearray(10)))
    assert pair.host.publish()
    assert pair.host.must_wake()
    assert not pair.target.sleep(blocked=False)
    take(pair)
    pair.host.awake()
    pair.target.complete(cid, 0x4002)
    pair.turn()
    assert not pair.target.must_wake()  # the host is awake
    assert not pair.host.sleep()
    assert finish(pair) == [(cid, 0x4002, 0)]


def header(pair, *fields):
    HEADER.pack_into(pair.memory.header(0, outward=False), 0, *fields)
    pair.memory.store(dma.IN_FILLED, 1)


@pytest.mark.parametrize(
    "fields",
    [(1, 5000, 0, 4096), (0, 4999, 0, 4096), (0, 5000, 1, 4096), (0, 5000, 0, 4095),
     (0, 5000, 0, 0), (0, 5000, 0, 1 << 63)],
)  # fmt: skip
def test_a_header_that_says_something_else(fields):
    pair = Pair()
    read(pair, memoryview(bytearray(5000)))
    take(pair)
    header(pair, *fields)
    with pytest.raises(Violation, match="packet"):
        pair.host.advance()
    assert pair.host.state is State.CLOSED


def test_a_read_that_succeeds_without_its_bytes():
    pair = Pair()
    cid = read(pair, memoryview(bytearray(5000)))
    take(pair)
    pair.target.complete(cid)
    pair.turn()
    with pytest.raises(Violation, match="read 0 bytes of 5000, and succeeded"):
        pair.host.advance()


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_words_of_the_peer_end_in_a_violation_and_nothing_else(data):
    """Whatever stands in the shared memory, no end hangs, grows, or raises anything else."""
    pair = Pair(depth=4, buffers=2)
    page = memoryview(bytearray(9000))
    read(pair, memoryview(bytearray(9000)))
    write(pair, page)
    for cid, command in take(pair).items():
        if command.opcode == Opcode.READ:
            pair.target.send_data(cid, page, success=True)
        else:
            pair.target.request_data(cid, memoryview(bytearray(9000)))
    small = st.integers(-3, 12)
    word = st.one_of(small, st.integers(-(1 << 63), (1 << 63) - 1))
    every = [
        dma.SQ_TAIL, dma.CQ_HEAD, dma.OUT_FILLED, dma.IN_EMPTIED, dma.HOST_SLEEPS, dma.CQ_TAIL,
        dma.IN_FILLED, dma.OUT_EMPTIED, dma.TARGET_SLEEPS,
    ]  # fmt: skip
    noise = random.Random(data.draw(st.integers(0, 1 << 32)))
    for _ in range(data.draw(st.integers(1, 4))):
        pair.memory.words[data.draw(st.sampled_from(every))] = data.draw(word)
        if data.draw(st.booleans()):
            at = noise.randrange(dma.PAGE, pair.shape.nbytes - 64)
            pair.memory.memory[at : at + 64] = noise.randbytes(64)
        try:
            pair.turn()
            pair.host.advance()
            pair.host.publish()
            pair.host.sleep()
            pair.target.sleep(blocked=True)
        except PeerError:
            return
        assert len(pair.target.commands) <= 4 * pair.shape.entries
        assert pair.target.outstanding <= pair.shape.entries
        assert len(pair.host.completions) <= 4 * pair.shape.entries


@given(st.binary(max_size=64), st.sampled_from(list(Kind)))
def test_messages_that_are_none(raw, kind):
    data = dma.PLAIN.pack(dma.MAGIC, kind) + raw
    for parse in (
        dma.parse_hello, dma.parse_arena, lambda d: dma.check_plain(d, Kind.READY),
        lambda d: dma.parse_welcome(d, Shape(2, 1, 4096)),
    ):  # fmt: skip
        for text in (raw, data):
            try:
                parse(text)
            except PeerError:
                continue


def test_what_a_hello_may_ask_for():
    good = Hello(Shape(33, 4, 1 << 20), direct=True)
    assert dma.parse_hello(good.pack()) == good
    for shape in (Shape(1, 4, 4096), Shape(33, 0, 4096), Shape(33, 65, 4096), Shape(33, 4, 4095)):
        with pytest.raises(PeerError, match="are possible"):
            dma.parse_hello(Hello(shape, direct=False).pack())
    with pytest.raises(PeerError, match="the target refused the connection: no room"):
        dma.parse_welcome(dma.pack_refusal("no room"), good.shape)
    with pytest.raises(PeerError, match="chunks of 4097 bytes in buffers of 4096"):
        dma.parse_welcome(dma.pack_welcome(4097), Shape(2, 1, 4096))
