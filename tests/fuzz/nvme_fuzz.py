"""Mutated NVMe/TCP conversations against both queues, the parsers and bring-up.

A case is a valid conversation, mutated and cut, all from (seed, number of the case).  Rules that
every case must keep:
1. A queue takes the stream, or raises Violation and has the right TermReq, and nothing else, in its
   output.  Parsers and bring-up raise the error types of common/errors.py.  Nothing else is raised.
2. A host writes into its slots what an accepted stream says, and not one byte elsewhere; a target
   not outside the memory of its writes.  Every command ends once.
3. A queue holds at most `depth` x `in_capsule` bytes of the peer's, and a constant; what it asks
   the socket for fits into that, or into a slot.
4. A wrong header digest is never accepted; a wrong data digest never lets its command succeed.

Long run: `python -m tests.fuzz.nvme_fuzz --pdus 10000000 --seed 1`; one case again: `--case N`.
"""

import argparse
import random
import sys
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

from tests.fuzz.nvme_mutants import SLOTS, WRITES, host_side, prepare, target_side
from tests.fuzz.nvme_structures import run_structures
from tests.reference.nvme_pdus import (
    C2H,
    C2H_TERM,
    COMMAND,
    H2C,
    H2C_TERM,
    IC_RESP,
    R2T,
    RESPONSE,
    SUCCESS,
    Disk,
)

from hyades.common.checksum import crc32c
from hyades.common.nvme import commands
from hyades.common.nvme.host import HostQueue
from hyades.common.nvme.layout import Opcode
from hyades.common.nvme.pdu import Violation
from hyades.common.nvme.target import TargetQueue

DEPTH, IN_CAPSULE, MAX_H2C = 8, 2048, 4096
GUARD = 32
SLACK = 256 << 10  # what a case may hold beside the data of capsules


class FuzzFailure(AssertionError):  # noqa: N818 - as AssertionError
    """A rule was broken; the text names the seed and the case."""


@dataclass
class Report:
    """What a run did: `pdus` mutated PDUs reached a queue."""

    cases: int = 0
    pdus: int = 0
    accepted: int = 0  # streams
    structures: int = 0  # parsed, and conversations of bring-up
    fatal: Counter[str] = field(default_factory=Counter)
    peak: int = field(default=0, compare=False)  # bytes, in the cases that were measured


# -- feeding


def feed_piece(queue, view: memoryview) -> None:
    """Put *view* where the queue wants it, as a socket would."""
    if len(view) == 1:
        queue.buffers()[0][0] = view[0]
        queue.received(1)
        return
    while view:
        taken = 0
        for buffer in queue.buffers():
            step = min(len(buffer), len(view))
            buffer[:step] = view[:step]
            view = view[step:]
            taken += step
        if not taken:
            raise FuzzFailure("the queue has no place for the next byte")
        queue.received(taken)


def pieces(data: bytes, cut: int, rng: random.Random):
    """Yield *data* in pieces of *cut* bytes (0: whole, -1: of random lengths)."""
    view = memoryview(data)
    if cut == 0:
        yield view
    elif cut == 1:  # but what lies deep inside a payload in one piece
        inner = slice(140, -8) if len(view) > 200 else slice(0, 0)
        for at in range(inner.start):
            yield view[at : at + 1]
        if inner.start:
            yield view[inner]
        for at in range(inner.start and len(view) - 8, len(view)):
            yield view[at : at + 1]
    elif cut > 0:
        for at in range(0, len(view), cut):
            yield view[at : at + cut]
    else:
        while view:
            step = rng.randrange(1, 100)
            yield view[:step]
            view = view[step:]


def check_offer(queue, most: int) -> None:
    """Check that the queue asks for no more than *most* bytes of data, a digest and a header."""
    offered = sum(map(len, queue.buffers()))
    if not 0 < offered <= max(most + 28, 252):
        raise FuzzFailure(f"the queue offers room for {offered} bytes")


def check_violation(violation: Violation, output: list, kind: int) -> str:
    """Check the output after *violation* and return what it was."""
    if violation.fatal is None:
        if output:
            raise FuzzFailure(f"a TermReq answered: {violation}")
        return "peer"
    if len(output) != 1:
        raise FuzzFailure(f"{len(output)} segments after {violation}")
    (term,) = output
    fes, fei = int.from_bytes(term[8:10], "little"), int.from_bytes(term[10:14], "little")
    right = (
        term[0] == kind
        and term[1:4] == b"\0\x18\0"
        and 24 < len(term) == int.from_bytes(term[4:8], "little") <= 152
        and fes == violation.fatal
        and fei == violation.info
        and (fes == 3 or (fei < 72 if fes in (1, 6) else fei == 0))
        and 1 <= fes <= 6
    )
    if not right:
        raise FuzzFailure(f"TermReq {term.hex()} after {violation}")
    return violation.fatal.name


