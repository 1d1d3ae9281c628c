"""`hyades refresh` with a clock that starts after the imports, as peer_worker.py's does.

usage: python -m hyades.deploy.bench.refresh_worker [--in-memory] RESULT.json VOLUME.vol OPTIONS...

OPTIONS are those of `hyades refresh`, which runs unchanged in this process.  With --in-memory it
works on a copy of the volume in memory, made before the clock starts: the cost without a disk.
Same code, plan and budget; only the transport differs, and a page costs a copy in memory.
"""

import json
import sys
import time
from pathlib import Path

from hyades.common.layout import BLOCK
from hyades.common.units import MIB, round_up
from hyades.deploy.bench.peer_worker import io_bytes
from hyades.deploy.cli import cli
from hyades.deploy.commands import refresh
from hyades.proxy.registry import open_transport
from hyades.proxy.transport_blocks import TransportBlocks

MEMORY_URL = "mem://bench"


def load(path: Path) -> None:
    """Copy the file at *path* into the device MEMORY_URL, which lives as long as this process."""
    with path.open("rb") as file:
        device = TransportBlocks(open_transport(MEMORY_URL, create=True), MEMORY_URL)
        device.grow(round_up(path.stat().st_size, BLOCK) // BLOCK)
        lba = 0
        while part := file.read(4 * MIB):
            padded = part.ljust(round_up(len(part), BLOCK), b"\0")
            device.write(lba, padded)
            lba += len(padded) // BLOCK
        device.flush()
        device.close()


def run(volume: str, options: list[str]) -> dict[str, float]:
    """Run `hyades refresh`; return seconds and bytes read and written, exit where it fails."""
    assert refresh.command.name  # imported before the clock starts, used by name below
    read, written = io_bytes()
    started = time.monotonic()
    code = cli.main(["refresh", volume, *options], prog_name="hyades", standalone_mode=False)
    seconds = time.monotonic() - started
    if code:
        sys.exit(code)
    read_after, written_after = io_bytes()
    return {
        "seconds": seconds,
        "read_bytes": read_after - read,
        "written_bytes": written_after - written,
    }


if __name__ == "__main__":
    arguments = sys.argv[1:]
    in_memory = arguments[0] == "--in-memory"
    result, url, *rest = arguments[in_memory:]
    if in_memory:
        load(Path(url))
        url = MEMORY_URL
    Path(result).write_text(json.dumps(run(url, rest)))
