"""The work requests of one send queue: which are signalled, and what their completions free.

Rules:
1. Each request gets the next serial number, and a slot (serial modulo capacity) until it is
   retired.
2. At most `capacity` are not retired.  Every `every`-th is signalled, so are those that must be,
   and the last one that fits: so a full queue always has a completion on its way.
3. A reliable connection completes in order: the completion of a serial retires all before it.
No I/O.
"""

from hyades.common.errors import PeerError, UsageError


class SendRing:
    """See the module."""

    def __init__(self, capacity: int, every: int) -> None:
        """Hold *capacity* requests, of which every *every*-th is signalled."""
        if not 1 <= every <= capacity:
            raise UsageError(f"every {every} of {capacity} sends signalled")
        self.capacity, self.every = capacity, every
        self._next = 0
        self._retired = 0  # serials below are free
        self._unsignalled = 0
        self._last_signalled = -1

    @property
    def room(self) -> int:
        """Requests that may be posted now."""
        return self.capacity - (self._next - self._retired)

    @property
    def quiet(self) -> bool:
        """Whether no completion is on its way."""
        return self._last_signalled < self._retired

    def post(self, *, signal: bool = False) -> tuple[int, bool]:
        """Return (serial, whether it is signalled) of one more request."""
        if not self.room:
            raise UsageError(f"all {self.capacity} entries of the send queue are in use")
        serial, self._next = self._next, self._next + 1
        self._unsignalled += 1
        signal = signal or self._unsignalled >= self.every or not self.room
        if signal:
            self._unsignalled, self._last_signalled = 0, serial
        return serial, signal

    def slot(self, serial: int) -> int:
        """Return the slot of *serial*."""
        return serial % self.capacity

    def retire(self, serial: int) -> range:
        """Return the serials that the completion of *serial* frees; PeerError if it is not out."""
        if not self._retired <= serial < self._next:
            raise PeerError(f"a completion of send {serial}, which is not out")
        freed = range(self._retired, serial + 1)
        self._retired = serial + 1
        return freed
