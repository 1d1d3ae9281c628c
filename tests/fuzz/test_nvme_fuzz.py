"""Mutated NVMe/TCP PDUs: 50,000, or HYADES_FUZZ_PDUS; nvme_fuzz.py alone runs longer still.

Faults planted into the code under test show that the fuzzer would tell.
"""

import os

import pytest
from tests.fuzz import nvme_fuzz, nvme_structures
from tests.fuzz.nvme_fuzz import FuzzFailure, Report, run, run_case

from hyades.common.nvme import host, identify, pdu, target
from hyades.common.nvme.host import HostQueue
from hyades.common.nvme.pdu import Receiver
from hyades.common.nvme.target import TargetQueue

PDUS = int(os.environ.get("HYADES_FUZZ_PDUS", "50000"))


def test_mutated_pdus():
    report = run(PDUS, seed=2026)
    assert report.pdus >= PDUS
    assert report.peak > 10_000  # some cases were measured
    # every way to end was seen, so the mutations reach behind the first checks
    names = ("HEADER_FIELD", "SEQUENCE", "HEADER_DIGEST", "OUT_OF_RANGE", "LIMIT_EXCEEDED")
    for name in (*names, "UNSUPPORTED", "peer"):
        assert report.fatal[name] > PDUS // 1000, (name, report)
    assert report.accepted > PDUS // 10
    ends = ("parsed", "structure refused", "brought up", "bring-up refused")
    assert all(report.fatal[end] for end in ends)


def test_a_seed_gives_the_same_run():
    first, second = (run(500, seed=7, every=10**9) for _ in range(2))
    assert first == second
    assert run(500, seed=8, every=10**9) != first


def no_range_check(monkeypatch):
    def place(self, header):
        cid, _, offset, nbytes, _ = host.DATA_BODY.unpack_from(header.raw, 8)
        self._landing = exchange = self._exchange(cid, 8)
        return exchange.into[offset : offset + nbytes]

    monkeypatch.setattr(HostQueue, "place", place)


def writes_beside_the_slot(monkeypatch):
    right = HostQueue.place

    def place(self, header):
        view = right(self, header)
        at = host.DATA_BODY.unpack_from(header.raw, 8)[2]
        if at:  # 16 bytes too far
            arena = memoryview(view.obj)
            for start, nbytes in nvme_fuzz.slot_places():
                if nbytes >= at + len(view) and view.obj is arena.obj:
                    return arena[start + at + 16 : start + at + 16 + len(view)]
        return view

    monkeypatch.setattr(HostQueue, "place", place)


def no_header_digest(monkeypatch):
    monkeypatch.setattr(pdu, "crc32c", lambda data: 0)
    begin = Receiver._begin

    def skip(self):
        hlen = self._head[2]
        self._head[hlen : hlen + 4] = bytes(4)
        begin(self)

    monkeypatch.setattr(Receiver, "_begin", skip)


def no_data_digest(monkeypatch):
    finish = Receiver._finish

    def skip(self):
        self._digested = False
        finish(self)

    monkeypatch.setattr(Receiver, "_finish", skip)


def no_bound_on_capsules(monkeypatch):
    def make(self, owner, accepts, max_data, init=Receiver.__init__):
        init(self, owner, accepts, 1 << 40)

    def place(self, header):
        if header.kind == 4:
            self._check_command(header)
            self._capsule_data = memoryview(bytearray(header.data_bytes))
            return self._capsule_data
        return self._place_write(header)

    monkeypatch.setattr(Receiver, "__init__", make)
    monkeypatch.setattr(TargetQueue, "place", place)


def no_command_check(monkeypatch):
    monkeypatch.setattr(TargetQueue, "_check_command", lambda self, header: None)


def unknown_commands(monkeypatch):
    monkeypatch.setattr(HostQueue, "_exchange", lambda self, cid, at: self._exchanges[cid])


def answered_terminate_requests(monkeypatch):
    build = pdu.build_term

    def answer(kind, violation, offending):
        violation.fatal = violation.fatal or pdu.Fatal.SEQUENCE
        return build(kind, violation, offending)

    monkeypatch.setattr(host, "build_term", answer)

    def wrong(kind, violation, offending):
        return build(kind, violation, offending) or b"\3"

    monkeypatch.setattr(target, "build_term", wrong)


def term_without_a_quote(monkeypatch):
    monkeypatch.setattr(Receiver, "header", property(lambda self: b""))


def lost_completion(monkeypatch):
    end = HostQueue._end

    def lose(self, exchange, code, result):
        end(self, exchange, code, result)
        if code == 0x281:
            self.completions.pop()

    monkeypatch.setattr(HostQueue, "_end", lose)


def success_of_half_a_read(monkeypatch):
    def respond(self, header):
        result, _, _, cid, status = host.CQE.unpack_from(header.raw, 8)
        self._end(self._exchange(cid, 20), status >> 1, result)
        self._end(host._Exchange(cid, memoryview(b""), memoryview(b"")), status >> 1, result)

    monkeypatch.setattr(HostQueue, "_responded", respond)


def no_check_of_structures(monkeypatch):
    whole = (
        (lambda data: identify.unpack_from("<Q", data, 4088), nvme_structures.STRUCTURES[0][1]),
    )
    monkeypatch.setattr(nvme_structures, "STRUCTURES", whole * 5)


PLANTED = [
    no_range_check, writes_beside_the_slot, no_header_digest, no_data_digest, no_bound_on_capsules,
    no_command_check, unknown_commands, answered_terminate_requests, term_without_a_quote,
    lost_completion, success_of_half_a_read, no_check_of_structures,
]  # fmt: skip


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_planted_faults_are_found(plant, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(FuzzFailure, match=r"seed 3, case \d+: ") as caught:
        run(8000, seed=3)
    # and the case that is named shows it again, alone
    case = int(str(caught.value).partition("case ")[2].partition(":")[0])
    with pytest.raises(FuzzFailure, match=f"seed 3, case {case}: "):
        run_case(3, case, Report(), measure=case % 50 == 0)
