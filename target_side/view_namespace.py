"""A namespace that is computed when it is read: what namespaces.py asks for, over ViewPages.

Rules:
1. It is read-only, and its bytes are always made anew: `view` and `reference` give None.
2. It reads its volume through the namespace that has it, whose lock is the volume's: many views
   share it.  It stays at the generation that was committed when it was made; where the space of its
   source has been used again since, the source's checksums do not fit and reads fail.
3. A source that is damaged or gone is READ_ERROR, and the log says which page; a view that has been
   closed meanwhile is INVALID_NAMESPACE.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from hyades.common.blocks import check_span
from hyades.common.errors import DeviceLost, HyadesError, UsageError
from hyades.common.layout import BLOCK
from hyades.common.nvme.status import DNR, StatusCode, describe
from hyades.common.viewspec import ViewSpec
from hyades.target_side.events import Sink, ViewFailed
from hyades.target_side.namespaces import FileRange, Namespace

if TYPE_CHECKING:
    from hyades.target_side.stage.viewpages import ViewPages


class NamespaceBlocks:
    """The blocks of a namespace, as a volume that is only read has them.

    Reads raise DeviceLost with the namespace's status, and once `stopped` is set.
    """

    def __init__(self, namespace: Namespace, stopped: threading.Event) -> None:
        self._namespace, self._stopped = namespace, stopped
        self.name = namespace.name

    @property
    def nblocks(self) -> int:
        """Whole blocks of 4096 bytes."""
        return self._namespace.blocks * self._namespace.block_bytes // BLOCK

    def read(self, lba: int, count: int) -> bytearray:
        """Return *count* blocks from *lba* on."""
        check_span(self, lba, count * BLOCK)
        if self._stopped.is_set():
            raise DeviceLost(f"{self.name}: the view that reads this has been closed")
        out = bytearray(count * BLOCK)
        status = self._namespace.read_into(lba * BLOCK, memoryview(out))
        if status:
            raise DeviceLost(f"{self.name}: LBA {lba} + {count} blocks: {describe(status)}")
        return out

    def write(self, lba: int, data: Any) -> None:
        """Refuse."""
        del data
        raise UsageError(f"{self.name}: block {lba} is not written here: it is read for views")

    def flush(self) -> None:
        """Do nothing: nothing was written."""

    def grow(self, nblocks: int) -> None:
        """Refuse."""
        raise UsageError(f"{self.name} does not grow to {nblocks} blocks: it is read for views")

    def close(self) -> None:
        """Do nothing: the namespace belongs to whoever serves it."""


class ViewNamespace:
    """See the module."""

    block_bytes = BLOCK
    read_only = True

    def __init__(
        self, pages: "ViewPages", name: str, *, stopped: threading.Event, sink: Sink,
        closed: Callable[[], None],
    ) -> None:  # fmt: skip
        """Serve *pages*, which it closes; *stopped* ends what they read, *closed* is called once.

        *name* says what is seen, for people.
        """
        self.name, self.identity = name, msgspec.json.encode(pages.spec).decode()
        self.blocks = pages.nblocks
        self._pages, self._stopped = pages, stopped
        self._sink, self._closed = sink, closed
        self._lock = threading.Lock()
        self._open = True

    @property
    def spec(self) -> ViewSpec:
        """What is seen."""
        return self._pages.spec

    @property
    def memory(self) -> int:
        """Bytes that its stage takes at most."""
        return self._pages.plan.nbytes

    def view(self, offset: int, nbytes: int) -> memoryview | None:  # noqa: ARG002
        """Return None: the bytes lie nowhere."""
        return None

    def reference(self, offset: int, nbytes: int) -> FileRange | None:  # noqa: ARG002
        """Return None, as above."""
        return None

    def expect(self, offset: int, nbytes: int) -> None:
        """Do nothing: the stage reads ahead by itself."""

    def read_into(self, offset: int, into: memoryview) -> int:
        """Compute the bytes; return a status code."""
        if self._stopped.is_set():
            return StatusCode.INVALID_NAMESPACE | DNR
        try:
            self._pages.read_into(offset // BLOCK, into)
        except (HyadesError, MemoryError) as error:
            if self._stopped.is_set():
                return StatusCode.INVALID_NAMESPACE | DNR
            notes = getattr(error, "__notes__", [])
            self._sink.emit(ViewFailed(self.name, "; ".join((str(error) or "no memory", *notes))))
            return StatusCode.READ_ERROR if isinstance(error, HyadesError) else StatusCode.INTERNAL
        return 0

    def write(self, offset: int, data: memoryview) -> int:  # noqa: ARG002
        """Refuse."""
        return StatusCode.WRITE_PROTECTED | DNR

    def zero(self, offset: int, nbytes: int) -> int:  # noqa: ARG002
        """Refuse."""
        return StatusCode.WRITE_PROTECTED | DNR

    def flush(self) -> int:
        """Do nothing: nothing was written."""
        return 0

    def close(self) -> None:
        """End its threads, soon: what they are at fails.  The volume stays with its namespace."""
        with self._lock:
            was_open, self._open = self._open, False
        if was_open:
            self._stopped.set()
            self._pages.close()
            self._closed()
