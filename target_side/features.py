"""The features of a controller: what Get and Set Features know.

Source: NVM Express Base Specification 2.0, sections 5.15, 5.27.
"""

from hyades.common.nvme.layout import Feature
from hyades.common.nvme.status import DNR, StatusCode

Answer = tuple[int, int, bytes]  # status code, result, data
_SAVE = 1 << 31
_DEFAULT, _CAPABILITIES = 1, 3  # SEL; 2, saved, is the default where nothing can be saved
_CHANGEABLE = 1 << 2
_REFUSED: Answer = (StatusCode.INVALID_FIELD | DNR, 0, b"")
_EXTENDED_HOST_ID = 1
# Those that are numbers which mean nothing more here: the default, and the bits that can be set.
_PLAIN = {
    Feature.ARBITRATION: (0, 0xFFFFFF07),
    Feature.POWER: (0, 0),
    Feature.TEMPERATURE: (0xFFFF, 0x003FFFFF),
    Feature.ERROR_RECOVERY: (0, 0xFFFF),
    Feature.ASYNC_EVENTS: (0, 0xFFFFFFFF),
}


class Features:
    """The values; *kato* in milliseconds."""

    def __init__(self, kato: int, queues: int) -> None:
        self._default_kato = self.kato = _round_kato(kato)
        self.granted = self._queues = queues
        self.write_cache = True
        self._values = {feature: default for feature, (default, _) in _PLAIN.items()}

    def set(self, dwords: tuple[int, ...], *, io_queues: bool) -> Answer:
        """Answer a Set Features; *io_queues* says whether I/O queues are connected."""
        feature, value = dwords[0] & 0xFF, dwords[1]
        if dwords[0] & _SAVE:
            return StatusCode.FEATURE_NOT_SAVEABLE | DNR, 0, b""
        if feature == Feature.QUEUES:
            return self._set_queues(value, io_queues=io_queues)
        if feature == Feature.KEEP_ALIVE:
            self.kato = _round_kato(value)
            return 0, self.kato, b""
        if feature == Feature.WRITE_CACHE:
            self.write_cache = bool(value & 1)
            return 0, 0, b""
        if feature == Feature.HOST_ID:  # Connect has set it
            return StatusCode.SEQUENCE_ERROR | DNR, 0, b""
        if feature not in self._values:
            return _REFUSED
        if value & ~_PLAIN[Feature(feature)][1]:
            return _REFUSED
        self._values[Feature(feature)] = value
        return 0, 0, b""

    def get(self, dwords: tuple[int, ...], hostid: bytes) -> Answer:
        """Answer a Get Features."""
        feature, select = dwords[0] & 0xFF, dwords[0] >> 8 & 7
        if select > _CAPABILITIES:
            return _REFUSED
        if feature == Feature.HOST_ID and select == 0:
            if not dwords[1] & _EXTENDED_HOST_ID:  # fabrics has 128 bits always
                return _REFUSED
            return 0, 0, hostid
        known = {
            Feature.QUEUES: (_queue_word(self.granted), _queue_word(self._queues)),
            Feature.KEEP_ALIVE: (self.kato, self._default_kato),
            Feature.WRITE_CACHE: (int(self.write_cache), 1),
            Feature.HOST_ID: (0, 0),
            **{f: (value, _PLAIN[f][0]) for f, value in self._values.items()},
        }
        if feature not in known:
            return _REFUSED
        if select == _CAPABILITIES:
            return 0, 0 if feature == Feature.HOST_ID else _CHANGEABLE, b""
        return 0, known[Feature(feature)][min(select, _DEFAULT)], b""

    def _set_queues(self, value: int, *, io_queues: bool) -> Answer:
        wanted = value & 0xFFFF, value >> 16
        if 0xFFFF in wanted:
            return _REFUSED
        if io_queues:
            return StatusCode.SEQUENCE_ERROR | DNR, 0, b""
        # Submission and completion queues come in pairs: there are as many of both.
        self.granted = min(self._queues, max(wanted) + 1)
        return 0, _queue_word(self.granted), b""


def _queue_word(queues: int) -> int:
    return (queues - 1) | (queues - 1) << 16


def _round_kato(milliseconds: int) -> int:
    """Return the timeout rounded up to the granularity of KAS, one second."""
    return -(-milliseconds // 1000) * 1000
