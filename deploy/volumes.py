"""Opening the volume that a user names."""

from hyades.common.blocks import FileBlocks
from hyades.common.volume import Volume
from hyades.proxy.registry import open_transport
from hyades.proxy.transport_blocks import TransportBlocks
from hyades.proxy.urls import Url


def open_volume(url: str, *, writable: bool = False) -> Volume:
    """Return the volume at a path or URL; UsageError, DataError or BackendMissing."""
    parsed = Url(url)
    if parsed.scheme == "file":
        # A file is locked, so that two programs cannot write to it.  Options are for pages, which
        # transports move; what is wrong with them is said now.
        blocks = FileBlocks(parsed.path, writable=writable)
        try:
            if parsed.original != parsed.path:
                open_transport(parsed, writable=False).close()
        except BaseException:
            blocks.close()
            raise
        return Volume.open(blocks, writable=writable)
    transport = open_transport(parsed, writable=writable)
    return Volume.open(TransportBlocks(transport, url), writable=writable)
