"""Where a block of a device lies, and why a flush failed: rule 8 of hyades.proxy.transport."""

from typing import Any

from hyades.proxy.transport import Transport


def locate(transport: Transport, lba: int, nblocks: int = 1) -> str:
    """Return where block *lba* lies, or the first of *nblocks* that failed; "" if it is obvious."""
    names: Any = getattr(transport, "locate", None)
    return "" if names is None else str(names(failed_lba(transport, lba, nblocks)))


def failed_lba(transport: Transport, lba: int, nblocks: int) -> int:
    """Return the first of *nblocks* blocks from *lba* on that is known to have failed, or *lba*."""
    known: Any = getattr(transport, "failed_lba", None)
    return lba if known is None else int(known(lba, nblocks))


def flush_failure(transport: Transport) -> str:
    """Return why the last flush of *transport* failed, "" where it does not say."""
    known: Any = getattr(transport, "flush_failure", None)
    return "" if known is None else str(known())


def patience(transport: Transport, usual: float) -> float:
    """Return for how many seconds *transport* may be silent without being lost."""
    return max(usual, float(getattr(transport, "patience", 0.0)))
