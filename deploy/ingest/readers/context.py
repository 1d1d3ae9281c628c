"""What every reader may use."""

from dataclasses import dataclass
from pathlib import Path

from hyades.deploy.ingest.progress import Progress, silent


@dataclass(frozen=True)
class Context:
    """Folder for temporary files, memory in bytes, and where to report progress."""

    scratch: Path
    memory: int
    progress: Progress = silent