def walk(stream: bytes, digests: int):
    """Yield (type, body, data, data digest right) of the PDUs of an accepted *stream*."""
    digests_now = 0
    while len(stream) >= 24:
        kind, flags, hlen, pdo = stream[:4]
        plen = int.from_bytes(stream[4:8], "little")
        header = digests_now & 1 and kind > C2H_TERM
        tail = 4 if digests_now & 2 and flags & 2 else 0
        if len(stream) < hlen + 4 * header or (kind in (COMMAND, H2C, C2H) and len(stream) < pdo):
            return
        found = int.from_bytes(stream[hlen : hlen + 4], "little")
        if header and crc32c(stream[:hlen]) != found:
            raise FuzzFailure(f"a wrong header digest was accepted: {stream[:hlen].hex()}")
        data, right = b"", True
        if kind in (COMMAND, H2C, C2H) and plen > hlen + 4 * header:
            data = stream[pdo : plen - tail]
            if tail and len(stream) >= plen:
                right = crc32c(data) == int.from_bytes(stream[plen - 4 : plen], "little")
        yield kind, stream[8:hlen], data, right
        stream = stream[plen:]
        digests_now = digests


# -- cases


def run_host(rng: random.Random, report: Report) -> None:
    """Run one case against a host queue."""
    digests = rng.randrange(4)
    host = HostQueue(DEPTH, header_digest=bool(digests & 1), data_digest=bool(digests & 2))
    host.start()
    arena = bytearray(sum(SLOTS) + GUARD * (len(SLOTS) + 1))
    said = list(host_side(digests))
    early = rng.random() < 0.1
    if not early:
        feed_piece(host, memoryview(said[0]))
        submit_all(host, memoryview(arena))
        said = said[1:]
    said, changed = prepare(said, digests, rng)
    cut = rng.choices((0, -1, 24, 1), (24, 5, 3, 2))[0]
    stream, count = b"" if early else host_side(digests)[0], 0
    data_out = 0
    try:
        for number, data in enumerate(said):
            count += number in changed
            stream += data
            for piece in pieces(data, cut, rng):
                feed_piece(host, piece)
            check_offer(host, max(SLOTS))
            if early and number == 0 and host.room:
                submit_all(host, memoryview(arena))
            if rng.random() < 0.7:
                data_out += sum(len(s) for s in host.take_output() if isinstance(s, memoryview))
    except Violation as violation:
        report.fatal[check_violation(violation, host.take_output(), H2C_TERM)] += 1
    else:
        report.accepted += 1
        check_host(host, stream, digests, arena)
    report.pdus += count
    done = [cid for cid, _, _ in host.completions]
    lost = host.close()
    if sorted(done + lost) not in ([], list(range(7))):
        raise FuzzFailure(f"commands that ended: {done}, lost: {lost}")
    if data_out > sum(WRITES):
        raise FuzzFailure(f"{data_out} bytes were sent of {sum(WRITES)}")
    check_guards(arena, slot_places())


def submit_all(host: HostQueue, arena: memoryview) -> None:
    """Put the commands out that the corpus answers; ids 0 to 6."""
    for at, nbytes in slot_places():
        host.submit(commands.transfer(Opcode.READ, 1, 0, 1), into=arena[at : at + nbytes])
    for nbytes in WRITES:
        host.submit(commands.transfer(Opcode.WRITE, 1, 0, 1), source=memoryview(bytes(nbytes)))
    host.submit(commands.flush(1))
    host.take_output()


@cache
def slot_places() -> tuple[tuple[int, int], ...]:
    """Return (offset, bytes) of the slots in the arena."""
    places, at = [], GUARD
    for nbytes in SLOTS:
        places.append((at, nbytes))
        at += nbytes + GUARD
    return tuple(places)


def check_guards(arena: bytearray, places: tuple[tuple[int, int], ...]) -> None:
    """Check that nothing lies between the slots."""
    at = 0
    for start, nbytes in (*places, (len(arena), 0)):
        if any(arena[at:start]):
            raise FuzzFailure(f"bytes outside the slots, between {at} and {start}")
        at = start + nbytes


def check_host(host: HostQueue, stream: bytes, digests: int, arena: bytearray) -> None:
    """Check the slots and the completions against an accepted *stream*."""
    expected = bytearray(len(arena))
    broken = set()
    for kind, body, data, right in walk(stream, digests):
        if kind == C2H:
            cid, offset = int.from_bytes(body[:2], "little"), int.from_bytes(body[4:8], "little")
            at = slot_places()[cid][0] + offset
            expected[at : at + len(data)] = data
            if not right:
                broken.add(cid)
    if arena != expected:
        raise FuzzFailure("the slots do not hold what the stream said")
    worked = {cid for cid, code, _ in host.completions if not code}
    if worked & broken:
        raise FuzzFailure(f"commands {worked & broken} succeeded with wrong data digests")


