"""`ingest`: from files to a committed volume."""

import time
from pathlib import Path
from typing import Any

from hyades.common.errors import UsageError
from hyades.common.units import parse_size
from hyades.deploy.ingest.build import BuildOptions, build_graph
from hyades.deploy.ingest.features import NAME, stored_dtype
from hyades.deploy.ingest.inputs import open_inputs
from hyades.deploy.ingest.options import IngestOptions, IngestReport, PathLike
from hyades.deploy.ingest.progress import Progress, silent
from hyades.deploy.ingest.readers.context import Context
from hyades.deploy.ingest.reorder import find_order
from hyades.deploy.ingest.sources import FeatureSource
from hyades.deploy.ingest.target import check_target, find_target, new_volume


def ingest(
    target: PathLike,
    *,
    edges: Any,
    features: Any = None,
    weights: Any = None,
    memory: int | str = "1GiB",
    progress: Progress = silent,
    **more: Any,
) -> IngestReport:
    """Make the volume *target* from edges and features; *more* are fields of `IngestOptions`.

    UsageError or DataError in one line; nothing is left behind then, and an existing volume is
    untouched.
    """
    try:
        options = IngestOptions(
            edges=edges, features=features, weights=weights, memory=memory, **more
        )
    except TypeError as error:
        raise UsageError(f"ingest: {error}") from error
    return run_ingest(target, options, progress)


def run_ingest(
    target: PathLike, options: IngestOptions, progress: Progress = silent
) -> IngestReport:
    """Make the volume *target* as *options* say; errors as for `ingest`."""
    began = time.perf_counter()
    place = find_target(target)
    check_target(place, force=options.force)
    memory, page_size = parse_size(options.memory), parse_size(options.page_size)
    scratch = Path(options.scratch) if options.scratch is not None else place.scratch
    timer = _Timer(progress)
    inputs = open_inputs(options, Context(scratch, memory, timer))
    left = memory - inputs.held
    least = least_bytes(inputs.features, inputs.vertices)
    with new_volume(place, page_size, force=options.force, least=least) as volume:
        order = find_order(inputs.edges, inputs.vertices, options.reorder, left, timer)
        build = BuildOptions(
            memory=left,
            vertices=inputs.vertices,
            range_rows=options.range_rows,
            new_index=order.new_index,
            reorder=options.reorder if order.new_index is not None else "none",
            undirected=options.undirected,
            allow_nonfinite=options.allow_nonfinite,
            scratch=scratch,
        )
        graph = build_graph(volume, inputs.edges, inputs.features, build, timer)
        if inputs.original_ids is not None:
            volume.write_table("original_ids", inputs.original_ids)
        timer("committing", 0, 1, "volume")
        features = volume.catalog.objects.get(NAME)
        nbytes = sum(info.nbytes for info in volume.catalog.objects.values())
    timer("committing", 1, 1, "volume")
    notes = inputs.notes if order.note is None else (*inputs.notes, order.note)
    return IngestReport(
        path=place.path or place.name,
        graph=graph,
        feature_width=None if features is None else features.width,
        feature_dtype=None if features is None else features.dtype,
        nbytes=nbytes,
        seconds=time.perf_counter() - began,
        phases=timer.seconds(),
        notes=notes,
    )


def least_bytes(features: FeatureSource | None, vertices: int) -> int:
    """Return what the rows and the tables of a volume take, without its edges."""
    tables = 12 * vertices  # degrees and loops
    if features is None:
        return tables
    return tables + features.rows * features.width * stored_dtype(features).itemsize


class _Timer:
    """Passes progress on and keeps the seconds of each phase."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def __call__(self, phase: str, done: int, total: int, unit: str) -> None:
        """Count the time since the last call to *phase*."""
        now = time.perf_counter()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._since
        self._since = now
        self._progress(phase, done, total, unit)

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase."""
        return dict(self._seconds)
