"""Waking a thread that waits in poll, from any other thread."""

import os
import threading
from contextlib import suppress


class Waker:
    """An eventfd that is never written to once it is closed.

    Its number may be that of another connection, or of a namespace's file, by then: eight bytes
    would be written there.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Make the descriptor readable; nothing happens once it is closed."""
        with self._lock:
            if self.fd >= 0:
                with suppress(BlockingIOError):  # woken 2**64 times: awake enough
                    os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Make the descriptor unreadable again."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close it."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
