"""`hyades refresh` on a copy of a volume in memory: what a refresh costs without a disk.

usage: python -m hyades.deploy.bench.compute_alone VOLUME.vol OPTIONS-OF-REFRESH...

The copy is made first and is not part of the refresh's own time.  Same code, plan and budget as on
the file; only the transport differs, and a page costs a copy in memory.
"""

import sys
from pathlib import Path

from hyades.common.layout import BLOCK
from hyades.common.units import MIB, round_up
from hyades.deploy.cli import cli
from hyades.proxy.registry import open_transport
from hyades.proxy.transport_blocks import TransportBlocks

URL = "mem://bench"


def load(path: Path) -> None:
    """Copy the file at *path* into the memory device URL, which lives as long as this process."""
    with path.open("rb") as file:
        device = TransportBlocks(open_transport(URL, create=True), URL)
        device.grow(round_up(path.stat().st_size, BLOCK) // BLOCK)
        lba = 0
        while part := file.read(4 * MIB):
            padded = part.ljust(round_up(len(part), BLOCK), b"\0")
            device.write(lba, padded)
            lba += len(padded) // BLOCK
        device.flush()
        device.close()


if __name__ == "__main__":
    load(Path(sys.argv[1]))
    cli(["refresh", URL, *sys.argv[2:]], prog_name="hyades")