class GuardedDisk(Disk):
    """Gives writes memory between guards, and knows the rooms it gave."""

    def __init__(self, queue: TargetQueue) -> None:
        super().__init__(queue)
        self.rooms: list[tuple[bytearray, int]] = []

    def room(self, nbytes: int) -> bytearray:
        """Return memory with a guard after it; the one before it is the heap's."""
        made = bytearray(nbytes + GUARD)
        self.rooms.append((made, nbytes))
        return made

    def check(self) -> None:
        """Check the guards, and what the queue holds of the peer's."""
        for room, nbytes in self.rooms:
            if len(room) != nbytes + GUARD or any(room[nbytes:]):
                raise FuzzFailure("bytes after the memory of a write")


def run_target(rng: random.Random, report: Report) -> None:
    """Run one case against a target queue with an executor."""
    digests = rng.randrange(4)
    target = TargetQueue(depth=DEPTH, in_capsule=IN_CAPSULE, max_h2c=MAX_H2C)
    disk = GuardedDisk(target)
    said = list(target_side(digests))
    early = rng.random() < 0.1
    if not early:
        feed_piece(target, memoryview(said[0]))
        target.take_output()
        said = said[1:]
    said, changed = prepare(said, digests, rng)
    cut = rng.choices((0, -1, 24, 1), (24, 5, 3, 2))[0]
    lazy = rng.random() < 0.2
    stream, count, answers = b"" if early else target_side(digests)[0], 0, 0
    taken: list[int] = []
    try:
        for number, data in enumerate(said):
            count += number in changed
            stream += data
            for piece in pieces(data, cut, rng):
                feed_piece(target, piece)
                if not lazy and (target.commands or target.arrived):
                    taken += [command.cid for command, _, _ in target.commands]
                    disk.run()
            check_offer(target, max(IN_CAPSULE, MAX_H2C))
            held = sum(len(data) for _, data, _ in target.commands if data is not None)
            if held > DEPTH * IN_CAPSULE or target.outstanding > DEPTH:
                raise FuzzFailure(f"{held} bytes held, {target.outstanding} commands")
            if not lazy:
                answers += check_output(target.take_output(), target.digests)
    except Violation as violation:
        report.fatal[check_violation(violation, target.take_output(), C2H_TERM)] += 1
    else:
        report.accepted += 1
        if not lazy:
            for _ in walk(stream, target.digests):
                pass
        if not lazy and answers + target.outstanding != len(taken):
            raise FuzzFailure(f"{len(taken)} commands, {answers} answers")
    report.pdus += count
    target.close()
    disk.check()


def check_output(segments: list, digests: int) -> int:
    """Check that *segments* are whole PDUs of a controller; return how many end a command."""
    stream, ends = b"".join(bytes(s) for s in segments), 0
    while stream:
        kind, flags, hlen, pdo = stream[:4]
        plen = int.from_bytes(stream[4:8], "little")
        right = kind in (IC_RESP, RESPONSE, C2H, R2T) and 24 <= hlen <= plen <= len(stream)
        if not right or pdo % 4 or (kind != IC_RESP and flags & 1 != digests & 1):
            raise FuzzFailure(f"the target sent {stream[:128].hex()}")
        ends += kind == RESPONSE or bool(kind == C2H and flags & SUCCESS)
        stream = stream[plen:]
    return ends


def run_case(seed: int, case: int, report: Report, *, measure: bool = False) -> None:
    """Run case *case* of *seed*; with *measure* its memory is counted."""
    rng = random.Random(seed << 40 | case)
    report.cases += 1
    which = case % 21
    try:
        if measure:
            tracemalloc.start()
            try:
                (run_host if which & 1 else run_target)(rng, report)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            report.peak = max(report.peak, peak)
            if peak > DEPTH * IN_CAPSULE + SLACK:
                raise FuzzFailure(f"{peak} bytes were held")
        elif which == 20:
            report.structures += 1
            report.fatal[run_structures(rng)] += 1
        else:
            (run_host if which & 1 else run_target)(rng, report)
    except FuzzFailure as failure:
        raise FuzzFailure(f"seed {seed}, case {case}: {failure}") from failure
    except Exception as error:
        raise FuzzFailure(f"seed {seed}, case {case}: {type(error).__name__}: {error}") from error


def run(pdus: int, seed: int, first: int = 0, *, every: int = 50) -> Report:
    """Run cases from *first* on until *pdus* mutated PDUs were fed; each *every*th is measured."""
    report, case = Report(), first
    while report.pdus < pdus:
        run_case(seed, case, report, measure=case % every == 0)
        case += 1
    return report


def main() -> None:
    """Run as many mutated PDUs as were asked for, and say how it went."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pdus", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", type=int, help="run this case alone")
    arguments = parser.parse_args()
    if arguments.case is not None:
        run_case(arguments.seed, arguments.case, Report(), measure=arguments.case % 50 == 0)
        return
    began, total, first = time.monotonic(), 0, 0
    while total < arguments.pdus:
        report = run(min(100_000, arguments.pdus - total), arguments.seed, first)
        first += report.cases
        total += report.pdus
        rate = total / (time.monotonic() - began)
        sys.stdout.write(
            f"{total} mutated PDUs in {first} cases, {rate:.0f}/s, peak {report.peak} bytes,"
            f" {report.accepted} streams accepted, ended: {dict(report.fatal)}\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
