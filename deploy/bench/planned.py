"""What Hyades plans for a graph at a budget of lane states, priced by the planner itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hyades.common.catalog import ObjectInfo, new_object
from hyades.common.pages import DEFAULT_PAGE, range_rows_for, shape_pages
from hyades.common.units import round_up
from hyades.common.volume import Volume
from hyades.deploy.bench.eviction import Reorder, Topology
from hyades.deploy.bench.graphs import GraphFiles
from hyades.deploy.ingest.api import ingest
from hyades.deploy.volumes import open_volume
from hyades.gpu_side import topology as tiles
from hyades.gpu_side.models.ir import Conv, Linear, Model
from hyades.gpu_side.plan import RunPlan, plan_run
from hyades.gpu_side.price import Candidate, PlanRequest
from hyades.gpu_side.program import Stage, lower_model
from hyades.gpu_side.vector import WIDTH

ORDERS = ("none", "rcm", "hyades")
_UNLIMITED = 1 << 50
_LEAST_LANES = 64


class HyadesPlanner:
    """Volumes of one topology, one for each order, and the planner's prices for them.

    `width` columns of a lane state and `input_width` columns of the input, float32.  Volumes hold
    no features: the planner needs their shape only.
    """

    def __init__(self, files: GraphFiles, folder: Path, width: int, input_width: int) -> None:
        self._files = files
        self._folder = folder
        self._input_width = input_width
        self._width = width
        self._stage = _stage(width, input_width)
        self.kept: set[str] = set()  # orders that are those of the input

    def orders(self, names: tuple[str, ...]) -> dict[str, Reorder | None]:
        """Return what `eviction.compare` takes as orders; ingest makes each when it is used."""
        return {name: None if name == "none" else self._reorder(name) for name in names}

    def __call__(self, topology: Topology, budget: int) -> list[tuple[str, int, int]]:
        """Return passes and the best log with *budget* bytes of states, rounded up to whole lanes.

        Each with the bytes read and written beyond one scan with all states resident.
        """
        with self._open(topology.name) as volume:
            graph = volume.catalog.graph
            assert graph is not None
            pricer = _Pricer(volume, tiles.load_topology(volume), self._stage, self._input_width)
            state = 4 * graph.range_rows * round_up(self._width, WIDTH)
            slots = -(-budget // state)
            if slots >= graph.chunks:
                return [("resident", 0, 0)]
            resident = pricer.price("resident")
            # Windows overlap, so a window may have to be shorter than the slots are many.
            lengths = {max(1, int(slots * part)) for part in (1, 0.9, 0.75, 0.6, 0.5, 0.35)}
            logs = [pricer.price(f"log:{length}") for length in sorted(lengths)]
            logs = [log for log in logs if log.state_slots <= slots]
            passes = pricer.price(f"passes:{-(-graph.chunks // slots)}")
            found = [passes, *sorted(logs, key=lambda log: log.bytes_moved)[:1]]
            return [
                (
                    plan.name,
                    plan.bytes_read - resident.bytes_read,
                    plan.bytes_written - resident.bytes_written,
                )
                for plan in found
            ]

    def _reorder(self, name: str) -> Callable[..., NDArray[np.int64]]:
        def order(*_: Any) -> NDArray[np.int64]:
            with self._open(name) as volume:
                if "order" not in volume.catalog.objects:
                    self.kept.add(name)  # ingest found no order that beats that of the input
                    return np.arange(self._files.spec.vertices)
                return volume.read_table("order").astype(np.int64)

        return order

    def _open(self, order: str) -> Volume:
        """Return the volume of the topology in *order*, made when it is first asked for."""
        path = self._folder / f"{self._files.directory.name}-{order}-topology.vol"
        made = self._files.indptr.stat().st_mtime
        if not path.exists() or path.stat().st_mtime < made:
            path.unlink(missing_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            vertices = self._files.spec.vertices
            rows = range_rows_for(vertices)
            while rows > 16 and vertices < rows * _LEAST_LANES:
                rows //= 2
            edges = (str(self._files.indptr), str(self._files.indices))
            ingest(path, edges=edges, reorder=order, range_rows=rows, memory="6GiB")
        return open_volume(str(path))


class _Pricer:
    """Asks the planner for one plan at a time, with exactly the memory that the plan needs."""

    def __init__(
        self, volume: Volume, topology: tiles.Topology, stage: Stage, input_width: int
    ) -> None:
        graph = volume.catalog.graph
        assert graph is not None
        self._graph = graph
        self._topology = topology
        self._tiles = volume.object("tiles")
        self._stage = stage
        self._features = _features(graph.vertices, input_width, graph.range_rows)

    def price(self, plan: str) -> Candidate:
        """Return the candidate: no memory is left over in which input chunks would be kept."""
        run, generous = self._ask(plan, _UNLIMITED)
        always = run.table_bytes + run.temporaries
        return self._ask(plan, generous.memory - generous.pinned_bytes + always)[1]

    def _ask(self, plan: str, memory: int) -> tuple[RunPlan, Candidate]:
        run = plan_run(self._request(plan, memory), self._topology)
        return run, next(c for c in run.stages[0].candidates if c.project_first)

    def _request(self, plan: str, memory: int) -> PlanRequest:
        return PlanRequest(
            self._graph, self._features, self._tiles, DEFAULT_PAGE, (self._stage,), memory,
            workers=2, fanouts=(0,), forced=plan,
        )  # fmt: skip


def _stage(width: int, input_width: int) -> Stage:
    """Return one sum over neighbours, projected where the widths differ."""
    product = None if width == input_width else Linear(torch.zeros(width, input_width))
    conv = Conv("sum", input_width, width, "sum", neighbour=product)
    return lower_model(Model((conv,)))[0]


def _features(vertices: int, width: int, range_rows: int) -> ObjectInfo:
    shape = shape_pages(vertices, 4 * width, range_rows, DEFAULT_PAGE)
    return new_object("features", "rows", "float32", width, shape, {})
