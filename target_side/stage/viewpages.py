"""The blocks of a view, computed when they are read."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from hyades.common.catalog import Catalog
from hyades.common.checksum import crc32c
from hyades.common.encodings import Encoding
from hyades.common.errors import DataError, UsageError
from hyades.common.layout import BLOCK
from hyades.common.pages import DEFAULT_PAGE, PageShape
from hyades.common.trace import Sink
from hyades.common.views import SparseShape, build_sparse, open_dense, seal
from hyades.common.viewspec import (
    SampleSpec,
    ViewHead,
    ViewSpec,
    build_head,
    landing_rows,
    parse_spec,
)
from hyades.common.volume import Volume
from hyades.target_side.stage.ahead import Ahead
from hyades.target_side.stage.blocks import Block, Bytes, Operator
from hyades.target_side.stage.meter import Meter, OperatorCounts
from hyades.target_side.stage.options import StageOptions, StagePlan, make_pool, plan_stage
from hyades.target_side.stage.pipeline import Pipeline
from hyades.target_side.stage.project import Floats, Project
from hyades.target_side.stage.quantise import Quantise
from hyades.target_side.stage.sample import Sample
from hyades.target_side.stage.source import PageReader, Source, row_encoding
from hyades.target_side.stage.stream import Stream

PAGES = "pages"  # the name under which laying out pages is counted


def make_spec(
    catalog: Catalog, identity: tuple[str, int], source: str, *, encoding: Encoding = "float32",
    sample: SampleSpec | None = None, weights: Sequence[Floats] = (), page_size: int = DEFAULT_PAGE,
) -> ViewSpec:  # fmt: skip
    """Return the spec of a view of *source*; *identity* is UUID and generation of the volume.

    UsageError where the catalog has no such matrix, or the parts do not fit together.
    """
    info = catalog.objects.get(source)
    if info is None or info.kind != "rows":
        raise UsageError(f"there is no matrix {source!r} to make a view of")
    row_encoding(info)
    for weight in weights:
        if weight.ndim != 2 or weight.shape[1] != info.width:
            raise UsageError(f"weights {weight.shape} for rows of {info.width} values")
    if sample is not None:
        graph = catalog.graph
        if graph is None or (graph.vertices, graph.range_rows) != (info.rows, info.range_rows):
            raise UsageError(f"{source!r} does not have a row for each vertex of the graph")
        sample.asked(graph.chunks)
    spec = ViewSpec(
        volume=identity[0], generation=identity[1], source=source, rows=info.rows,
        width=sum(len(weight) for weight in weights) or info.width, range_rows=info.range_rows,
        block_rows=landing_rows(info.shape()), page_size=page_size, encoding=encoding,
        sample=sample,
        projections=tuple((len(w), crc32c(np.ascontiguousarray(w, "<f4"))) for w in weights),
    )  # fmt: skip
    spec.shape()
    return spec


class ViewPages:
    """Serves a view's blocks: head and pages.  Any thread may read, in any order.

    The same bytes whatever the order, the threads and the memory.
    """

    def __init__(
        self, spec: ViewSpec, catalog: Catalog, read_page: PageReader, *, name: str = "volume",
        weights: Sequence[Floats] = (), options: StageOptions | None = None,
        sink: Sink | None = None, number: int = 0,
    ) -> None:  # fmt: skip
        """Set up the stage; a sampled view looks at all tiles now, to know its sizes."""
        options = options if options is not None else StageOptions()
        self.spec = spec
        self.shape: PageShape | SparseShape = spec.shape()
        self.meter = Meter(sink, number)
        self._salt = spec.salt
        source = Source(name, catalog, read_page, self.meter)
        self._check(source, weights)
        self.plan = self._plan(source, options)
        self._closed = False
        self._making: list[Ahead[Any]] = []
        self._reading: list[Ahead[Any]] = []
        self._readers = make_pool(options.readers, "stage-read", options, self.meter)
        self._workers = make_pool(self.plan.threads, "stage-work", options, self.meter)
        try:
            self._build(source, weights)
        except BaseException:
            self.close()
            raise

    def _build(self, source: Source, weights: Sequence[Floats]) -> None:
        spec, window = self.spec, self.plan.window
        self.sample: Sample | None = None
        counts = np.zeros(0, np.uint32)
        if spec.sample is not None:
            self.sample = Sample(source, spec.sample, pool=self._readers, window=window)
            self._reading.append(self.sample.ahead)
            counts = self.sample.counts()
            self.sample.ahead.forget()
        wanted = None if self.sample is None else self.sample.ids
        stream = Stream(source, spec.source, pool=self._readers, window=window, wanted=wanted)
        ops: list[Operator] = [stream]
        if self.sample is not None:
            ops.append(self.sample)
        if weights:
            ops.append(
                Project(weights, spec.rows, spec.range_rows, spec.block_rows, self.meter)
            )  # fmt: skip
        ops.append(Quantise(spec.encoding, self.meter))
        self.pipeline = Pipeline(ops, spec.encoding, spec.width)
        self._ahead = Ahead(self._make, self.shape.ranges, self._workers, self.plan.ahead)
        self._reading.append(stream.ahead)
        self._making.append(self._ahead)
        self._lock = threading.Lock()
        self._held: OrderedDict[int, Future[list[Bytes]]] = OrderedDict()
        self._head_bytes = build_head(spec, counts)
        self.head = ViewHead(spec, counts, len(self._head_bytes) // BLOCK)

    def _check(self, source: Source, weights: Sequence[Floats]) -> None:
        """Raise UsageError unless the spec is one that this volume and these weights make."""
        spec = self.spec
        made = make_spec(
            source.catalog, (spec.volume, spec.generation), spec.source, encoding=spec.encoding,
            sample=spec.sample, weights=weights, page_size=spec.page_size,
        )  # fmt: skip
        if made != spec:
            raise UsageError(f"{source.name}: the view asked for is {spec}, this would be {made}")
        try:
            parse_spec(msgspec.json.encode(spec))
        except DataError as error:
            raise UsageError(f"{source.name}: no such view can be: {error}") from error

    def _plan(self, source: Source, options: StageOptions) -> StagePlan:
        spec, catalog = self.spec, source.catalog
        info = source.object(spec.source, "rows")
        fixed = tile_page = 0
        if spec.sample is not None and catalog.graph is not None:
            tiles = source.object("tiles", "pages")
            fixed, tile_page = Sample.memory(catalog.graph, tiles.pages), tiles.page_bytes
        fixed += sum(4 * width * info.width for width, _ in spec.projections)
        return plan_stage(options, spec, info.shape(), info.width, fixed, tile_page)

    @property
    def nblocks(self) -> int:
        """Blocks of the view, head included."""
        return self.head.nblocks

    def counts(self) -> dict[str, OperatorCounts]:
        """Return what each operator has done so far."""
        return self.meter.counts()

    def page(self, number: int) -> Bytes:
        """Return the used bytes of page *number*, whole blocks; raises what a reader raised."""
        if self._closed:
            raise UsageError(f"view of {self.spec.source!r} is closed")
        if not 0 <= number < self.shape.pages:
            raise UsageError(
                f"view of {self.spec.source!r} has no page {number}: it has {self.shape.pages}"
            )
        index, place = divmod(number, self.shape.pages_per_range)
        return self._range(index)[place]

    def read(self, lba: int, count: int) -> bytearray:
        """Return *count* blocks from *lba* on, zeros where nothing lies; as BlockDevice.read."""
        self._check_span(lba, count)
        out = bytearray(count * BLOCK)
        self.read_into(lba, memoryview(out))
        return out

    def read_into(self, lba: int, into: memoryview) -> None:
        """Fill *into*, whole blocks, from *lba* on, as `read`; after an error it holds anything."""
        self._check_span(lba, len(into) // BLOCK)
        begin, end = lba * BLOCK, lba * BLOCK + len(into)
        head, place = len(self._head_bytes), self.shape.page_bytes
        done = begin  # bytes of the view before are in *into*
        if begin < head:
            done = min(end, head)
            into[: done - begin] = self._head_bytes[begin:done]
        while done < end:
            number, at = divmod(done - head, place)
            page, after = self.page(number), min(end, done - at + place)
            filled = max(min(len(page) - at, after - done), 0)
            into[done - begin : done - begin + filled] = page[at : at + filled].data
            if done + filled < after:
                into[done + filled - begin : after - begin] = bytes(after - done - filled)
            done = after

    def _check_span(self, lba: int, count: int) -> None:
        if lba < 0 or count < 0 or lba + count > self.nblocks:
            raise UsageError(
                f"view of {self.spec.source!r}: LBA {lba} + {count} blocks is outside its "
                f"{self.nblocks} blocks"
            )

    def close(self) -> None:
        """End the threads; what they are at is finished first, and reads that wait get theirs."""
        self._closed = True
        for aheads, pool in ((self._making, self._workers), (self._reading, self._readers)):
            for ahead in aheads:
                ahead.close()
            if pool is not None:  # who makes ranges still takes pages, so they end first
                pool.shutdown(cancel_futures=True)

    def _range(self, index: int) -> list[Bytes]:
        """Return the pages of a range; those who ask at the same time share one computation."""
        with self._lock:
            future = self._held.get(index)
            mine = future is None
            if future is None:
                future = self._held[index] = Future()
            self._held.move_to_end(index)
            while len(self._held) > self.plan.held:
                self._held.popitem(last=False)
        if mine:
            try:
                future.set_result(self._ahead.get(index))
            except BaseException as error:
                with self._lock:  # asking again tries again
                    if self._held.get(index) is future:
                        del self._held[index]
                future.set_exception(error)
        return future.result()

    def _make(self, index: int) -> list[Bytes]:
        """Return the pages of range *index*."""
        shape = self.shape
        if isinstance(shape, SparseShape):
            pages, rows = self._make_sparse(shape, index)
        else:
            pages, rows = self._make_dense(shape, index)
        size = sum(page.size for page in pages)
        self.meter.add(PAGES, OperatorCounts(rows, rows, rows * shape.row_bytes, size))
        return pages

    def _make_sparse(self, shape: SparseShape, index: int) -> tuple[list[Bytes], int]:
        rows = self.pipeline.run_range(index)
        assert rows.ids is not None
        first, pages = index * shape.pages_per_range, []
        with self.meter.span(PAGES):
            for number in range(first, first + shape.pages_per_range):
                pages.append(build_sparse(shape, number, rows.ids, rows.data, self._salt))
        return pages, len(rows.data)

    def _make_dense(self, shape: PageShape, index: int) -> tuple[list[Bytes], int]:
        first, last = shape.first_page(index), shape.first_page(index + 1)
        opened = [open_dense(shape, number) for number in range(first, last)]
        for block in self.pipeline.blocks(index):
            with self.meter.span(PAGES):
                self._place(shape, block, [places for _, places in opened])
        with self.meter.span(PAGES):
            for number, (page, _) in enumerate(opened, first):
                seal(page, number, self._salt)
        return [page for page, _ in opened], sum(len(places) for _, places in opened)

    @staticmethod
    def _place(shape: PageShape, block: Block, pages: Sequence[Bytes]) -> None:
        """Copy the rows of *block* to their places in the *pages* of its range."""
        row = block.start
        while row < block.stop:
            page, at = divmod(row, shape.rows_per_page)
            into = pages[page][at : at + block.stop - row]
            into[...] = block.data[row - block.start : row - block.start + len(into)]
            row += len(into)


def open_volume_view(
    volume: Volume, source: str, *, encoding: Encoding = "float32",
    sample: SampleSpec | None = None, weights: Sequence[Floats] = (),
    page_size: int = DEFAULT_PAGE, options: StageOptions | None = None, sink: Sink | None = None,
) -> ViewPages:  # fmt: skip
    """Return a view of the committed state of an open *volume*."""
    spec = make_spec(
        volume.catalog, (str(volume.uuid), volume.generation), source, encoding=encoding,
        sample=sample, weights=weights, page_size=page_size,
    )  # fmt: skip
    return ViewPages(
        spec, volume.catalog, volume.read_page, name=volume.name, weights=weights, options=options,
        sink=sink,
    )  # fmt: skip
