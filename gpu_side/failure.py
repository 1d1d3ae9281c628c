"""Turn failed requests into one of the five exceptions, naming object, page, LBA and status."""

from hyades.common.errors import DataError, DeviceLost, HyadesError, UsageError
from hyades.common.layout import Status
from hyades.common.port import Port


def explain_failure(port: Port, volume: str, objects: tuple[str, ...]) -> HyadesError:
    """Return the exception for the first failure of *port*; *objects* are named by number."""
    failures = port.failures()
    if not failures:
        death = port.death()
        return DeviceLost(f"{volume}: the proxy stopped{f': {death}' if death else ''}")
    first = failures[0]
    name = objects[first.object] if first.object < len(objects) else f"number {first.object}"
    where = f"{volume}: object {name!r} page {first.page} (LBA {first.lba})"
    verb = "write" if first.write else "read"
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    if first.status == Status.CRC:
        return DataError(
            f"{where}: the page's CRC32C is wrong, twice{more}; run `hyades inspect --verify`,"
            " then ingest again or restore the volume"
        )
    if first.status == Status.NO_SPACE:
        return UsageError(f"{where}: no space left on the device{more}; free some, then --resume")
    return DeviceLost(
        f"{where}: {verb} failed with status {first.status.name} after retries{more};"
        " check the device, then --resume"
    )
