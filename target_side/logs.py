"""Log pages of a controller.

Source: NVM Express Base Specification 2.0, section 5.16.1.
"""

from collections import deque
from collections.abc import Sequence
from struct import Struct, pack_into

from hyades.common.nvme.identify import DiscoveryEntry, build_discovery_log
from hyades.common.nvme.layout import Admin, LogPage, Opcode
from hyades.common.nvme.status import StatusCode
from hyades.target_side.counters import Counters

MAX_ERRORS = 64
_ERROR = Struct("<QHHHHQI28x")  # count, sqid, cid, status << 1, parameter, LBA, nsid
_SUPPORTED = 1  # of a command, in the effects log; LSUPP of a page
_CHANGES_DATA = 1 << 1
_UNITS = 512 * 1000  # bytes of a data unit of the health log
_MEDIA = (StatusCode.READ_ERROR, StatusCode.WRITE_FAULT)
assert _ERROR.size == 56


class ErrorLog:
    """The last commands that failed, newest first; may be added to from several threads."""

    def __init__(self) -> None:
        self.count = 0
        self._entries: deque[bytes] = deque(maxlen=MAX_ERRORS)

    def add(self, qid: int, cid: int, status: int, *, nsid: int = 0, lba: int = 0) -> None:
        """Take a failed command."""
        self.count += 1
        entry = _ERROR.pack(self.count, qid, cid, (status << 1) & 0xFFFF, 0xFFFF, lba, nsid)
        self._entries.appendleft(entry.ljust(64, b"\0"))

    def page(self) -> bytes:
        """Return 64 bytes for each of MAX_ERRORS entries."""
        return b"".join(list(self._entries)).ljust(64 * MAX_ERRORS, b"\0")


def build_page(
    page: int,
    entries: Sequence[DiscoveryEntry] | None,
    errors: ErrorLog,
    health: Counters,
    firmware: str,
) -> bytes | None:
    """Return a log page, None where there is none; *entries* are those of a discovery controller.

    A discovery controller has the discovery log and the list of pages only.
    """
    if page == LogPage.SUPPORTED:
        return _supported(discovery=entries is not None)
    if entries is not None:
        return build_discovery_log(1, entries) if page == LogPage.DISCOVERY else None
    if page == LogPage.ERRORS:
        return errors.page()
    if page == LogPage.HEALTH:
        return _health(health, errors.count)
    if page == LogPage.FIRMWARE:
        return b"\x01".ljust(8, b"\0") + firmware[:8].ljust(8).encode().ljust(504, b"\0")
    if page == LogPage.CHANGED_NAMESPACES:
        return bytes(4096)  # they never change
    if page == LogPage.EFFECTS:
        return _effects()
    return None


def _supported(*, discovery: bool) -> bytes:
    data = bytearray(1024)
    pages = (LogPage.SUPPORTED, LogPage.DISCOVERY) if discovery else tuple(LogPage)[:-1]
    for page in pages:
        pack_into("<I", data, 4 * page, _SUPPORTED)
    return bytes(data)


def _health(health: Counters, errors: int) -> bytes:
    data = bytearray(512)
    data[3] = 100  # spare, in per cent
    for at, value in (
        (32, -(-health.bytes_read // _UNITS)),
        (48, -(-health.bytes_written // _UNITS)),
        (64, health.commands[False, Opcode.READ]),
        (80, health.commands[False, Opcode.WRITE]),
        (160, sum(health.failures[code] for code in _MEDIA)),
        (176, errors),
    ):
        data[at : at + 16] = value.to_bytes(16, "little")
    return bytes(data)


def _effects() -> bytes:
    data = bytearray(4096)
    for command in Admin:
        pack_into("<I", data, 4 * command, _SUPPORTED)
    for command_, changes in (
        (Opcode.FLUSH, False), (Opcode.WRITE, True), (Opcode.READ, False),
        (Opcode.WRITE_ZEROES, True),
    ):  # fmt: skip
        effect = _SUPPORTED | (_CHANGES_DATA if changes else 0)
        pack_into("<I", data, 1024 + 4 * command_, effect)
    return bytes(data)
