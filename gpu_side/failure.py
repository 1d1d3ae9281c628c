"""Turn failed requests into one of the five exceptions, naming object, page, LBA and status."""

from hyades.common.catalog import Catalog
from hyades.common.errors import DataError, DeviceLost, HyadesError, UsageError
from hyades.common.layout import Status
from hyades.common.port import Failure, Port
from hyades.common.volume import Volume


def explain_failure(
    port: Port, source: Volume, outputs: Volume, view_device: int = -1
) -> HyadesError:
    """Return the exception for the first failure of *port*.

    Its device 0 holds the volume *source*, *view_device* a view of it, any other one the volume
    *outputs*.
    """
    death, failures = port.death(), port.failures()
    if isinstance(death, HyadesError):
        return death
    if death is not None:
        lost = DeviceLost(
            f"{outputs.name}: the proxy ended early: {type(death).__name__}: {death};"
            " --resume continues the run"
        )
        lost.__cause__ = death
        return lost
    # What was cancelled failed only because something else did.
    failures = [f for f in failures if f.status != Status.CANCELLED] or failures
    if not failures:
        return DeviceLost(f"{outputs.name}: the run was stopped while pages were on the way")
    first = failures[0]
    volume = source if first.device == 0 else outputs
    place = f": {first.place}" if first.place else ""
    if first.flush:
        return DeviceLost(
            f"{volume.name}: a flush failed with status {first.status.name}{place}: what was"
            " written since the last commit may be lost; check the device, then --resume goes on"
            " from there"
        )
    if first.device == view_device:
        where = f"{source.name}: a view of the features, LBA {first.lba}{place}"
        return _error(first, where, f" (and {len(failures) - 1} more)" if failures[1:] else "")
    name, page = locate(volume.catalog, first)
    where = f"{volume.name}: object {name!r} page {page} (LBA {first.lba}{place})"
    more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
    return _error(first, where, more)


def _error(first: Failure, where: str, more: str) -> HyadesError:
    verb = "write" if first.write else "read"
    if first.status == Status.CRC:
        return DataError(
            f"{where}: the page's CRC32C is wrong, twice (status CRC){more};"
            " run `hyades inspect --verify`, then ingest again or restore the volume"
        )
    if first.status == Status.NO_SPACE:
        return UsageError(
            f"{where}: no space left on the device (status NO_SPACE){more};"
            " free some, then --resume"
        )
    if first.status == Status.SHORT:
        return DeviceLost(
            f"{where}: {verb} moved fewer bytes than asked after retries (status SHORT){more}; was"
            " the volume truncated? Check the device, then --resume"
        )
    return DeviceLost(
        f"{where}: {verb} failed with status {first.status.name} after retries{more};"
        " check the device, then --resume"
    )


def locate(catalog: Catalog, failure: Failure) -> tuple[str, int]:
    """Return the object in whose extents the failed request lies, and the page."""
    for info in catalog.objects.values():
        before = 0
        for extent in info.extents:
            if extent.lba <= failure.lba < extent.end:
                return info.name, before + (failure.lba - extent.lba) // info.page_blocks
            before += extent.nblocks // info.page_blocks
    return "(none)", failure.page
