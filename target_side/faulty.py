"""Faults on purpose, for tests of whoever uses a target: `hyades serve --fault RULE`.

    read:LBA[+COUNT][=STATUS]    reads that touch these blocks fail      (read error)
    write:LBA[+COUNT][=STATUS]   writes that touch them fail             (write fault)
    flush[=STATUS]               every flush fails                       (write fault)
    full:BYTES                   no space once so many bytes are written (capacity exceeded)
    delay:SECONDS                every read and write takes longer
    digest:N                     every Nth data digest that is sent is wrong
    drop:N                       every Nth I/O command of the target cuts its connection

LBA counts logical blocks of the namespace; STATUS is a number (0x281) or a name of StatusCode
(read_error); a fault with `once` after a comma (read:7,once) strikes once.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hyades.common.errors import UsageError
from hyades.common.nvme.status import StatusCode
from hyades.common.units import parse_size
from hyades.target_side.namespaces import FileRange, Namespace

_DEFAULTS = {
    "read": StatusCode.READ_ERROR,
    "write": StatusCode.WRITE_FAULT,
    "flush": StatusCode.WRITE_FAULT,
    "full": StatusCode.CAPACITY_EXCEEDED,
}
_FORM = (
    "write read:LBA[+COUNT][=STATUS], write:..., flush, full:SIZE, delay:SECONDS, digest:N, drop:N"
)


@dataclass(slots=True)
class Fault:
    """One rule; see the module."""

    kind: str
    lba: int = 0
    count: int = 1
    status: int = 0
    number: float = 0.0
    once: bool = False
    spent: bool = False


def parse_fault(text: str) -> Fault:
    """Return the rule that *text* writes; UsageError."""
    rule, comma, once = text.partition(",")
    body, equals, status = rule.partition("=")
    kind, _, argument = body.partition(":")
    try:
        if comma and once != "once":
            raise ValueError
        fault = Fault(kind, once=bool(comma))
        if kind in _DEFAULTS:
            fault.status = _parse_status(status) if equals else _DEFAULTS[kind]
        elif equals:
            raise ValueError
        if kind in ("read", "write"):
            lba, plus, count = argument.partition("+")
            fault.lba, fault.count = int(lba, 0), int(count, 0) if plus else 1
        elif kind == "full":
            fault.number = parse_size(argument)
        elif kind == "delay":
            fault.number = float(argument)
        elif kind in ("digest", "drop"):
            fault.number = int(argument)
        elif kind != "flush" or argument:
            raise ValueError
        if fault.number < 0 or fault.count < 1 or (kind in ("digest", "drop") and not fault.number):
            raise ValueError
    except (ValueError, UsageError):
        raise UsageError(f"--fault {text!r}: {_FORM}") from None
    return fault


def _parse_status(text: str) -> int:
    if text.upper() in StatusCode.__members__:
        return StatusCode[text.upper()]
    return int(text, 0)


class Faults:
    """The rules of a target, and what has been counted for them; any thread may ask."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        self._commands = self._digests = 0
        self._lock = threading.Lock()

    def wrap(self, namespace: Namespace) -> Namespace:
        """Return *namespace* with the faults of media, or itself where there are none."""
        media = [f for f in self.faults if f.kind not in ("digest", "drop")]
        return FaultyNamespace(namespace, media) if media else namespace

    def drops(self) -> bool:
        """Count an I/O command; return whether its connection is to be cut."""
        return self._strikes("drop")

    def spoils(self) -> bool:
        """Count a data digest; return whether it is to be wrong."""
        return self._strikes("digest")

    def _strikes(self, kind: str) -> bool:
        struck = False
        for fault in self.faults:
            if fault.kind != kind:
                continue
            with self._lock:
                if kind == "drop":
                    self._commands += 1
                    count = self._commands
                else:
                    self._digests += 1
                    count = self._digests
                if count % int(fault.number) == 0 and not (fault.once and fault.spent):
                    fault.spent = struck = True
        return struck


class FaultyNamespace:
    """A namespace with faults; reads go through memory, so that they can fail."""

    def __init__(self, inner: Namespace, faults: Sequence[Fault]) -> None:
        self._inner, self._faults = inner, faults
        self.name, self.identity = inner.name, inner.identity
        self.block_bytes, self.blocks = inner.block_bytes, inner.blocks
        self.read_only = inner.read_only
        self._written = 0
        self._lock = threading.Lock()

    def view(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        """Return None: what goes through here can fail."""
        return None

    def reference(self, offset: int, nbytes: int) -> FileRange | None:  # noqa: ARG002
        """Return None, as above."""
        return None

    def expect(self, offset: int, nbytes: int) -> None:
        """Pass it on."""
        self._inner.expect(offset, nbytes)

    def read_into(self, offset: int, into: memoryview) -> int:
        """Read, or fail."""
        return self._find("read", offset, len(into)) or self._inner.read_into(offset, into)

    def write(self, offset: int, data: memoryview) -> int:
        """Write, or fail."""
        return (
            self._find("write", offset, len(data))
            or self._fill(len(data))
            or self._inner.write(offset, data)
        )

    def zero(self, offset: int, nbytes: int) -> int:
        """Write zeroes, or fail."""
        return self._find("write", offset, nbytes) or self._inner.zero(offset, nbytes)

    def flush(self) -> int:
        """Flush, or fail."""
        for fault in self._faults:
            if fault.kind == "flush" and self._take(fault):
                return fault.status
        return self._inner.flush()

    def close(self) -> None:
        """Close what is wrapped."""
        self._inner.close()

    def _find(self, kind: str, offset: int, nbytes: int) -> int:
        """Return the status of the rule that strikes, 0 if none does."""
        first = offset // self.block_bytes
        after = first + nbytes // self.block_bytes
        for fault in self._faults:
            if fault.kind == "delay":
                time.sleep(fault.number)
            elif (
                fault.kind == kind
                and fault.lba < after
                and first < fault.lba + fault.count
                and self._take(fault)
            ):
                return fault.status
        return 0

    def _fill(self, nbytes: int) -> int:
        for fault in self._faults:
            if fault.kind == "full":
                with self._lock:
                    if self._written + nbytes > fault.number:
                        return fault.status
                    self._written += nbytes
        return 0

    def _take(self, fault: Fault) -> bool:
        with self._lock:
            struck = not (fault.once and fault.spent)
            fault.spent = True
            return struck
