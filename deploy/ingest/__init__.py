"""From users' files to a volume: `ingest`."""

from hyades.deploy.ingest.api import ingest, run_ingest
from hyades.deploy.ingest.options import IngestOptions, IngestReport
from hyades.deploy.ingest.progress import Progress

__all__ = ["IngestOptions", "IngestReport", "Progress", "ingest", "run_ingest"]
