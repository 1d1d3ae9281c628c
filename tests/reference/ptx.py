"""What PTX may hold for one warp a block: read from its text, not from the source that made it.

Lanes of a warp take one path through a kernel.  Whether they all reach a barrier is not decidable
from PTX; but every ordered memory access, atomic and shuffle must have the one form in which lane 0
acts after the others and all get its result.
"""

import re
from typing import NamedTuple

FULL = "0xffffffff"
# Ordered accesses and their scopes: words of one device's workers (gpu), words of a host (sys).
ORDERED = {
    "ld.relaxed.gpu.b64", "ld.acquire.gpu.b64", "ld.acquire.sys.b64",
    "st.relaxed.gpu.b64", "st.release.gpu.b64", "st.release.sys.b64",
    "atom.acq_rel.gpu.add.u64", "atom.acq_rel.gpu.cas.b64",
}  # fmt: skip
_ORDERING = {
    "relaxed",
    "acquire",
    "release",
    "acq_rel",
    "volatile",
    "mmio",
    "sys",
    "cta",
    "cluster",
}
_ATOMIC = ("atom", "red", "fence", "membar")
_ELECTION = ["mov.u32", "setp.eq.u32", "mov.b64", "bar.warp.sync"]
_SHARING = ["mov.b64", "shfl.sync.idx.b32", "shfl.sync.idx.b32", "mov.b64", "bar.warp.sync"]
_FORBIDDEN = {
    "bar": "a block's barrier: a block is one warp",
    "barrier": "a block's barrier: a block is one warp",
    "mbarrier": "a block's barrier: a block is one warp",
    "vote": "asks which lanes are here: all are",
    "match": "asks which lanes are here: all are",
    "activemask": "asks which lanes are here: all are",
    "elect": "elects a lane other than 0",
    "redux": "mixes lanes",
    "call": "a call that was not inlined",
    "alloca": "a stack that grows",
    "trap": "stops the whole GPU context",
    "brkpt": "stops the whole GPU context",
    "exit": "ends some lanes before the others",
}


class Instruction(NamedTuple):
    """One instruction: its predicate ("" for none), opcode and operands."""

    predicate: str
    opcode: str
    operands: str


def instructions(text: str) -> list[Instruction]:
    """Return the instructions of PTX text, in order."""
    found = []
    for statement in re.split(r"[;\n]|(?<=:)\s|[{}](?=\s)", re.sub(r"//[^\n]*", "", text)):
        words = re.match(r"\s*(?:(@!?[%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.DOTALL)
        if words and not statement.rstrip().endswith(":"):
            found.append(Instruction(words[1] or "", words[2], words[3].strip()))
    return found


def findings(ptx: str) -> list[str]:
    """Return what a kernel must not hold, one line each."""
    found = [f"not in this module: {line.strip()}" for line in re.findall(r"\.extern[^\n]*", ptx)]
    found += [f"memory a lane: {line}" for line in re.findall(r"\.local\s+\.align[^\n]*", ptx)]
    found += [f"shared memory: {line}" for line in re.findall(r"\.shared\s+\.align[^\n]*", ptx)]
    plain, blocks = split_asm(ptx)
    for instruction in instructions(plain):
        found += _check(instruction, inline=False)
    for block in blocks:
        inside = instructions(block)
        for instruction in inside:
            found += _check(instruction, inline=True)
        found += _check_election(inside)
    return found


def split_asm(ptx: str) -> tuple[str, list[str]]:
    """Return the PTX without its inline assembly, and the inline pieces."""
    pieces = re.split(r"// (?:begin|end) inline asm", ptx)
    return "\n".join(pieces[::2]), pieces[1::2]


def _check(instruction: Instruction, inline: bool) -> list[str]:
    predicate, opcode, operands = instruction
    kind, *qualifiers = opcode.split(".")
    shown = f"{predicate} {opcode} {operands}".strip()
    if opcode == "bar.warp.sync":
        good = inline and not predicate and operands == FULL
        return [] if good else [f"a warp's barrier for some lanes: {shown}"]
    if kind == "shfl":
        good = inline and not predicate and operands.endswith(FULL) and "sync" in qualifiers
        return [] if good else [f"a shuffle among some lanes: {shown}"]
    if kind in _FORBIDDEN:
        return [f"{_FORBIDDEN[kind]}: {shown}"]
    if "f64" in qualifiers:
        return [f"double precision: {shown}"]
    if "local" in qualifiers:
        return [f"memory a lane: {shown}"]
    if kind in _ATOMIC or (kind in ("ld", "st") and _ORDERING & set(qualifiers)):
        if opcode not in ORDERED:
            return [f"an order or scope that atomics.py does not have: {shown}"]
        if not inline or predicate != "@p":
            return [f"every lane does it, not lane 0: {shown}"]
    return []


def _check_election(block: list[Instruction]) -> list[str]:
    """Check an inline piece with an ordered access: elect lane 0, act, share the result."""
    places = [i for i, entry in enumerate(block) if entry.opcode in ORDERED]
    if not places:
        return []
    [place] = places
    before, after = block[:place], block[place + 1 :]
    good = (
        [entry.opcode for entry in before] == _ELECTION
        and [entry.opcode for entry in after] == _SHARING
        and before[0].operands == "l, %laneid"
        and before[1].operands == "p, l, 0"
    )
    return [] if good else [f"not lane 0's alone: {' '.join(e.opcode for e in block)}"]
